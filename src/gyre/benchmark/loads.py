"""Loads: what each request of a benchmark asks, and when an open loop sends it. In: lengths or a
file's conversations, a rate, a seed, the request's place. Out: a `DrawnRequest`, the same for the
same place, whatever ran before; times, drawn before any answer, so that a slow server is not asked
less often.

A prompt is drawn as units, numbers below NUM_UNITS. `prompts.py` makes token ids or words of them.
Warm-up and each level draw apart, so that no prompt of one is in a prefix cache for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from gyre.benchmark.records import DrawnRequest
from gyre.core.errors import ConfigError, InputError

NUM_UNITS = 256
_LENGTHS, _PREFIXES, _SHUFFLE = 1, 2, 3  # streams of the seed
# as in `vllm bench serve`: shorter conversations measure little, longer ones fit few servers
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048
_ARRIVALS_BLOCK = 256  # gaps drawn at once


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlace:
    """Which request of a benchmark."""

    level: int  # from 1
    warm_up: bool
    index: int


class Workload(Protocol):
    """A source of requests."""

    def draw(self, place: RequestPlace) -> DrawnRequest: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of a prompt and an answer: uniform within `spread` of the mean."""

    input_tokens: int
    output_tokens: int
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.input_tokens < 1 or self.output_tokens < 1 or not 0.0 <= self.spread < 1.0:
            raise ConfigError(
                f"lengths of {self.input_tokens} and {self.output_tokens} tokens, spread "
                f"{self.spread:g}: need lengths of at least 1 and a spread of 0 to below 1",
                hint="--input-tokens 1024 --output-tokens 1024 --spread 0.2 is a usual load",
            )

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        """Return tokens of the prompt and of the answer."""
        return self._around(self.input_tokens, rng), self._around(self.output_tokens, rng)

    def _around(self, mean: int, rng: np.random.Generator) -> int:
        least, most = round(mean * (1 - self.spread)), round(mean * (1 + self.spread))
        return int(rng.integers(max(1, least), max(1, most) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLoad:
    """Prompts that share nothing."""

    lengths: Lengths
    seed: int

    def draw(self, place: RequestPlace) -> DrawnRequest:
        rng = _rng(self.seed, place)
        num_input, num_output = self.lengths.draw(rng)
        units = rng.integers(0, NUM_UNITS, num_input)
        return DrawnRequest(units=tuple(units.tolist()), max_tokens=num_output)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLoad:
    """Prompts that begin with one of `prefixes` texts, drawn by Zipf's law, and end apart: the
    share of prefix n is proportional to n^-zipf."""

    lengths: Lengths  # of the part that no other prompt has, and of the answer
    prefixes: int
    prefix_tokens: int
    zipf: float
    seed: int
    _ends: np.ndarray = field(init=False)  # cumulative shares
    _texts: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.prefixes < 1 or self.prefix_tokens < 1 or self.zipf < 0.0:
            raise ConfigError(
                f"{self.prefixes} prefixes of {self.prefix_tokens} tokens, Zipf exponent "
                f"{self.zipf:g}: need at least 1, at least 1, and at least 0",
                hint="--prefixes 16 --prefix-tokens 1024 --zipf 1 is a usual load",
            )
        shares = np.arange(1, self.prefixes + 1, dtype=np.float64) ** -self.zipf
        object.__setattr__(self, "_ends", np.cumsum(shares) / shares.sum())
        rng = np.random.default_rng((self.seed, _PREFIXES))
        drawn = rng.integers(0, NUM_UNITS, (self.prefixes, self.prefix_tokens)).tolist()
        object.__setattr__(self, "_texts", tuple(map(tuple, drawn)))

    def draw(self, place: RequestPlace) -> DrawnRequest:
        rng = _rng(self.seed, place)
        number = int(np.searchsorted(self._ends, rng.random(), side="right"))
        prefix = self._texts[min(number, self.prefixes - 1)]
        num_suffix, num_output = self.lengths.draw(rng)
        suffix = rng.integers(0, NUM_UNITS, num_suffix).tolist()
        return DrawnRequest(prefix=prefix, units=tuple(suffix), max_tokens=num_output)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLoad:
    """Questions of a file, shuffled. They begin again where there are fewer than requests."""

    drawn: Sequence[DrawnRequest]
    seed: int
    per_level: int  # so that levels take different ones as long as there are some
    _order: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng((self.seed, _SHUFFLE))
        object.__setattr__(self, "_order", rng.permutation(len(self.drawn)))

    def draw(self, place: RequestPlace) -> DrawnRequest:
        at = (place.level - 1) * self.per_level + place.index
        if place.warm_up:  # from the end, where the levels come last
            at = -1 - at
        return self.drawn[int(self._order[at % len(self.drawn)])]


def sharegpt_turns(rows: Any, *, source: str) -> list[tuple[str, str]]:
    """Return each conversation's first question and its answer. Conversations without both are
    left out. InputError where the file has another shape or nothing is left."""
    hint = 'need a JSON list of {"conversations": [{"from": "human", "value": …}, …]}'
    if not isinstance(rows, list):
        raise InputError(f"{source}: its JSON is a {type(rows).__name__}", hint=hint)
    turns = [found for row in rows if (found := _first_turn(row)) is not None]
    if not turns:
        raise InputError(f"{source}: no conversation has a question and its answer", hint=hint)
    return turns


def _first_turn(row: Any) -> tuple[str, str] | None:
    parts = row.get("conversations") if isinstance(row, Mapping) else None
    if not isinstance(parts, list):
        return None
    for asked, answered in pairwise(part for part in parts if isinstance(part, Mapping)):
        texts = asked.get("value"), answered.get("value")
        if asked.get("from") not in ("human", "user"):
            continue
        if answered.get("from") not in ("gpt", "assistant"):
            continue
        if all(isinstance(text, str) and text.strip() for text in texts):
            return str(texts[0]), str(texts[1])
    return None


def sharegpt_requests(
    turns: Sequence[tuple[str, str]],
    *,
    max_tokens: int,
    count_tokens: Callable[[str], int] | None,
) -> list[DrawnRequest]:
    """Return the requests of a file. With `count_tokens` each answer is as long as the recorded
    one, and turns outside the usual bounds are left out; otherwise all may have `max_tokens`."""
    if count_tokens is None:
        return [DrawnRequest(text=question, max_tokens=max_tokens) for question, _ in turns]
    found = []
    for question, answer in turns:
        num_input, num_output = count_tokens(question), count_tokens(answer)
        is_long = num_input > MAX_PROMPT_TOKENS or num_input + num_output > MAX_TOTAL_TOKENS
        if min(num_input, num_output) >= MIN_TOKENS and not is_long:
            found.append(DrawnRequest(text=question, max_tokens=num_output))
    if not found:
        raise InputError(
            f"none of {len(turns)} conversations has a question of {MIN_TOKENS} to "
            f"{MAX_PROMPT_TOKENS} tokens, and {MAX_TOTAL_TOKENS} with its answer",
            hint="leave --tokenizer out to take them all",
        )
    return found


def _rng(seed: int, place: RequestPlace) -> np.random.Generator:
    return np.random.default_rng((seed, _LENGTHS, place.level, int(place.warm_up), place.index))


def poisson_times_s(rate_per_s: float, *, seed: tuple[int, ...]) -> Iterator[float]:
    """Yield arrivals of a Poisson process from 0 on, without end."""
    rng, last_s = np.random.default_rng(seed), 0.0
    while True:
        for gap_s in rng.exponential(1.0 / rate_per_s, _ARRIVALS_BLOCK).tolist():
            last_s += gap_s
            yield last_s
