"""ResultEvent: waits for the device that end. In: an event behind what was queued, a deadline. Out:
nothing, or an error that names what was awaited.

A device that hangs cannot be made to stop from here; the error at least frees the thread and says
which step it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from gyre.core.errors import DeadlineError
from gyre.engine.scheduler.step import Step

SPIN_S = 0.002  # asked without a pause for so long: what comes in time is late by microseconds
NAP_S = 50e-6


class Event(Protocol):
    """What we ask of a CUDA event."""

    def query(self) -> bool: ...


def wait_for(
    event: Event,
    describe: Callable[[], str],
    deadline_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    nap: Callable[[float], None] = time.sleep,
) -> None:
    """Return when the event has happened; DeadlineError after `deadline_s` without it. What went
    wrong on the device before it is raised as it is."""
    begun_s = clock()
    while not event.query():
        waited_s = clock() - begun_s
        if waited_s > deadline_s:
            raise DeadlineError(
                f"the device did not finish {describe()} within engine.step_deadline_s = "
                f"{deadline_s:g} s",
                hint="look for a hung kernel or a lost device (nvidia-smi, the driver's lines in "
                "dmesg) and start "
                "again; a model whose steps take longer needs a longer deadline or a smaller "
                "engine.token_budget",
            )
        # 0: other threads of this process may run between two questions
        nap(0.0 if waited_s < SPIN_S else NAP_S)


class ResultEvent:
    """When a step's results are on the host."""

    def __init__(self, step: Step, deadline_s: float) -> None:
        self._step, self._deadline_s = step, deadline_s
        self._event: torch.cuda.Event | None = None

    def mark(self) -> None:
        """Record the point that the device's queue must have passed."""
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> None:
        """Wait for what was marked; a step that brings nothing back marks nothing."""
        if self._event is not None:
            wait_for(self._event, self._describe, self._deadline_s)

    def _describe(self) -> str:
        prompt_tokens = sum(chunk.count for chunk in self._step.chunks)
        return (
            f"a step of {len(self._step.decode_rows)} decoding completions and "
            f"{prompt_tokens} prompt tokens"
        )
