"""Part range: bytes of a part, and where they are in a bucket. In: places in both. Out: views of
either, and smaller buckets. Pure.

A range is consecutive in the part, or some bytes of each of several rows: the columns of a matrix
that a reader wants. In a bucket it is consecutive either way.
"""

# N bytes, R rows, B bytes of a row

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRange:
    """Bytes of a part, and their place in a bucket: both begin at lines of 64 bytes. Of rows, each
    row does, in both."""

    start: int  # byte of the part
    stop: int
    at: int  # byte of the bucket
    row_bytes: int = 0  # of each row; 0: all bytes from start to stop
    pitch_bytes: int = 0  # from the beginning of a row to that of the next one

    @property
    def num_rows(self) -> int:
        """Return how many rows it has; 1 where it is consecutive."""
        if not self.row_bytes:
            return 1
        return (self.stop - self.start - self.row_bytes) // self.pitch_bytes + 1

    @property
    def size_bytes(self) -> int:
        return self.num_rows * (self.row_bytes or self.stop - self.start)

    @property
    def end(self) -> int:
        """Return the byte of the bucket behind it."""
        return self.at + self.size_bytes

    @property
    def is_sound(self) -> bool:
        """Return whether it has bytes, and begins at lines in part and bucket."""
        rows = self.row_bytes, self.pitch_bytes
        sizes = (self.start, self.at, *rows)
        if self.start >= self.stop or any(one % ALIGN_BYTES for one in sizes):
            return False
        if rows == (0, 0):
            return True
        last = self.stop - self.start - self.row_bytes  # where the last row begins
        return 0 < self.row_bytes <= self.pitch_bytes and last >= 0 == last % self.pitch_bytes

    def rows(self) -> Iterator[PartRange]:
        """Yield its rows as ranges that are consecutive."""
        size_bytes = self.row_bytes or self.stop - self.start
        for row in range(self.num_rows):
            start = self.start + row * self.pitch_bytes
            at = self.at + row * size_bytes
            yield PartRange(start=start, stop=start + size_bytes, at=at)

    def of_part(self, bytes_N: Tensor) -> Tensor:
        """Return its bytes, of the part's from `start` to `stop`: [N], or [R, B] of rows."""
        if not self.row_bytes:
            return bytes_N
        return bytes_N.as_strided((self.num_rows, self.row_bytes), (self.pitch_bytes, 1))

    def of_bucket(self, bucket_N: Tensor) -> Tensor:
        """Return its place in a bucket, shaped as `of_part`."""
        place_N = bucket_N[self.at : self.end]
        return place_N.view(self.num_rows, -1) if self.row_bytes else place_N


def bucket_size(stretches: Sequence[PartRange]) -> int:
    """Return the bytes of a bucket with these stretches."""
    return stretches[-1].end if stretches else 0


def cut_stretches(
    stretches: Sequence[PartRange], most_bytes: int
) -> list[tuple[int, tuple[PartRange, ...]]]:
    """Cut a bucket into smaller ones of at most `most_bytes`, a multiple of 64. Each comes with the
    byte of the whole bucket where it begins. Rows stay together where the bucket is not cut."""
    assert most_bytes > 0 and most_bytes % ALIGN_BYTES == 0
    if not stretches:
        return []
    if bucket_size(stretches) <= most_bytes:
        return [(0, tuple(stretches))]
    cuts: list[tuple[int, tuple[PartRange, ...]]] = []
    base, held = 0, list[PartRange]()
    for one in (row for stretch in stretches for row in stretch.rows()):
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
    cuts.append((base, tuple(held)))
    return cuts
