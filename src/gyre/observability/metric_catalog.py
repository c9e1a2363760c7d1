"""Catalog: what the standard metrics of `step.done` mean and where they are shown. In: a metric
name. Out: its place.

A metric that is not listed is still shown, under its own name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gyre.observability.intervals import wilson_interval
from gyre.observability.jsonl import as_number

PHASE_ORDER = ("rollout", "score", "train", "handover", "evaluate", "snapshot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart. `metrics` are names, or prefixes that end with "*", in the order in which they are
    drawn."""

    panel_id: str
    title: str
    unit: str  # "" for plain numbers, "fraction" for what reads as percent
    help: str  # one sentence for who has not met it
    metrics: tuple[str, ...]
    per_stage: bool = False  # stages measure it on different scales: one chart each


PANELS = (
    Panel(
        panel_id="reward",
        title="Reward",
        unit="",
        help="Mean score of the rollouts of a step: the weighted sum of the reward's parts.",
        metrics=("reward", "reward_mean", "reward/mean"),
    ),
    Panel(
        panel_id="accuracy",
        title="Accuracy",
        unit="fraction",
        help="Share of problems answered rightly. Dots are evaluations with their 95 % interval.",
        metrics=(
            "accuracy",
            "train_accuracy",
            "pair_accuracy",
            "preference_accuracy",
            "reward_accuracy",
            "accuracy/*",
        ),
    ),
    Panel(
        panel_id="reward_parts",
        title="Reward by part",
        unit="",
        help="Mean value of each part of the reward, before its weight.",
        metrics=("reward/*",),
    ),
    Panel(
        panel_id="sampled_per_kept",
        title="Sampled for one kept",
        unit="",
        help="Prompts (and completions) sampled for one group that is trained on; the others "
        "teach nothing.",
        metrics=("sampled_per_kept",),
    ),
    Panel(
        panel_id="left_out",
        title="Left out",
        unit="fraction",
        help="Share of groups that teach nothing, of completions that no reward could score, and "
        "of those that were ended because they repeated themselves.",
        metrics=("equal_groups_share", "unscored_share", "repetition_share"),
    ),
    Panel(
        panel_id="length",
        title="Completion length",
        unit="tokens",
        help="Mean number of tokens that the policy chose per completion.",
        metrics=("length", "length/*", "length_mean", "completion_tokens"),
    ),
    Panel(
        panel_id="entropy",
        title="Entropy",
        unit="nats",
        help="Mean entropy of the policy's next-token distribution. A collapse to 0 ends "
        "exploration.",
        metrics=("entropy", "entropy/*"),
    ),
    Panel(
        panel_id="kl",
        title="KL to the reference",
        unit="nats",
        help="How far the policy has moved from the reference model, per token.",
        metrics=("kl", "kl_reference", "kl/*"),
    ),
    Panel(
        panel_id="clip_fraction",
        title="Clip fraction",
        unit="fraction",
        help="Share of tokens whose probability ratio was clipped.",
        metrics=("clip_fraction", "clip_low_fraction", "clip_high_fraction", "clip_fraction/*"),
    ),
    Panel(
        panel_id="logprob_gap",
        title="Engine–trainer log-prob gap",
        unit="nats",
        help="Mean absolute difference between the log-probs that the engine sampled with and the "
        "trainer's own.",
        metrics=("logprob_gap", "logprob_gap/*"),
    ),
    Panel(
        panel_id="corrections",
        title="Engine corrections",
        unit="fraction",
        help="Effective sample size of the importance weights as a share of the tokens, and the "
        "shares of tokens truncated at tis_cap, outside the rejection band, masked with their "
        "sequence, and chosen by older weights.",
        metrics=(
            "tis_ess",
            "tis_truncated_fraction",
            "rejected_fraction",
            "rejected_low_fraction",
            "rejected_high_fraction",
            "off_policy_masked_fraction",
            "stale_tokens_share",
        ),
    ),
    Panel(
        panel_id="staleness",
        title="Staleness",
        unit="versions",
        help="By how many published versions the tokens of a batch are older than the weights that "
        "they train: the mean, the youngest and the oldest.",
        metrics=("staleness_mean", "staleness_min", "staleness_max"),
    ),
    Panel(
        panel_id="chi2",
        title="Chi-squared to the engine",
        unit="",
        help="Variance of the importance weights, mean of their squares less 1: over tokens, and "
        "over sequences with the product of their tokens' weights.",
        metrics=("chi2_token", "chi2_sequence"),
    ),
    Panel(
        panel_id="loss",
        title="Loss",
        unit="",
        help="What the optimizer minimizes. Stages with different objectives are not comparable.",
        metrics=("loss", "policy_loss", "value_loss", "preference_loss", "loss/*"),
        per_stage=True,
    ),
    Panel(
        panel_id="grad_norm",
        title="Gradient norm",
        unit="",
        help="Norm of the whole gradient before clipping.",
        metrics=("grad_norm", "critic_grad_norm", "grad_norm/*"),
        per_stage=True,
    ),
    Panel(
        panel_id="tokens_per_second",
        title="Throughput",
        unit="tokens/s",
        help="Tokens per second of wall time: over whole steps, and per device while it trains.",
        metrics=(
            "tokens_per_second",
            "tokens_per_second/*",
            "*_tokens_per_second",
            "tokens_per_s",
            "train_tokens_per_second_per_device",
        ),
    ),
    Panel(
        panel_id="mfu",
        title="Model FLOPs used",
        unit="fraction",
        help="What the models' arithmetic asks for, by the time of all training and scoring "
        "passes and the devices' "
        "data-sheet rate. Causal attention counts half, work done twice counts once.",
        metrics=("mfu",),
    ),
    Panel(
        panel_id="communication",
        title="Communication",
        unit="s",
        help="Seconds per step by which collectives made the slowest rank's device wait, late "
        "ranks included.",
        metrics=("communication_wait_seconds",),
    ),
    Panel(
        panel_id="sent_bytes",
        title="Bytes sent",
        unit="bytes",
        help="What the collectives of all ranks sent per step, by kind.",
        metrics=("sent_bytes/*",),
    ),
    Panel(
        panel_id="learning_rate",
        title="Learning rate",
        unit="",
        help="Step size of the optimizer after warm-up and decay.",
        metrics=("learning_rate", "learning_rate/*", "lr"),
    ),
)


