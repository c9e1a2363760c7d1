"""What the pool does when an engine is lost at the worst moment, with every answer and notice
placed by the test."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster_sim import SimEngine, token_at
from gyre.cluster.engine_pool.restarts import RestartPolicy
from gyre.cluster.worker.server import WorkerFault
from gyre.core.errors import InputError, RankError, SnapshotError
from gyre.core.offers import RegisteredPart, RegisteredShards
from pool_bench import A, B, Bench, ask, drive, finish, finishes, go, read, step, tokens_of


async def lost_and_offered_again(bench: Bench) -> SimEngine:
    """The next life of an engine that died, as it is about to receive the current version;
    `prepare` is held."""
    bench.hold("engine.prepare")
    bench.sim.newest(A).die()
    await bench.until(lambda: len(bench.sim.lives[A]) == 2)
    again = bench.sim.newest(A)
    await bench.reach(again, "engine.prepare")
    return again


# ---- weights


@pytest.mark.parametrize("back_with_old_weights", [True, False])
def test_an_engine_that_comes_back_amid_a_commit_gets_the_new_version_before_work(
    back_with_old_weights: bool,
) -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        await bench.prepare(2)
        bench.hold("engine.commit")
        commit = asyncio.create_task(bench.pool.commit(2, policy="drain"))
        await bench.reach(bench.sim.newest(A), "engine.commit")
        bench.sim.newest(A).die()
        await bench.until(lambda: len(bench.sim.lives[A]) == 2)
        again = bench.sim.newest(A)
        await bench.reach(again, "engine.commit")
        # the others are not through yet: it is brought to what they answer with
        if back_with_old_weights:
            again.perform()
            await bench.until(lambda: bench.count("engine.rejoined"))
        bench.sim.newest(B).perform()
        await commit
        tasks = [bench.read(ask("x" * (i + 1))) for i in range(4)]
        await bench.settle()
        bench.release("engine.commit")
        await bench.until(lambda: bench.state(A) == "up")
        more = [bench.read(ask("y" * (i + 1))) for i in range(4)]
        await bench.until(lambda: again.running)
        assert not again.stale, "it was given work on old weights"
        await finish(bench, [*tasks, *more])

    go(work)


def test_an_engine_lost_between_prepare_and_commit_follows_by_itself() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        await bench.prepare(2)
        bench.sim.newest(A).die()
        await bench.until(lambda: bench.count("engine.rejoined"))
        await bench.pool.commit(2, policy="drain")
        await bench.until(lambda: bench.state(A) == "up")
        assert bench.sim.newest(A).version == 2 and bench.count("engine.lost") == 1

    go(work)


def test_an_answer_of_a_dead_life_prepares_nothing_of_the_next_one() -> None:
    """The answer to `prepare` and the notice of the death come together; the new life must not be
    taken for ready."""

    async def work(bench: Bench) -> None:
        await bench.publish(1)
        bench.hold("engine.prepare", "engine.commit")
        prepare = asyncio.create_task(bench.prepare(2))
        await bench.reach(bench.sim.newest(A), "engine.prepare")
        await bench.reach(bench.sim.newest(B), "engine.prepare")
        bench.sim.newest(A).perform()
        bench.sim.newest(A).die()
        bench.sim.newest(B).perform()
        await prepare
        await bench.until(lambda: len(bench.sim.lives[A]) == 2)
        commit = asyncio.create_task(bench.pool.commit(2, policy="drain"))
        bench.release("engine.prepare", "engine.commit")
        await commit
        await bench.until(lambda: bench.sim.newest(A).version == 2)

    go(work)


def test_a_version_offered_while_an_engine_catches_up_does_not_disturb_it() -> None:
    """What the pool prepares and what brings the engine back would overwrite each other."""

    async def work(bench: Bench) -> None:
        await bench.publish(1)
        again = await lost_and_offered_again(bench)  # version 1
        prepare = asyncio.create_task(bench.prepare(2))
        await bench.reach(bench.sim.newest(B), "engine.prepare")
        bench.release("engine.prepare")
        await prepare
        await bench.pool.commit(2, policy="drain")
        await bench.until(lambda: again.version == 2)
        assert bench.count("engine.waits_for_weights") == 0
        assert bench.count("engine.lost") == 1

    go(work)


def test_what_came_back_after_the_pool_was_terminated_waits_for_the_next_version() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        await bench.pool.terminate()
        bench.sim.newest(A).die()
        await bench.until(lambda: bench.count("engine.restarted"))
        await bench.settle()
        assert bench.sim.newest(A).version is None, "it serves a version that was taken back"
        assert finishes(await bench.read(ask("early"))) == ["refused"]
        await bench.publish(2)
        assert bench.sim.newest(A).version == 2 and bench.state(A) == "up"

    go(work, (A,))


def test_an_engine_that_waits_for_weights_is_told_of_when_the_next_version_brings_it_back() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        again = await lost_and_offered_again(bench)
        again.open.pop(0).future.set_exception(
            InputError("version 1 was asked for, the trainer is at 2")
        )
        await bench.until(lambda: bench.count("engine.waits_for_weights"))
        bench.release("engine.prepare")
        await bench.publish(2)
        assert bench.state(A) == "up"
        (joined,) = [fields for kind, fields in bench.events if kind == "engine.rejoined"]
        assert joined == {"engine": A, "version": 2}
        await bench.publish(3)
        assert bench.count("engine.rejoined") == 1

    go(work)


def test_an_engine_that_cannot_read_what_is_registered_ends_the_step_and_not_the_run() -> None:
    """With RankError the run restarts, and registers anew; a refusal would end it."""

    async def work(bench: Bench) -> None:
        parts = (RegisteredPart(addresses=("shm:here/gyre-a-0-0",), size_bytes=0),)
        await bench.publish(1, RegisteredShards(parts=parts))
        bench.hold("engine.prepare")
        bench.sim.newest(A).die()
        await bench.until(lambda: len(bench.sim.lives[A]) == 2)
        again = bench.sim.newest(A)
        await bench.reach(again, "engine.prepare")
        again.open.pop(0).future.set_exception(SnapshotError("the slot was cut"))
        await bench.until(lambda: bench.count("engine.waits_for_weights"))
        with pytest.raises(RankError, match="no engine could read version 1"):
            await bench.read(ask("r"))
        bench.release("engine.prepare")
        await bench.publish(2)
        assert bench.state(A) == "up"

    go(work, (A,))


# ---- losses are counted once


def test_a_loss_that_several_notice_is_one_loss() -> None:
    """The dead engine's poll answers late, after the engine is back: that is no second loss."""

    async def work(bench: Bench) -> None:
        await bench.publish(1)
        task = bench.read(ask("r"))
        first = bench.sim.newest(A)
        await bench.reach(first, "engine.poll")
        polls = first.asked("engine.poll")
        first.open.clear()  # its answer is still on the way
        first.die()
        await bench.until(lambda: bench.count("engine.rejoined"))
        for call in polls:
            call.future.set_exception(first.lost_error())
        await bench.settle()
        assert bench.count("engine.lost") == 1 and len(bench.sim.lives[A]) == 2
        await finish(bench, [task])

    go(work)


