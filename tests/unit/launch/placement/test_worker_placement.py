"""Starting a fleet's workers: one that fails ends the wait for the others, and none is left with
its device."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gyre.cluster.worker.server import WorkerFault
from gyre.core.errors import RankError
from gyre.core.liveness import StallLimit
from gyre.launch.placement import worker_placement
from gyre.launch.placement.engine_ranks import EngineRanks
from gyre.launch.placement.worker_placement import WorkerPlacement


def test_a_worker_that_hangs_while_snapshots_are_looked_through_is_a_lost_rank() -> None:
    """So the run is started again."""
    looked: Future[str] = Future()
    looked.set_result("what it is at")
    handle = SimpleNamespace(
        name="worker-0",
        place="here",
        begin=lambda method, *args: Future(),
        look=lambda what: looked,
    )
    spread: Any = SimpleNamespace(
        _fleet=SimpleNamespace(cluster=None, ranks_have_engines=True),
        _handles=[handle],
        _emit=lambda kind, **fields: None,
        _settings=SimpleNamespace(call_deadline_s=0.5, hang_s=60.0),
        stall_limit=StallLimit(key="snapshot.deadline_s", seconds=0.5),
    )
    spread.make_group = lambda: WorkerPlacement.make_group(spread)
    with pytest.raises(
        RankError, match="looking through step-00000003 hangs: no progress on worker-0"
    ) as hung:
        asyncio.run(WorkerPlacement.look_through(spread, Path("step-00000003")))
    assert "snapshot.deadline_s = 0.5" in hung.value.hint


def test_an_engine_that_cannot_begin_its_stage_does_not_keep_its_device(monkeypatch) -> None:
    handle = SimpleNamespace(name="engine-0", place="here")
    stopped: list[Any] = []

    class Cluster:
        async def start(self, spec: Any) -> Any:
            return handle

        async def stop(self, one: Any) -> None:
            stopped.append(one)

    async def ask(*args: Any, **options: Any) -> None:
        raise WorkerFault("out of memory")

    monkeypatch.setattr(worker_placement, "ask", ask)
    spread: Any = SimpleNamespace(
        _stage=(SimpleNamespace(name="main"), SimpleNamespace(to_json=lambda: "{}")),
        _engines=EngineRanks(Cluster()),
        _engine_specs=lambda name: [SimpleNamespace(name=name)],
        _neighbors=dict,
        _takes_turns=True,
        _gate=object(),
        _handles=[],
        _settings=SimpleNamespace(start_deadline_s=1.0),
        _emit=lambda kind, **fields: None,
    )
    with pytest.raises(WorkerFault, match="out of memory"):
        asyncio.run(WorkerPlacement.start_engine(spread, "engine-0"))
    assert stopped == [handle]


@pytest.mark.parametrize(
    ("calls_s", "snapshots_s", "key"),
    [
        (300.0, 1800.0, "snapshot.deadline_s"),
        (300.0, 60.0, "cluster.call_deadline_s"),
    ],
)
def test_the_longer_of_two_limits_is_in_force_with_its_name(calls_s, snapshots_s, key) -> None:
    spread: Any = SimpleNamespace(
        _settings=SimpleNamespace(call_deadline_s=calls_s),
        _config=SimpleNamespace(snapshot=SimpleNamespace(deadline_s=snapshots_s)),
    )
    assert WorkerPlacement.stall_limit.fget(spread) == StallLimit(
        key=key, seconds=max(calls_s, snapshots_s)
    )  # type: ignore[attr-defined]
