"""Staging: host memory that a rank's parts are copied into while training continues. In: parts of
live state, on a device, on the host or in a mapped file. Out: the same parts in staging memory,
pinned beside a GPU.

`place` assigns addresses and copies nothing. `fill` copies, in any thread, while others read the
state. Bytes leave a GPU in batches: a small copy to the host waits behind all queued copies, and a
step issues some of those.
"""

# N numbers of a part

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gyre.core.errors import DeadlineError
from gyre.core.rounding import round_up
from gyre.memory.pools.host_buffer import HostBuffer
from gyre.trainer.checkpoint.shards import Part

LINE_BYTES = 64  # every staged part begins on one
# of one launch of copies; launches that a device has before it at a time
BATCH_BYTES, QUEUED = 128 << 20, 2
BLOCK_BYTES = 32 << 20  # of a copy on the host
HOST_THREADS = 4  # that copy what is on the host: one alone is slower than the memory


Copies = tuple[list[Tensor], list[Tensor]]  # from, to


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The copies from one device."""

    stream: torch.cuda.Stream
    after: torch.cuda.Event  # when the numbers are there
    batches: Sequence[Copies]


@dataclass(slots=True, kw_only=True)
class StagedParts:
    """Parts and the addresses of their copies."""

    staged: Sequence[Part]  # in the staging memory
    leaving: Sequence[Leaving]
    on_host: Sequence[tuple[Tensor, Tensor]]  # from, to

    def drop(self) -> None:
        """Release the live state, so that pages parked by a component are freed at once."""
        self.leaving, self.on_host = (), ()


class StagingBuffer:
    """One buffer, reused by the next save and reallocated when it must grow."""

    def __init__(self, device: torch.device, *, deadline_s: float) -> None:
        """Set the device that memory is pinned for (not on a CPU). `deadline_s` bounds how long
        `place` waits for the allocation."""
        self._device = device
        self._deadline_s = deadline_s
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # of copies, one for each device
        self._buffer: HostBuffer | None = None
        self._coming: Future[HostBuffer] | None = None

    def prepare(self, size_bytes: int) -> None:
        """Start to allocate the buffer in the background. Pinning takes seconds, which a run's
        first save should not wait for. `place` raises the errors."""
        if size_bytes and self._buffer is None and self._coming is None:
            apart = ThreadPoolExecutor(1, thread_name_prefix="snapshot-staging")
            self._coming = apart.submit(self._make, size_bytes)
            apart.shutdown(wait=False)

    def place(self, parts: Sequence[Part]) -> StagedParts:
        """Assign addresses to the copies, valid until the next call. Raises MemoryBudgetError if
        the host lacks memory, and DeadlineError if the allocation is too slow."""
        starts, size_bytes = [], 0
        for part in parts:
            starts.append(size_bytes)
            size_bytes += padded(part.size_bytes)
        self._take_prepared()
        if size_bytes and (self._buffer is None or self._buffer.size_bytes < size_bytes):
            self._buffer = None
            self._buffer = self._make(size_bytes)
        staged = []
        for part, start in zip(parts, starts, strict=True):
            assert self._buffer is not None
            home_N = self._buffer.bytes[start : start + part.size_bytes].view(part.values_N.dtype)
            staged.append(replace(part, values_N=home_N))
        pairs = [(part.values_N, home.values_N) for part, home in zip(parts, staged, strict=True)]
        devices = {source_N.device for source_N, _ in pairs if source_N.is_cuda}
        return StagedParts(
            staged=staged,
            leaving=[
                self._leaving(device, [pair for pair in pairs if pair[0].device == device])
                for device in devices
            ],
            on_host=list(_blocks([pair for pair in pairs if not pair[0].is_cuda], BLOCK_BYTES)),
        )

    def _take_prepared(self) -> None:
        coming, self._coming = self._coming, None
        if coming is None:
            return
        if not wait([coming], self._deadline_s).done:
            raise DeadlineError(
                f"the memory that snapshots are staged in is not there after {self._deadline_s:g} "
                "s",
                hint="the host is short of memory: set snapshot.background = false, then nothing "
                "is staged",
            )
        self._buffer = coming.result()

    def fill(self, placed: StagedParts) -> None:
        """Copy everything and wait for completion. The parts must not change meanwhile."""
        for leaving in placed.leaving:
            _copy_down(leaving)
        with ThreadPoolExecutor(HOST_THREADS, thread_name_prefix="snapshot-copy") as pool:
            for copied in [
                pool.submit(into_N.copy_, source_N) for source_N, into_N in placed.on_host
            ]:
                copied.result()

    def _leaving(self, device: torch.device, pairs: Sequence[tuple[Tensor, Tensor]]) -> Leaving:
        """Enqueue copies after the work that the calling thread has launched."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        after = torch.cuda.Event()
        after.record(torch.cuda.current_stream(device))
        return Leaving(stream=self._streams[device], after=after, batches=_batches(pairs))

    @property
    def size_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.size_bytes

    def _make(self, size_bytes: int) -> HostBuffer:
        pinned = self._device.type == "cuda"
        # of this thread
        with torch.cuda.device(self._device) if pinned else contextlib.nullcontext():
            return HostBuffer(size_bytes, pin=pinned, owner="staging of snapshots")


def padded(size_bytes: int) -> int:
    return round_up(size_bytes, LINE_BYTES)


def _batches(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Copies]:
    batches: list[Copies] = []
    size_bytes = BATCH_BYTES
    for source_N, into_N in _blocks(pairs, BATCH_BYTES):
        if size_bytes >= BATCH_BYTES:
            batches.append(([], []))
            size_bytes = 0
        batches[-1][0].append(source_N)
        batches[-1][1].append(into_N)
        size_bytes += source_N.nbytes
    return batches


def _copy_down(leaving: Leaving) -> None:
    """Copy one batch in one call: each call contends with the training thread for Python's lock."""
    stream, queued = leaving.stream, deque[torch.cuda.Event]()
    stream.wait_event(leaving.after)
    for sources, targets in leaving.batches:
        while len(queued) >= QUEUED:
            queued.popleft().synchronize()
        with torch.cuda.stream(stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
        queued.append(event := torch.cuda.Event(blocking=True))
        event.record(stream)
    stream.synchronize()


def _blocks(
    pairs: Sequence[tuple[Tensor, Tensor]], block_bytes: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (source, destination) blocks of bounded size."""
    for source_N, into_N in pairs:
        step = max(1, block_bytes // source_N.element_size())
        yield from zip(source_N.split(step), into_N.split(step), strict=True)
