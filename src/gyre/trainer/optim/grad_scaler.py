"""Loss scale: keeps gradients inside the range of FP16. In: whether an update's gradient was
finite. Out: the factor by which the next losses are multiplied. Pure.

As torch.amp.GradScaler with its defaults (Micikevicius et al. 2018, "Mixed precision training",
3.2). The factor is a power of two, so that scaling and unscaling round nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GOOD_UPDATES = 2000  # in a row, before the factor grows
MOST, LEAST = 2.0**127, 2.0**-126  # that float32 holds in full precision


@dataclass(frozen=True, slots=True)
class LossScale:
    factor: float = FIRST
    good_updates: int = 0  # since the factor changed last

    def after(self, *, finite: bool) -> LossScale:
        """Return the scale after an update with a finite or non-finite gradient. The latter update
        is skipped."""
        if not finite:
            return LossScale(max(LEAST, self.factor * BACKOFF))
        if self.good_updates + 1 < GOOD_UPDATES:
            return LossScale(self.factor, self.good_updates + 1)
        return LossScale(min(MOST, self.factor * GROWTH))
