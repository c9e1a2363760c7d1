"""Live part: a part's bytes from the publisher's own tensors, while these are of its version. In:
placed segments with their numbers. Out: bytes of the part, as its slot has them."""

# N bytes, or numbers of a run, R rows, B columns of them

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gyre.core.errors import InputError
from gyre.weights.transports.part_layout import PlacedSegment, dtype_of, part_bytes
from gyre.weights.transports.part_range import PartRange


class LivePart:
    """A ServedPart: a part and the numbers of its segments, flat, of any dtype, on one device."""

    takes_long = False

    def __init__(
        self, *, epoch: int, version: int, placed: Sequence[PlacedSegment], runs: Sequence[Tensor]
    ) -> None:
        self.epoch = epoch
        self.version = version
        self._placed = tuple(placed)
        self._runs = tuple(runs)
        self._starts = [one.start for one in placed]
        self.size_bytes = part_bytes(placed)

    def fill(self, stretches: Sequence[PartRange], out_N: Tensor) -> None:
        """Write the part's bytes to the stretches' places, rounded as in the slot. They are there
        when this returns. Bytes between two segments are left as they are."""
        event = self.begin(stretches, out_N)
        if event is not None:
            event.synchronize()

    @torch.no_grad()
    def begin(self, stretches: Sequence[PartRange], out_N: Tensor) -> Any:
        runs = [one for one in stretches if not one.row_bytes]
        pairs = [pair for stretch in runs for pair in self._pairs(stretch, out_N)]
        if pairs:
            homes, values = zip(*pairs, strict=True)
            torch._foreach_copy_(homes, values)
        for stretch in stretches:
            if stretch.row_bytes:  # apart: with one of them the others would be copied one by one
                self._copy_rows(stretch, out_N)
        if not out_N.is_cuda:
            return None
        return torch.cuda.current_stream(out_N.device).record_event()

    def check(self) -> None:
        """Do nothing: the tensors are of the version as long as they may be read."""

    def _pairs(self, stretch: PartRange, out_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of a stretch's place, and the numbers that belong there."""
        start, stop, shift = stretch.start, stretch.stop, stretch.at - stretch.start
        for number in range(max(0, bisect_right(self._starts, start) - 1), len(self._placed)):
            one = self._placed[number]
            low, high = max(start, one.start), min(stop, one.stop)
            if one.start >= stop:
                break
            if low < high:
                dtype = dtype_of(one.entry)
                first, last = ((at - one.start) // dtype.itemsize for at in (low, high))
                yield out_N[low + shift : high + shift].view(dtype), self._runs[number][first:last]

    def _copy_rows(self, stretch: PartRange, out_N: Tensor) -> None:
        """Copy columns of rows, which are of one segment."""
        number = bisect_right(self._starts, stretch.start) - 1
        one, values_N = self._placed[number], self._runs[number]
        if stretch.stop > one.stop:
            raise InputError(
                f"bytes {stretch.start} to {stretch.stop} of a part are no rows of one tensor",
                hint="publisher and receiver must be of one Gyre",
            )
        dtype = dtype_of(one.entry)
        first, last, pitch, width = (
            count // dtype.itemsize
            for count in (
                stretch.start - one.start,
                stretch.stop - one.start,
                stretch.pitch_bytes,
                stretch.row_bytes,
            )
        )
        home_RB = stretch.of_bucket(out_N).view(dtype)
        size = stretch.num_rows, width
        home_RB.copy_(values_N[first:last].as_strided(size, (pitch, 1)))
