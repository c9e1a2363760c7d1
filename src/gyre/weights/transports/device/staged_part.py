"""Staged part: a part from its publisher's device, by two buckets of memory that both processes
have. In: its address, how such memory is opened. Out: a PartReader.

    reader      Asks for bucket n + 1, copies bucket n out, asks for bucket n + 2.
    publisher   Rounds bucket n + 1 into the other half meanwhile.

The first bucket of the next read is asked for within this one. A copy has ended before its half is
asked for again, and a fill before it is answered: each side waits for its own device, and neither
for the other's.
"""

# N bytes

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from gyre.core.errors import GyreError
from gyre.weights.transports.addresses import LIVE_SCHEMES, PartAddress
from gyre.weights.transports.device.control import (
    CHECK,
    FILL,
    OPEN,
    ControlLink,
    ControlRequest,
)
from gyre.weights.transports.device.cuda_ipc import Staging

NUM_BUCKETS = 2  # of staging memory, filled in turn
_Fill = tuple[int, int]  # start and bytes
# (bytes, handle) → memory; InputError where it cannot be opened here
OpenStaging = Callable[[int, bytes], Staging]


class StagedPart:
    """A PartReader. One thread reads."""

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
        self._asked: deque[_Fill] = deque()  # whose answers have not been read
        self._num_copied = 0
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
            self._bucket_bytes = answer.numbers[0]
            self._staging = open_staging(2 * self._bucket_bytes, answer.text)
        except GyreError:
            self._link.close()
            raise

    def view(self, start: int, stop: int) -> None:
        return None

    def read(self, start: int, out_N: Tensor, *, next_read: tuple[int, int] | None = None) -> None:
        try:
            self._read(start, out_N, self._cut(*next_read)[:1] if next_read else [])
        except BaseException:
            self._link.give_up()  # what it would answer next is not known
            raise

    def check(self) -> None:
        self._link.ask(ControlRequest(op=CHECK))

    def close(self) -> None:
        # before the publisher, which sees that the link has ended, frees the memory
        self._staging.close()
        self._link.close()

    def _cut(self, start: int, size_bytes: int) -> list[_Fill]:
        step, stop = self._bucket_bytes, start + size_bytes
        return [(at, min(step, stop - at)) for at in range(start, stop, step)]

    def _read(self, start: int, out_N: Tensor, after: list[_Fill]) -> None:
        fills = self._cut(start, len(out_N))
        assert list(self._asked) == fills[: len(self._asked)], "another place was asked for"
        asking = deque((fills + after)[len(self._asked) :])
        for at, size_bytes in fills:
            while asking and len(self._asked) < NUM_BUCKETS:
                self._ask(asking.popleft())
            self._link.answer()
            first = self._num_copied % NUM_BUCKETS * self._bucket_bytes
            bucket_N = self._staging.bytes_N[first : first + size_bytes]
            out_N[at - start : at - start + size_bytes].copy_(bucket_N)
            if bucket_N.is_cuda:
                torch.cuda.current_stream(bucket_N.device).synchronize()
            self._asked.popleft()
            self._num_copied += 1
        while asking and len(self._asked) < NUM_BUCKETS:
            self._ask(asking.popleft())

    def _ask(self, fill: _Fill) -> None:
        start, size_bytes = fill
        self._link.send(ControlRequest(op=FILL, first=start, second=size_bytes))
        self._asked.append(fill)
