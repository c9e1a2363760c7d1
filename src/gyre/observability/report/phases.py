"""Time and memory of the report. In: a Story. Out: spans, seconds by phase, overlap account and
bytes by owner, ready for JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gyre.core.rounding import ceil_div
from gyre.observability.jsonl import as_number
from gyre.observability.metric_catalog import PHASE_ORDER
from gyre.observability.overlap import length, union
from gyre.observability.report.story import PlacedRow, Story, spread

MAX_SPANS = 30_000
MAX_COLUMNS = 400  # of seconds per step
MAX_WHOLE_OVER_PEAK = 4  # the whole device is drawn while what is used is at least a quarter of it
MAX_MEMORY_POINTS = 2400

# phase, depth, start s, seconds, x (step) or -1, stage
Span = tuple[str, int, float, float, float, str]


def timeline(story: Story) -> dict[str, Any] | None:
    """Return every phase with its time and its share of the total. None for a run without
    phases."""
    spans = sorted(phase_spans(story), key=lambda span: (span[2], span[1]))
    if not spans:
        return None
    phases = order_phases([span[0] for span in spans])
    shown = choose_spans(spans, MAX_SPANS)
    notes = []
    if len(shown) < len(spans):
        notes.append(
            f"{len(shown):,} of {len(spans):,} phases are drawn: inner phases of some steps only, "
            "evenly spread. "
            "Shares and seconds per step count all."
        )
    outer = [span for span in spans if span[1] == 0]
    seconds: dict[str, float] = {}
    for phase, _, _, span_s, _, _ in spans:
        seconds[phase] = seconds.get(phase, 0.0) + span_s
    index = {phase: number for number, phase in enumerate(phases)}
    return {
        "phases": phases,
        "outer": [phase for phase in phases if any(span[0] == phase for span in outer)],
        "seconds": {phase: round(seconds[phase], 3) for phase in phases},
        "counts": {phase: sum(1 for span in spans if span[0] == phase) for phase in phases},
        "unaccounted_s": round(
            max(0.0, story.seconds - length(union((s[2], s[2] + s[3]) for s in outer))), 3
        ),
        "spans": [[index[s[0]], s[1], round(s[2], 3), round(s[3], 4), s[4], s[5]] for s in shown],
        "columns": step_columns(outer),
        "notes": notes,
    }


def phase_spans(story: Story) -> list[Span]:
    """Return the closed phases and those still open at the last row."""
    spans: list[Span] = []
    open_phases: dict[str, PlacedRow] = {}
    for told in story.of_kind("attempt.started", "phase.started", "phase.ended"):
        phase = str(told.row.get("phase", ""))
        if told.row["kind"] == "attempt.started":
            open_phases.clear()  # what a killed attempt left open has no end to draw
        elif told.row["kind"] == "phase.started":
            open_phases[phase] = told
        else:
            open_phases.pop(phase, None)
            spans.append(
                _span(story, told, phase, as_number(told.row.get("seconds")) or 0.0, told.time_s)
            )
    spans += [
        _span(story, told, phase, story.seconds - told.time_s, story.seconds)
        for phase, told in open_phases.items()
    ]
    return spans


def _span(story: Story, told: PlacedRow, phase: str, seconds: float, end_s: float) -> Span:
    depth = told.row.get("depth", phase.count("/"))
    step = told.row.get("step")
    x = story.x(told.stage, float(step)) if isinstance(step, int | float) else -1.0
    return (phase, int(depth), max(0.0, end_s - seconds), seconds, x, told.stage)


def order_phases(names: Sequence[str]) -> list[str]:
    """Return each phase once: the loop's own in its order, others by first appearance, children
    after their parent."""
    seen = list(dict.fromkeys(names))

    def rank(name: str) -> tuple[int, int, int]:
        parent = name.split("/")[0]
        known = PHASE_ORDER.index(parent) if parent in PHASE_ORDER else len(PHASE_ORDER)
        first = next(
            position for position, other in enumerate(seen) if other.split("/")[0] == parent
        )
        return (known, first, -1 if name == parent else seen.index(name))

    return sorted(seen, key=rank)


def choose_spans(spans: Sequence[Span], limit: int) -> list[Span]:
    """Return about `limit` spans in order of time. Keeps the outermost (the longest, if there are
    too many), and the inner ones of whole, evenly spread steps."""
    if len(spans) <= limit:
        return list(spans)
    outer = sorted((span for span in spans if span[1] == 0), key=lambda span: -span[3])[:limit]
    by_step: dict[float, list[Span]] = {}
    for span in spans:
        if span[1] > 0:
            by_step.setdefault(span[4], []).append(span)
    most = max((len(inner) for inner in by_step.values()), default=1)
    steps = spread(list(by_step), (limit - len(outer)) // most)
    kept = outer + [span for step in steps for span in by_step[step]]
    return sorted(kept, key=lambda span: (span[2], span[1]))


def step_columns(outer: Sequence[Span]) -> dict[str, Any]:
    """Return seconds by phase for each step, or for groups of neighboring steps where there are
    many."""
    by_x: dict[float, dict[str, float]] = {}
    for phase, _, _, seconds, x, _ in outer:
        if x >= 0:
            column = by_x.setdefault(x, {})
            column[phase] = column.get(phase, 0.0) + seconds
    xs = sorted(by_x)
    size = ceil_div(len(xs), MAX_COLUMNS) if xs else 1
    phases = order_phases([span[0] for span in outer])
    runs = [xs[start : start + size] for start in range(0, len(xs), size)]
    return {
        "size": size,
        "x": [run[0] for run in runs],
        "phases": phases,
        "seconds": {
            phase: [round(sum(by_x[x].get(phase, 0.0) for x in run) / len(run), 4) for run in runs]
            for phase in phases
        },
    }


def overlap(story: Story) -> dict[str, Any] | None:
    """Return how much reward time each window hid, per step and in total. None without data."""
    return _by_step(story, "reward.window", ("rule_s", "rollout_s", "reference_s", "hidden_s"))


def roles(story: Story) -> dict[str, Any] | None:
    """Return how long collector and learner waited, per step and in total. None without data: the
    two took turns."""
    names = ("seconds", "collector_idle_s", "learner_idle_s", "synchronous_s")
    return _by_step(story, "step.roles", names)


def _by_step(story: Story, kind: str, names: Sequence[str]) -> dict[str, Any] | None:
    """Return these fields of the events of one kind: per step, thinned, and in total."""
    steps: list[dict[str, float]] = []
    for told in story.of_kind(kind):
        numbers = {name: as_number(told.row.get(name)) or 0.0 for name in names}
        step = told.row.get("step")
        numbers["x"] = (
            story.x(told.stage, float(step))
            if isinstance(step, int | float)
            else float(len(steps) + 1)
        )
        steps.append(numbers)
    if not steps:
        return None
    total = {name: round(sum(step[name] for step in steps), 4) for name in names}
    size = ceil_div(len(steps), MAX_COLUMNS)
    runs = [steps[start : start + size] for start in range(0, len(steps), size)]
    return {
        "total": total,
        "size": size,
        "x": [run[0]["x"] for run in runs],
        "steps": {
            name: [round(sum(s[name] for s in run) / len(run), 4) for run in runs] for name in names
        },
    }


def memory(story: Story) -> dict[str, Any] | None:
    """Return bytes by owner and tier at each phase boundary. None for a run without
    measurements."""
    rows = story.of_kind("memory")
    if not rows:
        return None
    notes, peak = [], measured_peak(rows, on_cpu=_is_on_cpu(story))
    workers = sorted({str(told.row["worker"]) for told in rows if "worker" in told.row})
    if workers:  # ranks do the same, and so do engines alone: one is drawn
        drawn = next((name for name in workers if name.startswith("worker-")), workers[0])
        rows = [told for told in rows if told.row.get("worker") == drawn]
        notes.append(
            f"Of {len(workers)} workers {drawn} is drawn; events.jsonl has what each one measured."
        )
    shown = choose_boundaries(rows, MAX_MEMORY_POINTS)
    if len(shown) < len(rows):
        notes.append(
            f"{len(shown):,} of {len(rows):,} boundaries are drawn: those of whole steps, evenly "
            "spread, with the peak "
            "of each tier among them."
        )
    owners = list(dict.fromkeys(owner for told in rows for owner in told.row.get("owners") or {}))
    return {
        "owners": sorted(owners, key=lambda owner: (owner.split(".")[0] != "engine", owner)),
        "phase": [str(told.row.get("phase", "")) for told in shown],
        "step": [told.row.get("step") for told in shown],
        "stage": [told.stage for told in shown],
        "t": [told.time_s for told in shown],
        "tiers": {
            tier: {owner: [owner_bytes(told, owner, tier) for told in shown] for owner in owners}
            for tier in ("device", "host", "disk")
        },
        "peak": peak,
        "whole": whole_device(shown, on_cpu=_is_on_cpu(story)),
        "notes": notes,
    }


def measured_peak(rows: Sequence[PlacedRow], *, on_cpu: bool) -> dict[str, Any] | None:
    """Return the peak of allocated memory over all workers, or None where it was not recorded. On a
    device it is the allocator's count within phases; on a CPU it is the peak of the whole
    process."""
    key = "host_peak_rss_bytes" if on_cpu else "device_peak_bytes"
    found = [(size, told) for told in rows if (size := as_number(told.row.get(key)))]
    if not found:
        return None
    size, told = max(found, key=lambda pair: pair[0])
    # a row has the peak of the phase that it leaves
    phase = "" if on_cpu else str(told.row.get("left") or "")
    return {"of": "process" if on_cpu else "device", "bytes": int(size), "phase": phase}


def whole_device(rows: Sequence[PlacedRow], *, on_cpu: bool) -> dict[str, Any] | None:
    """Return a caption with the capacity for components, and a chart line where it fits the scale.
    On a CPU the capacity is the budget."""
    used = [tier_bytes(told, "device") for told in rows]
    frees = [as_number(told.row.get("device_free_bytes")) for told in rows]
    totals = [None if free is None else free + held for free, held in zip(frees, used, strict=True)]
    most = max((total for total in totals if total is not None), default=0)
    if not most:
        return None
    readable = most <= MAX_WHOLE_OVER_PEAK * max(used)
    name = "the budget on this CPU" if on_cpu else "all that the device has"
    return {"bytes": most, "name": name, "line": totals if readable else None}


def _is_on_cpu(story: Story) -> bool:
    return any(
        str(told.row.get("device", "")).startswith("cpu") for told in story.of_kind("run.started")
    )


def owner_bytes(told: PlacedRow, owner: str, tier: str) -> int:
    return int(as_number(((told.row.get("owners") or {}).get(owner) or {}).get(tier)) or 0)


def choose_boundaries(rows: Sequence[PlacedRow], limit: int) -> list[PlacedRow]:
    """Return about `limit` rows: all of some steps, evenly spread, including the first peak of each
    tier."""
    if len(rows) <= limit:
        return list(rows)
    by_step: dict[tuple[str, Any], list[int]] = {}
    for at, told in enumerate(rows):
        by_step.setdefault((told.stage, told.row.get("step")), []).append(at)
    most = max(len(members) for members in by_step.values())
    chosen = set(spread(list(by_step), max(2, limit // most)))
    for tier in ("device", "host", "disk"):
        peak = max(rows, key=lambda told, tier=tier: tier_bytes(told, tier))
        chosen.add((peak.stage, peak.row.get("step")))
    kept = sorted(at for key, members in by_step.items() if key in chosen for at in members)
    return [rows[at] for at in (kept if len(kept) < len(rows) else spread(range(len(rows)), limit))]


def tier_bytes(told: PlacedRow, tier: str) -> int:
    return sum(owner_bytes(told, owner, tier) for owner in told.row.get("owners") or {})
