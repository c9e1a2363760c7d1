"""Slices: how a rank's optimizer state passes through limited device memory. In: the spans of
numbers that the rank updates, the size of a slice. Out: StateSlices that contain each of these
numbers once. Pure.

Slices are aligned to a grid: all begin at a multiple of BLOCK numbers, so that a blockwise codec of
the state never sees part of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gyre.core.rounding import ceil_div
from gyre.trainer.adamw.blocks import BLOCK

FLOAT_BYTES = 4
GRADIENT_BUFFERS = 2  # of a cut's size, through which gradients go to the host
# places on the device for layers whose weights are away: one that computes, one on its way in
LAYER_BUFFERS = 2
SLOTS = 3  # places on the device: one cut on its way in, one being updated, one being returned


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePiece:
    """The part of a span inside a slice."""

    span: int  # its index
    first: int  # numbers of the state: [first, last)
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlice:
    """Numbers [first, last) of the state. The pieces are updated; the rest is padding between
    tensors."""

    first: int
    last: int
    pieces: tuple[SlicePiece, ...]

    @property
    def size(self) -> int:
        return self.last - self.first


def numbers_per_cut(cut_bytes: int, *, block_bytes: int, size: int) -> int:
    """Return the numbers of a slice of `cut_bytes`, where a block of numbers has `block_bytes`.

    The result is whole blocks, at least one. It is bounded so that all slots on the device are no
    larger than a state of `size` numbers.
    """
    most = ceil_div(max(1, size), SLOTS * BLOCK) * BLOCK
    return min(most, max(1, cut_bytes // block_bytes) * BLOCK)


def staging_bytes(cut_bytes: int, *, block_bytes: int, size: int) -> int:
    """Return the bytes of all slots on the device."""
    return (
        SLOTS
        * numbers_per_cut(cut_bytes, block_bytes=block_bytes, size=size)
        // BLOCK
        * block_bytes
    )


def plan_cuts(spans: Sequence[tuple[int, int]], *, numbers: int) -> tuple[StateSlice, ...]:
    """Divide ascending, disjoint spans [first, last) on a grid of `numbers`; empty grid cells are
    omitted. The last slice ends where the last span does."""
    assert numbers > 0 and numbers % BLOCK == 0, numbers
    pieces: dict[int, list[SlicePiece]] = {}
    end = 0
    for index, (first, last) in enumerate(spans):
        assert end <= first <= last, f"span {index} [{first}, {last}) after {end}"
        end = last
        for place in range(first // numbers, ceil_div(last, numbers) if last > first else 0):
            low, high = max(first, place * numbers), min(last, (place + 1) * numbers)
            pieces.setdefault(place, []).append(SlicePiece(span=index, first=low, last=high))
    return tuple(
        StateSlice(first=place * numbers, last=min(end, (place + 1) * numbers), pieces=tuple(found))
        for place, found in sorted(pieces.items())
    )
