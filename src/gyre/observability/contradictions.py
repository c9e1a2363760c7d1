"""Contradictions: training and held-out figures that cannot both be right. In: event rows, one by
one. Out: a Contradiction at an evaluation, or none; the event `warn.figures_contradict`.

Two figures differ when their 95 % intervals do not overlap, which is stricter than a test of their
difference at 5 %. `opposed`: one improved from its first to its newest value while the other got
worse. `gap`: the newest of the two differ. A difference that the temperatures explain is none:
greedy answers are better than sampled ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gyre.core.events import Emit
from gyre.observability.intervals import mean_error, normal_interval, wilson_interval
from gyre.observability.jsonl import as_number
from gyre.observability.metric_catalog import SHARES, eval_interval, eval_measure
from gyre.observability.progress.state import CONTRADICTION

WINDOW_STEPS = 8  # at most, that one training figure is taken from
# steps whose spread gives their standard error, where a step does not record its own
FEWEST_SPREAD = 5
TRAINING = {
    "accuracy": "train_accuracy",
    "reward": "reward",
    "loss": "loss",
    "pair_accuracy": "pair_accuracy",
    "preference_accuracy": "reward_accuracy",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A measure as one training step reported it."""

    value: float
    prompts: int  # groups of completions; 0 where not recorded
    error: float | None  # standard error; None where not recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Two figures that cannot both be right."""

    rule: Literal["opposed", "gap"]
    training: tuple[Figure, ...]  # first and newest for "opposed", the newest for "gap"
    held_out: tuple[Figure, ...]


def training_figure(measure: str, steps: Sequence[MeasuredStep]) -> Figure | None:
    """Pool a measure over neighboring steps. Returns None where they do not report its uncertainty.
    Each prompt is one trial of a share, since its completions are correlated."""
    if not steps:
        return None
    value = math.fsum(step.value for step in steps) / len(steps)
    prompts, errors = (
        sum(step.prompts for step in steps),
        [step.error for step in steps if step.error is not None],
    )
    if measure in SHARES and prompts:
        interval = wilson_interval(value, prompts)
    elif len(errors) == len(steps):
        interval = normal_interval(value, math.hypot(*errors) / len(steps))
    elif len(steps) >= FEWEST_SPREAD:
        interval = normal_interval(value, mean_error([step.value for step in steps]))
    else:
        interval = None
    return None if interval is None else Figure(value=value, low=interval[0], high=interval[1])


def find_contradiction(
    measure: str,
    steps: Sequence[MeasuredStep],
    held_out: Sequence[Figure],
    *,
    temperatures: tuple[float, float] | None,
) -> Contradiction | None:
    """Return the figure that contradicts the newest evaluation, if any. `temperatures`: of rollouts
    and of evaluation; None where nothing is sampled."""
    size = min(WINDOW_STEPS, len(steps) // 2)
    first, newest = (
        training_figure(measure, steps[:size]),
        training_figure(measure, steps[-size:] if size else ()),
    )
    if (
        first
        and newest
        and len(held_out) > 1
        and _change(first, newest) * _change(held_out[0], held_out[-1]) < 0
    ):
        return Contradiction(
            rule="opposed", training=(first, newest), held_out=(held_out[0], held_out[-1])
        )
    newest = training_figure(measure, steps[-WINDOW_STEPS:])
    # a loss is lower on what was trained on
    if newest is None or not held_out or measure == "loss":
        return None
    gap = _change(newest, held_out[-1])
    still = _change(
        Figure(value=steps[-1].value, low=steps[-1].value, high=steps[-1].value), held_out[-1]
    )
    explained = temperatures is not None and gap * (temperatures[0] - temperatures[1]) > 0
    # the newest step alone: a policy that changes fast is no contradiction
    if gap == 0 or still != gap or explained:
        return None
    return Contradiction(rule="gap", training=(newest,), held_out=(held_out[-1],))


def _change(a: Figure, b: Figure) -> int:
    """Return 1 where b is above a by more than their intervals, -1 below, 0 where they overlap."""
    return (b.low > a.high) - (b.high < a.low)


class ContradictionWatch:
    """A listener that compares at each evaluation. Rows of earlier attempts come first, as
    `history`."""

    def __init__(
        self,
        emit: Emit,
        *,
        temperatures: tuple[float, float],
        show: Callable[[str, float], str],
        history: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._emit = emit
        self._temperatures = temperatures
        self._show = show
        self._stage = ""
        self._steps: dict[str, list[MeasuredStep]] = {}
        self._held_out: dict[str, list[Figure]] = {}
        for row in history:
            self._take(row)

    def __call__(self, row: Mapping[str, Any]) -> None:
        measure = self._take(row)
        if measure is None:
            return
        steps, held_out = self._steps.get(TRAINING[measure], []), self._held_out[measure]
        found = find_contradiction(measure, steps, held_out, temperatures=self._temperatures)
        if found is not None:
            self._emit(
                CONTRADICTION,
                stage=self._stage,
                step=row.get("step", 0),
                name=measure,
                rule=found.rule,
                training=[[figure.value, figure.low, figure.high] for figure in found.training],
                held_out=[[figure.value, figure.low, figure.high] for figure in found.held_out],
                reason=describe(measure, found, self._show),
            )

    def _take(self, row: Mapping[str, Any]) -> str | None:
        """Keep a row's figures; return the measure of an evaluation."""
        kind, stage = row["kind"], str(row.get("stage") or self._stage)
        if stage != self._stage:
            self._stage, self._steps, self._held_out = stage, {}, {}
        if kind == "step.done":
            self._take_step(row)
        judged = eval_measure(row) if kind == "eval.done" else None
        interval = eval_interval(row) if judged is not None else None
        if judged is None or interval is None:
            return None
        figure = Figure(value=judged[1], low=interval[0], high=interval[1])
        self._held_out.setdefault(judged[0], []).append(figure)
        return judged[0]

    def _take_step(self, row: Mapping[str, Any]) -> None:
        metrics, prompts = row.get("metrics") or {}, int(as_number(row.get("num_prompts")) or 0)
        for name in set(TRAINING.values()):
            value = as_number(metrics.get(name))
            if value is not None and math.isfinite(value):
                error = as_number(row.get("reward_standard_error")) if name == "reward" else None
                self._steps.setdefault(name, []).append(
                    MeasuredStep(value=value, prompts=prompts, error=error)
                )


def describe(measure: str, found: Contradiction, show: Callable[[str, float], str]) -> str:
    """Format both figures and the likely causes as one line."""
    name = measure.replace("_", " ")

    def told(figures: Sequence[Figure]) -> str:
        newest = figures[-1]
        path = " to ".join(show(measure, figure.value) for figure in figures)
        return f"{path} (95 % interval {show(measure, newest.low)} to {show(measure, newest.high)})"

    if found.rule == "opposed":
        cause = (
            "the policy may have learned its training problems by heart, or a reward that "
            "does not hold elsewhere"
        )
        return (
            f"training {name} went from {told(found.training)}, held-out {name} from "
            f"{told(found.held_out)}: {cause}"
        )
    cause = (
        "more than sampling explains; compare the problems, the sampling and the lengths of "
        "training and evaluation"
    )
    return (
        f"training {name} is {told(found.training)}, held-out {name} {told(found.held_out)}: "
        f"{cause}"
    )
