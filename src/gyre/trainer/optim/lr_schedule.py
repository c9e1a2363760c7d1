"""Learning-rate schedule. In: TrainerConfig and the number of completed loop steps. Out: a factor
of the peak. Pure."""

from __future__ import annotations

import math

from gyre.trainer.config import TrainerConfig


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
