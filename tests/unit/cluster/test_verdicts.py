"""Which error a call to all engines ends with, when one fails, one hangs and others wait for it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from gyre.cluster import watchdog
from gyre.cluster.engine_pool import pool
from gyre.cluster.engine_pool.pool import find_first
from gyre.cluster.engine_pool.restarts import RestartPolicy
from gyre.cluster.worker import rpc
from gyre.core.errors import GyreError, MemoryBudgetError, RankError
from pool_bench import A, B, Bench, go

NO_ROOM, SAW = MemoryBudgetError("no room on engine-1"), RankError("rank 1 has failed")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE_S", 0.2)
    monkeypatch.setattr(rpc, "STACKS_S", 0.1)
    monkeypatch.setattr(watchdog, "LOOK_S", 0.1)


async def begin_commit(bench: Bench) -> asyncio.Task[None]:
    await bench.publish(1)
    await bench.prepare(2)
    bench.hold("engine.commit")
    commit = asyncio.create_task(bench.pool.commit(2, policy="drain"))
    for name in (A, B):
        await bench.reach(bench.sim.newest(name), "engine.commit")
    return commit


def fail(bench: Bench, name: str, error: GyreError) -> None:
    bench.sim.newest(name).open.pop(0).future.set_exception(error)


def test_the_error_of_one_engine_is_raised_although_another_one_never_answers() -> None:
    """Engines gather their weights together: one that fails leaves the others waiting."""

    async def work(bench: Bench) -> None:
        commit = await begin_commit(bench)
        fail(bench, B, NO_ROOM)
        with pytest.raises(MemoryBudgetError, match="no room on engine-1"):
            await asyncio.wait_for(commit, 20)
        assert not bench.count("engine.lost")

    go(work, vital=(A, B))


def test_an_engine_that_saw_another_one_fail_is_not_the_cause() -> None:
    async def work(bench: Bench) -> None:
        commit = await begin_commit(bench)
        fail(bench, A, SAW)
        await bench.settle()
        fail(bench, B, NO_ROOM)
        with pytest.raises(MemoryBudgetError, match="no room on engine-1"):
            await asyncio.wait_for(commit, 20)

    go(work, vital=(A, B))


def test_a_vital_engine_that_answers_nothing_is_found_with_all_stacks_long_before_its_deadline() -> (
    None
):
    async def work(bench: Bench) -> None:
        commit = await begin_commit(bench)
        bench.sim.newest(B).look = lambda what: Future()  # type: ignore[method-assign]
        with pytest.raises(
            RankError, match="commit of version 2 hangs: no progress on engine-1"
        ) as hung:
            await asyncio.wait_for(commit, 30)
        assert (
            "stacks of engine-0" in hung.value.message
            and "engine-1 answers nothing" in hung.value.message
        )
        assert "cluster.hang_s = 0.5" in hung.value.hint
        assert bench.count("rank.hung") == 1

    go(work, vital=(A, B), hang_s=0.5)


def test_a_hang_that_cannot_be_told_ends_the_call_too() -> None:
    """The disk of the events is full: nobody would watch any more."""

    async def work(bench: Bench) -> None:
        commit = await begin_commit(bench)
        bench.full_disk_at = "rank.hung"
        bench.sim.newest(B).look = lambda what: Future()  # type: ignore[method-assign]
        with pytest.raises(OSError, match="No space left"):
            await asyncio.wait_for(commit, 30)

    go(work, vital=(A, B), hang_s=0.5)


def test_a_vital_engine_that_hangs_in_a_call_is_found_by_the_deadline_with_all_stacks() -> None:
    async def work(bench: Bench) -> None:
        commit = await begin_commit(bench)
        bench.sim.newest(A).perform(bench.sim.newest(A).asked("engine.commit")[0])
        with pytest.raises(
            RankError, match="commit of version 2 hangs: no progress on engine-1"
        ) as hung:
            await asyncio.wait_for(commit, 30)
        assert (
            "stacks of engine-0" in hung.value.message
            and "stacks of engine-1" in hung.value.message
        )
        assert "cluster.call_deadline_s = 0.5" in hung.value.hint

    go(work, vital=(A, B), call_deadline_s=0.5)


def test_an_engine_alone_that_hangs_in_prepare_is_lost_and_its_stacks_are_told() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        bench.hold("engine.prepare")
        prepare = asyncio.create_task(bench.prepare(2))
        await bench.reach(bench.sim.newest(A), "engine.prepare")
        engine = bench.sim.newest(B)
        engine.perform(engine.asked("engine.prepare")[0])
        await asyncio.wait_for(prepare, 30)
        (lost,) = [fields for kind, fields in bench.events if kind == "engine.lost"]
        assert (
            lost["engine"] == A and "had not answered 'engine.prepare' after 0.5 s" in lost["cause"]
        )
        assert "stacks of engine-0" in lost["cause"]

    go(work, call_deadline_s=0.5, restarts=RestartPolicy())


def test_what_began_it_is_an_engines_own_error_before_that_of_the_pool() -> None:
    broken = RankError("engine-0 is lost")
    assert find_first([], None) is None
    assert find_first([], broken) is broken
    assert find_first([NO_ROOM], broken) is NO_ROOM
    assert find_first([SAW], broken) is broken
    assert find_first([SAW, NO_ROOM], None) is NO_ROOM
    assert find_first([SAW], None) is SAW
