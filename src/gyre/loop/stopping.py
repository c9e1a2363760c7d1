"""Stopping: a cooperative stop of a run. In: a request from a signal. Out: whether to continue, and
waits bounded by the request's deadline.

    request ──▶ the step in flight ends ──▶ snapshot            before the deadline
            └─▶ rollouts are interrupted, kept ──▶ snapshot   at the deadline: the last update
                                                                stands

Computation (a training pass, a snapshot) is never interrupted here; `launch.signals` ends a process
that exceeds the deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class StepUnfinished(Exception):
    """The deadline of a stop passed during a step. The handler of this keeps the step's partial
    results."""


class StopRequest:
    """A stop request, set once by a signal handler in the event loop's thread or by the loop
    itself. Never withdrawn."""

    def __init__(self, *, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Set the seconds that the step in flight may take after the request."""
        self.deadline_s = deadline_s
        # the step in flight has ended, or was broken off: what follows is not bounded
        self.saving = False
        self._clock = clock
        self._until_s: float | None = None
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @property
    def is_asked(self) -> bool:
        return self._until_s is not None

    def ask(self) -> None:
        if self._until_s is None:
            self._until_s = self._clock() + self.deadline_s
            for loop, event in self._waiting:
                loop.call_soon_threadsafe(event.set)

    def remaining_s(self) -> float:
        """Return the seconds left to the step in flight; infinity without a request."""
        return float("inf") if self._until_s is None else max(0.0, self._until_s - self._clock())

    async def within(self, work: Coroutine[Any, Any, Result], *, at_once: bool = False) -> Result:
        """Await `work` and return its result. Raises StepUnfinished when the stop deadline passes
        first, or with `at_once` when the stop is asked for; `work` is then cancelled and has
        ended."""
        task = asyncio.ensure_future(work)
        asked = asyncio.Event()
        entry = (asyncio.get_running_loop(), asked)
        self._waiting.append(entry)
        alarm = asyncio.ensure_future(self._expire(asked, 0.0 if at_once else None))
        try:
            await asyncio.wait((task, alarm), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
                if task.cancelled():
                    raise StepUnfinished
            return task.result()
        finally:
            self._waiting.remove(entry)
            for one in (task, alarm):
                one.cancel()
            await asyncio.gather(task, alarm, return_exceptions=True)

    async def _expire(self, asked: asyncio.Event, grace_s: float | None) -> None:
        if not self.is_asked:
            await asked.wait()
        await asyncio.sleep(self.remaining_s() if grace_s is None else grace_s)
