"""Signals: Ctrl-C, SIGTERM and SIGHUP as a request to stop. In: signals. Out: a StopRequest that is
asked, a task that is canceled, or the end of the process.

    the first one   while a loop runs: the step in flight ends, or is broken off at its deadline,
                    and is saved else (a start, a plan, an export): what runs is canceled;
                    snapshots are whole by then
    the second one  ends the process at once; so does a step that is still computing GRACE_S after
                    the deadline

A process that ends at once is like a killed one: its children end with it, and a run resumes from
its snapshots. A signal that was ignored when the command began (nohup, a background job) stays
ignored.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gyre.core.errors import RunStopped
from gyre.loop.stopping import StopRequest

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 5.0  # for a phase that was broken off to come to an end
DISPLAY_S = 1.0  # for the display to close and the last words to be written


class StopSignals:
    """Signals belong to the main thread. In another thread this does nothing, and the run is never
    stopped by a signal."""

    def __init__(self, stop: StopRequest, *, say: Callable[[RunStopped], None]) -> None:
        """`say` prints why a process that ends at once has ended."""
        self.stop = stop
        self.hint = ""
        self.signum = 0  # of the first one
        self.close_display: Callable[[], None] = lambda: None
        self._say = say
        self._task: asyncio.Task[Any] | None = None
        self._heeded = False
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Also after a library has put handlers of its own in place."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before != signal.SIG_IGN and before != self._handle:
                self._before.setdefault(number, before)
                signal.signal(number, self._handle)

    def uninstall(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    @contextmanager
    def task(self) -> Iterator[None]:
        """Make the current task the one that a signal cancels."""
        self._task = asyncio.current_task()
        try:
            yield
        finally:
            self._task = None

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Mark that a loop runs, which looks at the request."""
        self._heeded = True
        try:
            yield
        finally:
            self._heeded = False

    def stopped(self, message: str = "") -> RunStopped:
        return RunStopped(self.signum or signal.SIGINT, message, hint=self.hint)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum:
            self._end_process("again, at once")
        self.signum = signum
        if self._heeded:
            self.stop.ask()
        elif self._task is not None:
            # here and not in a callback: what runs may come to its end without another wait
            self._task.cancel()
            self._task.get_loop().call_soon_threadsafe(lambda: None)
        else:
            raise KeyboardInterrupt
        alarm = threading.Timer(self.stop.deadline_s + GRACE_S, self._expire)
        alarm.daemon = True
        alarm.start()

    def _expire(self) -> None:
        if not self.stop.saving:
            self._end_process(
                f"; what ran could not be ended within {self.stop.deadline_s:g} s "
                "(run.stop_deadline_s)"
            )

    def _end_process(self, message: str) -> None:
        error = self.stopped(message)
        # The display's locks may be held by what the signal interrupted, or by a thread whose
        # terminal takes nothing.
        end = threading.Timer(DISPLAY_S, os._exit, (error.exit_code,))
        end.daemon = True
        end.start()
        try:
            self.close_display()
            self._say(error)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(error.exit_code)