# Metrics of `step.done` by which two runs that do the same may differ: by the clock, or by where
# one was resumed.
MEASURED = (
    "tokens_per_second",
    "train_tokens_per_second_per_device",
    "mfu",
    "communication_wait_seconds",
    "sent_bytes/*",
)

# What an evaluation is judged by: the first that it has.
EVAL_MEASURES = ("accuracy", "pair_accuracy", "preference_accuracy", "reward", "loss")
# of trials: shown as percent; the others are means
SHARES = ("accuracy", "pair_accuracy", "preference_accuracy")


def eval_measure(row: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the headline measure of an `eval.done` row and its value."""
    for measure in EVAL_MEASURES:
        value = as_number(row.get(measure))
        if value is not None and math.isfinite(value):
            return measure, value
    return None


def eval_interval(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the 95 % interval of an `eval.done` row's headline measure. Uses the recorded
    interval, else Wilson's for a share."""
    given = row.get("interval")
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2:
        low, high = as_number(given[0]), as_number(given[1])
        if low is not None and high is not None and math.isfinite(low) and math.isfinite(high):
            return low, high
    judged = eval_measure(row)
    if judged is None or judged[0] not in SHARES:
        return None
    return wilson_interval(judged[1], int(as_number(row.get("n")) or 0))


def eval_title(name: str, measure: str) -> str:
    """Return the title of an evaluation: its problem set, or "held out" where its name only repeats
    the measure."""
    plain = name.replace("_", " ")
    if name in EVAL_MEASURES:
        return f"held-out {plain}"
    return f"{plain} {measure.replace('_', ' ')}"


def matches(pattern: str, metric: str) -> bool:
    """Return whether a metric matches a pattern with at most one "*", at either end."""
    if pattern.endswith("*"):
        return metric.startswith(pattern[:-1])
    if pattern.startswith("*"):
        return metric.endswith(pattern[1:])
    return metric == pattern


def place(metric: str) -> tuple[Panel, int] | None:
    """Return a metric's panel and its rank there. An exact name takes precedence over a prefix."""
    hits = [
        (("*" in pattern), rank, panel)
        for panel in PANELS
        for rank, pattern in enumerate(panel.metrics)
        if matches(pattern, metric)
    ]
    if not hits:
        return None
    _, rank, panel = min(hits, key=lambda hit: hit[0])
    return panel, rank


def pick(metrics: dict[str, float], panel_id: str) -> float | None:
    """Return the first metric of a panel that a step reports, for a display with room for one
    number."""
    placed = [(place(name), value) for name, value in metrics.items()]
    ranked = [
        (where[1], value)
        for where, value in placed
        if where is not None and where[0].panel_id == panel_id
    ]
    return min(ranked, key=lambda item: item[0])[1] if ranked else None