def test_a_loss_amid_a_call_to_all_is_one_loss() -> None:
    """One engine is lost and back while another one's answer is still awaited."""

    async def work(bench: Bench) -> None:
        await bench.publish(1)
        bench.hold("engine.stats")
        stats = asyncio.create_task(bench.pool.stats())
        await bench.reach(bench.sim.newest(B), "engine.stats")
        bench.sim.newest(A).die()
        await bench.until(lambda: bench.count("engine.rejoined"))
        await bench.settle()
        bench.release("engine.stats")
        await stats
        await bench.settle()
        assert bench.count("engine.lost") == 1 and len(bench.sim.lives[A]) == 2

    go(work)


def test_health_names_the_engine_that_is_unwell() -> None:
    """Though another one is lost while they are asked."""

    async def work(bench: Bench) -> None:
        await bench.publish(1)
        bench.sim.newest(B).version = None
        bench.hold("engine.health")
        health = asyncio.create_task(bench.pool.health())
        await bench.reach(bench.sim.newest(B), "engine.health")
        bench.sim.newest(A).die(noticed=False)
        bench.release("engine.health")
        found = await health
        assert (
            f"{B}: {B} is on dummies" in found.reason
            and f"{A}: lost" in found.reason
            and not found.ok
        )

    go(work)


