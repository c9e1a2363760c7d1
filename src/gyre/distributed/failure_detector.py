"""Failure detector: notifies all ranks in time which rank broke an operation. In: a store that all
ranks reach. Out: `broken`, the reason why no further collective may run; it frees a main thread
that waits in one over gloo. A call to `abort` frees it over NCCL.

Every rank counts its guarded operations (a step, an evaluation), so the number is the same
everywhere. A rank that fails reports the number. On each other rank a thread reads the report and
gives the main thread a moment to fail by itself. A bad batch is refused by all ranks alike, and
nothing is broken. Otherwise the thread aborts the collectives. The threads also send heartbeats.
Each watches the next rank's and reports when they stop: NCCL does not notice a death.
`core.liveness` decides what counts as silence.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable

from gyre.core.errors import RankError
from gyre.core.liveness import LastProgress, decide
from gyre.distributed.kv_store import KVStore

POLL_S = 0.1
OWN_FAULT_S = 1.0  # how long a rank may take to come to the same error by itself
BEAT_S = 1.0  # between two signs of life
LIFE_S = 15.0  # without one a rank is dead; no call may hold Python's lock for longer
UNKNOWN = "another rank failed"  # until the one at fault has reported why


class FailureDetector:
    """One rank's view. `store` is a separate connection: nothing else blocks on it."""

    def __init__(
        self, store: KVStore, *, rank: int, size: int, grace_s: float, abort: Callable[[], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._grace_s = grace_s
        self._abort = abort
        self._operation = 0
        self._inside = False
        self._beat = 0
        self._next_beat = 0.0
        self._neighbor = (rank + 1) % size
        self._life = LastProgress([f"{self._neighbor}"], time.monotonic())  # of the neighbor
        self.broken = ""  # why no collective of this group may run any more
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fault-board", daemon=True)
        self._thread.start()

    def enter(self) -> None:
        """Enter a guarded operation. Raises if the others have aborted without this rank."""
        self._operation += 1
        if self.broken in ("", UNKNOWN):
            self.broken = self._store.get("broken") or self.broken
        self._inside = True

    def leave(self) -> None:
        self._inside = False

    def report(self, message: str, *, own: bool) -> None:
        """Report to the others that this operation failed here; `own` marks a cause on this
        rank."""
        self._accuse(self._operation, self._rank, message, own=own)

    def blame(self) -> str:
        """Return the rank that broke this operation: one that reported its own cause or, after a
        grace period, a silent one."""
        began_s = time.monotonic()
        while True:
            reports = self._reports()
            if cause := self._cause(reports):
                return cause
            waits_s = {f"{rank}": began_s for rank in range(self._size) if rank not in reports}
            verdict = decide(time.monotonic(), waits_s, self._grace_s)
            if not waits_s or verdict.has_failed:
                break
            self._end.wait(POLL_S)
        silent = ", ".join(rank for rank in verdict.still_s if rank != f"{self._rank}")
        if silent:
            return f"rank {silent} said nothing for {self._grace_s:g} s: it died, or hangs"
        return "all ranks lost their connections"

    def break_off(self, culprit: str) -> None:
        """Forbid further collectives on every rank. `culprit` is the reason, unless this rank
        knows another."""
        if self.broken in ("", UNKNOWN):
            self.broken = culprit
        with contextlib.suppress(RankError):  # the store may be what was lost
            self._store.put("broken", self.broken)

    def close(self) -> None:
        self._end.set()
        self._thread.join(self._grace_s)

    def _reports(self) -> dict[int, dict]:
        found = {}
        try:
            for rank in range(self._size):
                if (entry := self._store.get(f"{self._operation}/{rank}")) is not None:
                    found[rank] = json.loads(entry)
        except RankError as error:
            self.broken = self.broken or error.message
        return found

    def _cause(self, reports: dict[int, dict]) -> str:
        """Return which other rank reported its own cause, and what; an empty string if none did."""
        for rank, report in reports.items():
            if report["own"] and rank != self._rank:
                return f"rank {rank} failed: {report['message']}"
        return ""

    def _watch(self) -> None:
        while not self._end.wait(POLL_S):
            operation, inside = self._operation, self._inside and not self.broken
            try:
                self._live()
                if not inside:
                    continue
                self._check_neighbor(operation)
                failed = self._store.get(f"{operation}") is not None
            except RankError as error:
                self.broken, failed = error.message, True
            if (
                failed
                and not self._end.wait(OWN_FAULT_S)
                and self._inside
                and self._operation == operation
            ):
                cause = self._cause(self._reports()) or UNKNOWN
                self.broken = self.broken or cause
                self._abort()

    def _live(self) -> None:
        """Send a heartbeat when due."""
        if time.monotonic() >= self._next_beat:
            self._beat, self._next_beat = self._beat + 1, time.monotonic() + BEAT_S
            self._store.put(f"life/{self._rank}", f"{self._beat}")

    def _check_neighbor(self, operation: int) -> None:
        """Report the next rank when its heartbeats have stopped for too long."""
        seen, now_s = self._store.get(f"life/{self._neighbor}"), time.monotonic()
        self._life.observe({f"{self._neighbor}": seen}, now_s)
        if decide(now_s, self._life.changed_s, LIFE_S).has_failed:
            message = f"no sign of life for {LIFE_S:g} s; its process is gone"
            self._accuse(operation, self._neighbor, message, own=True)

    def _accuse(self, operation: int, rank: int, message: str, *, own: bool) -> None:
        """Say why the operation failed on a rank, then that it failed: readers look in that
        order."""
        self._store.put(f"{operation}/{rank}", json.dumps({"message": message, "own": own}))
        self._store.put(f"{operation}", "failed")
