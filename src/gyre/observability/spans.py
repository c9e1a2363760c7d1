"""Spans: nested timers. In: `with spans.phase(name, step=…)`. Out: phase events, totals.

A phase inside another is named by its path ("score/reference"). Nesting follows the asyncio task,
so phases of concurrent tasks do not become each other's children.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gyre.core.events import Emit


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
