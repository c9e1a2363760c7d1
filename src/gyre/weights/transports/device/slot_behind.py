"""Slot behind: a part from its publisher's device, and from its slot when that ends. In: a reader
of the first, and how the second is opened. Out: a PartReader.

Both have the same bytes, so it may change at any byte. It does so once. The slot is opened only
then, since page-locking it takes longer than to read the part.
"""

# N bytes

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gyre.core.errors import GyreError
from gyre.weights.transports.contracts import PartReader
from gyre.weights.transports.part_range import PartRange, bucket_size


class SlotBehind:
    """A PartReader over two. `on_change` hears why the first was given up."""

    def __init__(
        self,
        live: PartReader,
        open_slot: Callable[[], PartReader],
        on_change: Callable[[GyreError], None],
    ) -> None:
        self._reader = live
        self._is_live = True
        self._open_slot = open_slot
        self._on_change = on_change
        self.lends_bytes = live.lends_bytes

    def view(self, start: int, stop: int) -> None:
        return None

    def read(
        self,
        stretches: Sequence[PartRange],
        out_N: Tensor,
        *,
        next_stretches: Sequence[PartRange] = (),
    ) -> None:
        try:
            self._reader.read(stretches, out_N, next_stretches=next_stretches)
        except GyreError as error:
            self._change(error)
            self._reader.read(stretches, out_N)

    def lend(
        self, stretches: Sequence[PartRange], *, next_stretches: Sequence[PartRange] = ()
    ) -> Tensor:
        if self._is_live:
            try:
                return self._reader.lend(stretches, next_stretches=next_stretches)
            except GyreError as error:
                self._change(error)
        # new for each bucket: the device may still be copying the last one
        out_N = torch.empty(bucket_size(stretches), dtype=torch.uint8)
        self._reader.read(stretches, out_N)
        return out_N

    def check(self) -> None:
        try:
            self._reader.check()
        except GyreError as error:
            # what it gave was of the version then; whether the slot has it still, it says
            self._change(error)
            self._reader.check()

    def close(self) -> None:
        self._reader.close()

    def _change(self, error: GyreError) -> None:
        if not self._is_live:
            raise error
        self._on_change(error)
        slot = self._open_slot()
        self._reader.close()
        self._reader, self._is_live = slot, False
