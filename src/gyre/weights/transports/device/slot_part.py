"""Slot part: a part's bytes from the publisher's own slot, which outlive its tensors. In: a slot
that is whole. Out: bytes of the part; SnapshotError once the slot has another version.

One copy of page-locked memory fills a bucket on the publisher's GPU, on a stream of its own. So the
bytes cross the link to the host once, however many readers the bucket has.
"""

# N bytes

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gyre.weights.transports.part_layout import PartRange


class SlotPart:
    """A PartSource over the slot's bytes. Any thread may call."""

    takes_long = True

    def __init__(
        self, *, epoch: int, version: int, bytes_N: Tensor, check: Callable[[], None]
    ) -> None:
        """`check` raises SnapshotError unless the slot has the version whole."""
        self.epoch = epoch
        self.version = version
        self.size_bytes = len(bytes_N)
        self.check = check
        self._bytes_N = bytes_N

    def begin(self, stretches: Sequence[PartRange], out_N: Tensor) -> Any:
        """Copy the stretches, as the slot has them."""
        self.check()  # also that the file was not cut: its pages would be gone
        if not out_N.is_cuda:
            self._copy(stretches, out_N)
            return None
        stream = _stream_of(out_N.device)
        with torch.cuda.stream(stream):
            self._copy(stretches, out_N)
            return stream.record_event()

    def _copy(self, stretches: Sequence[PartRange], out_N: Tensor) -> None:
        for one in stretches:
            out_N[one.at : one.end].copy_(self._bytes_N[one.start : one.stop], non_blocking=True)


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return a device's stream of these copies: the trainer's own wait for none of them."""
    return torch.cuda.Stream(device)
