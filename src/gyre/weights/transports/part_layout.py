"""Part layout: where an owner's segments are in the bytes that it registers, and how a receiver
reads them in buckets. In: the entries of a manifest. Out: places in bytes. Pure.

A part has the owner's segments in the manifest's order, each at the next multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from gyre.core.records import Segment, TensorEntry
from gyre.core.rounding import round_up
from gyre.distributed.layout import BoxRun

ALIGN_BYTES = 64
GAP_BYTES = 64 << 10  # that nobody wants, and that are read rather than asked for around
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
class ReadPiece:
    """Numbers of a segment that a bucket has."""

    placed: PlacedSegment
    run: BoxRun  # of the whole tensor, within the segment
    start: int  # byte of the bucket
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBucket:
    """Bytes of one part that are read at once."""

    owner: int
    start: int  # byte of the part
    stop: int
    pieces: tuple[ReadPiece, ...]


def all_numbers(placed: PlacedSegment) -> Iterable[tuple[int, int]]:
    return [(placed.segment.start, placed.segment.stop)]


def plan_reads(
    entries: Sequence[TensorEntry],
    *,
    num_owners: int,
    bucket_bytes: int,
    wanted: Callable[[int], Wanted] = lambda owner: all_numbers,
) -> tuple[ReadBucket, ...]:
    """Plan to read every wanted number once, in buckets of at most `bucket_bytes`. Owners take
    turns, so that no one's link waits for another's. `wanted` is asked for each owner's part."""
    assert bucket_bytes >= ALIGN_BYTES
    plans = [_plan_part(entries, owner, bucket_bytes, wanted(owner)) for owner in range(num_owners)]
    turns = zip_longest(*plans)
    return tuple(bucket for turn in turns for bucket in turn if bucket is not None)


def _plan_part(
    entries: Sequence[TensorEntry], owner: int, bucket_bytes: int, wanted: Wanted
) -> Iterator[ReadBucket]:
    """Cut a part at lines of 64 bytes, which are whole numbers of any dtype."""
    pieces: list[ReadPiece] = []
    base = end = last = 0  # bytes of the part: of the bucket, and where its last piece ends
    for placed, at, run_end in _stretches(entries, owner, wanted):
        size_bytes = dtype_of(placed.entry).itemsize
        while at < run_end:
            if pieces and (at >= end or at > last + GAP_BYTES):
                yield _close(owner, base, pieces)
                pieces = []
            if not pieces:
                base = at // ALIGN_BYTES * ALIGN_BYTES
                end = base + bucket_bytes // ALIGN_BYTES * ALIGN_BYTES
            last = min(run_end, end)
            first = placed.segment.start + (at - placed.start) // size_bytes
            count = (last - at) // size_bytes
            run = BoxRun(start=first, stop=first + count, columns=placed.segment.columns)
            pieces.append(ReadPiece(placed=placed, run=run, start=at - base, stop=last - base))
            at = last
    if pieces:
        yield _close(owner, base, pieces)


def _stretches(
    entries: Sequence[TensorEntry], owner: int, wanted: Wanted
) -> Iterator[tuple[PlacedSegment, int, int]]:
    """Yield (segment, first byte, end) of each wanted stretch of a part."""
    for placed in place_part(entries, owner):
        size_bytes = dtype_of(placed.entry).itemsize
        for low, high in wanted(placed):
            base = placed.start - placed.segment.start * size_bytes
            yield placed, base + low * size_bytes, base + high * size_bytes


def _close(owner: int, base: int, pieces: list[ReadPiece]) -> ReadBucket:
    return ReadBucket(owner=owner, start=base, stop=base + pieces[-1].stop, pieces=tuple(pieces))
