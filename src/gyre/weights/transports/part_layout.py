"""Part layout: where an owner's segments are in the bytes that it registers, and how a receiver
reads them in buckets. In: the entries of a manifest. Out: places in bytes. Pure.

A part has the owner's segments in the manifest's order, each at the next multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from gyre.core.records import Segment, TensorEntry
from gyre.core.rounding import round_up
from gyre.distributed.layout import BoxRun

ALIGN_BYTES = 64
GAP_BYTES = 64 << 10  # that are not wanted, and that are read rather than left out
# [start, stop) of a segment's numbers that a receiver wants, in order
Wanted = Callable[["PlacedSegment"], Iterable[tuple[int, int]]]


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
class PartRange:
    """Consecutive bytes of a part, and their place in a bucket: both begin at lines of 64 bytes."""

    start: int  # byte of the part
    stop: int
    at: int  # byte of the bucket

    @property
    def end(self) -> int:
        """Return the byte of the bucket behind it."""
        return self.at + self.stop - self.start


def bucket_size(stretches: Sequence[PartRange]) -> int:
    """Return the bytes of a bucket with these stretches."""
    return stretches[-1].end if stretches else 0


def cut_stretches(
    stretches: Sequence[PartRange], most_bytes: int
) -> list[tuple[int, tuple[PartRange, ...]]]:
    """Cut a bucket into smaller ones of at most `most_bytes`, a multiple of 64. Each comes with the
    byte of the whole bucket where it begins."""
    assert most_bytes > 0 and most_bytes % ALIGN_BYTES == 0
    cuts: list[tuple[int, tuple[PartRange, ...]]] = []
    base, held = 0, list[PartRange]()
    for one in stretches:
        at = one.at
        while at < one.end:
            if held and at >= base + most_bytes:
                cuts.append((base, tuple(held)))
                held = []
            if not held:
                base = at
            end = min(one.end, base + most_bytes)
            first = one.start + at - one.at
            held.append(PartRange(start=first, stop=first + end - at, at=at - base))
            at = end
    if held:
        cuts.append((base, tuple(held)))
    return cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPiece:
    """Numbers of a segment that a bucket has."""

    placed: PlacedSegment
    run: BoxRun  # of the whole tensor, within the segment
    at: int  # byte of the part
    start: int  # byte of the bucket
    stop: int

    @property
    def end(self) -> int:
        """Return the byte of the part behind it."""
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


def all_numbers(placed: PlacedSegment) -> Iterable[tuple[int, int]]:
    return [(placed.segment.start, placed.segment.stop)]


def owners_in_turn(num_owners: int, *, reader: int, num_readers: int) -> tuple[int, ...]:
    """Return the order in which a reader asks the owners of parts, the one beside it first. As long
    as readers keep step, no owner is asked by two of them at once where there is one for each, and
    every link between two devices is used both ways."""
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
) -> Iterator[ReadBucket]:
    """Cut a part at lines of 64 bytes, which are whole numbers of any dtype."""
    limit = bucket_bytes // ALIGN_BYTES * ALIGN_BYTES
    filling = _Filling(owner)
    for placed, at, run_end in _wanted_bytes(entries, owner, wanted):
        while at < run_end:
            start = filling.place(at)
            if start >= limit:
                yield filling.close()
                filling = _Filling(owner)
                continue
            end = min(run_end, at + limit - start)
            filling.add(placed, at, end, start)
            at = end
    if filling.pieces:
        yield filling.close()


class _Filling:
    """A bucket while it is planned."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self.pieces: list[ReadPiece] = []
        self._stretches: list[PartRange] = []

    def place(self, at: int) -> int:
        """Return the byte of the bucket where the part's byte `at` would be."""
        if not self._stretches:
            return at % ALIGN_BYTES
        last = self._stretches[-1]
        if at <= last.stop + GAP_BYTES:
            return last.at + at - last.start
        return round_up(last.end, ALIGN_BYTES) + at % ALIGN_BYTES

    def add(self, placed: PlacedSegment, at: int, end: int, start: int) -> None:
        """Add the part's bytes [at, end) at the byte `start` of the bucket."""
        size_bytes = dtype_of(placed.entry).itemsize
        first = placed.segment.start + (at - placed.start) // size_bytes
        count = (end - at) // size_bytes
        run = BoxRun(start=first, stop=first + count, columns=placed.segment.columns)
        stop = start + end - at
        self.pieces.append(ReadPiece(placed=placed, run=run, at=at, start=start, stop=stop))
        if self._stretches and start - at == self._stretches[-1].at - self._stretches[-1].start:
            self._stretches[-1] = replace(self._stretches[-1], stop=end)
            return
        before = at % ALIGN_BYTES
        self._stretches.append(PartRange(start=at - before, stop=end, at=start - before))

    def close(self) -> ReadBucket:
        return ReadBucket(
            owner=self._owner, stretches=tuple(self._stretches), pieces=tuple(self.pieces)
        )


def _wanted_bytes(
    entries: Sequence[TensorEntry], owner: int, wanted: Wanted
) -> Iterator[tuple[PlacedSegment, int, int]]:
    """Yield (segment, first byte, end) of each wanted stretch of a part."""
    for placed in place_part(entries, owner):
        size_bytes = dtype_of(placed.entry).itemsize
        for low, high in wanted(placed):
            base = placed.start - placed.segment.start * size_bytes
            yield placed, base + low * size_bytes, base + high * size_bytes
