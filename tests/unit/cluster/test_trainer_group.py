"""The trainer group over workers that are threads: who is named when a rank fails, hangs or
dies."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import cluster_roles  # noqa: F401  the workers import it by name
from gyre.cluster import watchdog
from gyre.cluster.phase_barrier import ClusterGate
from gyre.cluster.trainer_group import TrainerGroup
from gyre.cluster.worker import rpc
from gyre.cluster.worker.rpc import ask
from gyre.core.errors import InputError, MemoryBudgetError, RankError, WorkerLost
from gyre.core.liveness import StallLimit
from gyre.core.records import DeviceHoldings, RoleSpec, TrainBatch, TrainSequence
from local_cluster import LocalCluster
from offers import tensors_in

Group = tuple[TrainerGroup, LocalCluster, list[tuple[str, dict[str, Any]]]]


def batch(step: int) -> TrainBatch:
    return TrainBatch(
        sequences=(TrainSequence(tokens=np.arange(6, dtype=np.int32), columns={}),), step=step
    )


async def make(
    role: str, ranks: list[dict[str, Any]], *, hang_s: float = 20.0, call_deadline_s: float = 10.0
) -> Group:
    events: list[tuple[str, dict[str, Any]]] = []
    cluster = LocalCluster(
        on_event=lambda worker, kind, **fields: events.append((kind, {"worker": worker, **fields}))
    )
    handles = [
        await cluster.start(
            RoleSpec(
                name=f"rank-{i}",
                builder=f"cluster_roles:{role}",
                arguments={"rank": i, **arguments},
            )
        )
        for i, arguments in enumerate(ranks)
    ]
    group = TrainerGroup(
        cluster,
        handles,
        emit=lambda kind, **fields: events.append((kind, fields)),
        call_deadline_s=call_deadline_s,
        hang_s=hang_s,
        look_s=0.1,
        grace_s=0.5,
    )
    return group, cluster, events


def go(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 40))  # type: ignore[arg-type]


def test_one_rank_that_raises_is_named_and_ends_the_step() -> None:
    async def work() -> None:
        group, cluster, events = await make("fake_trainer", [{}, {"fail_at_steps": (2,)}, {}])
        assert (await group.step(batch(1))).version == group.version == 1
        with pytest.raises(
            RankError, match=r"step 2: rank 1 \(rank-1, .*told to fail at step 2"
        ) as failed:
            await group.step(batch(2))
        assert "max_restarts" in failed.value.hint
        with pytest.raises(RankError, match="rank 1"):
            await group.step(batch(3))
        with pytest.raises(RankError, match="rank 1"):
            await group.register()
        (told,) = [fields for kind, fields in events if kind == "rank.failed"]
        assert told["rank"] == 1 and told["worker"] == "rank-1"
        assert (
            "trainer.update_skipped",
            {"worker": "rank-1", "step": 2, "reason": "as told"},
        ) in events
        await cluster.close()

    go(work)


def test_a_rank_that_dies_is_named() -> None:
    async def work() -> None:
        group, cluster, _ = await make("stuck_trainer", [{"stuck": True}, {"stuck": True}])
        step = asyncio.create_task(group.step(batch(1)))
        await asyncio.sleep(0.05)
        cluster.handles["rank-0"].kill("killed by a test")
        with pytest.raises(RankError, match=r"rank 0 \(rank-0, .*killed by a test"):
            await step
        await cluster.close()

    go(work)


def test_a_hang_is_found_by_its_pulse_and_carries_all_stacks() -> None:
    async def work() -> None:
        group, cluster, events = await make("stuck_trainer", [{"stuck": True}, {}], hang_s=0.5)
        with pytest.raises(RankError, match=r"step 1 hangs: no progress on rank-0 for") as hung:
            await group.step(batch(1))
        assert "self._forever.wait" in hung.value.message and "== rank-1" in hung.value.message
        (told,) = [fields for kind, fields in events if kind == "rank.hung"]
        assert set(told["stacks"]) == {"rank-0", "rank-1"} and set(told["still_s"]) == {"rank-0"}
        await cluster.close()

    go(work)


def test_the_hint_of_a_hang_names_the_limit_that_was_in_force() -> None:
    async def work() -> None:
        group, cluster, _ = await make("stuck_trainer", [{"stuck": True}], hang_s=45.0)
        stall_limit = StallLimit(key="snapshot.deadline_s", seconds=0.5)
        with pytest.raises(RankError, match="snapshot of step 2 hangs") as hung:
            await group.run("snapshot of step 2", "trainer.step", batch(1), stall_limit=stall_limit)
        assert (
            "snapshot.deadline_s = 0.5 is how long" in hung.value.hint
            and "hang_s" not in hung.value.hint
        )
        await cluster.close()

    go(work)


def test_a_slow_step_that_makes_progress_is_no_hang() -> None:
    """Longer than hang_s, with ticks all the while; the rank that waits for it is not taken for
    hung either."""

    async def work() -> None:
        group, cluster, _ = await make("stuck_trainer", [{"slow_s": 2.5}, {}], hang_s=1.5)
        assert (await group.step(batch(1))).step == 1
        await cluster.close()

    go(work)


def test_what_a_user_can_act_on_comes_as_it_is() -> None:
    async def work() -> None:
        group, cluster, _ = await make("fake_trainer", [{}, {}])
        with pytest.raises(InputError, match="no component"):
            await group.move(["actor.nothing"], "host")
        assert (await group.step(batch(1))).version == 1
        await group.close()
        await cluster.close()

    go(work)


def test_a_version_that_is_over_gives_no_tensors() -> None:
    async def work() -> None:
        group, cluster, events = await make("fake_trainer", [{}, {}])
        offer = await group.register()
        found = await tensors_in(offer)
        assert offer.version == 0
        assert {name: t.tolist() for name, t in found.items()} == {"version": [0.0]}
        await group.step(batch(1))
        with pytest.raises(InputError, match="version 0 was asked for"):
            await tensors_in(offer)
        assert not [kind for kind, _ in events if kind == "rank.failed"], "it is well"
        assert (await tensors_in(await group.register()))["version"].tolist() == [1.0]
        await cluster.close()

    go(work)


def test_a_rank_that_is_gone_ends_a_blocking_call_though_another_one_waits_for_it() -> None:
    async def work() -> None:
        group, cluster, _ = await make("stuck_trainer", [{}, {}])
        mute(cluster.handles["rank-0"], looks=False)
        cluster.handles["rank-1"].kill("killed by a test")
        with pytest.raises(RankError, match=r"rank 1 \(rank-1, .*killed by a test"):
            await group.register()
        await cluster.close()

    go(work)


def mute(handle: Any, *, looks: bool) -> None:
    """From here on a worker answers no call; with `looks` no look either, as one whose process was
    stopped."""
    handle.begin = lambda method, *args: Future()
    if looks:
        handle.look = lambda what: Future()


@pytest.mark.parametrize("how", ["silent", "stuck"])
def test_a_hang_of_a_blocking_call_is_found_and_carries_all_stacks(how: str, monkeypatch) -> None:
    """The process answers nothing for hang_s, or the call alone makes no progress for
    call_deadline_s."""
    monkeypatch.setattr(watchdog, "LOOK_S", 0.1)
    monkeypatch.setattr(rpc, "STACKS_S", 0.1)

    async def work() -> None:
        limits = (
            {"hang_s": 1.0, "call_deadline_s": 30.0}
            if how == "silent"
            else {"call_deadline_s": 1.0}
        )
        group, cluster, events = await make("stuck_trainer", [{}, {}], **limits)
        mute(cluster.handles["rank-0"], looks=how == "silent")
        with pytest.raises(
            RankError, match=r"trainer.register hangs: no progress on rank-0 for [1-9]"
        ) as hung:
            await group.register()
        assert ("rank-0 answers nothing" in hung.value.message) == (how == "silent")
        assert "== rank-1\nthread" in hung.value.message
        key = "cluster.hang_s" if how == "silent" else "cluster.call_deadline_s"
        assert f"{key} = 1 is how long" in hung.value.hint
        (told,) = [fields for kind, fields in events if kind == "rank.hung"]
        assert set(told["stacks"]) == {"rank-0", "rank-1"}
        await cluster.close()

    go(work)


def test_a_blocking_call_may_be_made_where_an_event_loop_is_at_work() -> None:
    async def work() -> None:
        group, cluster, _ = await make("fake_trainer", [{}, {}])
        assert (await group.register()).version == 0
        await cluster.close()

    go(work)


def test_a_full_disk_in_a_rank_is_said_as_that_and_not_as_a_lost_rank() -> None:
    """A user mends it; another attempt at the run would end the same way."""

    async def work() -> None:
        group, cluster, _ = await make("full_disk_trainer", [{}, {}])
        with pytest.raises(OSError, match="No space left") as failed:
            await group.step(batch(1))
        assert failed.value.errno == errno.ENOSPC and failed.value.filename == "/full"
        await cluster.close()

    go(work)


def test_an_event_that_cannot_be_written_fails_the_call_that_brought_it() -> None:
    async def work() -> None:
        def on_event(worker: str, kind: str, **fields: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        cluster = LocalCluster(on_event=on_event)
        handle = await cluster.start(RoleSpec(name="odd", builder="odd_role:odd"))
        with pytest.raises(OSError, match="No space left"):
            await ask(handle, "echo", 1, deadline_s=20)
        assert isinstance(await ask(handle, "pid", deadline_s=20), int)
        await cluster.close()

    go(work)


def test_a_lost_rank_is_not_taken_for_the_loss_of_who_wants_its_tensors() -> None:
    async def work() -> None:
        group, cluster, _ = await make("fake_trainer", [{}, {}])
        offer = await group.register()
        cluster.handles["rank-0"].kill("killed by a test")
        with pytest.raises(
            RankError, match=r"tensors of version 0: rank 0 \(rank-0, .*killed"
        ) as failed:
            await tensors_in(offer)
        assert not isinstance(failed.value, WorkerLost)
        await cluster.close()

    go(work)


def test_the_gate_enters_a_phase_everywhere_and_says_what_each_holds() -> None:
    async def work() -> None:
        _, cluster, events = await make("gated", [{"held_bytes": 10}, {"held_bytes": 20}])
        gate = ClusterGate(
            list(cluster.handles.values()),
            emit=lambda kind, **fields: events.append((kind, fields)),
            deadline_s=10.0,
            hang_s=10.0,
        )
        await gate.enter("train", step=3)
        assert (
            "cluster.memory",
            {"phase": "train", "step": 3, "device_bytes": {"rank-0": 10, "rank-1": 20}},
        ) in events
        with pytest.raises(MemoryBudgetError, match=r"rank-1 \(.*\): no room on rank-1"):
            await gate.enter("score", step=3)
        with pytest.raises(RankError, match=r"rank-0 .* could not enter phase handover"):
            await gate.enter("handover", step=3)
        await cluster.close()

    go(work)


@pytest.mark.parametrize(
    ("phase", "first"), [("train", "engine"), ("score", "engine"), ("rollout", "rank")]
)
def test_on_shared_devices_one_side_leaves_before_the_other_comes(phase: Any, first: str) -> None:
    async def work() -> None:
        asked: list[tuple[str, int | None]] = []

        class Handle:
            def __init__(self, name: str) -> None:
                self.name = self.place = name

            def begin(self, method: str, *args: Any) -> Future[DeviceHoldings]:
                asked.append((self.name, args[2]))
                answer: Future[DeviceHoldings] = Future()

                def settle() -> None:
                    asked.append((self.name, None))
                    answer.set_result(DeviceHoldings(process_bytes=len(self.name)))

                asyncio.get_running_loop().call_later(0.02, settle)
                return answer

            def look(self, what: str) -> Future[int]:
                answer: Future[int] = Future()
                answer.set_result(1)
                return answer

        gate = ClusterGate(
            [Handle("rank")],
            emit=lambda kind, **fields: None,
            deadline_s=10.0,
            hang_s=10.0,
            engines=lambda: [Handle("engine")],
            neighbors={"rank": frozenset({"engine"}), "engine": frozenset({"rank", "gone"})},
        )
        second = {"engine": "rank", "rank": "engine"}[first]
        await gate.enter(phase, step=1)
        assert asked == [(first, 0), (first, None), (second, len(first)), (second, None)]
        asked.clear()
        await gate.enter(phase, step=2)
        assert asked[0] == (first, len(second)), "what it said last"

    go(work)


def test_a_rank_that_hangs_in_a_phase_change_is_found_with_all_stacks(monkeypatch) -> None:
    """Long before its deadline, when its process answers nothing."""
    monkeypatch.setattr(watchdog, "LOOK_S", 0.1)
    monkeypatch.setattr(rpc, "STACKS_S", 0.1)

    async def work() -> None:
        _, cluster, events = await make("gated", [{"held_bytes": 10}, {"held_bytes": 20}])
        gate = ClusterGate(
            list(cluster.handles.values()),
            emit=lambda kind, **fields: events.append((kind, fields)),
            deadline_s=30.0,
            hang_s=1.0,
        )
        mute(cluster.handles["rank-1"], looks=True)
        with pytest.raises(
            RankError, match="phase rollout of step 3 hangs: no progress on rank-1"
        ) as hung:
            await gate.enter("rollout", step=3)
        assert (
            "rank-1 answers nothing" in hung.value.message
            and "== rank-0\nthread" in hung.value.message
        )
        assert "cluster.hang_s = 1" in hung.value.hint
        await cluster.close()

    go(work)


@pytest.mark.parametrize("how", ["dead", "broken", "silent"])
def test_an_engine_alone_that_cannot_change_phase_costs_itself_and_not_the_run(how: str) -> None:
    async def work() -> None:
        _, cluster, events = await make("gated", [{"held_bytes": 10}, {"held_bytes": 20}])
        engine, rank = cluster.handles.values()
        lost: list[tuple[Any, str]] = []
        gate = ClusterGate(
            [rank],
            emit=lambda kind, **fields: events.append((kind, fields)),
            deadline_s=0.5,
            hang_s=10.0,
            engines=lambda: [engine],
            on_lost=lambda handle, cause: lost.append((handle, cause)),
        )
        if how == "dead":
            engine.kill("killed by a test")
        if how == "silent":
            mute(engine, looks=False)
        await gate.enter("handover" if how == "broken" else "rollout", step=3)
        ((handle, cause),) = lost
        told = {
            "dead": "killed by a test",
            "broken": "told to break",
            "silent": "had not answered 'enter'",
        }[how]
        assert handle is engine and told in cause
        assert ("thread rank-0:" in cause) == (how == "silent"), "what it is at"
        assert events[-1][1]["device_bytes"] == {"rank-1": 20}
        await cluster.close()

    go(work)


@pytest.mark.parametrize("which", ["first", "behind"])
def test_a_rank_of_an_engine_that_does_not_answer_costs_its_engine_by_name(which: str) -> None:
    """Within the deadline, and before the trainer's ranks come to the devices that it shares. The
    phase is not entered until every rank has told what it holds."""

    async def work() -> None:
        roles = [{"rank": rank, "held_bytes": 10 * (rank + 1)} for rank in range(3)]
        _, cluster, events = await make("gated", roles)
        trainer, first, behind = cluster.handles.values()
        lost: list[tuple[Any, str]] = []
        gate = ClusterGate(
            [trainer],
            emit=lambda kind, **fields: events.append((kind, fields)),
            deadline_s=0.5,
            hang_s=10.0,
            engines=lambda: [first],
            behind=lambda handle: (behind,) if handle is first else (),
            on_lost=lambda handle, cause: lost.append((handle, cause)),
            neighbors={
                trainer.name: frozenset({behind.name}),
                behind.name: frozenset({trainer.name}),
            },
        )
        await gate.enter("rollout", step=1)
        assert not lost
        assert events[-1][1]["device_bytes"] == {"rank-0": 10, "rank-1": 20, "rank-2": 30}
        silent = {"first": first, "behind": behind}[which]
        asked_s, honest, clock = dict[str, float](), trainer.begin, asyncio.get_running_loop().time

        def begin(method: str, *args: Any) -> Future[Any]:
            asked_s[method] = clock()
            return honest(method, *args)

        trainer.begin = begin
        mute(silent, looks=False)
        began_s = clock()
        await gate.enter("train", step=1)
        assert 0.5 <= asked_s["enter"] - began_s < 5.0, "once the engine's ranks have told"
        ((engine, cause),) = lost
        assert engine is first and "had not answered 'enter' after 0.5 s" in cause
        assert silent.name in cause and "could not enter phase train of step 1" in cause
        assert set(events[-1][1]["device_bytes"]) == {"rank-0", "rank-1", "rank-2"} - {silent.name}
        await cluster.close()

    go(work)


def test_each_rank_of_an_engine_hears_what_its_own_neighbor_has() -> None:
    async def work() -> None:
        _, cluster, events = await make(
            "gated", [{"rank": rank, "held_bytes": 10 * (rank + 1)} for rank in range(4)]
        )
        *trainers, first, behind = cluster.handles.values()
        pairs = [(trainers[0], first), (trainers[1], behind)]
        told: dict[tuple[str, str], int | None] = {}
        for handle in (*trainers, first, behind):
            honest = handle.begin

            def begin(method: str, *args: Any, handle=handle, honest=honest) -> Future[Any]:
                if method == "enter":
                    told[handle.name, args[0]] = args[2]
                return honest(method, *args)

            handle.begin = begin
        gate = ClusterGate(
            trainers,
            emit=lambda kind, **fields: events.append((kind, fields)),
            deadline_s=10.0,
            hang_s=10.0,
            engines=lambda: [first],
            behind=lambda handle: (behind,),
            neighbors={
                name: frozenset({other})
                for one, two in pairs
                for name, other in ((one.name, two.name), (two.name, one.name))
            },
        )
        await gate.enter("rollout", step=1)
        await gate.enter("train", step=1)
        # 7 bytes are outside the components, of what each says that its process holds
        assert told == {
            ("rank-0", "rollout"): 37,
            ("rank-1", "rollout"): 47,
            ("rank-2", "rollout"): 17,
            ("rank-3", "rollout"): 27,
            ("rank-2", "train"): 17,
            ("rank-3", "train"): 27,
            ("rank-0", "train"): 37,
            ("rank-1", "train"): 47,
        }
        await cluster.close()

    go(work)


def test_a_verdict_on_the_ranks_waits_for_no_engine_alone(monkeypatch) -> None:
    """As where a node with a rank and an engine stops: the engine's own deadline is far away."""
    monkeypatch.setattr(watchdog, "LOOK_S", 0.1)
    monkeypatch.setattr(rpc, "STACKS_S", 0.1)

    async def work() -> None:
        _, cluster, events = await make("gated", [{"held_bytes": 10}, {"held_bytes": 20}])
        rank, engine = cluster.handles.values()
        gate = ClusterGate(
            [rank],
            emit=lambda kind, **fields: events.append((kind, fields)),
            deadline_s=600.0,
            hang_s=1.0,
            engines=lambda: [engine],
        )
        mute(rank, looks=True)
        mute(engine, looks=True)
        with pytest.raises(RankError, match="phase rollout of step 3 hangs: no progress on rank-0"):
            await asyncio.wait_for(gate.enter("rollout", step=3), 30)
        await cluster.close()

    go(work)


def test_a_late_fetch_of_tensors_takes_no_group_along(monkeypatch) -> None:
    """The one rank that is asked may be at something long; an engine that comes back asks again
    later."""
    monkeypatch.setattr(watchdog, "LOOK_S", 0.1)

    async def work() -> None:
        group, cluster, _ = await make("fake_trainer", [{}, {}], call_deadline_s=1.0)
        offer = await group.register()
        first = cluster.handles["rank-0"]
        honest = first.begin
        first.begin = lambda method, *args: (
            Future() if method == "trainer.tensors" else honest(method, *args)
        )
        with pytest.raises(RankError, match="tensors of version 0 hangs: no progress on rank-0"):
            await tensors_in(offer)
        first.begin = honest
        assert (await group.register()).version == 0
        assert list(await tensors_in(offer)) == ["version"]
        await cluster.close()

    go(work)
