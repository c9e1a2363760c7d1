"""Bucket plan: how the bytes of many tensors travel in pieces of bounded size. In: sizes by name.
Out: buckets. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of bytes of one tensor."""

    name: str
    start: int  # byte within the tensor
    stop: int
    offset: int  # byte within the bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Pieces that travel together."""

    pieces: tuple[Piece, ...]
    size_bytes: int


def plan_buckets(sizes_bytes: Mapping[str, int], *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Fill buckets in order and cut tensors that do not fit. Every bucket but the last is full."""
    assert bucket_bytes > 0
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    filled = 0
    for name, size in sizes_bytes.items():
        start = 0
        while start < size:
            stop = min(size, start + bucket_bytes - filled)
            pieces.append(Piece(name=name, start=start, stop=stop, offset=filled))
            filled += stop - start
            start = stop
            if filled == bucket_bytes:
                buckets.append(Bucket(pieces=tuple(pieces), size_bytes=filled))
                pieces, filled = [], 0
    if pieces:
        buckets.append(Bucket(pieces=tuple(pieces), size_bytes=filled))
    return tuple(buckets)
