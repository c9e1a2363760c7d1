"""Runner: plays one level. In: a client, bodies by place, a `Level`. Out: outcomes, in the order of
their ends.

A closed loop has so many clients, each of which asks again when it was answered. An open loop asks
at times drawn before, whether or not earlier requests were answered; a request that waits for a
connection waits at the server's cost, since latencies count from its due time.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from gyre.benchmark.client import Client
from gyre.benchmark.loads import poisson_times_s
from gyre.benchmark.records import Level, RequestResult

FAILED_PAUSE_S = 0.1  # of a client of a closed loop, so that a server that refuses is not flooded

BodyAt = Callable[[int], bytes]
OnOutcome = Callable[[RequestResult], None]


class Tally:
    """The outcomes of a level so far: what an interruption leaves."""

    def __init__(self, on_outcome: OnOutcome) -> None:
        self._on_outcome = on_outcome
        self.outcomes: list[RequestResult] = []
        self.begun = 0

    async def ask(self, client: Client, body: bytes, due_s: float) -> RequestResult:
        self.begun += 1
        outcome = await client.ask(body, due_s)
        self.outcomes.append(outcome)
        self._on_outcome(outcome)
        return outcome

    @property
    def unfinished(self) -> int:
        """Return how many requests have no outcome."""
        return self.begun - len(self.outcomes)


async def run_closed(client: Client, body_at: BodyAt, level: Level, tally: Tally) -> None:
    """Play a closed loop. Each request has the client's deadline, so the level ends."""
    places = _places(level)

    async def one_client() -> None:
        for place in places:
            outcome = await tally.ask(client, body_at(place), time.perf_counter())
            if outcome.failure:
                await asyncio.sleep(FAILED_PAUSE_S)

    await _all(one_client() for _ in range(level.concurrency))


async def run_open(
    client: Client, body_at: BodyAt, level: Level, tally: Tally, *, seed: tuple[int, ...]
) -> None:
    """Play an open loop."""
    begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for place, after_s in enumerate(poisson_times_s(level.rate_per_s, seed=seed)):
            if place == level.requests if level.requests else after_s > level.seconds:
                break
            body = body_at(place)  # made before it is due
            await asyncio.sleep(max(0.0, begun_s + after_s - time.perf_counter()))
            group.create_task(tally.ask(client, body, begun_s + after_s))


def _places(level: Level) -> Iterator[int]:
    """Yield the requests' numbers until the level has enough, or its time is over."""
    if level.requests:
        yield from range(level.requests)
        return
    ends_s = time.perf_counter() + level.seconds
    for place in itertools.count():
        if time.perf_counter() >= ends_s:
            return
        yield place


async def _all(work: Iterator[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)
