"""Training and held-out figures: when they contradict each other, and who says so where."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gyre.observability.contradictions import (
    ContradictionWatch,
    Figure,
    MeasuredStep,
    find_contradiction,
)
from gyre.observability.events import EventLog, count_events, read_events
from gyre.observability.intervals import mean_error, ratio_error, wilson_interval
from gyre.observability.progress.terminal import LineProgress, show_measure
from gyre.observability.report.build import gather
from observability_run import Clock

SAMPLED, GREEDY = (1.0, 1.0), (1.0, 0.0)  # temperatures of rollouts and evaluation


def shares(values: Sequence[float], prompts: int = 32) -> list[MeasuredStep]:
    return [MeasuredStep(value=value, prompts=prompts, error=None) for value in values]


def judged(*values: float, n: int = 256) -> list[Figure]:
    found = [(value, wilson_interval(value, n)) for value in values]
    return [
        Figure(value=value, low=interval[0], high=interval[1])
        for value, interval in found
        if interval
    ]


def rule(
    steps: Sequence[MeasuredStep],
    held_out: Sequence[Figure],
    temperatures: tuple[float, float] = SAMPLED,
) -> str | None:
    found = find_contradiction("accuracy", steps, held_out, temperatures=temperatures)
    return None if found is None else found.rule


RISING = shares([0.2 + 0.03 * step for step in range(20)])  # to 0.77


@pytest.mark.parametrize(
    ("steps", "held_out", "temperatures", "expected"),
    [
        (RISING, judged(0.4, 0.2), SAMPLED, "opposed"),
        (shares([1.0 - step.value for step in RISING]), judged(0.2, 0.5), GREEDY, "opposed"),
        (RISING, judged(0.2, 0.76), SAMPLED, None),
        # held out fell by no more than sampling explains, and is far below
        (RISING, judged(0.4, 0.37), GREEDY, "gap"),
        (shares([0.5] * 8), judged(0.5, 0.9), GREEDY, None),  # greedy answers are better
        (shares([0.5] * 8), judged(0.5, 0.9), SAMPLED, "gap"),
        (shares([0.5] * 8), judged(0.5, 0.1), GREEDY, "gap"),
        (shares([0.5] * 8), judged(0.5, 0.1), (0.5, 1.5), None),  # hotter answers are worse
        (shares([0.5] * 8, prompts=1), judged(0.8, n=16), SAMPLED, None),  # so few prove nothing
        # a policy that just learned
        (shares([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.9]), judged(0.88), SAMPLED, None),
        ([], judged(0.1, 0.9), SAMPLED, None),
        (RISING, [], SAMPLED, None),
    ],
)
def test_the_rule(
    steps: list[MeasuredStep],
    held_out: list[Figure],
    temperatures: tuple[float, float],
    expected: str | None,
) -> None:
    assert rule(steps, held_out, temperatures) == expected


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5),
    st.sampled_from([SAMPLED, GREEDY]),
)
def test_what_overlaps_is_no_contradiction(
    values: list[float], held: list[float], temperatures: tuple[float, float]
) -> None:
    found = find_contradiction("accuracy", shares(values), judged(*held), temperatures=temperatures)
    if found is None:
        return
    for path in (found.training, found.held_out) if found.rule == "opposed" else ():
        assert path[0].high < path[1].low or path[1].high < path[0].low
    if found.rule == "gap":
        (training,), (held_out,) = found.training, found.held_out
        assert training.high < held_out.low or held_out.high < training.low
        assert temperatures == SAMPLED or held_out.value < training.value


def test_figures_of_the_same_policy_are_hardly_ever_flagged() -> None:
    draw, flagged = random.Random(0), 0
    for _ in range(400):
        steps = shares([sum(draw.random() < 0.6 for _ in range(32)) / 32 for _ in range(12)])
        held = judged(
            *(sum(draw.random() < 0.6 for _ in range(128)) / 128 for _ in range(2)), n=128
        )
        flagged += rule(steps, held) is not None
    assert flagged <= 8  # 2 %


def test_a_reward_that_is_no_share_is_compared_by_its_standard_error() -> None:
    steps = [MeasuredStep(value=3.0, prompts=32, error=0.1)] * 8
    for value, expected in ((3.05, None), (2.0, "gap")):
        held = [Figure(value=value, low=value - 0.2, high=value + 0.2)]
        found = find_contradiction("reward", steps, held, temperatures=SAMPLED)
        assert (found.rule if found else None) == expected


def test_a_held_out_loss_that_rises_while_the_training_loss_falls() -> None:
    draw = random.Random(1)
    steps = [
        MeasuredStep(value=2.0 - 0.05 * at + draw.gauss(0, 0.02), prompts=0, error=None)
        for at in range(30)
    ]
    rising = [Figure(value=value, low=value - 0.05, high=value + 0.05) for value in (1.6, 2.2)]
    found = find_contradiction("loss", steps, rising, temperatures=None)
    assert found is not None and found.rule == "opposed"
    # it is higher, as it always is
    assert find_contradiction("loss", steps, rising[::-1], temperatures=None) is None


def test_standard_errors_are_those_of_the_textbook() -> None:
    assert mean_error([1.0, 2.0, 3.0, 4.0]) == pytest.approx((5 / 3) ** 0.5 / 2)
    assert mean_error([1.0]) is None and ratio_error([1.0], [1.0]) is None
    assert ratio_error([1.0, 2.0, 3.0, 4.0], [1.0] * 4) == pytest.approx(
        mean_error([1.0, 2.0, 3.0, 4.0])
    )
    assert ratio_error([1.0, 2.0, 4.0], [0.5, 1.0, 2.0]) == pytest.approx(0.0)  # the ratio is exact


def live_run(folder: Path, *, attempts: int = 1) -> tuple[list[dict[str, Any]], str]:
    """Twenty steps of a training accuracy that rises while the held-out one falls, in so many
    attempts."""
    stream, clock = io.StringIO(), Clock()
    for attempt in range(1, attempts + 1):
        log = EventLog(folder / "events.jsonl", attempt=attempt, clock=clock, check_schema=False)
        progress = LineProgress(Console(file=stream, width=400))
        log.subscribe(progress)
        history = read_events(folder / "events.jsonl")
        log.subscribe(
            ContradictionWatch(log.emit, temperatures=GREEDY, show=show_measure, history=history)
        )
        if attempt == 1:
            log.emit("stage.started", stage="main", steps=20)
            log.emit("eval.done", stage="main", name="accuracy", accuracy=0.5, n=256, step=0)
        per = 20 // attempts
        for step in range((attempt - 1) * per + 1, attempt * per + 1):
            accuracy = 0.2 + 0.03 * step
            log.emit(
                "step.done",
                stage="main",
                step=step,
                metrics={"train_accuracy": accuracy},
                num_prompts=32,
            )
        if attempt == attempts:
            log.emit("eval.done", stage="main", name="accuracy", accuracy=0.25, n=256, step=20)
            log.emit("run.done")
            progress.summary(folder)
    return list(read_events(folder / "events.jsonl")), stream.getvalue()


@pytest.mark.parametrize("attempts", [1, 2])
def test_the_event_the_terminal_and_the_report_say_both_figures(
    tmp_path: Path, attempts: int
) -> None:
    rows, printed = live_run(tmp_path, attempts=attempts)
    (row,) = [row for row in rows if row["kind"] == "warn.figures_contradict"]
    assert (
        row["rule"] == "opposed" and row["held_out"][0][0] == 0.5 and row["held_out"][1][0] == 0.25
    )
    assert count_events(rows)["warn.figures_contradict"] == 1
    said = "held-out accuracy from 50.0% to 25.0% (95 % interval 20.1% to 30.6%)"
    assert (
        "training accuracy went from 33.5% to 69.5% (95 % interval" in row["reason"]
        and said in row["reason"]
    )
    assert printed.count(said) == 2, "once when it was found, once at the end"
    report = gather(tmp_path)
    assert said in report["contradiction"]
    assert [entry["kind"] for entry in report["counted"]] == ["warn.figures_contradict"]
