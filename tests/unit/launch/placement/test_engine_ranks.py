"""An engine's processes come and go together; one that fails ends the wait for the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gyre.cluster.worker.server import WorkerFault
from gyre.core.errors import ConfigError, RankError, WorkerLate, WorkerLost
from gyre.core.records import RoleSpec
from gyre.launch.placement import engine_ranks
from gyre.launch.placement.engine_ranks import EngineRanks, all_or_first_error


class Handle:
    def __init__(self, name: str) -> None:
        self.name, self.place = name, "here"


class Cluster:
    """Notes who is there. Workers of `failing` names do not come up."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.there = failing, set[Handle]()

    async def start(self, spec: RoleSpec) -> Any:
        await asyncio.sleep(0.002 if spec.name.endswith(".1") else 0.0)
        if spec.name == self.failing:
            raise ConfigError(f"no device for {spec.name}")
        self.there.add(handle := Handle(spec.name))
        return handle

    async def stop(self, handle: Any) -> None:
        self.there.discard(handle)


def roles(name: str, count: int) -> list[RoleSpec]:
    names = [name, *(f"{name}.{rank}" for rank in range(1, count))]
    return [RoleSpec(name=one, builder="none", arguments={}) for one in names]


def names_of(cluster: Cluster) -> list[str]:
    return sorted(handle.name for handle in cluster.there)


def test_ranks_are_started_together_and_end_with_the_first() -> None:
    async def main() -> None:
        ranks = EngineRanks(cluster := Cluster())  # type: ignore[arg-type]
        first = await ranks.start(roles("engine-0", 3))
        other = await ranks.start(roles("engine-1", 1))
        assert [handle.name for handle in first] == ["engine-0", "engine-0.1", "engine-0.2"]
        await ranks.stop(first[0])
        assert names_of(cluster) == ["engine-1"]
        await ranks.stop(other[0])
        assert not cluster.there

    asyncio.run(main())


@pytest.mark.parametrize("failing", ["engine-0", "engine-0.1"])
def test_where_one_does_not_come_up_none_stays(failing: str) -> None:
    async def main() -> None:
        ranks = EngineRanks(cluster := Cluster(failing))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"no device for {failing}"):
            await ranks.start(roles("engine-0", 2))
        assert not cluster.there

    asyncio.run(main())


def test_the_others_of_a_lost_first_rank_end_before_new_ones_start() -> None:
    async def main() -> None:
        ranks = EngineRanks(cluster := Cluster())  # type: ignore[arg-type]
        first, second = await ranks.start(roles("engine-0", 2))
        await cluster.stop(first)  # as the pool does with an engine that it has lost
        again = await ranks.start(roles("engine-0", 2))
        assert second not in cluster.there and cluster.there == set(again)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (WorkerFault("no CUDA here"), (RankError, "a worker could not be started: no CUDA here")),
        (ConfigError("a key"), (ConfigError, "a key")),
        (
            WorkerLate("worker-1 had not answered"),
            (RankError, "a worker could not be started: worker-1 had not"),
        ),
    ],
)
def test_a_worker_that_fails_ends_the_wait_for_those_that_wait_for_it(
    monkeypatch, error, seen
) -> None:
    monkeypatch.setattr(engine_ranks, "GRACE_S", 0.05)
    ended: list[str] = []

    async def fail() -> None:
        raise error

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("stopped")

    async def late() -> None:
        if not isinstance(error, WorkerLate):
            raise RankError("it saw the other one fail")

    async def main() -> None:
        await asyncio.wait_for(all_or_first_error([wait(), late(), fail(), wait()]), 60)

    with pytest.raises(seen[0], match=seen[1]):
        asyncio.run(main())
    assert ended == ["stopped", "stopped"]


def test_a_worker_that_fails_is_named_before_one_that_is_late() -> None:
    """The late one may have waited for it."""

    async def fail(error: Exception) -> None:
        raise error

    with pytest.raises(WorkerLost, match="worker-1 is gone"):
        works = [
            fail(WorkerLate("worker-0 had not answered")),
            fail(WorkerLost("worker-1 is gone")),
        ]
        asyncio.run(all_or_first_error(works))


def test_results_come_in_order_and_nothing_is_nothing() -> None:
    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(all_or_first_error([after(3), after(1), after(2)])) == [
        3,
        1,
        2,
    ]
    assert asyncio.run(all_or_first_error([])) == []
