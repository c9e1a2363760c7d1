"""Routing: which engine gets a request. In: a policy, what the request needs, what each engine has
to do and likely has cached. Out: an engine. Pure.

Load is measured in tokens that are still to be computed, not in requests: one long completion
outweighs many short ones. A request goes whole to one engine, so that its completions share the
prompt's work. Requests that are given together are routed one after the other, each counted before
the next is placed.

    cost = (load + prompt - hit + answer_work) / share - hit - ½ (prompt - hit) with the session.

The engine with the least cost gets the request. The hit counts a second time since a copy of the
prefix elsewhere would take the room of another one. So among engines with a whole share none is
chosen that has more to do than another by twice the prompt or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gyre.core.records import Request

RoutingPolicy = Literal["prefix", "least_tokens", "round_robin"]
# Tokens of a prompt share a step; each of an answer takes part in a step of its own, which reads
# the KV of all before it.
ANSWER_WEIGHT = 4
MEAN_OVER = 32  # answers that the mean length is mostly of


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestWork:
    """What a request asks of any engine, in tokens of a prompt."""

    prompt_tokens: int
    answer_work: int  # of its completions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCandidate:
    """An engine that takes work."""

    name: str
    place: int  # among all engines; decides between equals
    load: int  # what it has still to do, in tokens of a prompt
    share: float = 1.0  # of the load that it may have; 0 while it is ejected
    hit_tokens: int = 0  # of the prompt, likely in its prefix cache
    has_session: bool = False  # it served the last request of this session
    num_routed: int = 0  # requests that it was given


def rest_tokens(request: Request) -> int:
    """Return the tokens that a request's completions have still to get at most."""
    sampling = request.sampling
    begun = sum(min(len(partial.tokens), sampling.max_tokens) for partial in request.partials)
    return max(0, sampling.n * sampling.max_tokens - begun)


def estimate_work(request: Request, mean_answer_tokens: float | None) -> RequestWork:
    """Return what the request probably needs. Its completions are as long as others were; as long
    as they may be where that is less, or nothing is known."""
    rest = rest_tokens(request)
    if mean_answer_tokens is not None:
        rest = min(rest, round(request.sampling.n * mean_answer_tokens))
    return RequestWork(prompt_tokens=len(request.tokens), answer_work=ANSWER_WEIGHT * rest)


def follow_mean(mean: float | None, value: int) -> float:
    """Return a mean that forgets, after one more value."""
    return float(value) if mean is None else mean + (value - mean) / MEAN_OVER


def find_cost(one: EngineCandidate, work: RequestWork) -> float:
    """Return what it costs to give the request to this engine, in tokens of a prompt."""
    missing = work.prompt_tokens - one.hit_tokens
    load = one.load + missing + work.answer_work
    # where all are ejected, none is preferred for that
    return load / (one.share or 1.0) - one.hit_tokens - (missing / 2 if one.has_session else 0.0)


def choose(
    candidates: Sequence[EngineCandidate],
    work: RequestWork,
    *,
    policy: RoutingPolicy,
    turn: int = 0,
) -> EngineCandidate:
    """Return the engine for the request. One that is ejected is chosen only where all are. `turn`
    is the place that round robin has come to."""
    assert candidates, "no engine takes work"
    whole = [one for one in candidates if one.share > 0.0] or candidates
    if policy == "round_robin":
        return min(whole, key=lambda one: (one.place < turn, one.place))
    return min(whole, key=lambda one: (find_cost(one, work), one.num_routed, one.place))
