"""Part layout: where an owner's segments are in the bytes that it registers, and how a receiver
reads them in buckets. In: the entries of a manifest. Out: places in bytes. Pure.

A part has the owner's segments in the manifest's order, each at the next multiple of 64 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from gyre.core.records import Segment, TensorEntry
from gyre.core.rounding import round_up
from gyre.distributed.layout import BoxRun, Columns
from gyre.weights.transports.part_range import ALIGN_BYTES, PartRange, bucket_size

GAP_BYTES = 64 << 10  # that are not wanted, and that are read rather than left out
# [start, stop) of a segment's numbers, and the columns of them that a receiver wants; None: all
WantedRun = tuple[int, int, Columns]
Wanted = Callable[["PlacedSegment"], Iterable[WantedRun]]  # in order


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSegment:
    """A segment of one owner, and its bytes in the owner's part."""

    entry: TensorEntry
    segment: Segment
    start: int  # byte of the part
    stop: int

    @property
    def run(self) -> BoxRun:
        one = self.segment
        return BoxRun(start=one.start, stop=one.stop, columns=one.columns)

    @property
    def is_whole(self) -> bool:
        """Return whether the segment is its whole tensor."""
        return self.segment.columns is None and len(self.entry.segments) == 1


def place_part(entries: Sequence[TensorEntry], owner: int) -> tuple[PlacedSegment, ...]:
    """Place the owner's segments in its part."""
    placed = []
    at = 0
    for entry in entries:
        size_bytes = dtype_of(entry).itemsize
        for segment in entry.segments:
            if segment.owner == owner:
                stop = at + (segment.stop - segment.start) * size_bytes
                placed.append(PlacedSegment(entry=entry, segment=segment, start=at, stop=stop))
                at = round_up(stop, ALIGN_BYTES)
    return tuple(placed)


def part_bytes(placed: Sequence[PlacedSegment]) -> int:
    return placed[-1].stop if placed else 0


