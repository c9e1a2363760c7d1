"""Spans: timers. In: `with spans.phase(name, step=…)`, `with activities.timing(name)`. Out: events
at the start and end of a phase, one at the end of an activity; totals.

A phase inside another is named by its path ("score/reference"). Nesting follows the asyncio task,
so phases of concurrent tasks do not become each other's children. Activities are what a process of
a pod does, timed in that process; `report.pod` makes a timeline of them.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gyre.core.events import Emit
from gyre.core.records import Activity


class Spans:
    """Times phases and emits `phase.started` and `phase.ended` {phase, depth, seconds, …}."""

    def __init__(self, emit: Emit, *, clock: Callable[[], float] = time.monotonic):
        self._emit = emit
        self._clock = clock
        self._path: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
            "phase_path", default=()
        )
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, **fields: Any) -> Iterator[None]:
        """Time a block. If the block raises, the phase ends with the error's name and the error
        propagates."""
        path = (*self._path.get(), name)
        token = self._path.set(path)
        label, depth = "/".join(path), len(path) - 1
        self._emit("phase.started", phase=label, depth=depth, **fields)
        start_s = self._clock()
        outcome: dict[str, str] = {}
        try:
            yield
        except BaseException as error:
            outcome = {"error": type(error).__name__}
            raise
        finally:
            seconds = self._clock() - start_s
            self._path.reset(token)
            self._seconds[label] = self._seconds.get(label, 0.0) + seconds
            self._emit(
                "phase.ended",
                phase=label,
                depth=depth,
                seconds=round(seconds, 6),
                **fields,
                **outcome,
            )

    def seconds(self, *, nested: bool = False) -> dict[str, float]:
        """Return seconds by phase so far: outermost phases, or all by path."""
        return {
            label: total for label, total in self._seconds.items() if nested or "/" not in label
        }


class RunningActivity:
    """One activity under way."""

    def __init__(
        self, activity: Activity, emit: Emit, clock: Callable[[], float], *, ago_s: float
    ) -> None:
        self._activity = activity
        self._emit = emit
        self._clock = clock
        self._began_s = clock() - ago_s
        self.size_bytes: int | None = None  # that it moves, takes or frees; None: it does not

    def end(self) -> None:
        seconds = round(self._clock() - self._began_s, 6)
        sized = {} if self.size_bytes is None else {"size_bytes": self.size_bytes}
        self._emit("pod.activity", activity=self._activity, seconds=seconds, **sized)


class ActivityClock:
    """Times the activities of one process. Without `emit` they are not reported: the process is in
    no pod."""

    def __init__(
        self, emit: Emit | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._emit: Emit = emit or (lambda kind, /, **fields: None)
        self._clock = clock

    def begin(self, activity: Activity, *, ago_s: float = 0.0) -> RunningActivity:
        """Begin an activity, or take up one that began some seconds ago."""
        if ago_s < 0:  # by a wall clock that was set back since then
            self._emit("pod.clock_set_back", seconds=-ago_s)
            ago_s = 0.0
        return RunningActivity(activity, self._emit, self._clock, ago_s=ago_s)

    @contextmanager
    def timing(self, activity: Activity) -> Iterator[RunningActivity]:
        """Time a block, which may set `size_bytes`. One that raises is not reported."""
        running = self.begin(activity)
        yield running
        running.end()
