"""Copy streams: copies that overlap the computation. In: tensors on a device and in host memory.
Out: the copies, and events that signal their completion.

On CUDA these are streams and events of the device. On a CPU a stream copies synchronously and its
events are complete on creation, so callers are the same.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from gyre.kernels import device_wait
from gyre.kernels.device_wait import DeviceEvent

# the threads that wait leave Python's lock to the compute thread: no spin, and rare looks
wait_for = partial(
    device_wait.wait_for,
    key="trainer.offload_deadline_s",
    slow="raise trainer.offload_deadline_s if the device or its link is only slow",
    spin_s=0.0,
    nap_s=0.0005,
)


class CopyStream(Protocol):
    """Copies in order, concurrently with other streams."""

    def after(self, mark: DeviceEvent) -> None:
        """Make later work of this stream wait for `mark`, without blocking the caller."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy. Neither tensor may be changed or freed before a later event completes."""
        ...

    def mark(self) -> DeviceEvent: ...

    def holds(self, tensor: Tensor) -> None:
        """Keep the allocator from reusing the tensor's memory while this stream may read it."""
        ...


def make_lane(device: torch.device) -> CopyStream:
    return CudaCopyStream(torch.cuda.Stream(device)) if device.type == "cuda" else HostCopyStream()


def compute_lane(device: torch.device) -> CopyStream:
    """Return the stream of the calling thread's computation."""
    if device.type != "cuda":
        return HostCopyStream()
    return CudaCopyStream(torch.cuda.current_stream(device))


def make_thread(name: str, device: torch.device) -> ThreadPoolExecutor:
    """Create one thread that uses streams of `device`.

    A new thread selects the first GPU, and torch restores that after each copy. On a rank of
    another GPU this would allocate a context on the first rank's.
    """
    if device.type != "cuda":
        return ThreadPoolExecutor(1, thread_name_prefix=name)
    index = torch.cuda.current_device() if device.index is None else device.index
    return ThreadPoolExecutor(
        1, thread_name_prefix=name, initializer=torch.cuda.set_device, initargs=(index,)
    )


def seconds_between(first: DeviceEvent, second: DeviceEvent) -> float:
    """Return the seconds between two completed events of streams of one kind."""
    if isinstance(first, torch.cuda.Event):
        assert isinstance(second, torch.cuda.Event)
        return first.elapsed_time(second) / 1000.0
    assert isinstance(first, Reached) and isinstance(second, Reached)
    return second.at_s - first.at_s


class Reached:
    """An event that is complete on creation."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return True


class HostCopyStream:
    """Copies synchronously."""

    def after(self, mark: DeviceEvent) -> None:
        assert mark.query(), "nothing runs beside a CPU's own copies"

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> DeviceEvent:
        return Reached()

    def holds(self, tensor: Tensor) -> None:
        """Do nothing: no read is pending."""


class CudaCopyStream:
    """A CUDA stream. Host memory must be pinned, or the copies block the caller."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def after(self, mark: DeviceEvent) -> None:
        if isinstance(mark, torch.cuda.Event):
            self._stream.wait_event(mark)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def holds(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)
