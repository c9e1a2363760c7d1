"""The trainer group over workers that are threads: who is named when a rank fails, hangs or dies."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))
import cluster_roles  # noqa: F401  the workers import it by name

from gyre.cluster.gate import ClusterGate
from gyre.cluster.local import LocalCluster
from gyre.cluster.trainers import TrainerGroup
from gyre.core.errors import InputError, MemoryBudgetError, RankError
from gyre.core.records import RoleSpec, TrainBatch, TrainSequence

Group = tuple[TrainerGroup, LocalCluster, list[tuple[str, dict[str, Any]]]]


def batch(step: int) -> TrainBatch:
    return TrainBatch(sequences=(TrainSequence(tokens=np.arange(6, dtype=np.int32), columns={}),), step=step)


async def make(role: str, ranks: list[dict[str, Any]], *, hang_s: float = 20.0) -> Group:
    events: list[tuple[str, dict[str, Any]]] = []
    cluster = LocalCluster(on_event=lambda worker, kind, **fields: events.append((kind, {"worker": worker, **fields})))
    handles = [
        await cluster.start(
            RoleSpec(name=f"rank-{i}", builder=f"cluster_roles:{role}", arguments={"rank": i, **arguments})
        )
        for i, arguments in enumerate(ranks)
    ]
    group = TrainerGroup(
        cluster,
        handles,
        emit=lambda kind, **fields: events.append((kind, fields)),
        call_deadline_s=10.0,
        hang_s=hang_s,
    )
    return group, cluster, events


def go(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 40))  # type: ignore[arg-type]


def test_one_rank_that_raises_is_named_and_ends_the_step() -> None:
    async def work() -> None:
        group, cluster, events = await make("fake_trainer", [{}, {"fail_at_steps": (2,)}, {}])
        assert (await group.step(batch(1))).version == group.version == 1
        with pytest.raises(RankError, match=r"step 2: rank 1 \(rank-1, .*told to fail at step 2") as failed:
            await group.step(batch(2))
        assert "max_restarts" in failed.value.hint
        with pytest.raises(RankError, match="rank 1"):
            await group.step(batch(3))
        with pytest.raises(RankError, match="rank 1"):
            group.register()
        (told,) = [fields for kind, fields in events if kind == "rank.failed"]
        assert told["rank"] == 1 and told["worker"] == "rank-1"
        assert ("fake.failure", {"worker": "rank-1", "where": "trainer.step", "step": 2}) in events
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
        group, cluster, events = await make("stuck_trainer", [{"stuck": True}, {}], hang_s=1.5)
        with pytest.raises(RankError, match=r"step 1 hangs: no progress on rank-0 for") as hung:
            await group.step(batch(1))
        assert "self._forever.wait" in hung.value.message and "== rank-1" in hung.value.message
        (told,) = [fields for kind, fields in events if kind == "rank.hung"]
        assert set(told["stacks"]) == {"rank-0", "rank-1"} and set(told["still_s"]) == {"rank-0"}
        await cluster.close()

    go(work)


def test_a_slow_step_that_makes_progress_is_no_hang() -> None:
    """Longer than hang_s, with ticks all the while; the rank that waits for it is not taken for hung either."""

    async def work() -> None:
        group, cluster, _ = await make("stuck_trainer", [{"slow_s": 3.5}, {}], hang_s=1.5)
        assert (await group.step(batch(1))).step == 1
        await cluster.close()

    go(work)


def test_what_a_user_can_act_on_comes_as_it_is() -> None:
    async def work() -> None:
        group, cluster, _ = await make("fake_trainer", [{}, {}])
        with pytest.raises(InputError, match="no component"):
            group.move(["actor.nothing"], "host")
        assert (await group.step(batch(1))).version == 1
        await group.close()
        await cluster.close()

    go(work)


def test_a_version_that_is_over_gives_no_tensors() -> None:
    async def work() -> None:
        group, cluster, _ = await make("fake_trainer", [{}, {}])
        manifest, tensors = group.register()
        assert manifest.version == 0 and tensors["version"].tolist() == [0.0]
        assert {name: t.tolist() for name, t in tensors.fetch_all().items()} == {"version": [0.0]}
        await group.step(batch(1))
        with pytest.raises(InputError, match="version 0 was asked for"):
            tensors["version"]
        assert group.register()[1]["version"].tolist() == [1.0]
        await cluster.close()

    go(work)


def test_the_gate_enters_a_phase_everywhere_and_says_what_each_holds() -> None:
    async def work() -> None:
        _, cluster, events = await make("gated", [{"held_bytes": 10}, {"held_bytes": 20}])
        handles = list(cluster.handles.values())
        gate = ClusterGate(lambda: handles, emit=lambda kind, **fields: events.append((kind, fields)), deadline_s=10.0)
        await gate.enter("train", step=3)
        assert ("cluster.memory", {"phase": "train", "step": 3, "device_bytes": {"rank-0": 10, "rank-1": 20}}) in events
        with pytest.raises(MemoryBudgetError, match="no room on rank-1"):
            await gate.enter("score", step=3)
        with pytest.raises(RankError, match=r"rank-0 .* could not enter phase handover"):
            await gate.enter("handover", step=3)
        await cluster.close()

    go(work)
