"""An engine's processes come and go together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gyre.core.errors import ConfigError
from gyre.core.records import RoleSpec
from gyre.launch.placement.engine_ranks import EngineRanks


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
