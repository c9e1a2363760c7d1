"""Closed and open loops against a server that plays a script."""

from __future__ import annotations

import asyncio
import time

from gyre.benchmark.records import Level, RequestResult
from gyre.benchmark.runner import Tally, run_closed, run_open
from scripted_api import Api, Script, client_of, scripted, stream


def play(script: Script, level: Level, *, most: int = 64) -> tuple[list[RequestResult], Api]:
    async def go() -> tuple[list[RequestResult], Api]:
        tally = Tally(lambda outcome: None)
        async with scripted(script) as api:
            with client_of(api, most=most) as client:
                body_at = b'{"n": %d}'.__mod__
                if level.rate_per_s:
                    await run_open(client, body_at, level, tally, seed=(0,))
                else:
                    await run_closed(client, body_at, level, tally)
        assert tally.unfinished == 0
        return tally.outcomes, api

    return asyncio.run(go())


def test_a_closed_loop_asks_each_once_over_its_connections() -> None:
    outcomes, api = play(lambda number, body: stream("a"), Level(concurrency=4, requests=30))
    assert [outcome.failure for outcome in outcomes] == [""] * 30
    assert sorted(body["n"] for body in api.bodies) == list(range(30))
    assert api.connections == 4


def test_a_closed_loop_never_has_more_under_way() -> None:
    running = most = 0

    async def count() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1

    play(lambda number, body: [count(), *stream("a")], Level(concurrency=3, requests=20))
    assert most == 3


def test_a_level_of_seconds_asks_until_they_are_over() -> None:
    begun_s = time.perf_counter()
    outcomes, _ = play(lambda number, body: stream("a"), Level(concurrency=2, seconds=0.2))
    assert time.perf_counter() - begun_s >= 0.2
    assert len(outcomes) > 2 and all(outcome.due_s < begun_s + 10 for outcome in outcomes)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """The server answers nobody before all have asked; a loop that waits would never end."""

    async def until_all(number: int) -> None:
        arrived.append(number)
        while len(arrived) < 12:
            await asyncio.sleep(0.001)

    arrived: list[int] = []
    outcomes, api = play(
        lambda number, body: [until_all(number), *stream("a")],
        Level(rate_per_s=500.0, requests=12),
    )
    assert [outcome.failure for outcome in outcomes] == [""] * 12
    assert [body["n"] for body in api.bodies] == list(range(12))


def test_latencies_of_an_open_loop_count_from_the_due_time() -> None:
    """With one connection and 50 ms for an answer, the tenth request waits for nine others. A
    clock that started at its sending would say 50 ms."""
    outcomes, _ = play(
        lambda number, body: [0.05, *stream("a")], Level(rate_per_s=1e5, requests=10), most=1
    )
    last = max(outcomes, key=lambda outcome: outcome.ended_s)
    assert last.ended_s - last.due_s >= 0.4
    assert last.text_times_s[0] - last.due_s >= 0.4
    assert last.sent_s - last.due_s >= 0.35


def test_arrivals_of_an_open_loop_are_those_drawn() -> None:
    level = Level(rate_per_s=200.0, requests=20)
    first, second = (play(lambda number, body: stream("a"), level)[0] for _ in range(2))
    gaps = [
        [round(outcome.due_s - run[0].due_s, 6) for outcome in run]
        for run in (sorted(one, key=lambda outcome: outcome.due_s) for one in (first, second))
    ]
    assert gaps[0] == gaps[1]
    assert all(outcome.sent_s >= outcome.due_s for outcome in first)


def test_an_interruption_leaves_what_has_ended() -> None:
    async def go() -> Tally:
        tally = Tally(lambda outcome: len(tally.outcomes) == 5 and task.cancel())
        answers = [*[stream("a")] * 5, [60.0], [60.0]]
        async with scripted(lambda number, body: answers[number]) as api:
            with client_of(api) as client:
                level = Level(concurrency=2, requests=100)
                task = asyncio.ensure_future(run_closed(client, lambda _: b"{}", level, tally))
                await asyncio.wait([task], timeout=30)
                assert task.cancelled()
        return tally

    tally = asyncio.run(go())
    assert len(tally.outcomes) == 5 and tally.unfinished in (0, 1, 2)
