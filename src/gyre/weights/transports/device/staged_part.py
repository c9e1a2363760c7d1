"""Staged part: a part from its publisher's device, by two buckets of memory that both processes
have. In: its address, how such memory is opened. Out: a PartReader.

    reader      Asks for bucket n + 1, copies bucket n out, asks for bucket n + 2.
    publisher   Rounds bucket n + 1 into the other half meanwhile.

A copy has ended before its half is asked for again, and a fill before it is answered: each side
waits for its own device, and neither for the other's.
"""

# N bytes

from __future__ import annotations

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
        self._num_fills = 0  # that were asked for
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

    def read(self, start: int, out_N: Tensor) -> None:
        try:
            self._read(start, out_N)
        except BaseException:
            self._link.give_up()  # what it would answer next is not known
            raise

    def check(self) -> None:
        self._link.ask(ControlRequest(op=CHECK))

    def close(self) -> None:
        # before the publisher, which sees that the link has ended, frees the memory
        self._staging.close()
        self._link.close()

    def _read(self, start: int, out_N: Tensor) -> None:
        self._ask(start, out_N)
        for at in range(0, len(out_N), self._bucket_bytes):
            half = (self._num_fills - 1) % 2  # of the fill that is answered next
            if at + self._bucket_bytes < len(out_N):
                self._ask(start + at + self._bucket_bytes, out_N[at + self._bucket_bytes :])
            self._link.answer()
            home_N = out_N[at : at + self._bucket_bytes]
            first = half * self._bucket_bytes
            bucket_N = self._staging.bytes_N[first : first + len(home_N)]
            home_N.copy_(bucket_N)
            if bucket_N.is_cuda:
                torch.cuda.current_stream(bucket_N.device).synchronize()

    def _ask(self, start: int, rest_N: Tensor) -> None:
        size_bytes = min(self._bucket_bytes, len(rest_N))
        self._link.send(ControlRequest(op=FILL, first=start, second=size_bytes))
        self._num_fills += 1
