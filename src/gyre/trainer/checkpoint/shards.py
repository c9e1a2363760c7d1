"""Checkpoint shards: which rank saves which numbers of the trainer's tensors, and how to load them.
In: a ShardLayout, this rank's tensors. Out: Parts of whole tensors, each number on one rank only;
or the tensors, filled from any source of parts.

Replicas share the work: of a run that n ranks hold, each saves one n-th.
"""

# N numbers of a run

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gyre.core.errors import SnapshotError
from gyre.distributed.mesh import Mesh
from gyre.distributed.process_group import RankGroup
from gyre.weights.shards import Place, Shape, ShardLayout

OTHER_MODEL = (
    "resume with the config and the model that the run was started with, or begin a new run"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Numbers of a whole tensor, starting at `start`."""

    name: str  # of the tensor
    shape: Shape  # of the tensor
    start: int  # numbers of the row-major tensor
    values_N: Tensor

    @property
    def stop(self) -> int:
        return self.start + self.values_N.numel()

    @property
    def key(self) -> str:
        """Unique key among the parts of all ranks."""
        return f"{self.name}[{self.start}:{self.stop}]"

    @property
    def size_bytes(self) -> int:
        return self.values_N.numel() * self.values_N.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Shape and dtype of a tensor."""

    dtype: torch.dtype
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class PartSource(Protocol):
    """Tensors saved in parts, by any number of ranks."""

    def kinds(self) -> Mapping[str, Kind]: ...

    def read(self, name: str, start: int, out_N: Tensor) -> None:
        """Fill `out_N`, on any device, with the tensor's numbers from `start`. Raises SnapshotError
        if they are damaged."""
        ...


class HeldParts:
    """The parts of all ranks, in memory."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts: dict[str, list[Part]] = {}
        for part in parts:
            self._parts.setdefault(part.name, []).append(part)

    def kinds(self) -> dict[str, Kind]:
        return {
            name: Kind(dtype=parts[0].values_N.dtype, shape=parts[0].shape)
            for name, parts in self._parts.items()
        }

    def read(self, name: str, start: int, out_N: Tensor) -> None:
        filled, stop = 0, start + out_N.numel()
        for part in self._parts[name]:
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                out_N[first - start : last - start].copy_(
                    part.values_N[first - part.start : last - part.start]
                )
                filled += last - first
        if filled != out_N.numel():
            raise SnapshotError(
                f"the snapshot holds {filled} of the {out_N.numel()} numbers of {name} from "
                f"{start} on",
                hint="give the parts of all ranks together",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One rank's share of some tensors, all of one dtype and in one memory component."""

    component: str
    prefix: str  # of the tensors' names in a snapshot
    layout: ShardLayout
    rank: int  # within the layout
    sharers: RankGroup  # the ranks that hold the same
    dtype: torch.dtype
    # this rank's runs by bare name, or what `cut` makes them of; all have a storage
    tensors: Mapping[str, Tensor]
    # views, made only where there are bytes
    cut: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict
    # takes numbers of any floating dtype, and rounds what `dtype` cannot hold
    converts: bool = False

    def kinds(self) -> dict[str, Kind]:
        """Return the kinds of the whole tensors."""
        shapes = self.layout.shapes
        return {
            self.prefix + name: Kind(dtype=self.dtype, shape=tuple(shape))
            for name, shape in shapes.items()
        }

    def fitting(self, found: Mapping[str, Kind]) -> dict[str, Kind]:
        """Return the kinds of the whole tensors that this holding can load from a snapshot with
        those of `found`."""
        wanted = self.kinds()
        if not self.converts:
            return wanted
        saved = {name: found[name].dtype for name in wanted if name in found}
        floating = {name: dtype for name, dtype in saved.items() if dtype.is_floating_point}
        return {
            name: replace(kind, dtype=floating.get(name, kind.dtype))
            for name, kind in wanted.items()
        }

    def rounds(self, found: Mapping[str, Kind]) -> bool:
        """Return whether `load` would lose precision of a tensor of `found`."""
        saved = {kind.dtype for kind in self.fitting(found).values()}
        return any(torch.promote_types(dtype, self.dtype) != self.dtype for dtype in saved)

    def named(self) -> dict[str, Tensor]:
        """Return `tensors` under names unique to this holding."""
        return {self.prefix + name: tensor for name, tensor in self.tensors.items()}

    def parts(self, readable: Mapping[str, Tensor]) -> list[Part]:
        """Return the parts that this rank saves. `readable` contains `named` where the bytes can be
        read now."""
        runs, places = (
            self.cut({name: readable[self.prefix + name] for name in self.tensors}),
            self._places,
        )
        found = []
        mine = own_runs(
            self.layout, self.rank, copy=self.sharers.rank, num_copies=self.sharers.size
        )
        for name, (start, stop) in mine.items():
            values_N = runs[name].reshape(-1)[
                start - places[name].start : stop - places[name].start
            ]
            shape = tuple(self.layout.shapes[name])
            found.append(Part(name=self.prefix + name, shape=shape, start=start, values_N=values_N))
        return found

    def sizes_bytes(self) -> list[int]:
        """Return the sizes of the parts that this rank saves."""
        mine = own_runs(
            self.layout, self.rank, copy=self.sharers.rank, num_copies=self.sharers.size
        )
        return [(stop - start) * self.dtype.itemsize for start, stop in mine.values()]

    @torch.no_grad()
    def load(self, source: PartSource) -> None:
        """Overwrite this rank's runs, which are on the device."""
        for name, tensor in self.cut(self.tensors).items():
            if tensor.numel():
                source.read(self.prefix + name, self._places[name].start, tensor.view(-1))

    @property
    def _places(self) -> Mapping[str, Place]:
        return self.layout.ranks[self.rank]


def own_runs(
    layout: ShardLayout, rank: int, *, copy: int, num_copies: int
) -> dict[str, tuple[int, int]]:
    """Return [start, stop) of each tensor that this rank saves. The runs that the rank's replicas
    share are split into equal parts; this rank saves the `copy`-th. Together the ranks save each
    number once."""
    places = {
        name: place
        for name, place in layout.ranks[rank].items()
        if not _is_again(layout, rank, name, place)
    }
    total = sum(place.stop - place.start for place in places.values())
    low, high = total * copy // num_copies, total * (copy + 1) // num_copies
    found, at = {}, 0
    for name, place in places.items():
        first, last = max(low, at), min(high, at + place.stop - place.start)
        if first < last:
            found[name] = (place.start + first - at, place.start + last - at)
        at += place.stop - place.start
    return found


def sharers(layout: ShardLayout, mesh: Mesh) -> RankGroup:
    """Return the ranks that hold the same runs as this one."""
    return mesh.data if len(layout.ranks) == 1 else mesh.replica


def check_kinds(wanted: Mapping[str, Kind], found: Mapping[str, Kind]) -> None:
    """Raise SnapshotError, before any overwrite, unless the snapshot has exactly the wanted
    tensors."""
    for name, kind in wanted.items():
        if (got := found.get(name)) != kind:
            raise SnapshotError(
                f"the snapshot holds {got or 'nothing'} for {name}, this run needs {kind}",
                hint=OTHER_MODEL,
            )
    if extra := sorted(found.keys() - wanted.keys()):
        raise SnapshotError(
            f"the snapshot holds {len(extra)} tensors that this run has no place for, {extra[0]} "
            "among them",
            hint=OTHER_MODEL,
        )


def find_gap(shape: Shape, runs: Sequence[tuple[int, int]]) -> str | None:
    """Return how the runs fail to cover the tensor exactly once, or None."""
    at = 0
    for start, stop in sorted(runs):
        if start != at:
            return (
                f"numbers {min(at, start)} to {max(at, start)} are there "
                f"{'twice' if start < at else 'not at all'}"
            )
        at = stop
    return None if at == math.prod(shape) else f"it ends after {at} of {math.prod(shape)} numbers"


def _is_again(layout: ShardLayout, rank: int, name: str, place: Place) -> bool:
    """Return whether the layout's first rank holds the same runs, or this rank holds none."""
    return place.start == place.stop or (rank > 0 and place == layout.ranks[0][name])
