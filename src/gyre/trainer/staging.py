"""Staging: host memory into which a rank's parts are copied while training goes on. In: parts of live state, on a
device, on the host or in a mapped file. Out: the same parts in kept memory, pinned beside a GPU. Caller: trainer.saver.

`place` lays the parts out and copies nothing; `fill` copies, in any thread, beside whatever reads the state. Bytes
leave a GPU a block at a time: a copy of one number to the host waits behind all that were queued before it (308 ms
behind 16 GB, measured), and a step has some of those.
"""

# N numbers of a part

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gyre.trainer.parts import Part
from gyre.vram.hostbuffer import HostBuffer

LINE_BYTES = 64  # every staged part begins on one
BLOCK_BYTES, QUEUED = 32 << 20, 2  # of a copy; copies that lie in a device's queue at a time
HOST_THREADS = 4  # that copy what lies on the host: one alone moves 4 GB/s


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Parts and where their copies will be."""

    parts: Sequence[Part]
    staged: Sequence[Part]  # the same, in the staging memory
    after: tuple[torch.cuda.Event, ...]  # which their numbers are there


class Staging:
    """One buffer, kept for the next save and made anew when it must grow."""

    def __init__(self, device: torch.device) -> None:
        """`device`: that the memory is pinned for; none is for a CPU."""
        self._device = device
        self._buffer: HostBuffer | None = None
        self._coming: Future[HostBuffer] | None = None

    def prepare(self, size_bytes: int) -> None:
        """Begin to make the buffer: to pin memory takes seconds, and a run's first save should not wait for them. What
        fails is raised by `place`."""
        if size_bytes and self._buffer is None and self._coming is None:
            apart = ThreadPoolExecutor(1, thread_name_prefix="snapshot-staging")
            self._coming = apart.submit(self._make, size_bytes)
            apart.shutdown(wait=False)

    def place(self, parts: Sequence[Part]) -> Placed:
        """Where the parts will be copied to, until the next call. MemoryBudgetError if the host has not enough."""
        starts, size_bytes = [], 0
        for part in parts:
            starts.append(size_bytes)
            size_bytes += padded(part.size_bytes)
        coming, self._coming = self._coming, None
        if coming is not None:
            self._buffer = coming.result()
        if size_bytes and (self._buffer is None or self._buffer.size_bytes < size_bytes):
            self._buffer = None
            self._buffer = self._make(size_bytes)
        staged = []
        for part, start in zip(parts, starts, strict=True):
            assert self._buffer is not None
            home_N = self._buffer.bytes[start : start + part.size_bytes].view(part.values_N.dtype)
            staged.append(replace(part, values_N=home_N))
        after = []
        for device in {part.values_N.device for part in parts if part.values_N.is_cuda}:
            after.append(event := torch.cuda.Event())
            event.record(torch.cuda.current_stream(device))
        return Placed(parts=parts, staged=staged, after=tuple(after))

    def fill(self, placed: Placed) -> None:
        """Copy, and return when all of it is there. The parts must not change meanwhile."""
        pairs = list(zip(placed.parts, placed.staged, strict=True))
        from_device = [(part.values_N, home.values_N) for part, home in pairs if part.values_N.is_cuda]
        from_host = [(part.values_N, home.values_N) for part, home in pairs if not part.values_N.is_cuda]
        for device in {source_N.device for source_N, _ in from_device}:
            _copy_down([pair for pair in from_device if pair[0].device == device], device, placed.after)
        with ThreadPoolExecutor(HOST_THREADS, thread_name_prefix="snapshot-copy") as pool:
            for copied in [pool.submit(into_N.copy_, block_N) for block_N, into_N in _blocks(from_host)]:
                copied.result()

    @property
    def size_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.size_bytes

    def _make(self, size_bytes: int) -> HostBuffer:
        pinned = self._device.type == "cuda"
        with torch.cuda.device(self._device) if pinned else contextlib.nullcontext():  # of this thread
            return HostBuffer(size_bytes, pin=pinned, owner="staging of snapshots")


def padded(size_bytes: int) -> int:
    """Bytes that a part of this size takes."""
    return -(-size_bytes // LINE_BYTES) * LINE_BYTES


def _copy_down(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device, after: Sequence[torch.cuda.Event]) -> None:
    """On a stream of its own, with few bytes queued at a time."""
    stream, queued = torch.cuda.Stream(device), deque[torch.cuda.Event]()
    for event in after:
        stream.wait_event(event)
    for block_N, into_N in _blocks(pairs):
        while len(queued) >= QUEUED:
            queued.popleft().synchronize()
        with torch.cuda.stream(stream):
            into_N.copy_(block_N, non_blocking=True)
        queued.append(event := torch.cuda.Event(blocking=True))
        event.record(stream)
    stream.synchronize()


def _blocks(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """(from, to), a block at a time."""
    for source_N, into_N in pairs:
        step = max(1, BLOCK_BYTES // source_N.element_size())
        yield from zip(source_N.split(step), into_N.split(step), strict=True)
