"""Records of a benchmark: what to send, what came back, and what a level of load amounts to.

A level is one step of a sweep: so many requests at a time (closed loop), or so many arrivals a
second (open loop). All times are seconds of the client's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Endpoint = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRequest:
    """A request before it has words: `prefix` and `units` are numbers below `loads.NUM_UNITS`, and
    other prompts may begin with the same prefix. Or it has a `text` as it is."""

    prefix: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    text: str = ""
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One step of a sweep: a closed loop with `concurrency`, or an open loop with `rate_per_s`."""

    concurrency: int = 0
    rate_per_s: float = 0.0
    requests: int = 0  # 0 where `seconds` ends the level
    seconds: float = 0.0
    warm_up: int = 0  # requests before, not counted

    @property
    def name(self) -> str:
        """Return how a reader calls it."""
        return f"{self.rate_per_s:g}/s" if self.rate_per_s else f"concurrency {self.concurrency}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """What a server's `usage` says about one answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """One request, from when it was due to its end."""

    due_s: float  # when the load wanted it sent; latencies count from here
    sent_s: float  # when its bytes were handed to the connection; 0 where it came never so far
    ended_s: float
    failure: str = ""  # by status and reason, as in "429 queue_full"; empty for a whole answer
    detail: str = ""  # a server's own words about a failure, cut short
    text_times_s: tuple[float, ...] = ()  # of each chunk of a stream that carried text
    usage: TokenCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of `count` values, in milliseconds; all 0 where there are none."""

    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSummary:
    """What a level amounts to. Rates are of whole answers, over the time from the first due moment
    to the last end."""

    name: str
    concurrency: int
    rate_per_s: float
    wall_s: float
    ok: int
    failed: int
    failures: Mapping[str, int]
    failure_details: Mapping[str, str]  # the first words heard of each kind
    failed_warm_up: int  # requests before the level
    unfinished: int  # under way when the user stopped the run
    without_usage: int  # whole answers whose tokens the server did not count
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    chunks: int  # of streams, that carried text
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Percentiles
    itl: Percentiles
    tpot: Percentiles
    e2e: Percentiles
    send_delay: Percentiles  # from due to sent: what the client and its connections add
    client_cpu_share: float  # of one core


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelProgress:
    """How far a level is."""

    level: Level
    number: int  # from 1
    num_levels: int
    ok: int
    failed: int
    elapsed_s: float
    is_over: bool


OnProgress = Callable[[LevelProgress], None]
