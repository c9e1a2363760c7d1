"""Mismatch: do engine and trainer compute the same probabilities, and if not, what is the likely
cause? In: the metrics of a run's steps. Out: one finding, or None. Pure.

The cause follows from how the gap between the two log-probs of a sampled token is spread:

    not a number           a log-prob that is no number, on either side.
    truncation set         the trainer is below the engine wherever they differ: it normalizes over
                           more tokens.
    template               probabilities differ by more than a factor of two on many tokens: other
                           tokens were read.
    stale weights          the gap comes with tokens of an older policy, or grows from nothing as
                           the trainer moves.
    precision              a gap to both sides, small on nearly every token: the two round
                           differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Cause = Literal["not a number", "truncation set", "template", "stale weights", "precision"]
Metrics = Mapping[str, float]

ROUNDING = {"float32": 1e-3, "bfloat16": 0.02, "float16": 0.01}
"""Mean |log-prob gap| in nats that rounding of this dtype explains in a sound run, with room; a
wider one is told."""
# of the gap is where the trainer is above the engine, at most; rounding and drift give about a half
ONE_SIDED = 0.05
# nats: truncation that takes more than 63 % of the probability off the average token is not meant
TRUNCATED = 1.0
LARGE_SHARE = 0.15  # of tokens whose probabilities differ by more than a factor of two
# times the first step's gap: rounding is there from the first step, old weights are not
GROWTH = 10.0
FADES = 0.5  # without stale tokens the gap is at most this share of what it is with them

ADVICE: Mapping[Cause, str] = {
    "not a number": "a log-prob is no number: look for overflow in the model, and at the events "
    "of skipped updates.",
    "truncation set": "the trainer is below the engine wherever they differ, so it normalizes "
    "over more tokens: "
    "check that top_k, top_p, min_p, penalties and temperature reach the trainer (rollout "
    "support).",
    "template": "many tokens differ by more than a factor of two, so the two read other tokens or "
    "other weights: "
    "check the chat template, tokenizer, position ids and the hand-over of weights.",
    "stale weights": "the gap comes with tokens that older weights chose, or grows as the trainer "
    "moves: "
    "check the hand-over of weights, lower rollout.max_staleness, raise "
    "rollout.max_tokens_per_iteration, or set objective.correction.",
    "precision": "the gap lies on both sides and is small on nearly every token, so the two round "
    "differently: "
    "use one dtype on both sides (FP8 products, quantized weights and cache widen it), or keep "
    "objective.tis_cap.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    cause: Cause
    # mean |trainer - engine| log-prob over the steps concerned, nats; NaN where it is no number
    gap: float
    num_steps: int  # with a gap that rounding does not explain
    num_measured: int

    @property
    def line(self) -> str:
        """Format the finding as one line for the report."""
        size = "no number" if math.isnan(self.gap) else f"{self.gap:.2g} nats per token"
        return (
            f"Engine and trainer disagree on {self.num_steps} of {self.num_measured} steps "
            f"(log-prob gap {size}). "
            f"Likely cause: {self.cause}; {ADVICE[self.cause]}"
        )


def find_mismatch(steps: Sequence[Metrics], dtype: str) -> Mismatch | None:
    """Diagnose the steps of one stage that sampled and trained. `dtype` is the run's, such as
    "bfloat16"; an unknown one is treated as float32. Steps without the metric "logprob_gap" are
    skipped."""
    measured = [step for step in steps if "logprob_gap" in step]
    widest = ROUNDING.get(dtype.removeprefix("torch."), ROUNDING["float32"])
    found = [step for step in measured if not step["logprob_gap"] <= widest]
    if not found:
        return None
    cause = _cause(measured, found)
    if cause == "stale weights" and all(step.get("staleness_max", 0.0) > 0.0 for step in found):
        return None  # asked for, by rollout.max_staleness
    return Mismatch(
        cause=cause,
        gap=_mean(found, "logprob_gap"),
        num_steps=len(found),
        num_measured=len(measured),
    )


def _cause(measured: Sequence[Metrics], found: Sequence[Metrics]) -> Cause:
    if any(not math.isfinite(step["logprob_gap"]) for step in found):
        return "not a number"
    gap = _mean(found, "logprob_gap")
    if gap <= TRUNCATED and _mean(found, "logprob_gap_above", unknown=gap) <= ONE_SIDED * gap:
        return "truncation set"
    stale = [step for step in measured if step.get("stale_tokens_share", 0.0) > 0.0]
    fresh = [step for step in measured if step.get("stale_tokens_share", 0.0) == 0.0]
    if stale and fresh and _mean(fresh, "logprob_gap") <= FADES * _mean(stale, "logprob_gap"):
        return "stale weights"
    if _mean(found, "logprob_gap_large_fraction") > LARGE_SHARE:
        return "template"
    grows = measured[0]["logprob_gap"] * GROWTH <= gap
    return "stale weights" if grows or (stale and not fresh) else "precision"


def _mean(steps: Sequence[Metrics], name: str, *, unknown: float = 0.0) -> float:
    values = [step[name] for step in steps if name in step]
    return math.fsum(values) / len(values) if values else unknown
