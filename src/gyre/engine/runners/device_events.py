"""ResultEvent: waits for the device that end. In: an event behind what was queued, a deadline. Out:
nothing, or an error that names what was awaited.
"""

from __future__ import annotations

from functools import partial

import torch

from gyre.engine.scheduler.step import Step
from gyre.kernels import device_wait

SPIN_S = 0.002  # looked at without a pause for so long: what comes in time is late by microseconds
NAP_S = 50e-6
wait_for = partial(
    device_wait.wait_for,
    key="engine.step_deadline_s",
    slow="a model whose steps take longer needs a longer deadline or a smaller engine.token_budget",
    spin_s=SPIN_S,
    nap_s=NAP_S,
)


class ResultEvent:
    """When a step's results are on the host."""

    def __init__(self, step: Step, deadline_s: float) -> None:
        self._step = step
        self._deadline_s = deadline_s
        self.event: torch.cuda.Event | None = None

    def mark(self) -> None:
        """Record the point that the device's queue must have passed."""
        self.event = torch.cuda.Event()
        self.event.record()

    def wait(self) -> None:
        """Wait for what was marked; a step that brings nothing back marks nothing."""
        if self.event is not None:
            wait_for(self.event, self._describe, self._deadline_s)

    def _describe(self) -> str:
        prompt_tokens = sum(chunk.count for chunk in self._step.chunks)
        return (
            f"a step of {len(self._step.decode_rows)} decoding completions and "
            f"{prompt_tokens} prompt tokens"
        )
