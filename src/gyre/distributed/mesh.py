"""Mesh: the ranks of a trainer along named axes. In: the group of all ranks, the config. Out: a
Mesh with a group per use, and the sharding of each model.

Axes, outermost first: replica × shard × tensor. Neighbors share the innermost axis, so the heaviest
traffic stays inside a host. Pipeline, context and expert parallelism add their axes when used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gyre.core.errors import ConfigError
from gyre.distributed.config import ParallelConfig, SumGradients, Zero
from gyre.distributed.process_group import RankGroup, alone

AXES = ("replica", "shard", "tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """One rank's place on each axis."""

    replica: int
    shard: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The groups that one rank belongs to. Each use of a group names the ranks that it means."""

    all_ranks: RankGroup  # every rank of the trainer: start, errors, snapshots, per-device metrics
    data: RankGroup  # ranks that see different data: replica × shard
    replica: RankGroup  # ranks that hold the same part of the state
    shard: RankGroup  # ranks that hold one copy of the state together, or of a tensor rank's part
    tensor: RankGroup  # ranks that compute one layer together, on the same data
    holders: RankGroup  # ranks that hold one copy of the whole state together: shard × tensor
    torch_mesh: DeviceMesh | None  # of the axes that have a process group; None for one process

    @property
    def coordinate(self) -> Coordinate:
        return Coordinate(replica=self.replica.rank, shard=self.shard.rank, tensor=self.tensor.rank)

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self.all_ranks.device


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSharding:
    """Sharding of one model over a mesh."""

    mesh: Mesh
    zero: Zero
    sum_gradients: SumGradients

    @property
    def shards_state(self) -> bool:
        return self.zero >= 1 and self.mesh.shard.size > 1

    @property
    def shards_weights(self) -> bool:
        """True if weights are sharded between computations."""
        return self.zero >= 2 and self.mesh.shard.size > 1

    @property
    def rank(self) -> int:
        """Index of this rank among those that hold the weights together."""
        return self.mesh.shard.rank if self.shards_weights else 0


class Splitter:
    """Creates the shardings of a trainer's models; equal shardings share a mesh. Collective."""

    def __init__(self, all_ranks: RankGroup, config: ParallelConfig) -> None:
        self._all_ranks = all_ranks
        self._config = config
        self._meshes: dict[int, Mesh] = {}
        self._num_data_ranks = data_ranks(all_ranks.size, config.tensor_ranks)

    @property
    def tensor_ranks(self) -> int:
        """The ranks that compute one layer together."""
        return self._config.tensor_ranks

    def split(self, model: Literal["actor", "critic", "reference", "reward"]) -> ModelSharding:
        zero, shard_ranks = self._config.of(model)
        size = shard_size(self._num_data_ranks, shard_ranks) if zero else 1
        if size not in self._meshes:
            self._meshes[size] = make_mesh(self._all_ranks, size, tensor_ranks=self.tensor_ranks)
        return ModelSharding(
            mesh=self._meshes[size], zero=zero, sum_gradients=self._config.sum_gradients
        )


def data_ranks(num_ranks: int, tensor_ranks: int) -> int:
    """Return how many ranks see different data. Raises ConfigError if tensor groups would not be
    full."""
    if num_ranks % tensor_ranks:
        divisors = [str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        raise ConfigError(
            f"parallel.tensor_ranks = {tensor_ranks}: {num_ranks} ranks do not divide into groups "
            "of that size",
            hint=f"choose one of {', '.join(divisors)}, or set cluster.num_workers to a multiple",
        )
    return num_ranks // tensor_ranks


def shard_size(num_data_ranks: int, shard_ranks: int) -> int:
    """Return the ranks per copy; 0 takes all. Raises ConfigError if they do not divide evenly."""
    size = shard_ranks or num_data_ranks
    if size > num_data_ranks or num_data_ranks % size:
        divisors = [str(n) for n in range(1, num_data_ranks + 1) if num_data_ranks % n == 0]
        raise ConfigError(
            f"parallel.shard_ranks = {shard_ranks}: {num_data_ranks} ranks do not divide into "
            f"copies of {size}",
            hint=f"choose one of {', '.join(divisors)}, or 0 for all ranks",
        )
    return size


def make_mesh(all_ranks: RankGroup, shard_ranks: int, *, tensor_ranks: int = 1) -> Mesh:
    """Create the mesh. Every rank calls this, in the same order as other collectives."""
    num_data_ranks = data_ranks(all_ranks.size, tensor_ranks)
    size = shard_size(num_data_ranks, shard_ranks)
    one = alone(all_ranks.device)
    if all_ranks.size == 1:
        return Mesh(
            all_ranks=all_ranks,
            data=all_ranks,
            replica=all_ranks,
            shard=all_ranks,
            tensor=one,
            holders=all_ranks,
            torch_mesh=None,
        )
    sizes = (num_data_ranks // size, size, *([tensor_ranks] if tensor_ranks > 1 else []))
    axes = AXES[: len(sizes)]  # an axis of one rank needs no process group
    mesh = init_device_mesh(all_ranks.device.type, sizes, mesh_dim_names=axes)
    groups = {axis: all_ranks.part(axis, mesh.get_group(axis)) for axis in axes}
    groups.setdefault("tensor", one)
    groups["data"], groups["holders"] = all_ranks, groups["shard"]
    if tensor_ranks > 1:
        for name, two in (("data", AXES[:2]), ("holders", AXES[1:])):
            groups[name] = all_ranks.part(name, mesh[two]._flatten(name).get_group())
    if all_ranks.device.type == "cuda":
        used = {id(group): group for group in (all_ranks, *groups.values())}
        for group in used.values():
            group.warm_up()
    return Mesh(all_ranks=all_ranks, torch_mesh=mesh, **groups)
