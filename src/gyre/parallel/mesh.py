"""Mesh: the ranks along named axes. In: the group of all ranks and the number that share one copy of a model's state.
Out: a Mesh with a group per axis. Callers: trainer.

Axes now: "replica" × "shard"; neighbours share a copy, so that the bulk of the traffic stays inside a host. Tensor,
pipeline, context and expert parallelism add axes to the right of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gyre.core.errors import ConfigError
from gyre.parallel.group import Group

AXES = ("replica", "shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """`replica`: ranks that hold the same part of the state; `shard`: ranks that hold one copy together."""

    world: Group
    replica: Group
    shard: Group
    torch_mesh: DeviceMesh | None  # 2-D; None for one process


def shard_size(world_size: int, shard_ranks: int) -> int:
    """Ranks per copy; 0 takes all. ConfigError if copies would not be whole."""
    size = shard_ranks or world_size
    if size > world_size or world_size % size:
        divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise ConfigError(
            f"parallel.shard_ranks = {shard_ranks}: {world_size} ranks do not divide into copies of {size}",
            hint=f"choose one of {', '.join(divisors)}, or 0 for all ranks",
        )
    return size


def make_mesh(world: Group, shard_ranks: int) -> Mesh:
    """Every rank calls this, in the same order as other collectives."""
    size = shard_size(world.size, shard_ranks)
    if world.size == 1:
        return Mesh(world=world, replica=world, shard=world, torch_mesh=None)
    mesh = init_device_mesh(world.device.type, (world.size // size, size), mesh_dim_names=AXES)
    return Mesh(
        world=world,
        replica=world.part("replica", mesh.get_group("replica")),
        shard=world.part("shard", mesh.get_group("shard")),
        torch_mesh=mesh,
    )
