"""Scores: what the parts of a score decide. Pure.

Correctness of a completion by one part. In: its score, the metric of the config. Out: a bool.
The value of a failed part. In: scores of completions that are compared. Out: the same scores, in
which no failed part is worth more than the part's value for any other completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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


def lower_failed_parts(scores: Sequence[Score]) -> list[Score]:
    """Bound the contribution of a part that timed out, raised or returned no number by its least
    contribution elsewhere.

    A contribution is weight × value, so the part of a penalty counts in full. The least value of a
    reward function is not known beforehand. Without this rule a crash at 0 would beat a wrong
    answer at -1. Idempotent, and applying it to some of the scores first changes nothing.
    """
    least: dict[str, float] = {}  # value with the least contribution, by part
    for score in scores:
        for part in score.parts:
            known = least.get(part.name)
            if known is None or part.weight * part.value < part.weight * known:
                least[part.name] = part.value
    return [_lowered(score, least) for score in scores]


def _lowered(score: Score, least: dict[str, float]) -> Score:
    parts = tuple(
        part if part.outcome == "ok" else replace(part, value=least[part.name])
        for part in score.parts
    )
    if parts == score.parts:
        return score
    return replace(score, parts=parts, value=float(sum(part.weight * part.value for part in parts)))
