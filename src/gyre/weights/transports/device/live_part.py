"""Live part: a part's bytes from the publisher's own tensors, while these are of its version. In:
placed segments with their numbers. Out: bytes of the part, as its slot has them.

The tensors change at the trainer's next step, and may leave the device before. So nothing reads
them but under `reading`, and `withdraw` waits for what is being read.
"""

# N bytes, or numbers of a run

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gyre.core.errors import DeadlineError, InputError
from gyre.weights.transports.part_layout import PartRange, PlacedSegment, dtype_of, part_bytes


class LivePart:
    """A part and the numbers of its segments, flat, of any dtype, on one device."""

    def __init__(
        self, *, epoch: int, version: int, placed: Sequence[PlacedSegment], runs: Sequence[Tensor]
    ) -> None:
        self.epoch = epoch
        self.version = version
        self._placed = tuple(placed)
        self._runs = tuple(runs)
        self._starts = [one.start for one in placed]
        self.size_bytes = part_bytes(placed)

    @torch.no_grad()
    def fill(self, stretches: Sequence[PartRange], out_N: Tensor) -> None:
        """Write the part's bytes to the stretches' places, rounded as in the slot. They are there
        when this returns. Bytes between two segments are left as they are."""
        pairs = [pair for stretch in stretches for pair in self._pairs(stretch, out_N)]
        if pairs:
            homes, values = zip(*pairs, strict=True)
            torch._foreach_copy_(homes, values)
        if out_N.is_cuda:
            torch.cuda.current_stream(out_N.device).synchronize()

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


class CurrentPart:
    """The part that this process has in its tensors now, or none. Any thread may call."""

    def __init__(self, *, deadline_s: float) -> None:
        """`deadline_s`: longest wait for what is being read."""
        self._deadline_s = deadline_s
        self._part: LivePart | None = None
        self._num_reading = 0
        self._changed = threading.Condition()

    def put(self, part: LivePart) -> None:
        self.withdraw()
        with self._changed:
            self._part = part

    def has(self, *, epoch: int, version: int) -> bool:
        part = self._part
        return part is not None and (part.epoch, part.version) == (epoch, version)

    @contextmanager
    def reading(self, *, epoch: int, version: int) -> Iterator[LivePart]:
        """Keep the part's tensors as they are within the block. InputError where they are of
        another version now."""
        with self._changed:
            part = self._part
            if part is None or (part.epoch, part.version) != (epoch, version):
                now = "has none now" if part is None else f"has version {part.version}"
                raise InputError(
                    f"version {version} of epoch {epoch} is no longer on its publisher's device, "
                    f"which {now}",
                    hint="read it from its slot, or take a newer one",
                )
            self._num_reading += 1
        try:
            yield part
        finally:
            with self._changed:
                self._num_reading -= 1
                self._changed.notify_all()

    def withdraw(self) -> None:
        """Give the tensors back to their owner, who may change them from now on. DeadlineError if
        a read does not end."""
        with self._changed:
            self._part = None
            if not self._changed.wait_for(lambda: not self._num_reading, self._deadline_s):
                raise DeadlineError(
                    f"a read of registered weights has not ended after {self._deadline_s:g} s",
                    hint="the device may hang: see its kernel log",
                )
