"""Story: a run's rows on one axis of steps and one of time. In: live rows of events.jsonl. Out: a
Story. Pure.

Stages whose steps restart from zero are concatenated. Time between two attempts is cut out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gyre.observability.progress.state import read_stages

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """A stage as it happened."""

    name: str
    offset: float  # its step s is at x = offset + s
    first_x: float  # of its first and last finished step
    last_x: float
    start_s: float  # run time when it began and when its newest row came
    end_s: float
    num_steps: int  # finished
    planned_steps: int  # 0 where the run does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRow:
    """One row with its position on both axes."""

    row: Row
    stage: str  # "" before the first stage
    time_s: float  # seconds of run time


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    told: tuple[PlacedRow, ...]
    stages: tuple[StageSpan, ...]
    gaps_s: tuple[float, ...]  # time between attempts that was cut out
    started_t: float | None  # unix time of the first row
    seconds: float  # run time of the newest row

    def of_kind(self, *kinds: str) -> list[PlacedRow]:
        return [told for told in self.told if told.row["kind"] in kinds]

    def x(self, stage: str, step: float) -> float:
        """Return a step's position on the common axis."""
        for known in self.stages:
            if known.name == stage:
                return known.offset + step
        return float(step)


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Return `count` evenly spread items, including the first and the last."""
    if count >= len(items):
        return list(items)
    if count <= 1:
        return list(items[-1:])
    return [items[round(position * (len(items) - 1) / (count - 1))] for position in range(count)]


def tell(rows: Iterable[Row]) -> Story:
    """Place all rows."""
    told, gaps = _place_in_time(list(rows))
    return Story(
        told=tuple(told),
        stages=tuple(_lay_out_stages(told)),
        gaps_s=tuple(gaps),
        started_t=told[0].row["t"] if told else None,
        seconds=max((item.time_s for item in told), default=0.0),
    )


def _place_in_time(rows: Sequence[Row]) -> tuple[list[PlacedRow], list[float]]:
    told: list[PlacedRow] = []
    gaps: list[float] = []
    origin_t, latest_t, attempt, stage = 0.0, 0.0, None, ""
    for row in rows:
        t = float(row.get("t", latest_t))
        if attempt is None:
            origin_t = latest_t = t
        elif row["attempt"] != attempt:
            gap = max(0.0, t - latest_t)
            gaps.append(gap)
            origin_t += gap
        attempt, latest_t = row["attempt"], max(latest_t, t)
        if row.get("stage"):
            stage = str(row["stage"])
        told.append(PlacedRow(row=row, stage=stage, time_s=round(max(0.0, t - origin_t), 4)))
    return told, gaps


def _lay_out_stages(told: Sequence[PlacedRow]) -> list[StageSpan]:
    """Concatenate the stages: one whose steps restart begins where the previous ended."""
    planned = _planned_steps(told)
    stages: list[StageSpan] = []
    last_x = 0.0
    for name in dict.fromkeys(item.stage for item in told if item.stage):
        rows = [item for item in told if item.stage == name]
        steps = [
            float(item.row.get("step") or 0) for item in rows if item.row["kind"] == "step.done"
        ]
        restarts = bool(stages) and (not steps or min(steps) <= last_x)
        offset = (
            last_x + 1 - min(steps)
            if restarts and steps and min(steps) <= 0
            else last_x
            if restarts
            else 0.0
        )
        stage = StageSpan(
            name=name,
            offset=offset,
            first_x=offset + min(steps, default=0.0),
            last_x=offset + max(steps, default=0.0),
            start_s=rows[0].time_s,
            end_s=rows[-1].time_s,
            num_steps=len(set(steps)),
            planned_steps=planned.get(name, 0),
        )
        stages.append(stage)
        last_x = max(last_x, stage.last_x)
    return stages


def _planned_steps(told: Sequence[PlacedRow]) -> dict[str, int]:
    planned: dict[str, int] = {}
    for item in told:
        if item.row["kind"] == "run.started":
            planned |= dict(read_stages(item.row.get("stages")))
        if item.row["kind"] == "stage.started" and item.row.get("steps"):
            planned[item.stage] = int(item.row["steps"])
    return planned
