"""Schedules: the learning rate over a run, and the loss scale that keeps gradients inside the range
of FP16. In: TrainerConfig and the number of completed loop steps; whether an update's gradient was
finite. Out: a factor of the peak; the factor by which the next losses are multiplied. Pure.

The loss scale is that of torch.amp.GradScaler with its defaults (Micikevicius et al. 2018, "Mixed
precision training", 3.2). The factor is a power of two, so that scaling and unscaling round
nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gyre.trainer.config import TrainerConfig

FIRST_SCALE = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GOOD_UPDATES = 2000  # in a row, before the factor grows
MOST_SCALE, LEAST_SCALE = 2.0**127, 2.0**-126  # that float32 holds in full precision


def learning_rate_factor(config: TrainerConfig, steps_done: int) -> float:
    """Return the fraction of the peak learning rate for the step after `steps_done` steps."""
    if steps_done < config.warmup_steps:
        return (steps_done + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    span = max(1, config.steps - config.warmup_steps)
    progress = min(1.0, (steps_done - config.warmup_steps) / span)
    falling = (
        1.0 - progress
        if config.schedule == "linear"
        else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
    floor = config.final_learning_rate_fraction
    return floor + (1.0 - floor) * falling


@dataclass(frozen=True, slots=True)
class LossScale:
    factor: float = FIRST_SCALE
    good_updates: int = 0  # since the factor changed last

    def after(self, *, finite: bool) -> LossScale:
        """Return the scale after an update with a finite or non-finite gradient. The latter update
        is skipped."""
        if not finite:
            return LossScale(max(LEAST_SCALE, self.factor * BACKOFF))
        if self.good_updates + 1 < GOOD_UPDATES:
            return LossScale(self.factor, self.good_updates + 1)
        return LossScale(min(MOST_SCALE, self.factor * GROWTH))
