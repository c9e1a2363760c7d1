"""Accuracy: correctness of a completion by one part of its score. In: a score and the metric of the
config. Out: a bool. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gyre.core.records import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyMetric:
    """A completion is correct when the part's value reaches the threshold."""

    part: str  # name of a reward part
    threshold: float
    rewarded: bool = True  # False: the part has weight 0, so it is watched and decides nothing

    @property
    def meaning(self) -> str:
        """The definition, for reports."""
        return f"share of completions whose '{self.part}' is at least {self.threshold:g}"


def is_right(score: Score, metric: AccuracyMetric) -> bool:
    """Return whether the named part reaches the threshold. A part that could not be scored does
    not."""
    named = {part.name: part for part in score.parts}
    assert metric.part in named, f"no part '{metric.part}' in a score of {sorted(named)}"
    part = named[metric.part]
    return part.outcome == "ok" and part.value >= metric.threshold
