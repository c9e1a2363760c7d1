"""Mesh: the ranks along named axes. In: the group of all ranks, the config. Out: a Mesh with a
group per axis, and the Split of each model.

Axes now: "replica" × "shard"; neighbours share a copy, so that the bulk of the traffic stays inside
a host. Tensor, pipeline, context and expert parallelism add axes to the right of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gyre.core.errors import ConfigError
from gyre.distributed.config import ParallelConfig, SumGradients, Zero
from gyre.distributed.process_group import RankGroup

AXES = ("replica", "shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """`replica`: ranks that hold the same part of the state; `shard`: ranks that hold one copy
    together."""

    world: RankGroup
    replica: RankGroup
    shard: RankGroup
    torch_mesh: DeviceMesh | None  # 2-D; None for one process


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSharding:
    """How one model lies over a mesh."""

    mesh: Mesh
    zero: Zero
    sum_gradients: SumGradients

    @property
    def shards_state(self) -> bool:
        return self.zero >= 1 and self.mesh.shard.size > 1

    @property
    def shards_weights(self) -> bool:
        """Whether weights lie in shards while nothing computes."""
        return self.zero >= 2 and self.mesh.shard.size > 1

    @property
    def rank(self) -> int:
        """This rank's place among those that hold the weights together."""
        return self.mesh.shard.rank if self.shards_weights else 0


class Splitter:
    """Makes the splits of a trainer's models; models that are cut alike share a mesh.
    Collective."""

    def __init__(self, world: RankGroup, config: ParallelConfig) -> None:
        self._world, self._config = world, config
        self._meshes: dict[int, Mesh] = {}

    def split(self, model: Literal["actor", "critic", "reference", "reward"]) -> ModelSharding:
        zero, shard_ranks = self._config.of(model)
        size = shard_size(self._world.size, shard_ranks) if zero else 1
        if size not in self._meshes:
            self._meshes[size] = make_mesh(self._world, size)
        return ModelSharding(
            mesh=self._meshes[size], zero=zero, sum_gradients=self._config.sum_gradients
        )


def shard_size(world_size: int, shard_ranks: int) -> int:
    """Ranks per copy; 0 takes all. ConfigError if copies would not be whole."""
    size = shard_ranks or world_size
    if size > world_size or world_size % size:
        divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise ConfigError(
            f"parallel.shard_ranks = {shard_ranks}: {world_size} ranks do not divide into copies "
            f"of {size}",
            hint=f"choose one of {', '.join(divisors)}, or 0 for all ranks",
        )
    return size


def make_mesh(world: RankGroup, shard_ranks: int) -> Mesh:
    """Every rank calls this, in the same order as other collectives."""
    size = shard_size(world.size, shard_ranks)
    if world.size == 1:
        return Mesh(world=world, replica=world, shard=world, torch_mesh=None)
    mesh = init_device_mesh(world.device.type, (world.size // size, size), mesh_dim_names=AXES)
    replica, shard = (world.part(axis, mesh.get_group(axis)) for axis in AXES)
    if world.device.type == "cuda":
        for group in (world, replica, shard):
            group.warm_up()
    return Mesh(world=world, replica=replica, shard=shard, torch_mesh=mesh)
