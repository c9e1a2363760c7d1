"""Traces of training steps: phases lie within their step, and what runs between steps stands alone."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gyre.observability.spans import Spans
from gyre.observability.tracing.span_record import SpanRecord
from gyre.observability.tracing.step_spans import StepSpans


def shape(spans: list[SpanRecord]) -> Any:
    def below(parent: SpanRecord) -> Any:
        children = [below(span) for span in spans if span.parent_id == parent.span_id]
        return (parent.name, *children) if children else parent.name

    return below(spans[0])


def ended(phase: str, t: float, seconds: float, step: int = 1, **fields: Any) -> dict[str, Any]:
    row = {"kind": "phase.ended", "phase": phase, "depth": phase.count("/")}
    return {**row, "t": t, "seconds": seconds, "step": step, **fields}


def done(t: float, seconds: float, step: int = 1) -> dict[str, Any]:
    row = {"kind": "step.done", "stage": "main", "step": step, "version": step, "num_tokens": 9}
    return {**row, "t": t, "seconds": seconds}


def test_a_step_holds_its_phases_and_they_hold_theirs() -> None:
    steps = StepSpans()
    rows = [
        ended("evaluate", 99.0, 1.0, step=0),
        ended("rollout", 102.0, 2.0),
        ended("score/policy", 103.0, 0.5),
        ended("score/reference", 104.0, 0.5),
        ended("score", 104.0, 1.5),
        ended("train", 105.0, 1.0, error="DivergedError"),
    ]
    assert [steps.take(row) for row in rows] == [[]] * len(rows)
    before, step = steps.take(done(105.0, 5.0))
    assert shape(before) == "evaluate"
    assert shape(step) == ("train_step", "rollout", ("score", "policy", "reference"), "train")
    assert step[0].attributes == {
        "gyre.stage": "main", "gyre.step": 1, "gyre.version": 1, "gyre.num_tokens": 9
    }  # fmt: skip
    assert (step[0].started_ns, step[0].ended_ns) == (100 * 10**9, 105 * 10**9)
    assert [span.error for span in step if span.name == "train"] == ["DivergedError"]
    assert len({span.trace_id for span in step}) == 1 != before[0].trace_id
    steps.take(ended("export", 110.0, 1.0))
    assert [shape(spans) for spans in steps.rest()] == ["export"] and steps.rest() == []


def test_what_ends_after_the_last_step_of_a_stage_is_of_no_step_of_the_next() -> None:
    """Though its number comes again there."""
    steps = StepSpans()
    steps.take({"kind": "stage.started", "stage": "cold_start"})
    steps.take(done(10.0, 1.0, step=2) | {"stage": "cold_start"})
    steps.take(ended("evaluate", 11.0, 1.0, step=2))
    steps.take({"kind": "stage.started", "stage": "main"})
    steps.take(ended("rollout", 12.0, 1.0, step=1))
    assert [shape(spans) for spans in steps.take(done(12.0, 1.0, step=1))] == [
        "evaluate",
        ("train_step", "rollout"),
    ]
    steps.take(ended("rollout", 13.0, 1.0, step=2))
    assert [shape(spans) for spans in steps.take(done(13.0, 1.0, step=2))] == [
        ("train_step", "rollout")
    ]


pauses = st.floats(0.0, 0.01)


@st.composite
def runs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """The rows of steps, by the real timer and a clock that goes on between any two readings; times
    are rounded as a log rounds them."""
    now_s, rows = [1_700_000_000.0], []

    def clock() -> float:
        now_s[0] += draw(pauses)
        return now_s[0]

    def emit(kind: str, /, **fields: Any) -> None:
        rows.append({"kind": kind, "t": round(clock(), 4), **fields})

    spans = Spans(emit, clock=clock)
    for step in range(1, draw(st.integers(1, 3)) + 1):
        began_s = clock()
        for name in ("rollout", "score", "train"):
            with spans.phase(name, step=step):
                for inner in range(draw(st.integers(0, 2))):
                    with spans.phase(f"part{inner}", step=step):
                        clock()
        seconds = round(clock() - began_s, 4)
        emit("step.done", stage="main", step=step, version=step, num_tokens=1, seconds=seconds)
        with spans.phase("snapshot", step=step):
            clock()
    return rows


def test_rollouts_that_ran_ahead_are_told_with_their_step() -> None:
    def ended(phase: str, step: int, t: float) -> dict[str, Any]:
        return {"kind": "phase.ended", "phase": phase, "step": step, "t": t, "seconds": 1.0}

    def done(step: int, t: float) -> dict[str, Any]:
        more = {"stage": "main", "version": step, "num_tokens": 1, "seconds": 2.0}
        return {"kind": "step.done", "step": step, "t": t, **more}

    rows = [
        ended("rollout", 1, 1.0),
        ended("rollout", 2, 2.0),
        ended("train", 1, 2.5),
        done(1, 3.0),
        ended("train", 2, 4.0),
        done(2, 5.0),
    ]
    steps = StepSpans()
    traces = [trace for row in rows for trace in steps.take(row)] + steps.rest()
    assert [shape(trace) for trace in traces] == [("train_step", "rollout", "train")] * 2


@given(runs())
def test_every_phase_is_told_once_within_its_step(rows: list[dict[str, Any]]) -> None:
    steps = StepSpans()
    traces = [trace for row in rows for trace in steps.take(row)] + steps.rest()
    told = sorted(span.name for trace in traces for span in trace)
    expected = [row["phase"].rpartition("/")[2] for row in rows if row["kind"] == "phase.ended"] + [
        "train_step" for row in rows if row["kind"] == "step.done"
    ]
    assert told == sorted(expected)
    for trace in traces:
        by_id = {span.span_id: span for span in trace}
        for span in trace[1:]:
            parent = by_id[span.parent_id or 0]
            assert parent.started_ns <= span.started_ns <= span.ended_ns <= parent.ended_ns
    assert all(
        shape(trace)[1:] and trace[0].name == "train_step"
        for trace in traces
        if any(span.name == "rollout" for span in trace)
    )
