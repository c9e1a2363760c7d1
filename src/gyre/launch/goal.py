"""Goal: whether a run reached its [goal]. A goal is about the main stage: what it was before, what
it is after. In: config, which stages ran, evaluations of the main stage. Out: numbers and a
sentence. Pure, torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.core.errors import ConfigError
from gyre.core.scores import AccuracyMetric
from gyre.objectives.config import needs_rollouts, trains_scores
from gyre.runconfig.run_config import RunConfig

OFFLINE_METRICS = {"rm": "pair_accuracy", "dpo": "preference_accuracy", "sft": "loss"}


def main_metrics(config: RunConfig) -> tuple[str, ...]:
    """Names of the evaluations that the main stage makes."""
    if not config.eval.num_problems:
        return ()
    answers = "reward" if accuracy_metric(config) is None else "accuracy"
    if needs_rollouts(config.objective):
        return (answers,)
    generates = bool(config.rewards.parts) and not trains_scores(config.objective)
    return (OFFLINE_METRICS[config.objective.kind], *((answers,) if generates else ()))


def accuracy_metric(config: RunConfig) -> AccuracyMetric | None:
    """Return the part that counts right answers. None if none was named and no part compares with a
    right answer; the run then reports its mean reward. ConfigError for a name that no part has."""
    rules = {part.name: part for part in config.rewards.parts if part.kind != "model"}
    wanted, threshold = config.eval.metric.part, config.eval.metric.threshold
    if wanted and wanted not in rules:
        raise ConfigError(
            f"eval.metric.part = '{wanted}': the rewards are named {', '.join(rules) or 'nothing'}",
            hint="name one of them, or leave it out for the first part that compares with a right "
            "answer",
        )
    judging = (part for part in rules.values() if part.kind in ("answer", "code", "reasoning_gym"))
    part = rules[wanted] if wanted else next(judging, None)
    if part is None:
        return None
    right = part.right if part.kind == "answer" else 1.0
    threshold = right if threshold is None else threshold
    return AccuracyMetric(part=part.name, threshold=threshold, rewarded=part.weight != 0.0)


def why_unjudged(config: RunConfig, stage: str) -> str:
    """Return why these stages cannot say whether the goal is reached, or ""."""
    if config.goal is None:
        return "the config has no [goal]"
    if stage == "cold_start":
        return (
            f"[goal] is about {config.goal.metric} before and after the main stage, and "
            "--stage cold_start has none"
        )
    if config.goal.metric not in (made := main_metrics(config)):
        evaluated = ", ".join(made) or "nothing (eval.num_problems = 0)"
        return (
            f"goal.metric = '{config.goal.metric}', and the main stage with objective.kind = "
            f"'{config.objective.kind}' "
            f"evaluates {evaluated}"
        )
    return ""


def judge_goal(
    config: RunConfig, stage: str, evals: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return "reached", which is None if not measured, and a sentence. None without a goal."""
    goal = config.goal
    if goal is None:
        return None
    if reason := why_unjudged(config, stage):
        return {"reached": None, "verdict": f"goal not judged: {reason}"}
    before, after = evals[goal.metric]["before"], evals[goal.metric]["after"]
    checks = {
        f"before {before:.3f} ≤ {goal.at_most_before}": goal.at_most_before is None
        or before <= goal.at_most_before,
        f"after {after:.3f} ≥ {goal.at_least_after}": goal.at_least_after is None
        or after >= goal.at_least_after,
        f"gain {after - before:.3f} ≥ {goal.margin}": goal.margin is None
        or after - before >= goal.margin,
    }
    asked = [words for words in checks if not words.endswith("None")]
    reached = all(checks.values())
    return {
        "reached": reached,
        "verdict": f"goal {'reached' if reached else 'missed'}: {goal.metric} {', '.join(asked)}",
    }
