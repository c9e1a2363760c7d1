"""Metrics: numbers gathered over one step, each with a declared reduction. In: add(name, value). Out: one number per
name, the same however the observations were split over chunks or ranks. Callers: rooms that count; the loop collects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Reduction = Literal["sum", "mean", "max", "min", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What has been seen of one metric: enough to be merged with another tally."""

    reduction: Reduction
    value: float  # sum of weight × value for "mean"
    weight: float  # sum of weights; for "last" the number of observations

    def result(self) -> float:
        return self.value / self.weight if self.reduction == "mean" and self.weight else self.value


def largest(values: Iterable[float]) -> float | None:
    """The largest, or NaN when one is: Python's max would hide it behind whatever stands first. None of none."""
    seen = tuple(values)
    return keep_nan(max, seen) if seen else None


def keep_nan(choose: Callable[[Iterable[float]], float], values: Sequence[float]) -> float:
    """What `choose` (max or min) says of these, at least one; NaN when one is."""
    return math.nan if any(math.isnan(value) for value in values) else choose(values)


def merge(first: Tally, second: Tally) -> Tally:
    """Join two tallies of one metric. Associative; commutative too, "last" apart, where the second is the later."""
    assert first.reduction == second.reduction, "one metric has one reduction"
    weight = first.weight + second.weight
    if first.reduction in ("sum", "mean"):
        value = first.value + second.value
    elif first.reduction == "max":
        value = keep_nan(max, (first.value, second.value))
    elif first.reduction == "min":
        value = keep_nan(min, (first.value, second.value))
    else:
        value = second.value if second.weight else first.value
    return replace(first, value=value, weight=weight)


class Metrics:
    """Counters (reduction "sum") and gauges of one step."""

    def __init__(self) -> None:
        self._reductions: dict[str, Reduction] = {}
        self._tallies: dict[str, Tally] = {}

    def declare(self, name: str, reduction: Reduction) -> None:
        """Say once how observations of `name` become one number."""
        assert self._reductions.get(name, reduction) == reduction, f"{name} is declared as {self._reductions[name]}"
        self._reductions[name] = reduction

    def add(self, name: str, value: float, *, weight: float = 1.0) -> None:
        """Observe `name`. A mean weighs by `weight`, for example by tokens."""
        assert name in self._reductions, f"declare {name} first"
        reduction = self._reductions[name]
        seen = Tally(reduction=reduction, value=value * weight if reduction == "mean" else value, weight=weight)
        self._tallies[name] = merge(self._tallies[name], seen) if name in self._tallies else seen

    def tallies(self) -> dict[str, Tally]:
        return dict(self._tallies)

    def absorb(self, tallies: dict[str, Tally]) -> None:
        """Take in the tallies of another chunk or rank."""
        for name, tally in tallies.items():
            self.declare(name, tally.reduction)
            self._tallies[name] = merge(self._tallies[name], tally) if name in self._tallies else tally

    def collect(self) -> dict[str, float]:
        """Return one number per metric seen since the last call, and forget them."""
        results = {name: tally.result() for name, tally in self._tallies.items()}
        self._tallies.clear()
        return results
