"""Lanes: copies that run beside the computation. In: tensors on a device and in host memory. Out:
the copies, and marks that tell when they are done.

On a CUDA device a lane is a stream and a mark an event. On a CPU a lane copies at once and its
marks are reached when they are made, so the code above is the same.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from gyre.core.errors import DeadlineError

POLL_S = 0.0005  # between two looks at an event


class CopyEvent(Protocol):
    """A place in the work of a lane."""

    def query(self) -> bool:
        """Whether everything before it is done."""
        ...


class CopyStream(Protocol):
    """Copies in order, beside those of other lanes."""

    def after(self, mark: CopyEvent) -> None:
        """What is asked for from now on waits for `mark`. The caller does not wait."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Neither may be changed or given back before a mark behind it is reached."""
        ...

    def mark(self) -> CopyEvent: ...

    def holds(self, tensor: Tensor) -> None:
        """The allocator must not hand out the tensor's memory while this lane still reads it."""
        ...


def make_lane(device: torch.device) -> CopyStream:
    return CudaCopyStream(torch.cuda.Stream(device)) if device.type == "cuda" else HostCopyStream()


def compute_lane(device: torch.device) -> CopyStream:
    """The lane of what the calling thread computes now."""
    return (
        CudaCopyStream(torch.cuda.current_stream(device))
        if device.type == "cuda"
        else HostCopyStream()
    )


def make_thread(name: str, device: torch.device) -> ThreadPoolExecutor:
    """One thread that uses lanes of `device`. A thread begins on the first GPU, and torch goes back
    to that one after each copy: on a rank of another GPU this would take a context's memory from
    the first rank."""
    if device.type != "cuda":
        return ThreadPoolExecutor(1, thread_name_prefix=name)
    index = torch.cuda.current_device() if device.index is None else device.index
    return ThreadPoolExecutor(
        1, thread_name_prefix=name, initializer=torch.cuda.set_device, initargs=(index,)
    )


def wait_for(mark: CopyEvent, *, deadline_s: float, what: str) -> None:
    """Block until the mark is reached. DeadlineError says `what` was waited for."""
    ends = time.monotonic() + deadline_s
    while not mark.query():
        if time.monotonic() > ends:
            raise DeadlineError(
                f"{what} did not end within {deadline_s:g} s",
                hint="the device or its link is stuck; raise trainer.offload_deadline_s if it is "
                "only slow",
            )
        time.sleep(POLL_S)


def seconds_between(first: CopyEvent, second: CopyEvent) -> float:
    """Between two marks of lanes of one kind that have both been reached."""
    if isinstance(first, torch.cuda.Event):
        assert isinstance(second, torch.cuda.Event)
        return first.elapsed_time(second) / 1000.0
    assert isinstance(first, Reached) and isinstance(second, Reached)
    return second.at_s - first.at_s


class Reached:
    """A mark with nothing before it that is not done."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return True


class HostCopyStream:
    """At once."""

    def after(self, mark: CopyEvent) -> None:
        assert mark.query(), "nothing runs beside a CPU's own copies"

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> CopyEvent:
        return Reached()

    def holds(self, tensor: Tensor) -> None:
        """Nothing is read later."""


class CudaCopyStream:
    """A stream. Host memory must be pinned, or the copies block the caller."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def after(self, mark: CopyEvent) -> None:
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
