"""Arrivals: when an open loop sends. In: a rate, a seed. Out: times, drawn before any answer, so
that a slow server is not asked less often."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_BLOCK = 256


def poisson_times_s(rate_per_s: float, *, seed: tuple[int, ...]) -> Iterator[float]:
    """Yield arrivals of a Poisson process from 0 on, without end."""
    rng, last_s = np.random.default_rng(seed), 0.0
    while True:
        for gap_s in rng.exponential(1.0 / rate_per_s, _BLOCK).tolist():
            last_s += gap_s
            yield last_s
