"""Shards: which numbers of each tensor each rank of a group holds. In: shapes, a number of ranks.
Out: a ShardLayout, and the plan by which whole tensors come back from it in pieces of bounded size.
Pure.

A rank keeps its numbers in one flat buffer. A shard is always a run of the row-major local tensor;
the layout table (`distributed.layout`) says which runs of the whole tensor these numbers are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from gyre.core.rounding import ceil_div, round_up
from gyre.distributed.layout import BoxRun, ModelLayout, whole_model

ALIGN = 16  # numbers; every tensor of a flat buffer starts on a 64-byte line of float32
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's run of one tensor."""

    start: int  # numbers of the row-major tensor: [start, stop)
    stop: int
    at: int  # where the run begins in the rank's flat buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """Who holds what. Tensors that are not sharded have the same whole Place on every rank. Over
    tensor ranks these are local tensors, and `table` gives their places in the whole ones."""

    shapes: Mapping[str, Shape]
    ranks: tuple[Mapping[str, Place], ...]  # of the shard axis
    size: int  # numbers of a rank's flat buffer, alike on all ranks
    table: ModelLayout | None = None  # None: one tensor rank, whose tensors are whole

    @property
    def model(self) -> ModelLayout:
        """The table of the whole tensors."""
        return whole_model(self.shapes) if self.table is None else self.table

    @property
    def num_holders(self) -> int:
        """The ranks that hold one copy of the whole tensors together: shard × tensor."""
        return len(self.ranks) * (1 if self.table is None else len(self.table.ranks))

    @property
    def local(self) -> ShardLayout:
        """The layout of one tensor rank's local tensors, as whole ones."""
        return replace(self, table=None)

    def shard_of(self, holder: int) -> int:
        """Return the shard coordinate of a holder."""
        return holder // (self.num_holders // len(self.ranks))

    def owned(self, holder: int) -> Iterator[tuple[str, BoxRun, int]]:
        """Yield (tensor, its run, where the run begins in the flat buffer) of all that a holder
        has and no lower one. The holders together own each number once."""
        shard, tensor_rank = divmod(holder, self.num_holders // len(self.ranks))
        for name, place in self.ranks[shard].items():
            if shard and place == self.ranks[0][name]:
                continue  # the same whole tensor, or nothing at all
            if self.table is None:  # at once, since each gather plans with every run
                if place.start < place.stop:
                    yield name, BoxRun(start=place.start, stop=place.stop), place.at
                continue
            for run, at, owner in self.table.runs(tensor_rank, name, place.start, place.stop):
                if owner == tensor_rank:
                    yield name, run, place.at + at - place.start

    def of(self, names: Collection[str]) -> ShardLayout:
        """Return the layout of some of the tensors, in the same buffers."""
        return ShardLayout(
            shapes={name: self.shapes[name] for name in names},
            ranks=tuple({name: places[name] for name in names} for places in self.ranks),
            size=self.size,
            table=None if self.table is None else self.table.of(names),
        )


class Landing(NamedTuple):
    """Numbers of a bucket that belong to a tensor."""

    rank: int  # holder
    name: str
    run: BoxRun
    at: int  # in the holder's flat buffer
    offset: int  # within what the rank sends


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherBucket:
    """The same run of every rank's flat buffer, and where it lands."""

    size: int  # numbers that each rank sends
    landings: tuple[Landing, ...]


def align(numbers: int, unit: int = ALIGN) -> int:
    return round_up(numbers, unit)


def whole_layout(shapes: Mapping[str, Shape], starts: Mapping[str, int], size: int) -> ShardLayout:
    """Lay out every tensor on one rank, at the given starts."""
    places = {
        name: Place(start=0, stop=math.prod(shape), at=starts[name])
        for name, shape in shapes.items()
    }
    return ShardLayout(shapes=dict(shapes), ranks=(places,), size=size)


def row_layout(
    shapes: Mapping[str, Shape], *, num_ranks: int, replicated: frozenset[str] = frozenset()
) -> ShardLayout:
    """Cut each tensor by its rows into runs of ceil(rows / ranks), as FSDP2 does. The last ranks
    may hold less."""
    ranks: list[dict[str, Place]] = [{} for _ in range(num_ranks)]
    at = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        step = count if name in replicated else ceil_div(shape[0], num_ranks) * math.prod(shape[1:])
        for rank, places in enumerate(ranks):
            first = 0 if name in replicated else min(count, rank * step)
            places[name] = Place(start=first, stop=min(count, first + step), at=at)
        at += align(step)
    return ShardLayout(shapes=dict(shapes), ranks=tuple(ranks), size=at)


def slice_layout(
    shapes: Mapping[str, Shape],
    starts: Mapping[str, int],
    size: int,
    *,
    num_ranks: int,
    replicated: frozenset[str],
) -> ShardLayout:
    """Cut one flat buffer of `size` numbers, with the tensors at their starts, into equal slices.
    `replicated` tensors follow each rank's slice."""
    assert size % (num_ranks * ALIGN) == 0
    step = size // num_ranks
    ranks = []
    for rank in range(num_ranks):
        low, high = rank * step, (rank + 1) * step
        places, tail = {}, step
        for name, shape in shapes.items():
            count = math.prod(shape)
            if name in replicated:
                places[name] = Place(start=0, stop=count, at=tail)
                tail += align(count)
                continue
            first = min(max(low - starts[name], 0), count)
            last = max(first, min(high - starts[name], count))
            places[name] = Place(
                start=first, stop=last, at=max(0, starts[name] + first - low) if last > first else 0
            )
        ranks.append(places)
    tail_size = sum(align(math.prod(shapes[name])) for name in replicated)
    return ShardLayout(shapes=dict(shapes), ranks=tuple(ranks), size=step + tail_size)


def plan_gather(layout: ShardLayout, *, numbers_per_bucket: int) -> tuple[GatherBucket, ...]:
    """Cut the ranks' flat buffers into runs, so that a bucket of all ranks holds at most about
    `numbers_per_bucket`. What several ranks hold lands once, from the lowest."""
    step = max(ALIGN, numbers_per_bucket // layout.num_holders)
    landings: list[list[Landing]] = [[] for _ in range(0, layout.size, step)]
    for rank in range(layout.num_holders):
        for name, run, at in layout.owned(rank):
            start = run.start
            while start < run.stop:
                index, offset = divmod(at, step)
                count = min(run.stop - start, step - offset)
                part = run
                if count < run.stop - run.start:
                    part = BoxRun(start=start, stop=start + count, columns=run.columns)
                landings[index].append(
                    Landing(rank=rank, name=name, run=part, at=at, offset=offset)
                )
                start, at = start + count, at + count
    return tuple(
        GatherBucket(size=min(step, layout.size - index * step), landings=tuple(found))
        for index, found in enumerate(landings)
        if found
    )
