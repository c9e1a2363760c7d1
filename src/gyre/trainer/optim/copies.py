"""Copies: numbers of which several tensor ranks hold a copy, in one rank's part of a model. In: a
ShardLayout with its table, the rank's coordinate, its gradients. Out: gradients that are whole and
equal to the bit on all holders; which numbers a rank counts in a norm.

Norms and repeated KV heads are the copies. Where each holder has a part of the gradient they add
up; of others the owner's goes to all, so that copies never drift apart.
"""

# N numbers of a run, C copied numbers of all tensor ranks

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gyre.distributed.process_group import RankGroup
from gyre.weights.shards import ShardLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedRun:
    """A run of a rank's numbers of one tensor that other tensor ranks hold, too."""

    name: str
    start: int  # in the rank's numbers of the tensor
    stop: int
    at: int  # in the buffer that the tensor ranks sum
    adds: bool  # whether this rank's gradient is a part of the sum
    owned: bool  # whether this rank counts the numbers in a norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """All copied runs of one rank. `size` is equal on all ranks of a tensor group."""

    runs: tuple[CopiedRun, ...] = ()
    size: int = 0  # numbers of the buffer


def plan_copies(layout: ShardLayout, *, shard: int, tensor_rank: int) -> Copies:
    """Plan the sums of a rank. A tensor group has one shard coordinate. So its ranks hold the same
    local numbers, and a copy is at one place in all of them. Pure."""
    if layout.table is None:
        return Copies()
    table, runs, at = layout.table, [], 0
    for name, place in layout.ranks[shard].items():
        width = math.prod(table.local_shapes[name][1:])
        for box, holders in table.holders(name).items():
            first = max(place.start, box.at * width)
            last = min(place.stop, (box.at + box.rows) * width)
            if len(holders) == 1 or first >= last:
                continue
            if tensor_rank in holders:
                owned = box.owner == tensor_rank
                runs.append(
                    CopiedRun(
                        name=name,
                        start=first - place.start,
                        stop=last - place.start,
                        at=at,
                        adds=owned or name in table.partial,
                        owned=owned,
                    )
                )
            at += last - first
    return Copies(runs=tuple(runs), size=at)


@torch.no_grad()
def sum_copies(copies: Copies, grads: Mapping[str, Tensor], group: RankGroup) -> None:
    """Sum the gradients of copies over the tensor ranks, in place. `grads`: this rank's gradient of
    each tensor, flat, in float32, on any device."""
    if not copies.size:
        return
    sums_C = torch.zeros(copies.size, device=group.device)
    homes = [grads[run.name][run.start : run.stop] for run in copies.runs]
    sums = [sums_C[run.at : run.at + run.stop - run.start] for run in copies.runs]
    added = [index for index, run in enumerate(copies.runs) if run.adds]
    _copy_all([sums[index] for index in added], [homes[index] for index in added])
    group.all_reduce(sums_C)
    _copy_all(homes, sums)


def _copy_all(homes: list[Tensor], values: list[Tensor]) -> None:
    if homes:
        torch._foreach_copy_(homes, values)


def counted_runs(
    copies: Copies, starts: Mapping[str, int], size: int
) -> tuple[tuple[int, int], ...]:
    """Return [first, last) of the runs of a flat buffer that this rank counts: all but copies that
    another rank owns. `starts`: where each tensor's numbers begin. Pure."""
    left_out = sorted(
        (starts[run.name] + run.start, starts[run.name] + run.stop)
        for run in copies.runs
        if not run.owned
    )
    return tuple(_between(left_out, size))


def _between(left_out: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    at = 0
    for first, last in left_out:
        if at < first:
            yield at, first
        at = last
    if at < size:
        yield at, size
