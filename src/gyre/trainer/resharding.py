"""Resharding: between whole tensors and this rank's runs of them. In: a ShardLayout, runs or whole tensors. Out: the
other. Callers: trainer.learner, trainer.reference, for snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gyre.core.errors import SnapshotError
from gyre.parallel.group import Group
from gyre.weights.gather import gather_runs
from gyre.weights.manifest import dtype_name
from gyre.weights.shards import Place, Shape, ShardLayout


def join(layout: ShardLayout, parts: Mapping[str, Tensor], dtype: torch.dtype, group: Group) -> dict[str, Tensor]:
    """Whole tensors on the CPU of the group's rank 0, {} on the others. Never more than a bucket on the device."""
    keeps = group.rank == 0
    whole = {name: torch.empty(shape, dtype=dtype) for name, shape in layout.shapes.items()} if keeps else {}
    for run in gather_runs(layout, parts, group=group, dtype=dtype):
        if keeps:
            whole[run.name].view(-1)[run.start : run.stop].copy_(run.values_N)
    return whole


@torch.no_grad()
def load(places: Mapping[str, Place], own: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    """Overwrite this rank's runs by those of whole tensors (or of what is longer and begins with them)."""
    for name, tensor in own.items():
        place = places[name]
        tensor.view(-1).copy_(whole[name].reshape(-1)[place.start : place.stop])


def check_whole(shapes: Mapping[str, Shape], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """SnapshotError unless every tensor is there in its shape."""
    for name, shape in shapes.items():
        if name not in tensors or tuple(tensors[name].shape) != tuple(shape) or tensors[name].dtype != dtype:
            got = f"{tensors[name].dtype} {tuple(tensors[name].shape)}" if name in tensors else "nothing"
            raise SnapshotError(
                f"the snapshot holds {got} for {name}, this run needs torch.{dtype_name(dtype)} {tuple(shape)}",
                hint="resume with the config that the run was started with",
            )
