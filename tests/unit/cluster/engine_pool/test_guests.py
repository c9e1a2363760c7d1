"""Guests of the pool: engines that join, leave and are lost while a run goes on, with every answer
placed by the test."""

from __future__ import annotations

import asyncio

import pytest

from cluster_sim import SimEngine
from gyre.core.errors import RankError
from pool_bench import A, Bench, ask, finish, go, step, tokens_of

GUEST = "member-a"


async def join(bench: Bench) -> SimEngine:
    guest = bench.sim.make(GUEST)
    await bench.pool.add(guest)  # type: ignore[arg-type]
    return guest


def test_a_guest_gets_the_current_version_before_work() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(3)
        bench.hold("engine.prepare")
        joining = asyncio.create_task(join(bench))
        await bench.until(lambda: GUEST in bench.pool.members)
        guest = bench.sim.newest(GUEST)
        await bench.reach(guest, "engine.prepare")
        early = [bench.read(ask("x" * (i + 1))) for i in range(3)]
        await bench.settle()
        assert not guest.running
        bench.release("engine.prepare")
        await joining
        more = [bench.read(ask("y" * (i + 1))) for i in range(3)]
        await bench.until(lambda: guest.running)
        assert guest.version == 3 and not guest.stale
        await bench.settle()
        await finish(bench, [*early, *more])

    go(work, (A,))


def test_a_guest_that_comes_before_any_version_takes_the_first() -> None:
    async def work(bench: Bench) -> None:
        guest = await join(bench)
        assert bench.state(GUEST) == "fresh"
        await bench.publish(1)
        assert bench.state(GUEST) == "up" and guest.version == 1

    go(work, (A,))


def test_a_lost_guest_costs_its_rollouts_and_is_not_started_again() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        guest = await join(bench)
        tasks = [bench.read(ask("x" * (i + 1), n=2)) for i in range(2)]
        await bench.until(lambda: guest.running)
        await step(bench, guest, 3)
        guest.die()
        await bench.until(lambda: GUEST not in bench.pool.members)
        await finish(bench, tasks)
        assert bench.count("engine.lost") == 1 and not bench.count("engine.restarted")
        [requeued] = [fields for kind, fields in bench.events if kind == "retry.request_requeued"]
        assert requeued["kept_tokens"] == 6  # of both completions
        assert len(bench.sim.lives[GUEST]) == 1
        again = await join(bench)  # under its name
        assert bench.state(GUEST) == "up" and again.version == 1

    go(work, (A,))


def test_a_guest_that_leaves_ends_what_it_has_and_gets_nothing_more() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        guest = await join(bench)
        tasks = [bench.read(ask("x" * (i + 1))) for i in range(2)]
        await bench.until(lambda: guest.running)
        had = set(guest.running)
        leaving = asyncio.create_task(
            bench.pool.remove(guest, deadline_s=30.0)  # type: ignore[arg-type]
        )
        await bench.settle()
        more = [bench.read(ask("y" * (i + 1))) for i in range(3)]
        await bench.settle()
        assert set(guest.running) == had
        await finish(bench, [*tasks, *more])
        await leaving
        await bench.until(lambda: GUEST not in bench.pool.members)
        assert not bench.count("engine.lost") and not bench.count("retry.request_requeued")

    go(work, (A,))


def test_what_a_leaving_guest_has_not_ended_by_the_deadline_goes_on_elsewhere() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        guest = await join(bench)
        tasks = [bench.read(ask("x" * (i + 1))) for i in range(2)]
        await bench.until(lambda: guest.running)
        await step(bench, guest, 3)
        await bench.pool.remove(guest, deadline_s=0.01)  # type: ignore[arg-type]
        await bench.until(lambda: GUEST not in bench.pool.members)
        await finish(bench, tasks)
        assert bench.count("retry.request_requeued") == 1 and not bench.count("engine.lost")
        for task in tasks:
            assert len(tokens_of(task.result()[0])) == 8

    go(work, (A,))


def test_a_version_that_a_guest_cannot_take_costs_the_guest_alone() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        guest = await join(bench)
        await bench.prepare(2)
        guest.prepared = None  # so that its commit raises InputError
        await bench.pool.commit(2, policy="drain")
        await bench.until(lambda: GUEST not in bench.pool.members)
        assert bench.pool.version == 2 and bench.state(A) == "up"
        [lost] = [fields for kind, fields in bench.events if kind == "engine.lost"]
        assert lost["engine"] == GUEST and "not prepared" in lost["cause"]

    go(work, (A,))


def test_rollouts_of_a_version_are_counted_by_engine() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        guest = await join(bench)
        tasks = [bench.read(ask("x" * (i + 1), n=2)) for i in range(3)]
        await bench.until(lambda: guest.running)
        lost = len(guest.running)
        await step(bench, guest, 3)
        guest.die()  # what it had is ended, and counted, elsewhere
        await bench.until(lambda: GUEST not in bench.pool.members)
        await finish(bench, tasks)
        await bench.publish(2)
        again = await join(bench)
        tasks = [bench.read(ask("y" * (i + 1), n=2)) for i in range(3)]
        await bench.until(lambda: again.running)
        had = len(again.running)
        await finish(bench, tasks)
        await bench.publish(3)
        await bench.publish(4)
        assert lost and had
        told = [fields for kind, fields in bench.events if kind == "engine.answered"]
        assert [(row["version"], row["engine"], row["completions"]) for row in told] == [
            (1, A, 6),
            (2, A, 2 * (3 - had)),
            (2, GUEST, 2 * had),
        ]

    go(work, (A,))


def test_a_pool_without_guests_tells_no_counts() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        await finish(bench, [bench.read(ask("x"))])
        await bench.publish(2)
        assert not bench.count("engine.answered")

    go(work, (A,))


def test_a_guest_that_breaks_as_it_starts_is_no_member() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        bench.hold("engine.start")
        joining = asyncio.create_task(join(bench))
        await bench.until(lambda: GUEST in bench.sim.lives)
        await bench.reach(bench.sim.newest(GUEST), "engine.start")
        bench.sim.newest(GUEST).die()
        with pytest.raises(Exception, match="it died"):
            await joining
        assert GUEST not in bench.pool.members and not bench.count("engine.lost")

    go(work, (A,))


def test_the_last_engine_that_leaves_ends_the_requests_with_an_error() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        guest = await join(bench)
        bench.sim.newest(A).die()
        await bench.until(lambda: bench.state(A) == "lost")
        task = bench.read(ask("x"))
        await bench.until(lambda: guest.running)
        await bench.pool.remove(guest, deadline_s=0.01)  # type: ignore[arg-type]
        with pytest.raises(RankError, match="every engine is lost"):
            await asyncio.wait_for(task, 20)

    go(work, (A,), revive=False)
