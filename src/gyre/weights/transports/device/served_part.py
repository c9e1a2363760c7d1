"""Served part: where a publisher has the bytes of a part, and bytes on their way into a bucket. In:
the publisher's tensors (`live_part.py`), or its slot. Out: bytes of the part, as the slot has them.

Tensors change at the trainer's next step, and a slot at the next version but one. So nothing reads
them but under `reading`, and `withdraw` waits for what is being read.

One copy of a page-locked slot fills a bucket on the publisher's GPU, on a stream of its own. So the
bytes cross the link to the host once, however many readers the bucket has.
"""

# N bytes

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from gyre.core.errors import DeadlineError, InputError
from gyre.weights.transports.device.row_copy import copy_rows
from gyre.weights.transports.part_range import PartRange


class ServedPart(Protocol):
    """A part of one version, in one place."""

    epoch: int
    version: int
    size_bytes: int
    takes_long: bool  # whether a bucket takes as long as the link to the host

    def begin(self, stretches: Sequence[PartRange], out_N: Tensor) -> Any:
        """Write the part's bytes to the stretches' places, rounded as in the slot. Returns the
        event of a GPU behind them; None where they are there. Bytes between two segments may be
        any."""
        ...

    def check(self) -> None:
        """Raise SnapshotError unless what was written so far was of the version."""
        ...


Source = TypeVar("Source", bound=ServedPart)


class SlotPart:
    """A ServedPart over the bytes of a slot that is whole. Any thread may call."""

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
            for one in stretches:
                one.of_bucket(out_N).copy_(self._bytes_of(one))
            return None
        stream = _stream_of(out_N.device)
        with torch.cuda.stream(stream):
            for one in stretches:
                if one.row_bytes:
                    copy_rows(self._bytes_of(one), one.of_bucket(out_N), stream)
                else:
                    one.of_bucket(out_N).copy_(self._bytes_of(one), non_blocking=True)
            return stream.record_event()

    def _bytes_of(self, one: PartRange) -> Tensor:
        return one.of_part(self._bytes_N[one.start : one.stop])


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return a device's stream of these copies: the trainer's own wait for none of them."""
    return torch.cuda.Stream(device)


class Filling:
    """A bucket that is being filled, for the threads of all that wait for it."""

    def __init__(self, source: ServedPart, event: Any, let_go: Callable[[], None]) -> None:
        """`let_go`: of the source, which may change then."""
        self._source = source
        self._event = event
        self._let_go: Callable[[], None] | None = let_go
        self._lock = threading.Lock()

    @property
    def takes_long(self) -> bool:
        return self._source.takes_long

    def finish(self) -> None:
        """Return when the bytes are there. SnapshotError unless they are of the version."""
        try:
            if self._event is not None:
                self._event.synchronize()
            self._source.check()
        finally:
            with self._lock:
                let_go, self._let_go = self._let_go, None
            if let_go is not None:
                let_go()


class CurrentPart(Generic[Source]):
    """The part that this process has in one place now, or none. Any thread may call."""

    def __init__(self, *, deadline_s: float, place: str) -> None:
        """`deadline_s`: longest wait for what is being read, or comes. `place`: for errors."""
        self._deadline_s = deadline_s
        self._place = place
        self._part: Source | None = None
        self._coming: tuple[int, int] | None = None  # epoch and version of one that is written
        self._num_reading = 0
        self._changed = threading.Condition()

    def put(self, part: Source) -> None:
        with self._changed:
            self._end_reads()
            self._part = part

    def expect(self, *, epoch: int, version: int) -> None:
        """Let readers of a version wait until it is put, or withdrawn."""
        with self._changed:
            self._coming = epoch, version

    def has(self, *, epoch: int, version: int) -> bool:
        """Return whether the version is there, or comes."""
        with self._changed:
            part = self._part
            found = self._coming if part is None else (part.epoch, part.version)
        return found == (epoch, version)

    @contextmanager
    def reading(self, *, epoch: int, version: int) -> Iterator[Source]:
        """Keep the part as it is within the block, once it is there. InputError where another
        version is there now."""
        with self._changed:
            self._changed.wait_for(lambda: self._coming != (epoch, version), self._deadline_s)
            part = self._part
            if part is None or (part.epoch, part.version) != (epoch, version):
                now = "has none now" if part is None else f"has version {part.version}"
                raise InputError(
                    f"version {version} of epoch {epoch} is no longer {self._place}, which {now}",
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
        """Give the part's memory back to its owner, who may change it from now on. DeadlineError if
        a read does not end."""
        with self._changed:
            self._end_reads()

    def _end_reads(self) -> None:
        self._part = self._coming = None
        self._changed.notify_all()
        if not self._changed.wait_for(lambda: not self._num_reading, self._deadline_s):
            raise DeadlineError(
                f"a read of registered weights has not ended after {self._deadline_s:g} s",
                hint="the device may hang: see its kernel log",
            )
