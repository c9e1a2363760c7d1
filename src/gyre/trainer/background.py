"""Background snapshots: training waits until its state is staged in host memory, not until it is on disk. In: what the
trainer and the loop give to a snapshot. Out: the same snapshots as SnapshotStore writes, a little later. Caller: wire.

Staging buffers are kept from save to save (pinned beside a GPU), so one save is in flight at most: the next one waits
for it, with a deadline and an event. A write that failed is raised by the next `save` or by `finish`; the snapshots
before it are as they were. A process that is killed meanwhile loses only the one in flight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gyre.core.errors import DeadlineError, SnapshotError
from gyre.trainer.snapshot import SnapshotStore
from gyre.vram.pools import Take


class StagingBuffers:
    """Host memory by name. A buffer stays for the next save; one that must grow is made anew."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, size_bytes: int) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size_bytes:
            self._buffers.pop(name, None)
            buffer = self._buffers[name] = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        return buffer[:size_bytes]

    @property
    def size_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers.values())


class BackgroundSnapshots:
    """One writer thread at a time over a store. `save` and `finish` are called by one thread."""

    def __init__(self, store: SnapshotStore, *, pinned: bool, deadline_s: float, emit: Callable[..., None]) -> None:
        self._store, self._deadline_s, self._emit = store, deadline_s, emit
        self._buffers = StagingBuffers(pinned=pinned)
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._writing = -1  # step in flight

    def save(
        self,
        step: int,
        *,
        stage: Callable[[Take], Mapping[str, Any]],
        state: Mapping[str, Any],
        blobs: Mapping[str, bytes],
    ) -> None:
        """Stage and return. `stage` is given the buffers and returns {"tensors", "state"}, as the trainer does.
        SnapshotError of the save before, if it failed; DeadlineError if it is not done in time."""
        self._wait(step)
        began = time.monotonic()
        own = stage(self._buffers.take)
        seconds = time.monotonic() - began
        self._emit("snapshot.staged", step=step, seconds=seconds, buffer_bytes=self._buffers.size_bytes)
        whole = {"loop": state, "trainer": own["state"]}
        self._writing = step
        self._thread = threading.Thread(
            target=self._write, args=(step, own["tensors"], whole, blobs), name=f"snapshot-{step}"
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait for what is in flight. Raises as `save` does."""
        self._wait(None)

    def _write(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], blobs: Mapping[str, bytes]
    ) -> None:
        try:
            self._store.save(step, tensors=tensors, state=state, blobs=blobs)
        except Exception as error:  # noqa: BLE001  raised by the next save or by finish
            self._failure = error

    def _wait(self, next_step: int | None) -> None:
        thread = self._thread
        if thread is not None and thread.is_alive():
            began = time.monotonic()
            if next_step is not None:
                self._emit("snapshot.waiting", step=next_step, writing=self._writing)
            thread.join(self._deadline_s)
            if thread.is_alive():
                raise DeadlineError(
                    f"the snapshot of step {self._writing} is not written after {self._deadline_s:g} s of waiting",
                    hint="the disk is slow or stuck: raise snapshot.deadline_s, or snapshot less often",
                )
            if next_step is not None:
                self._emit("snapshot.waited", step=next_step, seconds=time.monotonic() - began)
        self._thread = None
        failure, self._failure = self._failure, None
        if isinstance(failure, SnapshotError):
            raise SnapshotError(failure.message, hint=failure.hint) from failure
        if failure is not None:
            raise failure
