"""Routing: which engine gets a request. In: outstanding tokens per engine, a request's cost in
tokens. Out: an engine. Pure.

Load is measured in tokens that are still to be computed, not in requests: one long completion
outweighs many short ones. A request goes whole to one engine, so that its completions share the
prompt's work. Requests that are given together are routed one after the other, so the same requests
always go the same ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gyre.core.records import Request


def cost_tokens(request: Request) -> int:
    """Tokens that an engine computes for a request at most: the prompt once, and every completion's
    rest."""
    sampling = request.sampling
    begun = sum(min(len(partial.tokens), sampling.max_tokens) for partial in request.partials)
    return len(request.tokens) + max(0, sampling.n * sampling.max_tokens - begun)


def choose(outstanding: Mapping[str, int]) -> str:
    """Return the engine with the least outstanding tokens; the first of equals."""
    assert outstanding, "no engine takes work"
    return min(outstanding, key=lambda name: outstanding[name])


def assign(costs: Sequence[int], outstanding: Mapping[str, int]) -> list[str]:
    """Return an engine for each of the requests, in order, each counted before the next is
    placed."""
    loads = dict(outstanding)
    chosen = []
    for cost in costs:
        name = choose(loads)
        loads[name] += cost
        chosen.append(name)
    return chosen
