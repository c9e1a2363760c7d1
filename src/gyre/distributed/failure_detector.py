"""Failure detector: notifies all ranks in time which rank broke an operation. In: a store that all
ranks reach. Out: `broken`, the reason why no further collective may run; it frees a main thread
that waits in one over gloo. A call to `abort` frees it over NCCL.

Every rank counts its guarded operations (a step, an evaluation), so the number is the same
everywhere. A rank that fails reports the number. On each other rank a thread reads the report and
gives the main thread a moment to fail by itself. A bad batch is refused by all ranks alike, and
nothing is broken. Otherwise the thread aborts the collectives. The threads also send heartbeats.
Each watches the next rank's and reports when they stop: NCCL does not notice a death.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable

from torch.distributed import Store

POLL_S = 0.1
OWN_FAULT_S = 1.0  # how long a rank may take to come to the same error by itself
BEAT_S = 1.0  # between two signs of life
LIFE_S = 15.0  # without one a rank is dead; no call may hold Python's lock for longer


class FailureDetector:
    """One rank's view. `store` is a separate connection: nothing else blocks on it."""

    def __init__(
        self, store: Store, *, rank: int, size: int, grace_s: float, abort: Callable[[], None]
    ) -> None:
        self._store, self._rank, self._size, self._grace_s, self._abort = (
            store,
            rank,
            size,
            grace_s,
            abort,
        )
        self._lock = threading.Lock()  # over the connection
        self._operation, self._inside = 0, False
        self._beat, self._next_beat = 0, 0.0
        # its last sign of life, and when the next is overdue
        self._neighbor, self._neighbor_until = "", math.inf
        self.broken = ""  # why no collective of this group may run any more
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fault-board", daemon=True)
        self._thread.start()

    def enter(self) -> None:
        """Enter a guarded operation. Raises if the others have aborted without this rank."""
        self._operation += 1
        with self._lock:
            if not self.broken and self._store.check(["broken"]):
                self.broken = self._store.get("broken").decode()
        self._inside = True

    def leave(self) -> None:
        self._inside = False

    def report(self, message: str, *, own: bool) -> None:
        """Report to the others that this operation failed here; `own` marks a cause on this
        rank."""
        entry = json.dumps({"message": message, "own": own})
        with self._lock:
            self._store.set(f"{self._operation}/{self._rank}", entry)
            self._store.set(f"{self._operation}", "failed")

    def blame(self) -> str:
        """Return the rank that broke this operation: one that reported its own cause or, after a
        grace period, a silent one."""
        until = time.monotonic() + self._grace_s
        while True:
            reports = self._reports()
            for rank, report in reports.items():
                if report["own"] and rank != self._rank:
                    return f"rank {rank} failed: {report['message']}"
            if len(reports) == self._size or time.monotonic() > until:
                break
            self._end.wait(POLL_S)
        silent = sorted(set(range(self._size)) - set(reports) - {self._rank})
        if silent:
            ranks = ", ".join(str(rank) for rank in silent)
            return f"rank {ranks} said nothing for {self._grace_s:g} s: it died, or hangs"
        return "all ranks lost their connections"

    def break_off(self, culprit: str) -> None:
        """Forbid further collectives on every rank."""
        self.broken = self.broken or culprit
        with contextlib.suppress(RuntimeError), self._lock:  # the store may be what was lost
            self._store.set("broken", self.broken)

    def close(self) -> None:
        self._end.set()
        self._thread.join(self._grace_s)

    def _reports(self) -> dict[int, dict]:
        found = {}
        try:
            with self._lock:
                for rank in range(self._size):
                    key = f"{self._operation}/{rank}"
                    if self._store.check([key]):
                        found[rank] = json.loads(self._store.get(key))
        except RuntimeError as error:
            self.broken = (
                self.broken or f"the process that holds the store is gone ({str(error)[:80]})"
            )
        return found

    def _watch(self) -> None:
        while not self._end.wait(POLL_S):
            operation, inside = self._operation, self._inside and not self.broken
            try:
                self._live()
                if not inside:
                    continue
                self._check_neighbor(operation)
                with self._lock:
                    failed = self._store.check([f"{operation}"])
            except RuntimeError as error:
                self.broken = f"the process that holds the store is gone ({str(error)[:80]})"
                failed = True
            if (
                failed
                and not self._end.wait(OWN_FAULT_S)
                and self._inside
                and self._operation == operation
            ):
                self.broken = self.broken or "another rank failed"
                self._abort()

    def _live(self) -> None:
        """Send a heartbeat when due."""
        if time.monotonic() >= self._next_beat:
            self._beat, self._next_beat = self._beat + 1, time.monotonic() + BEAT_S
            with self._lock:
                self._store.set(f"life/{self._rank}", f"{self._beat}")

    def _check_neighbor(self, operation: int) -> None:
        """Report the next rank when its heartbeats have stopped for too long."""
        rank = (self._rank + 1) % self._size
        with self._lock:
            seen = (
                self._store.get(f"life/{rank}").decode()
                if self._store.check([f"life/{rank}"])
                else ""
            )
        if seen != self._neighbor or self._neighbor_until == math.inf:
            self._neighbor, self._neighbor_until = seen, time.monotonic() + LIFE_S
        elif time.monotonic() > self._neighbor_until:
            entry = json.dumps(
                {"message": f"no sign of life for {LIFE_S:g} s; its process is gone", "own": True}
            )
            with self._lock:
                self._store.set(f"{operation}/{rank}", entry)
                self._store.set(f"{operation}", "failed")
