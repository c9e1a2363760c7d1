"""Read plan: what an engine reads of registered parts, and where the numbers belong. In: entries of
a manifest, the engine's own tensors. Out: buckets, with views of these tensors.

The next version mostly has the layout of the last one, and differs in its checksums alone. So a
plan is kept: to make it takes longer than to copy a bucket.
"""

# N bytes, or numbers of a run

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gyre.core.records import TensorEntry
from gyre.weights.boxes import views
from gyre.weights.tensor_part import TensorPart
from gyre.weights.transports.part_layout import (
    ReadBucket,
    ReadPiece,
    Wanted,
    all_numbers,
    dtype_of,
    owners_in_turn,
    plan_reads,
)
from gyre.weights.transports.part_range import PartRange

BytesOf = Callable[[ReadPiece], Tensor]  # of a bucket at hand


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueView:
    """The numbers of a piece that belong to one place: a view of the piece's, which are flat."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedBucket:
    """A bucket, and the views of the engine's tensors that it overwrites."""

    read: ReadBucket
    following: tuple[PartRange, ...]  # of the next bucket of its owner
    homes: list[Tensor]
    values: tuple[tuple[ReadPiece, bool, tuple[ValueView, ...]], ...]  # True: of some columns
    names: frozenset[str]

    def values_of(self, bytes_of: BytesOf, device: torch.device) -> list[Tensor]:
        """Return what belongs in `homes`, shaped alike. Columns are cut on `device`: between
        devices whole rows are copied."""
        found = []
        for piece, cuts_columns, cut in self.values:
            values_N = bytes_of(piece).view(dtype_of(piece.placed.entry))
            if cuts_columns:
                values_N = values_N.to(device, non_blocking=True)
            at = values_N.storage_offset()
            found += [values_N.as_strided(one.size, one.stride, at + one.offset) for one in cut]
        return found


class ReadPlan:
    """The buckets of one layout of parts, for one engine."""

    def __init__(
        self,
        entries: Sequence[TensorEntry],
        own: Mapping[str, Tensor],
        *,
        broadcast: Sequence[bool],
        bucket_bytes: int,
        by_rows: bool,
        held: TensorPart | None,
    ) -> None:
        """`broadcast`: by owner, whether its whole part is read. `by_rows`: whether publishers cut
        columns out of rows. `held`: what `own` is of the whole tensors."""
        self._layout = _layout_of(entries), tuple(broadcast), bucket_bytes, by_rows
        self._addresses = _addresses_of(own)
        self._held = held

        def wanted(owner: int) -> Wanted:
            if held is None or broadcast[owner]:
                return all_numbers
            return partial(held.wanted, by_rows=by_rows)

        owners = _order_owners(broadcast, held)
        reads = plan_reads(entries, owners=owners, bucket_bytes=bucket_bytes, wanted=wanted)
        self.buckets = tuple(
            _place(read, following, own, held)
            for read, following in zip(reads, _next_stretches(reads), strict=True)
        )

    def fits(
        self,
        entries: Sequence[TensorEntry],
        own: Mapping[str, Tensor],
        *,
        broadcast: Sequence[bool],
        bucket_bytes: int,
        by_rows: bool,
        held: TensorPart | None,
    ) -> bool:
        """Return whether a plan of these would be this one."""
        layout = _layout_of(entries), tuple(broadcast), bucket_bytes, by_rows
        same_tensors = held is self._held and _addresses_of(own) == self._addresses
        return same_tensors and layout == self._layout


def _order_owners(broadcast: Sequence[bool], held: TensorPart | None) -> Sequence[int]:
    """Return the order in which owners are asked. Readers of the same bytes have one order: what is
    broadcast, or staged once for several, comes to all of them at the same time. Tensor ranks read
    different bytes, and begin with different owners."""
    num_owners = len(broadcast)
    if held is None or any(broadcast):
        return range(num_owners)
    return owners_in_turn(num_owners, reader=held.group.rank, num_readers=held.group.size)


def _layout_of(entries: Sequence[TensorEntry]) -> tuple[object, ...]:
    """Return what a plan depends on: all but the checksums."""
    return tuple(
        (
            entry.name,
            entry.dtype,
            entry.shape,
            tuple((one.start, one.stop, one.columns, one.owner) for one in entry.segments),
        )
        for entry in entries
    )


def _addresses_of(own: Mapping[str, Tensor]) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
    return {name: (tensor.data_ptr(), tensor.shape, tensor.dtype) for name, tensor in own.items()}


def _next_stretches(reads: Sequence[ReadBucket]) -> list[tuple[PartRange, ...]]:
    """Return for each bucket the stretches of the next one of its owner."""
    found: list[tuple[PartRange, ...]] = []
    later: dict[int, tuple[PartRange, ...]] = {}  # by owner
    for read in reversed(reads):
        found.append(later.get(read.owner, ()))
        later[read.owner] = read.stretches
    return found[::-1]


def _place(
    read: ReadBucket,
    following: tuple[PartRange, ...],
    own: Mapping[str, Tensor],
    held: TensorPart | None,
) -> PlannedBucket:
    """Find the places of a bucket's numbers."""
    homes, values = [], []
    for piece in read.pieces:
        entry = piece.placed.entry
        plain_N = torch.empty(
            piece.run.stop - piece.run.start, dtype=dtype_of(entry), device="meta"
        )
        pairs = list(_pairs(own[entry.name], piece, plain_N, held))
        homes += [home for home, _ in pairs]
        cut = tuple(
            ValueView(size=tuple(one.shape), stride=one.stride(), offset=int(one.storage_offset()))
            for _, one in pairs
        )
        if cut:  # none where its columns are of other ranks
            cuts_columns = held is not None and held.cuts_columns(entry.name, piece.run)
            values.append((piece, cuts_columns, cut))
    names = frozenset(piece.placed.entry.name for piece in read.pieces)
    return PlannedBucket(
        read=read, following=following, homes=homes, values=tuple(values), names=names
    )


def _pairs(
    own: Tensor, piece: ReadPiece, values_N: Tensor, held: TensorPart | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of the engine's tensor, and of the values that belong there, shaped alike."""
    if held is not None:
        yield from held.views(piece.placed.entry.name, own, piece.run, values_N)
        return
    for home in views(own, piece.run):
        yield home, values_N[: home.numel()].view(home.shape)
        values_N = values_N[home.numel() :]
