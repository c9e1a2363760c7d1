"""Metrics: how observations of a step become one number. In: floats, by chunk or rank. Out: one.
Caller: trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable


def largest(values: Iterable[float]) -> float | None:
    """The largest, or NaN when one is: Python's max would hide it behind whatever stands first.
    None of none."""
    seen = tuple(values)
    if not seen:
        return None
    return math.nan if any(math.isnan(value) for value in seen) else max(seen)
