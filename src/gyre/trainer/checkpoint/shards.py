"""Checkpoint shards: which rank saves which numbers of the trainer's tensors, and how to load them.
In: a ShardLayout, this rank's tensors. Out: Parts of whole tensors, each number on one rank only;
or the tensors, filled from any source of parts.

Replicas share the work: of a run that n ranks hold, each saves one n-th.
"""

# N numbers of a run

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from gyre.core.errors import SnapshotError
from gyre.distributed.layout import BoxRun, Columns
from gyre.distributed.mesh import Mesh
from gyre.distributed.process_group import RankGroup
from gyre.weights.boxes import copy_common, fill_local
from gyre.weights.shards import Place, Shape, ShardLayout

OTHER_MODEL = (
    "resume with the config and the model that the run was started with, or begin a new run"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Numbers of a whole tensor, or of some of its columns, starting at `start`."""

    name: str  # of the tensor
    shape: Shape  # of the tensor
    start: int  # numbers of the columns, row by row
    values_N: Tensor
    columns: Columns = None

    @property
    def run(self) -> BoxRun:
        stop = self.start + self.values_N.numel()
        return BoxRun(start=self.start, stop=stop, columns=self.columns)

    @property
    def key(self) -> str:
        """Unique key among the parts of all ranks."""
        run = self.run
        cut = "" if run.columns is None else f",{run.columns[0]}:{run.columns[1]}"
        return f"{self.name}[{run.start}:{run.stop}{cut}]"

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

    def read(self, name: str, run: BoxRun, out_N: Tensor) -> None:
        """Fill `out_N`, on any device, with a run of the tensor's numbers. Raises SnapshotError if
        they are damaged."""
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

    def read(self, name: str, run: BoxRun, out_N: Tensor) -> None:
        filled = sum(
            copy_common(out_N, run, part.values_N, part.run, num_columns=math.prod(part.shape[1:]))
            for part in self._parts[name]
        )
        if filled != out_N.numel():
            raise SnapshotError(
                f"the snapshot holds {filled} of the {out_N.numel()} numbers of {name} from "
                f"{run.start} on",
                hint="give the parts of all ranks together",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One rank's share of some tensors, all of one dtype and in one memory component."""

    component: str
    prefix: str  # of the tensors' names in a snapshot
    layout: ShardLayout
    rank: int  # on the shard axis of the layout
    tensor_rank: int
    sharers: RankGroup  # the ranks that hold the same
    dtype: torch.dtype
    # this rank's runs by bare name, or what `cut` makes them of; all have a storage
    tensors: Mapping[str, Tensor]
    # views, made only where there are bytes
    cut: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict
    # takes numbers of any floating dtype, and rounds what `dtype` cannot hold
    converts: bool = False

    def kinds(self) -> dict[str, Kind]:
        shapes = self.layout.model.shapes
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
        values = self.cut({name: readable[self.prefix + name] for name in self.tensors})
        found, model = [], self.layout.model
        for name, run, at in self._saved_runs():
            at -= self._places[name].start
            part = Part(
                name=self.prefix + name,
                shape=tuple(model.shapes[name]),
                start=run.start,
                values_N=values[name].reshape(-1)[at : at + run.stop - run.start],
                columns=run.columns,
            )
            found.append(part)
        return found

    def sizes_bytes(self) -> list[int]:
        """Return the sizes of the parts that this rank saves."""
        return [(run.stop - run.start) * self.dtype.itemsize for _, run, _ in self._saved_runs()]

    def _saved_runs(self) -> Iterator[tuple[str, BoxRun, int]]:
        """Yield (tensor, its run, first local number) of each part that this rank saves. A box that
        several tensor ranks hold is saved by its owner."""
        mine = own_runs(
            self.layout, self.rank, copy=self.sharers.rank, num_copies=self.sharers.size
        )
        model = self.layout.model
        for name, (start, stop) in mine.items():
            for run, at, owner in model.runs(self.tensor_rank, name, start, stop):
                if owner == self.tensor_rank:
                    yield name, run, at

    @torch.no_grad()
    def load(self, source: PartSource) -> None:
        """Overwrite this rank's runs, which are on the device."""
        model = self.layout.model
        for name, tensor in self.cut(self.tensors).items():
            read = partial(source.read, self.prefix + name)
            start, flat_N = self._places[name].start, tensor.view(-1)
            fill_local(model, self.tensor_rank, name, start, flat_N, read)

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


def _is_again(layout: ShardLayout, rank: int, name: str, place: Place) -> bool:
    """Return whether the layout's first rank holds the same runs, or this rank holds none."""
    return place.start == place.stop or (rank > 0 and place == layout.ranks[0][name])
