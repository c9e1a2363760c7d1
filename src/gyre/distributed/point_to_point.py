"""Point to point: sends and receives that are waited for together. In: works that torch.distributed
has started. Out: their end, or the error of the first that failed.

Gloo closes the connection when a wait for a send or a receive runs out. So on a CPU a thread waits
for them, to the group's timeout, and others ask whether it has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


class PointToPoint:
    """Stands for `dist.Work` where that is waited for. On a GPU the current stream waits."""

    def __init__(self, works: Sequence[dist.Work], device: torch.device) -> None:
        self._works = works
        self._error: RuntimeError | None = None
        self._ended: threading.Event | None = None
        if device.type == "cpu":
            self._ended = threading.Event()
            threading.Thread(target=self._watch, args=(self._ended,), daemon=True).start()

    def is_completed(self) -> bool:
        if self._ended is None:
            return all(work.is_completed() for work in self._works)
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for all, on a CPU at most for `timeout`."""
        if self._ended is None:
            for work in self._works:
                work.wait()
            return
        self._ended.wait(None if timeout is None else timeout.total_seconds())
        if self._error is not None:
            raise self._error

    def _watch(self, ended: threading.Event) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        finally:
            ended.set()
