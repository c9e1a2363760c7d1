"""A pool whose engines read their weights from folders: who is started again has the newest
version before it works, a change waits for what runs, and one that fails on some engines is gone
from all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster_sim import SimEngine
from gyre.cluster.engine_pool.weight_change import change_weights
from gyre.core.errors import DeadlineError, InputError, RankError
from gyre.core.offers import RegisteredShards
from gyre.core.records import TokenChunk
from pool_bench import A, B, Bench, ask, drive, empty_offer, finish, finishes, go, step


def served(work: Any, *names: str, **settings: Any) -> None:
    go(work, names or (A, B), starts_with_weights=True, **settings)


def versions_of(found: dict[int, list[TokenChunk]]) -> list[int]:
    return [version for chunk in found[0] for version in chunk.versions.tolist()]


async def restart(bench: Bench, name: str, *, starts_at: int) -> Any:
    bench.sim.starts_at = starts_at
    bench.sim.newest(name).die()
    await bench.until(lambda: len(bench.sim.lives[name]) == 2 and bench.state(name) == "up")
    return bench.sim.newest(name)


def test_an_engine_that_starts_with_the_newest_version_works_at_once() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        again = await restart(bench, A, starts_at=1)
        assert "engine.prepare" not in [call.method for call in again.done]
        task = bench.read(ask("r"))
        await bench.until(lambda: again.running)
        await finish(bench, [task])
        assert not again.stale

    served(work, A)


def test_an_engine_that_starts_with_an_older_version_gets_the_newest_before_work() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        await bench.publish(2)
        bench.hold("engine.prepare")
        bench.sim.starts_at = 1
        bench.sim.newest(A).die()
        await bench.until(lambda: len(bench.sim.lives[A]) == 2)
        again = bench.sim.newest(A)
        await bench.reach(again, "engine.prepare")
        task = bench.read(ask("r"))
        await bench.settle()
        assert not again.running
        bench.release("engine.prepare")
        await bench.until(lambda: again.running)
        assert again.version == 2 and not again.stale
        await finish(bench, [task])

    served(work, A)


def test_what_comes_while_requests_are_held_waits_and_what_was_there_goes_on() -> None:
    """Also when its engine is lost meanwhile."""

    async def work(bench: Bench) -> None:
        await bench.publish(1)
        before = bench.read(ask("before"))
        await bench.until(lambda: bench.sim.newest(A).running)
        lives = bench.pool.router.all()
        with bench.pool.router.holding():
            held = bench.read(ask("held"))
            await bench.settle()
            again = await restart(bench, A, starts_at=1)
            await bench.until(lambda: again.running)
            assert list(again.running) == ["before"]
            with pytest.raises(DeadlineError):
                await bench.pool.router.until_gone(lives, 0.01)
            over = await bench.read(ask("over", n=2))
            assert finishes(over) == ["refused", "refused"]
            await step(bench, again, 8)
            await bench.pool.router.until_gone(lives, 5.0)
            assert not again.running and not held.done()
            assert (await bench.pool.stats()).waiting == 1
        await bench.until(lambda: list(again.running) == ["held"])
        await finish(bench, [before, held])

    served(work, A, max_waiting=2)


def test_a_held_request_that_its_client_gives_up_is_gone() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        with bench.pool.router.holding():
            held = bench.read(ask("held"))
            await bench.settle()
            await bench.pool.abort("held")
            assert finishes(await held) == ["abort"]
        await bench.settle()
        assert not bench.sim.newest(A).running

    served(work, A)


async def change(
    bench: Bench, version: int, *, policy: Any = "drain", drain_s: float = 20.0
) -> None:
    await change_weights(
        bench.pool,
        empty_offer(version),
        policy=policy,
        drain_deadline_s=drain_s,
        rollback_deadline_s=20.0,
    )


def fail(engine: SimEngine, method: str, error: Exception) -> None:
    (call,) = engine.asked(method)
    engine.open.remove(call)
    call.future.set_exception(error)


def state_of(bench: Bench) -> list[tuple[int | None, int | None]]:
    engines = [bench.sim.newest(name) for name in bench.pool.members]
    return [(engine.version, engine.prepared) for engine in engines]


def test_a_drained_change_waits_for_what_runs_and_holds_what_comes() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        before = bench.read(ask("before"))
        await bench.until(lambda: any(bench.sim.newest(name).running for name in (A, B)))
        changing = asyncio.create_task(change(bench, 2))
        await bench.until(lambda: all(prepared == 2 for _, prepared in state_of(bench)))
        await bench.settle()
        after = bench.read(ask("after"))
        await bench.settle()
        assert bench.pool.version == 1 and not changing.done()
        await drive(bench, [before, changing, after], tokens=4)
        assert state_of(bench) == [(2, None)] * 2 and bench.pool.version == 2
        versions = [set(versions_of(task.result())) for task in (before, after)]
        assert versions == [{1}, {2}]

    served(work)


def test_a_change_that_continues_ends_no_request() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        task = bench.read(ask("r"))
        await bench.until(lambda: bench.sim.newest(A).running)
        await step(bench, bench.sim.newest(A), 3)
        await change(bench, 2, policy="continue")
        await finish(bench, [task])
        assert versions_of(task.result()) == [1] * 3 + [2] * 5

    served(work, A)


def test_requests_that_do_not_end_in_time_leave_the_last_version() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        task = bench.read(ask("r"))
        await bench.until(lambda: any(bench.sim.newest(name).running for name in (A, B)))
        with pytest.raises(DeadlineError):
            await change(bench, 2, drain_s=0.05)
        assert state_of(bench) == [(1, None)] * 2 and bench.pool.version == 1
        await finish(bench, [task, bench.read(ask("later"))])
        await change(bench, 2)
        assert bench.pool.version == 2

    served(work)


@pytest.mark.parametrize("loses", [False, True])
def test_a_version_that_one_engine_cannot_take_is_on_none(loses: bool) -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        bench.sim.starts_at = 1
        bench.hold("engine.prepare")
        changing = asyncio.create_task(change(bench, 2))
        first, second = bench.sim.newest(A), bench.sim.newest(B)
        await bench.reach(first, "engine.prepare")
        await bench.reach(second, "engine.prepare")
        first.perform(first.asked("engine.prepare")[0])
        if loses:
            second.die("a bus error")
        else:
            fail(second, "engine.prepare", InputError("a shard is missing"))
        bench.release("engine.prepare")
        reason = "engine-1 was lost" if loses else "a shard is missing"
        with pytest.raises(InputError, match=reason):
            await changing
        await bench.until(lambda: bench.state(B) == "up")
        assert state_of(bench) == [(1, None)] * 2 and bench.pool.version == 1
        await change(bench, 2)
        assert state_of(bench) == [(2, None)] * 2

    served(work)


def test_without_an_engine_there_is_no_change() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        bench.sim.newest(A).die()
        await bench.until(lambda: bench.state(A) == "lost")
        with pytest.raises(RankError, match="no engine is up"):
            await change(bench, 2)
        assert bench.pool.version == 1

    served(work, A, revive=False)


@pytest.mark.parametrize("policy", ["drain", "continue"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_commit_that_fails_on_one_engine_is_undone_on_all(policy: str, is_there: bool) -> None:
    """The one that has swapped already takes the last version again from where it is still offered;
    else it is started again."""

    async def work(bench: Bench) -> None:
        await bench.publish(1, RegisteredShards(parts=()) if is_there else None)
        bench.sim.starts_at = 1
        bench.hold("engine.commit")
        changing = asyncio.create_task(change(bench, 2, policy=policy))
        first, second = bench.sim.newest(A), bench.sim.newest(B)
        await bench.reach(first, "engine.commit")
        await bench.reach(second, "engine.commit")
        first.perform(first.asked("engine.commit")[0])
        fail(second, "engine.commit", InputError("no memory"))
        bench.release("engine.commit")
        with pytest.raises(InputError, match="no memory"):
            await changing
        lives = 1 if is_there else 2
        await bench.until(lambda: len(bench.sim.lives[A]) == lives and bench.state(A) == "up")
        assert bench.pool.version == 1 and len(bench.sim.lives[B]) == 1
        assert bench.count("engine.reverted") == is_there
        assert state_of(bench) == [(1, None)] * 2
        await change(bench, 2)
        assert state_of(bench) == [(2, None)] * 2

    served(work)
