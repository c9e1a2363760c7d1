"""Metrics: reductions of a step's observations to one number. In: floats, by chunk or rank. Out:
one float."""

from __future__ import annotations

import math
from collections.abc import Iterable


def largest(values: Iterable[float]) -> float | None:
    """Return the maximum, or NaN if any value is NaN; None without values. Python's max depends on
    the position of a NaN."""
    seen = tuple(values)
    if not seen:
        return None
    return math.nan if any(math.isnan(value) for value in seen) else max(seen)
