"""Staged part: a part from its publisher's device, by buckets of memory that both processes have.
In: its address, how such memory is opened. Out: a PartReader, which lends the buckets.

    reader      Asks for bucket n + 1, copies bucket n out, asks for bucket n + 2.
    publisher   Fills bucket n + 1 meanwhile, and says in which staging bucket it is.

A reader has three at a time, so that bucket n may still be copied while n + 1 is waited for and
lent. The copy of bucket n has ended before n + 3 is asked for, and a fill before it is answered:
each side waits for its own device, and neither for the other's. Another reader of the version may
have the same buckets (staging_ring.py).
"""

# N bytes

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gyre.weights.transports.addresses import LIVE_SCHEMES, PartAddress
from gyre.weights.transports.device.control import (
    CHECK,
    FILL,
    OPEN,
    STAGING_BUCKETS,
    ControlLink,
    ControlRequest,
)
from gyre.weights.transports.device.cuda_ipc import Staging
from gyre.weights.transports.part_range import PartRange, bucket_size, cut_stretches

Fill = tuple[PartRange, ...]  # of one staging bucket
# (bytes, handle) → memory; InputError where it cannot be opened here
OpenStaging = Callable[[int, bytes], Staging]


class StagedPart:
    """A PartReader. One thread reads, on one stream."""

    def __init__(
        self,
        address: PartAddress,
        *,
        epoch: int,
        version: int,
        size_bytes: int,
        open_staging: OpenStaging,
        deadline_s: float,
    ) -> None:
        """Connect and open the buckets. InputError where the version is no longer on its
        publisher's device, or its memory cannot be opened."""
        self._link = ControlLink(address, deadline_s=deadline_s)
        self._asked: deque[Fill] = deque()  # whose answers have not been read
        self._num_asked = 0
        self._num_lent = 0
        self._copied: dict[int, Any] = {}  # by order of what was lent, event: it was copied
        try:
            answer = self._link.ask(
                ControlRequest(
                    op=OPEN,
                    epoch=epoch,
                    version=version,
                    part_bytes=size_bytes,
                    first=LIVE_SCHEMES.index(address.scheme),
                )
            )
            self.lends_bytes, self._num_buckets, *_ = answer.numbers
            self._staging = open_staging(self._num_buckets * self.lends_bytes, answer.text)
        except BaseException:
            self._link.close()
            raise

    def view(self, start: int, stop: int) -> None:
        return None

    def lend(
        self, stretches: Sequence[PartRange], *, next_stretches: Sequence[PartRange] = ()
    ) -> Tensor:
        assert bucket_size(stretches) <= self.lends_bytes, "it does not fit a staging bucket"
        try:
            return self._lend(tuple(stretches), self._first_fill(next_stretches))
        except BaseException:
            self._link.give_up()  # what it would answer next is not known
            raise

    def read(
        self,
        stretches: Sequence[PartRange],
        out_N: Tensor,
        *,
        next_stretches: Sequence[PartRange] = (),
    ) -> None:
        cuts = cut_stretches(stretches, self.lends_bytes)
        after = [fill for _, fill in cuts[1:]] + [self._first_fill(next_stretches)]
        for (base, fill), following in zip(cuts, after, strict=True):
            bucket_N = self.lend(fill, next_stretches=following)
            for one in fill:
                out_N[base + one.at : base + one.end].copy_(bucket_N[one.at : one.end])
        if out_N.is_cuda:
            torch.cuda.current_stream(out_N.device).synchronize()

    def check(self) -> None:
        self._note_copied()
        while self._asked:  # for a read that was given up
            self._take()
        self._link.ask(ControlRequest(op=CHECK))

    def close(self) -> None:
        # before the publisher, which sees that the link has ended, frees the memory
        try:
            self._staging.close()
        finally:
            self._link.close()

    def _first_fill(self, stretches: Sequence[PartRange]) -> Fill:
        """Return what is asked for first of a bucket that may be larger than the staging ones."""
        cuts = cut_stretches(stretches, self.lends_bytes)
        return cuts[0][1] if cuts else ()

    def _lend(self, fill: Fill, following: Fill) -> Tensor:
        self._note_copied()
        while self._asked and self._asked[0] != fill:  # for a read that was given up
            self._take()
        if not self._asked:
            self._ask(fill)
        if following and len(self._asked) == 1:
            self._ask(following)
        first = self._take()
        return self._staging.bytes_N[first : first + bucket_size(fill)]

    def _take(self) -> int:
        """Wait until the publisher has filled what was asked for first. Returns where it is."""
        bucket = self._link.answer().numbers[0]
        assert bucket < self._num_buckets, f"bucket {bucket} of {self._num_buckets}"
        self._asked.popleft()
        self._num_lent += 1
        return bucket * self.lends_bytes

    def _note_copied(self) -> None:
        """Note where the stream has copied what was lent last."""
        bytes_N = self._staging.bytes_N
        if self._num_lent and bytes_N.is_cuda:
            stream = torch.cuda.current_stream(bytes_N.device)
            self._copied[self._num_lent - 1] = stream.record_event()

    def _ask(self, fill: Fill) -> None:
        copied = self._copied.pop(self._num_asked - STAGING_BUCKETS, None)
        if copied is not None:
            copied.synchronize()
        self._num_asked += 1
        self._link.send(ControlRequest(op=FILL, stretches=fill))
        self._asked.append(fill)