# ---- requests that are to end


@pytest.mark.parametrize("how", ["abort", "close"])
def test_an_aborted_request_is_answered_so_although_its_engine_dies(how: str) -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        bench.hold("engine.abort")
        stream = bench.pool.submit(ask("r"))
        task = asyncio.create_task(read(stream))
        engine = bench.sim.newest(A)
        await bench.until(lambda: "r" in engine.running)
        await step(bench, engine, 3)
        abort = asyncio.create_task(bench.pool.abort("r") if how == "abort" else stream.aclose())
        await bench.reach(engine, "engine.poll")
        await bench.until(lambda: engine.asked("engine.abort"))
        engine.die()
        await abort
        if how == "abort":
            found = await task
            assert finishes(found) == ["abort"] and len(tokens_of(found[0])) == 3
        else:
            task.cancel()
        await bench.settle()
        assert bench.count("retry.request_requeued") == 0 and not bench.sim.newest(B).running

    go(work)


def test_interrupted_requests_stay_so_although_their_engine_dies() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        bench.hold("engine.interrupt")
        requests = [ask("a" * (i + 1), n=2) for i in range(4)]
        tasks = [bench.read(request) for request in requests]
        a, b = bench.sim.newest(A), bench.sim.newest(B)
        await bench.until(lambda: len(a.running) == len(b.running) == 2)
        await step(bench, a, 3)
        interrupt = asyncio.create_task(bench.pool.interrupt(deadline_s=30.0))
        await bench.until(lambda: a.asked("engine.interrupt") and b.asked("engine.interrupt"))
        lost = [request for request in requests if request.request_id in a.running]
        a.die()
        bench.release("engine.interrupt")
        await drive(bench, [interrupt])
        partials = await interrupt
        for request in lost:
            assert {p.index: len(p.tokens) for p in partials[request.request_id]} == {0: 3, 1: 3}
        for task in tasks:
            assert set(finishes(await task)) == {"interrupted"}
        assert bench.count("retry.request_requeued") == 0

    go(work)


def test_an_interrupted_request_may_be_asked_again_at_once() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        task = bench.read(ask("r"))
        await bench.until(lambda: "r" in bench.sim.newest(A).running)
        interrupt = asyncio.create_task(bench.pool.interrupt(deadline_s=30.0))
        await drive(bench, [interrupt])
        await interrupt
        again = bench.read(ask("r"))
        assert finishes(await task) == ["interrupted"]
        await finish(bench, [again])

    go(work)


def test_a_request_that_was_answered_wholly_is_not_asked_again() -> None:
    """The engine dies between the last chunk and the word that nothing follows."""

    async def work(bench: Bench) -> None:
        await bench.publish(1)
        task = bench.read(ask("r", max_tokens=3))
        engine = bench.sim.newest(A)
        await bench.until(lambda: "r" in engine.running)
        engine.step(3)
        engine.news[1].clear()
        await bench.reach(engine, "engine.poll")
        engine.perform()
        await bench.reach(engine, "engine.poll")
        engine.die()
        assert finishes(await task) == ["length"]
        assert bench.count("retry.request_requeued") == 0

    go(work)


def test_a_deadline_passes_while_no_engine_is_there() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        bench.hold("engine.start")
        bench.sim.newest(A).die()
        await bench.until(lambda: len(bench.sim.lives[A]) == 2)
        found = await bench.read(ask("r", deadline_s=0.02))
        assert finishes(found) == ["deadline"] and bench.count("engine.deadline") == 1

    go(work, (A,))


