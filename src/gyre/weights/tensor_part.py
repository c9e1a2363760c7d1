"""Tensor part: what one rank of the tensor axis takes of a version of whole tensors, and what the
ranks find out together. In: the layout table, the ranks. Out: the numbers that a rank holds of what
it reads; one result for all.

A rank verifies no checksum by itself, since those are of segments that it may hold in part. The
sums of all ranks' boxes add up to a tensor's. So each number is verified where it ends up, and no
rank needs a whole tensor.
"""

# N numbers of a run, B boxes of all ranks or of one, E tensors

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gyre.core.errors import GyreError, InputError
from gyre.core.records import Manifest, Segment
from gyre.distributed.layout import BoxRun, ModelLayout
from gyre.distributed.process_group import RankGroup
from gyre.kernels.checksum import ALL_BITS, checksums
from gyre.weights.boxes import common_views, local_source
from gyre.weights.manifest import checksum_fault, refuse_faults, segment_run
from gyre.weights.shards import Shape
from gyre.weights.tensor_source import TensorSource
from gyre.weights.transports.part_layout import PlacedSegment, WantedRun


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorPart:
    """One rank's part of each tensor of the table, and the group of all ranks."""

    table: ModelLayout
    group: RankGroup
    # what was found before: runs by rank and tensor; boxes by the tensors of a version
    _known: dict[tuple[int, str], tuple[tuple[BoxRun, int, int], ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    _found: dict[tuple[str, ...], _Boxes] = field(default_factory=dict, init=False, repr=False)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Return the shapes of the whole tensors."""
        return self.table.shapes

    def cut(self, source: TensorSource) -> TensorSource:
        """Return a source of this rank's local tensors, over one of whole tensors."""
        return local_source(source, self.table, self.group.rank)

    def wanted(self, placed: PlacedSegment, *, by_rows: bool = False) -> Iterator[WantedRun]:
        """Yield [start, stop) of a segment's numbers outside of which this rank holds none.
        `by_rows`: with the columns of them that it holds, where a whole row is not wanted."""
        name, last = placed.entry.name, placed.segment.start
        runs = self._runs(self.group.rank, name)
        by_rows = by_rows and len(runs) == 1 and placed.segment.columns is None
        for run, _, _ in runs:
            low, high = placed.run.reach(run, self._columns(name))
            if max(low, last) < high:
                yield max(low, last), high, run.columns if by_rows else None
                last = high

    def cuts_columns(self, name: str, found: BoxRun) -> bool:
        """Return whether this rank holds other columns of the tensor than the run has."""
        return any(run.columns != found.columns for run, _, _ in self._runs(self.group.rank, name))

    def views(
        self, name: str, local: Tensor, run: BoxRun, values_N: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of this rank's local tensor, and of the values of a run of the whole one that
        belong there, shaped alike."""
        flat_N, columns = local.view(-1), self._columns(name)
        for own, at, _ in self._runs(self.group.rank, name):
            home_N = flat_N[at : at + own.stop - own.start]
            yield from common_views(home_N, own, values_N, run, num_columns=columns)

    def verify(self, manifest: Manifest, own: Mapping[str, Tensor]) -> None:
        """Raise SnapshotError on every rank unless the ranks' tensors are the version. All ranks
        call it at the same point."""
        boxes = self._boxes(tuple(entry.name for entry in manifest.entries))
        sums_B = self._share_sums(self._sums(manifest, own), boxes.counts)
        totals_E = torch.zeros(len(manifest.entries), dtype=torch.int64)
        totals_E.index_add_(0, boxes.tensor_B[boxes.owned_B], sums_B[boxes.owned_B])
        differs = set(boxes.tensor_B[sums_B != sums_B[boxes.owner_B]].tolist())
        faults = []
        for number, (entry, total) in enumerate(
            zip(manifest.entries, totals_E.tolist(), strict=True)
        ):
            checksums = [one.checksum for one in entry.segments if one.checksum is not None]
            if len(checksums) < len(entry.segments):
                continue  # without checksums shapes alone are verified
            expected = sum(int(one, 16) for one in checksums)
            if number in differs or (total - expected) & ALL_BITS:
                faults.append(checksum_fault(entry))
        refuse_faults(manifest, faults)

    @contextmanager
    def agreed(self, what: str) -> Iterator[None]:
        """Let the block be refused on all ranks where it is on one; each undoes its own part. All
        ranks call it at the same point. InputError names the rank at fault on the others. Any other
        error is no answer: it ends the group."""
        fault: GyreError | None = None
        try:
            yield
        except GyreError as error:
            fault = error
        except (OSError, torch.OutOfMemoryError) as error:
            fault = InputError(f"{what} cannot be taken: {error}")
        told = self.group.share("" if fault is None else f"{fault}")
        if fault is not None:
            raise fault
        for rank, text in enumerate(told):
            if text:
                raise InputError(f"{what} was refused by rank {rank} of the engine: {text}")

    def _columns(self, name: str) -> int:
        return math.prod(self.table.shapes[name][1:])

    def _runs(self, rank: int, name: str) -> Sequence[tuple[BoxRun, int, int]]:
        """Return (run of the whole tensor, first local number, owner) of each of a rank's boxes."""
        if (rank, name) not in self._known:
            count = math.prod(self.table.local_shapes[name])
            self._known[rank, name] = tuple(self.table.runs(rank, name, 0, count))
        return self._known[rank, name]

    def _boxes(self, names: tuple[str, ...]) -> _Boxes:
        """Return the boxes of these tensors on all ranks, which are the same for each version."""
        if names not in self._found:
            self._found.clear()
            self._found[names] = self._find_boxes(names)
        return self._found[names]

    def _find_boxes(self, names: tuple[str, ...]) -> _Boxes:
        places = [
            (rank, owner, number, run)
            for rank in range(self.group.size)
            for number, name in enumerate(names)
            for run, _, owner in self._runs(rank, name)
        ]
        at = {(rank, number, run): place for place, (rank, _, number, run) in enumerate(places)}
        return _Boxes(
            counts=[sum(one[0] == rank for one in places) for rank in range(self.group.size)],
            tensor_B=torch.tensor([number for _, _, number, _ in places], dtype=torch.int64),
            owned_B=torch.tensor([rank == owner for rank, owner, _, _ in places]),
            owner_B=torch.tensor([at[owner, number, run] for _, owner, number, run in places]),
        )

    def _sums(self, manifest: Manifest, own: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of each of this rank's boxes, in the order of `_places`."""
        runs = []
        for entry in manifest.entries:
            flat_N = own[entry.name].view(-1)
            for run, at, _ in self._runs(self.group.rank, entry.name):
                segment = Segment(start=run.start, stop=run.stop, columns=run.columns)
                values_N = flat_N[at : at + run.stop - run.start]
                runs.append(segment_run(entry, segment, values_N))
        return checksums(runs)

    def _share_sums(self, sums_B: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather the ranks' sums, of which some have fewer, to the host."""
        longest = max(counts)
        padded_B = torch.zeros(longest, dtype=torch.int64, device=self.group.device)
        padded_B[: len(sums_B)] = sums_B
        joined_B = padded_B.new_empty(self.group.size * longest)
        self.group.all_gather(joined_B, padded_B)
        by_rank = joined_B.cpu().view(self.group.size, longest)
        return torch.cat([row_B[:count] for row_B, count in zip(by_rank, counts, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Boxes:
    """The boxes of all ranks, rank by rank, in the order of their sums."""

    counts: list[int]  # by rank
    tensor_B: Tensor  # the tensor's number
    owned_B: Tensor  # whether its rank is its owner
    owner_B: Tensor  # where its owner's sum is
