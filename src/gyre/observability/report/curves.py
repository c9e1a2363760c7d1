"""Curves of the report. In: a Story. Out: panels with series, ready for JSON, and the outcomes of
the evaluations. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre.observability.events import RESERVED
from gyre.observability.intervals import wilson_interval
from gyre.observability.jsonl import as_number
from gyre.observability.metric_catalog import (
    EVAL_MEASURES,
    PANELS,
    SHARES,
    Panel,
    eval_interval,
    eval_measure,
    eval_title,
    place,
)
from gyre.observability.report.story import PlacedRow, Story, spread

MAX_POINTS = 1200  # per series; more are shown as means of neighbors, and the page says so
ALWAYS_SHOWN = ("reward", "accuracy", "loss")
FRACTION_ENDINGS = ("_fraction", "_share", "accuracy")

NOT_MEASURED = {"step", "n", "standard_error"}  # numbers of an evaluation that have no curve

# x (step), run time in seconds, value or None, problems
Point = tuple[float, float, float | None, float]


@dataclass(slots=True)
class Series:
    """One metric over the run."""

    name: str
    dots: bool  # an evaluation, not a value of each step
    points: list[Point] = field(default_factory=list)
    # 95 %, of points by x
    intervals: dict[float, tuple[float, float]] = field(default_factory=dict)


def gather_series(story: Story) -> dict[str, Series]:
    """Collect every number of every step and evaluation by name."""
    found: dict[str, Series] = {}
    for told in story.of_kind("step.done"):
        x = story.x(told.stage, float(told.row.get("step") or 0))
        for name, value in (told.row.get("metrics") or {}).items():
            number = as_number(value)
            if number is not None:
                found.setdefault(name, Series(name, False)).points.append(
                    (x, told.time_s, _finite(number), 0)
                )
    for told in story.of_kind("eval.done"):
        x = story.x(told.stage, float(told.row.get("step") or 0))
        for name, value in eval_numbers(told).items():
            label = f"{told.row.get('name', 'eval')}: {name}"
            point = (x, told.time_s, _finite(value), float(told.row.get("n") or 0))
            series = found.setdefault(label, Series(label, True))
            series.points.append(point)
            if (
                (judged := eval_measure(told.row))
                and judged[0] == name
                and (interval := eval_interval(told.row))
            ):
                series.intervals[x] = interval
    return found


def eval_numbers(told: PlacedRow) -> dict[str, float]:
    """Return the measures of one evaluation."""
    detail = told.row.get("detail")
    fields = {**(detail if isinstance(detail, Mapping) else {}), **told.row}
    own = {
        name: as_number(value)
        for name, value in fields.items()
        if name not in RESERVED | NOT_MEASURED
    }
    return {name: value for name, value in own.items() if value is not None}


def curve_panels(story: Story) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Return (panels, metrics that never changed, notes on what was thinned)."""
    placed: dict[str, list[tuple[int, Series]]] = {}
    constants: list[dict[str, Any]] = []
    everything = gather_series(story)
    notes = curve_notes(list(everything.values()))
    for series in everything.values():
        series.points = thin_series(
            series, [stage.first_x for stage in story.stages if stage.num_steps]
        )
        metric = series.name.split(": ", 1)[-1] if series.dots else series.name
        where = place(metric)
        if where is not None:
            rank = where[1] + (0 if not series.dots else -100 if metric == "accuracy" else 100)
            placed.setdefault(where[0].panel_id, []).append((rank, series))
        elif (constant := _constant(series)) is not None:
            constants.append({"name": series.name, "value": constant})
        else:
            placed.setdefault(f"~{metric.split('/')[0]}", []).append((0, series))
    for panel in PANELS:
        if panel.panel_id in placed and _is_empty(
            panel, [series for _, series in placed[panel.panel_id]]
        ):
            constants += [
                {"name": s.name, "value": s.points[0][2]} for _, s in placed.pop(panel.panel_id)
            ]
    known = [
        _panel_json(panel, placed.pop(panel.panel_id))
        for panel in PANELS
        if panel.panel_id in placed
    ]
    other = [_panel_json(_own_panel(key[1:]), placed[key]) for key in sorted(placed)]
    return known + other, constants, notes


def _own_panel(metric: str) -> Panel:
    unit = "fraction" if metric.endswith(FRACTION_ENDINGS) else ""
    return Panel(
        panel_id=f"more-{metric}",
        title=metric.replace("_", " "),
        unit=unit,
        help="",
        metrics=(metric,),
    )


def _panel_json(panel: Panel, members: Sequence[tuple[int, Series]]) -> dict[str, Any]:
    ordered = [series for _, series in sorted(members, key=lambda member: member[0])]
    return {
        "id": panel.panel_id,
        "title": panel.title,
        "unit": panel.unit,
        "help": panel.help,
        "perStage": panel.per_stage,
        "series": [_series_json(series, panel) for series in ordered],
    }