def test_a_deadline_that_an_engine_slept_through_ends_the_request_with_that_engine() -> None:
    """No other engine is up then, so nobody else would ever look at its deadline."""

    async def work(bench: Bench) -> None:
        await bench.publish(1)
        bench.hold("engine.start")
        late, other = bench.read(ask("late", deadline_s=0.02)), bench.read(ask("other"))
        engine = bench.sim.newest(A)
        await bench.until(lambda: len(engine.running) == 2)
        await step(bench, engine, 3)
        await asyncio.sleep(0.05)
        assert not late.done(), "an engine that goes on would answer by itself"
        engine.die()
        found = await asyncio.wait_for(late, 10)
        assert finishes(found) == ["deadline"] and len(tokens_of(found[0])) == 3
        requeued = [fields for kind, fields in bench.events if kind == "retry.request_requeued"]
        assert [one["request_id"] for one in requeued] == ["other"]
        assert bench.count("engine.deadline") == 1
        bench.release("engine.start")
        await finish(bench, [other])

    go(work, (A,))


def test_only_what_a_lost_engine_had_is_marked_so() -> None:
    """Another engine takes it though its queue is full."""

    async def work(bench: Bench) -> None:
        await bench.publish(1)
        tasks = [bench.read(ask("a" * (i + 1))) for i in range(4)]
        a, b = bench.sim.newest(A), bench.sim.newest(B)
        await bench.until(lambda: len(a.running) == len(b.running) == 2)
        assert not any(one.resumed for one, _ in [*a.running.values(), *b.running.values()])
        moved = set(a.running)
        await bench.settle()  # it has said so
        bench.hold("engine.start")
        a.die()
        await bench.until(lambda: len(b.running) == 4)
        assert {name for name, (one, _) in b.running.items() if one.resumed} == moved
        bench.release("engine.start")
        await finish(bench, tasks)

    go(work)


@pytest.mark.parametrize("refuses", [False, True])
def test_what_a_lost_engine_never_admitted_is_not_marked(refuses: bool) -> None:
    """It stood still and had not read the request, or had refused it and nobody had heard so."""

    async def work(bench: Bench) -> None:
        await bench.publish(1)
        a, b = bench.sim.newest(A), bench.sim.newest(B)
        bench.hold("engine.submit", "engine.start")
        tasks = [bench.read(ask("a" * (i + 1))) for i in range(4)]
        await bench.until(lambda: a.asked("engine.submit") and b.asked("engine.submit"))
        if refuses:
            a.is_full = True
            a.perform(a.asked("engine.submit")[0])
            await bench.settle()
        a.die()
        bench.release("engine.submit")
        await bench.until(lambda: len(b.running) == 4)
        assert not any(one.resumed for one, _ in b.running.values())
        bench.release("engine.start")
        await finish(bench, tasks)

    go(work)


def test_an_engine_forgets_what_it_admitted_once_that_is_answered() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        task, member = bench.read(ask("r")), bench.pool.members[A]
        await bench.until(lambda: member.taken == {"r"})
        await finish(bench, [task])
        assert not member.taken

    go(work, (A,))


def test_an_engine_that_ends_requests_by_itself_is_lost_and_they_go_on() -> None:
    """Its cycle broke: it would refuse, or end, everything that it is given, and have the least to
    do."""

    async def work(bench: Bench) -> None:
        await bench.publish(1)
        task = bench.read(ask("r"))
        engine = bench.sim.newest(A)
        await bench.until(lambda: "r" in engine.running)
        await step(bench, engine, 3)
        engine.end_request("r", "abort")
        await bench.reach(engine, "engine.poll")
        engine.perform()
        await bench.until(lambda: bench.count("retry.request_requeued"))
        assert bench.count("engine.lost") == 1
        await finish(bench, [task])
        found = await task
        assert finishes(found) == ["length"] and tokens_of(found[0]) == [
            token_at(ask("r"), 0, i) for i in range(8)
        ]

    go(work)


