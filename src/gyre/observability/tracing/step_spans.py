"""Step spans: a trace of each training step. In: event rows. Out: SpanRecords: the step, its phases
within it, and theirs within them.

What runs between two steps (an evaluation, a snapshot, an export) is a trace of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gyre.observability.events import StageTracker
from gyre.observability.tracing.span_queue import SpanQueue
from gyre.observability.tracing.span_record import AttributeValue, SpanRecord
from gyre.observability.tracing.trace_context import new_id

CLOSE_S = 5.0  # for the spans that are left at the end of a run


@dataclass(slots=True)
class TimedPhase:
    """A phase that has ended, with those in it."""

    path: str
    step: int | None
    started_ns: int
    ended_ns: int
    attributes: dict[str, AttributeValue]
    error: str | None = None
    parts: list[TimedPhase] = field(default_factory=list)

    def cover(self) -> None:
        """Extend it over its parts, whose times are rounded apart from its own."""
        self.started_ns = min([self.started_ns, *(part.started_ns for part in self.parts)])
        self.ended_ns = max([self.ended_ns, *(part.ended_ns for part in self.parts)])


class StepSpans:
    """Builds spans from the rows of one attempt."""

    def __init__(self) -> None:
        self._stages = StageTracker()
        self._ended: list[TimedPhase] = []  # since the last step

    def take(self, row: Mapping[str, Any]) -> list[list[SpanRecord]]:
        """Take a row. Return the traces that are whole with it."""
        stage = self._stages.stage(row)
        if row["kind"] == "phase.ended":
            self._end_phase(row, stage)
        if row["kind"] != "step.done":
            return []
        step = make_phase(row, "train_step", stage)
        step.attributes |= {"gyre.version": row["version"], "gyre.num_tokens": row["num_tokens"]}
        # phases after a step carry its number too, but end after its row; so do those after the
        # last step of the stage before
        others, ahead = [], []
        for phase in self._ended:
            if phase.attributes["gyre.stage"] != stage or (phase.step or 0) < row["step"]:
                others.append(phase)
            elif phase.step == row["step"]:
                step.parts.append(phase)
            else:  # rollouts that ran ahead wait for their step
                ahead.append(phase)
        step.cover()
        self._ended = ahead
        return [make_trace(phase) for phase in [*others, step]]

    def rest(self) -> list[list[SpanRecord]]:
        """Return the traces of what has ended since the last step."""
        ended, self._ended = self._ended, []
        return [make_trace(phase) for phase in ended]

    def _end_phase(self, row: Mapping[str, Any], stage: str) -> None:
        phase = make_phase(row, row["phase"], stage)
        if "error" in row:
            phase.error = row["error"]
        inner = phase.path + "/"
        phase.parts = [one for one in self._ended if one.path.startswith(inner)]
        self._ended = [one for one in self._ended if not one.path.startswith(inner)]
        phase.cover()
        self._ended.append(phase)


def make_phase(row: Mapping[str, Any], path: str, stage: str) -> TimedPhase:
    """Return the phase that a row ends. Pure."""
    ended_ns = round(row["t"] * 1e9)
    attributes: dict[str, AttributeValue] = {"gyre.stage": stage}
    if "step" in row:
        attributes["gyre.step"] = row["step"]
    return TimedPhase(
        path=path,
        step=row.get("step"),
        started_ns=ended_ns - round(row["seconds"] * 1e9),
        ended_ns=ended_ns,
        attributes=attributes,
    )


def make_trace(root: TimedPhase) -> list[SpanRecord]:
    """Return the spans of a phase and of all in it, under a trace of their own."""
    trace_id, spans = new_id(128), []

    def add(phase: TimedPhase, parent_id: int | None) -> None:
        span = SpanRecord(
            name=phase.path.rpartition("/")[2],
            trace_id=trace_id,
            span_id=new_id(64),
            parent_id=parent_id,
            started_ns=phase.started_ns,
            ended_ns=phase.ended_ns,
            attributes=phase.attributes,
            error=phase.error,
        )
        spans.append(span)
        for part in phase.parts:
            add(part, span.span_id)

    add(root, None)
    return spans


class StepTraceSink:
    """Sends the traces of a run's steps."""

    def __init__(self, queue: SpanQueue) -> None:
        self._queue = queue
        self._steps = StepSpans()
        self._is_open = True

    def write(self, row: Mapping[str, Any]) -> None:
        for spans in self._steps.take(row):
            self._queue.offer(spans)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            for spans in self._steps.rest():
                self._queue.offer(spans)
            self._queue.close(CLOSE_S)