def dtype_of(entry: TensorEntry) -> torch.dtype:
    return getattr(torch, entry.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPiece:
    """Numbers of a segment that a bucket has."""

    placed: PlacedSegment
    run: BoxRun  # of the whole tensor, within the segment; of rows, their columns
    at: int  # byte of the part
    start: int  # byte of the bucket
    stop: int

    @property
    def end(self) -> int:
        """Return the byte of the part behind it, where it is consecutive there."""
        return self.at + self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBucket:
    """Stretches of one part that are read at once."""

    owner: int
    stretches: tuple[PartRange, ...]
    pieces: tuple[ReadPiece, ...]

    @property
    def size_bytes(self) -> int:
        return bucket_size(self.stretches)


def all_numbers(placed: PlacedSegment) -> Iterable[WantedRun]:
    return [(placed.segment.start, placed.segment.stop, None)]


def owners_in_turn(num_owners: int, *, reader: int, num_readers: int) -> tuple[int, ...]:
    """Return the order in which a reader asks the owners of parts. Readers begin at different
    owners. With an owner for each and readers in step, no two ask one at once: of ranks that share
    devices each asks its own first."""
    assert 0 <= reader < num_readers
    first = reader * num_owners // num_readers
    return tuple((first + step) % num_owners for step in range(num_owners))


def plan_reads(
    entries: Sequence[TensorEntry],
    *,
    owners: Sequence[int],
    bucket_bytes: int,
    wanted: Callable[[int], Wanted] = lambda owner: all_numbers,
) -> tuple[ReadBucket, ...]:
    """Plan to read every wanted number once, in buckets of at most `bucket_bytes`. What is not
    wanted is left out of a bucket. Owners take turns in their order, so that no one's link waits
    for another's. `wanted` is asked for each owner's part."""
    assert bucket_bytes >= ALIGN_BYTES
    plans = [_plan_part(entries, owner, bucket_bytes, wanted(owner)) for owner in owners]
    turns = zip_longest(*plans)
    return tuple(bucket for turn in turns for bucket in turn if bucket is not None)


def _plan_part(
    entries: Sequence[TensorEntry], owner: int, bucket_bytes: int, wanted: Wanted
) -> list[ReadBucket]:
    plan = _PartPlan(owner, bucket_bytes // ALIGN_BYTES * ALIGN_BYTES)
    for placed in place_part(entries, owner):
        for low, high, columns in wanted(placed):
            rows = _find_rows(placed, low, high, columns, plan.limit)
            if rows is None:
                plan.add_numbers(placed, low, high)
                continue
            plan.add_numbers(placed, low, rows.start)
            plan.add_rows(rows)
            plan.add_numbers(placed, rows.stop, high)
    return plan.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Columns of whole rows of a matrix, which begin at lines of a part."""

    placed: PlacedSegment
    start: int  # numbers of the whole matrix: of the first row, and behind the last one
    stop: int
    columns: tuple[int, int]
    num_columns: int  # of the whole matrix

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def at(self) -> int:
        """Return the byte of the part where the first row's columns begin."""
        one, size_bytes = self.placed, dtype_of(self.placed.entry).itemsize
        return one.start + (self.start + self.columns[0] - one.segment.start) * size_bytes

    @property
    def row_bytes(self) -> int:
        return self.width * dtype_of(self.placed.entry).itemsize

    @property
    def pitch_bytes(self) -> int:
        return self.num_columns * dtype_of(self.placed.entry).itemsize


def _find_rows(
    placed: PlacedSegment, low: int, high: int, columns: Columns, limit: int
) -> _Rows | None:
    """Return the whole rows of numbers [low, high) of which some columns are wanted. None where
    whole rows are to be read: they do not begin at lines, or one is larger than a bucket."""
    if columns is None:
        return None
    num_columns = math.prod(placed.entry.shape[1:])
    start, stop = round_up(low, num_columns), high // num_columns * num_columns
    rows = _Rows(placed=placed, start=start, stop=stop, columns=columns, num_columns=num_columns)
    sizes = rows.at, rows.row_bytes, rows.pitch_bytes
    if start >= stop or rows.row_bytes > limit or any(one % ALIGN_BYTES for one in sizes):
        return None
    return rows


class _PartPlan:
    """The buckets of a part while they are planned: cut at lines of 64 bytes, which are whole
    numbers of any dtype."""

    def __init__(self, owner: int, limit: int) -> None:
        """`limit`: bytes of a bucket, a multiple of 64."""
        self.limit = limit
        self._owner = owner
        self._buckets: list[ReadBucket] = []
        self._pieces: list[ReadPiece] = []
        self._stretches: list[PartRange] = []

    def add_numbers(self, placed: PlacedSegment, low: int, high: int) -> None:
        """Add numbers [low, high) of the segment."""
        size_bytes = dtype_of(placed.entry).itemsize
        base = placed.start - placed.segment.start * size_bytes
        at, stop = base + low * size_bytes, base + high * size_bytes
        while at < stop:
            start = self._place(at)
            if start >= self.limit:
                self._close()
                continue
            end = min(stop, at + self.limit - start)
            self._add(placed, at, end, start)
            at = end

    def add_rows(self, rows: _Rows) -> None:
        start, at = rows.start, rows.at
        while start < rows.stop:
            place = round_up(self._end, ALIGN_BYTES)
            count = (self.limit - place) // rows.row_bytes
            if count < 1:
                self._close()
                continue
            count = min(count, (rows.stop - start) // rows.num_columns)
            stretch = PartRange(
                start=at,
                stop=at + (count - 1) * rows.pitch_bytes + rows.row_bytes,
                at=place,
                row_bytes=rows.row_bytes,
                pitch_bytes=rows.pitch_bytes,
            )
            first = start // rows.num_columns * rows.width
            run = BoxRun(start=first, stop=first + count * rows.width, columns=rows.columns)
            self._stretches.append(stretch)
            self._pieces.append(
                ReadPiece(placed=rows.placed, run=run, at=at, start=place, stop=stretch.end)
            )
            start, at = start + count * rows.num_columns, at + count * rows.pitch_bytes

    def finish(self) -> list[ReadBucket]:
        if self._pieces:
            self._close()
        return self._buckets

    @property
    def _end(self) -> int:
        return bucket_size(self._stretches)

    def _place(self, at: int) -> int:
        """Return the byte of the bucket where the part's byte `at` would be."""
        if not self._stretches:
            return at % ALIGN_BYTES
        last = self._stretches[-1]
        if not last.row_bytes and at <= last.stop + GAP_BYTES:
            return last.at + at - last.start
        return round_up(last.end, ALIGN_BYTES) + at % ALIGN_BYTES

    def _add(self, placed: PlacedSegment, at: int, end: int, start: int) -> None:
        """Add the part's bytes [at, end) at the byte `start` of the bucket."""
        size_bytes = dtype_of(placed.entry).itemsize
        first = placed.segment.start + (at - placed.start) // size_bytes
        count = (end - at) // size_bytes
        run = BoxRun(start=first, stop=first + count, columns=placed.segment.columns)
        stop = start + end - at
        self._pieces.append(ReadPiece(placed=placed, run=run, at=at, start=start, stop=stop))
        last = self._stretches[-1] if self._stretches else None
        if last is not None and not last.row_bytes and start - at == last.at - last.start:
            self._stretches[-1] = replace(last, stop=end)
            return
        before = at % ALIGN_BYTES
        self._stretches.append(PartRange(start=at - before, stop=end, at=start - before))

    def _close(self) -> None:
        self._buckets.append(
            ReadBucket(
                owner=self._owner, stretches=tuple(self._stretches), pieces=tuple(self._pieces)
            )
        )
        self._pieces, self._stretches = [], []