# ---- faults reach whoever waits


@pytest.mark.parametrize("method", ["engine.poll", "engine.submit"])
def test_an_engine_whose_seat_breaks_is_lost(method: str) -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        engine = bench.sim.newest(A)
        bench.hold(method)
        task = bench.read(ask("r"))
        await bench.reach(engine, method)
        call = engine.open.pop(0)
        call.future.set_exception(WorkerFault("broken inside"))
        bench.release(*({"engine.submit"} & {method}))
        await bench.until(lambda: bench.count("retry.request_requeued"))
        assert "broken inside" in next(
            fields["cause"] for kind, fields in bench.events if kind == "engine.lost"
        )
        await finish(bench, [task])

    go(work)


@pytest.mark.parametrize(
    "kind", ["engine.lost", "retry.request_requeued", "engine.restarted", "engine.rejoined"]
)
def test_a_full_disk_under_the_events_reaches_every_reader(kind: str) -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        tasks = [bench.read(ask("a" * (i + 1))) for i in range(4)]
        await bench.until(lambda: bench.sim.newest(A).running and bench.sim.newest(B).running)
        bench.full_disk_at = kind
        bench.sim.newest(A).die()
        for task in tasks:
            with pytest.raises(OSError, match="No space left"):
                await asyncio.wait_for(task, 30)
        with pytest.raises(OSError, match="No space left"):
            await bench.pool.stats()
        with pytest.raises(OSError, match="No space left"):
            await read(bench.pool.submit(ask("later")))
        assert "No space left" in (await bench.pool.health()).reason

    go(work)


def test_a_request_that_cannot_be_sent_reaches_its_reader() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)

        def begin(method: str, *args: Any) -> Any:
            raise TypeError("cannot pickle this")

        bench.sim.newest(A).begin = begin  # type: ignore[method-assign]
        with pytest.raises(TypeError, match="cannot pickle"):
            await asyncio.wait_for(bench.read(ask("r")), 30)

    go(work, (A,))


def test_a_call_to_all_ends_as_soon_as_a_vital_engine_is_lost() -> None:
    """Though the other one, which waits for the lost one's rank, never answers."""

    async def work(bench: Bench) -> None:
        await bench.publish(1)
        bench.hold("engine.commit")
        await bench.prepare(2)
        commit = asyncio.create_task(bench.pool.commit(2, policy="drain"))
        await bench.reach(bench.sim.newest(B), "engine.commit")
        bench.sim.newest(A).open.clear()  # its answer never comes
        bench.sim.newest(A).die()
        with pytest.raises(RankError, match=f"{A} .* is lost"):
            await asyncio.wait_for(commit, 30)

    go(work, vital=(A, B))


def test_a_revived_engine_that_does_not_start_is_stopped_and_counted() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        bench.hold("engine.start")
        bench.sim.newest(A).die()
        for number in (1, 2):
            await bench.until(lambda number=number: len(bench.sim.lives[A]) == number + 1)
            again = bench.sim.newest(A)
            await bench.reach(again, "engine.start")
            again.open.pop(0).future.set_exception(WorkerFault("no start"))
            await bench.until(lambda again=again: again.cause == "it was stopped")
        await bench.until(lambda: bench.count("engine.restarts_exhausted"))
        assert len(bench.sim.lives[A]) == 3 and bench.count("engine.restart_failed") == 2

    go(work, restarts=RestartPolicy(max_restarts=2))


def test_two_who_wait_for_the_queue_to_drain_both_hear_of_it() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        task = bench.read(ask("r"))
        await bench.until(lambda: bench.sim.newest(A).running)
        drains = [asyncio.create_task(bench.pool.drain(deadline_s=30.0)) for _ in range(2)]
        await finish(bench, [task])
        await asyncio.wait_for(asyncio.gather(*drains), 5)

    go(work)