def _series_json(series: Series, panel: Panel) -> dict[str, Any]:
    points = series.points
    result: dict[str, Any] = {
        "name": series_label(series, panel),
        "metric": series.name,
        "dots": series.dots,
        "x": [round(x, 2) for x, _, _, _ in points],
        "t": [round(t, 2) for _, t, _, _ in points],
        "v": [significant(value) for _, _, value, _ in points],
    }
    if series.dots:
        result["n"] = [int(n) for _, _, _, n in points]
        shares = panel.unit == "fraction"
        bounds = [
            series.intervals.get(x) or (wilson_interval(value, int(n)) if shares else None)
            for x, _, value, n in points
        ]
        if any(bounds):
            result["lo"] = [significant(bound[0]) if bound else None for bound in bounds]
            result["hi"] = [significant(bound[1]) if bound else None for bound in bounds]
    return result


def series_label(series: Series, panel: Panel) -> str:
    """Return a label that does not repeat the title of its panel."""
    if series.dots:
        name, metric = series.name.split(": ", 1)
        whose = "held out" if name in EVAL_MEASURES else name.replace("_", " ")
        return whose + (
            "" if metric in ("accuracy", panel.panel_id) else f" {metric.replace('_', ' ')}"
        )
    label = series.name.split("/", 1)[-1] if "/" in series.name else series.name
    return "in training" if label in ("accuracy", "train_accuracy") else label.replace("_", " ")


def curve_notes(everything: Sequence[Series]) -> list[str]:
    """Return notes on data that the curves alter or omit."""
    notes = []
    long = [series for series in everything if len(series.points) > MAX_POINTS]
    if long:
        most = max(len(series.points) for series in long)
        notes.append(
            f"{len(long)} curves have more than {MAX_POINTS:,} points, up to {most:,}: they are "
            "drawn through means of "
            "neighbors, evaluations through every n-th. events.jsonl has all points."
        )
    lost = {
        series.name: sum(1 for point in series.points if point[2] is None) for series in everything
    }
    holes = [f"{name} ({count:,})" for name, count in lost.items() if count]
    if holes:
        notes.append(f"Values that were not finite numbers leave gaps: {', '.join(holes)}.")
    return notes


def thin_series(series: Series, stage_starts: Sequence[float]) -> list[Point]:
    """Bound the points of a series. Averages never span two stages; evaluations are not
    averaged."""
    if len(series.points) <= MAX_POINTS:
        return series.points
    if series.dots:
        return spread(series.points, MAX_POINTS)
    share = MAX_POINTS / len(series.points)
    parts: dict[int, list[Point]] = {}
    for point in series.points:
        parts.setdefault(sum(1 for start in stage_starts if point[0] >= start), []).append(point)
    return [
        point for part in parts.values() for point in thin(part, max(3, int(share * len(part))))
    ]


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most `limit` points: averages of neighboring points, with the first and last
    unchanged."""
    if len(points) <= limit:
        return list(points)
    inner = points[1:-1]
    size = math.ceil(len(inner) / (limit - 2))
    buckets = [inner[start : start + size] for start in range(0, len(inner), size)]
    return [points[0], *(_mean_point(bucket) for bucket in buckets), points[-1]]


def _mean_point(bucket: Sequence[Point]) -> Point:
    values = [value for _, _, value, _ in bucket if value is not None]
    middle = bucket[len(bucket) // 2]
    return (middle[0], middle[1], sum(values) / len(values) if values else None, middle[3])


def outcomes(story: Story) -> list[dict[str, Any]]:
    """Return the path of each evaluation from first to newest: accuracies first, then held-out
    measures."""
    paths: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for told in story.of_kind("eval.done"):
        judged = eval_measure(told.row)
        if judged is None:
            continue
        measure, value = judged
        step, n = told.row.get("step") or 0, int(told.row.get("n") or 0)
        point = {
            "value": value,
            "n": n,
            "step": step,
            "x": story.x(told.stage, float(step)),
            "stage": told.stage,
            "interval": eval_interval(told.row),
            "meaning": str(told.row.get("meaning") or ""),
        }
        paths.setdefault((str(told.row.get("name", "eval")), measure), []).append(point)
    result = [
        {
            "title": eval_title(name, measure),
            "measure": measure,
            "meaning": path[-1]["meaning"],
            "unit": "fraction" if measure in SHARES else "",
            "before": path[0],
            "after": path[-1],
            "path": path,
        }
        for (name, measure), path in paths.items()
    ]
    order = EVAL_MEASURES.index  # a share or a reward before a loss
    return sorted(
        result,
        key=lambda out: (
            order(out["measure"]) > order("reward"),
            "held" not in out["title"],
            len(out["path"]) < 2,
        ),
    )


def significant(value: float | None) -> float | None:
    """Round to the six significant figures that a chart can show."""
    return None if value is None else float(f"{value:.6g}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _is_empty(panel: Panel, members: Sequence[Series]) -> bool:
    """Return whether a panel has no finite number or only zeros. The run's main measures are shown
    even then."""
    values = [value for series in members for _, _, value, _ in series.points if value is not None]
    if not values:
        return True
    several = any(len(series.points) > 1 for series in members)
    return several and panel.panel_id not in ALWAYS_SHOWN and not any(values)


def _constant(series: Series) -> float | None:
    values = {value for _, _, value, _ in series.points}
    return values.pop() if len(values) == 1 else None
