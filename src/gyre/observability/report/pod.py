"""Pod: each step of a run in a pod, by what its processes did. In: a Story. Out: a PodStep for each
step; the table and the drawing of one, ready for JSON. Pure.

Each process reports what it has done (`pod.activity`) and moved (`memory.move`, `memory`); a row's
time is when it ended. A process does one thing at a time, but for an engine's rollout, which may
go on during an update, and its start behind training. What a trainer rank does not fill while
engines roll out is its wait for them. A step is cut out of the run by its `step.done`; what is
outside of all steps is separate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal, get_args

from gyre.core.records import Activity
from gyre.observability.jsonl import as_number
from gyre.observability.overlap import Interval, intersect, length, union
from gyre.observability.report.pod_text import draw_step, table_lines
from gyre.observability.report.story import PlacedRow, Story

Role = Literal["trainer", "engine"]

TRAINER: tuple[Activity, ...] = (
    *("train", "score", "offload", "onload", "convert", "register", "wait_rollout"),
)
TRAINING: tuple[Activity, ...] = ("train", "score")  # what an engine's work may hide behind
# those that only a trainer rank reports by itself; memory rows are everyone's
TOLD_BY_RANKS = frozenset({"train", "score", "convert", "register"})
# what runs while its process does something else
BACKGROUND: frozenset[Activity] = frozenset({"rollout", "dummy_start"})
MOVES_NONE: frozenset[Activity] = frozenset({"train", "score", "wait_rollout", "rollout"})
ORDER: tuple[Activity, ...] = get_args(Activity)  # that of the drawing, and of the table


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePiece:
    """One activity of one process."""

    activity: Activity
    start_s: float
    end_s: float
    size_bytes: int | None = None

    @property
    def interval(self) -> Interval:
        return self.start_s, self.end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What one process did in a step, in order and without overlap."""

    worker: str
    role: Role
    pieces: tuple[LanePiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityTime:
    """One activity in one step: seconds of the process that took longest, bytes of all."""

    seconds: float
    worker: str  # that took longest
    size_bytes: int | None  # None: it moves none
    hidden_s: float  # of the seconds, those in which a trainer rank trained or scored


@dataclass(frozen=True, slots=True, kw_only=True)
class PodStep:
    stage: str
    step: int
    start_s: float  # on the run's axis of time
    seconds: float
    lanes: tuple[Lane, ...]  # trainers first
    activities: Mapping[Activity, ActivityTime]


def pod_steps(story: Story) -> tuple[PodStep, ...]:
    """Return a record for each finished step of a run in a pod; none for another run."""
    lanes = pod_lanes(story)
    if not lanes:
        return ()
    windows = step_windows(story)
    bounds = [(start_s, end_s) for _, _, start_s, end_s in windows]
    cut = [_cut(lane.pieces, bounds) for lane in lanes]
    rollouts = _cut(_rollout_spans(story, lanes), bounds)
    steps = []
    for at, (stage, step, start_s, end_s) in enumerate(windows):
        own = tuple(
            Lane(worker=lane.worker, role=lane.role, pieces=tuple(cut[number][at]))
            for number, lane in enumerate(lanes)
        )
        spans = [piece.interval for piece in rollouts[at]]
        own = tuple(_with_waits(lane, spans) if lane.role == "trainer" else lane for lane in own)
        steps.append(
            PodStep(
                stage=stage,
                step=step,
                start_s=start_s,
                seconds=end_s - start_s,
                lanes=own,
                activities=_times(own),
            )
        )
    return tuple(steps)


def pod_lanes(story: Story) -> list[Lane]:
    """Return what each process did over the whole run, trainers first."""
    rows: dict[str, list[PlacedRow]] = {}
    for told in story.of_kind("pod.activity", "memory.move", "memory"):
        rows.setdefault(str(told.row.get("worker", "")), []).append(told)
    told_by = {
        worker: {told.row.get("activity") for told in own if told.row["kind"] == "pod.activity"}
        for worker, own in rows.items()
    }
    lanes = []
    for worker, own in rows.items():
        if not told_by[worker]:
            continue
        role: Role = "trainer" if told_by[worker] & TOLD_BY_RANKS else "engine"
        lanes.append(Lane(worker=worker, role=role, pieces=tuple(_stack(_told_pieces(own, role)))))
    return sorted(lanes, key=lambda lane: (lane.role != "trainer", lane.worker))


def step_windows(story: Story) -> list[tuple[str, int, float, float]]:
    """Return stage, step, start and end of each finished step, in order and without overlap."""
    windows: list[tuple[str, int, float, float]] = []
    last_s = 0.0
    for told in story.of_kind("step.done"):
        seconds = as_number(told.row.get("seconds")) or 0.0
        start_s, end_s = max(last_s, told.time_s - seconds), told.time_s
        if end_s > start_s:
            step = int(as_number(told.row.get("step")) or 0)
            windows.append((told.stage, step, start_s, end_s))
            last_s = end_s
    return windows


def _told_pieces(rows: Sequence[PlacedRow], role: Role) -> list[LanePiece]:
    """Return a process's activities in the order in which they ended. A phase change's proof counts
    as a part of its last move."""
    pieces: list[LanePiece] = []
    moves: list[tuple[bool, float, int]] = []  # to the device?, seconds, bytes
    for told in rows:
        row, seconds = told.row, as_number(told.row.get("seconds")) or 0.0
        if row["kind"] == "pod.activity":
            if row.get("activity") in get_args(Activity):
                pieces.append(_piece(row["activity"], told, seconds, row.get("size_bytes")))
        elif row["kind"] == "memory.move":
            size = int(as_number(row.get("size_bytes")) or 0)
            if "device" in (row.get("source"), row.get("target")):
                moves.append((row.get("target") == "device", seconds, size))
        elif moves:
            proof_s = max(0.0, seconds - sum(move[1] for move in moves))
            for number, (is_in, move_s, size) in enumerate(moves):
                activity = _move_activity(role, is_in, str(row.get("phase")))
                whole_s = move_s + (proof_s if number == len(moves) - 1 else 0.0)
                pieces.append(_piece(activity, told, whole_s, size))
            moves = []
    return pieces


def _piece(activity: Activity, told: PlacedRow, seconds: float, size: Any) -> LanePiece:
    return LanePiece(
        activity=activity,
        start_s=told.time_s - seconds,
        end_s=told.time_s,
        size_bytes=size if isinstance(size, int) else None,
    )


def _move_activity(role: Role, is_in: bool, phase: str) -> Activity:
    if role == "trainer":
        return "onload" if is_in else "offload"
    if not is_in:
        return "park"
    return "wake" if phase == "handover" else "start"


def _stack(pieces: Sequence[LanePiece]) -> list[LanePiece]:
    """Lay pieces one after the other, by their ends: rows that were sent together have one time.
    What runs in the background keeps its place, and loses what another activity covers."""
    laid: list[LanePiece] = []
    next_s = float("inf")
    for piece in reversed([one for one in pieces if one.activity not in BACKGROUND]):
        end_s = min(piece.end_s, next_s)
        next_s = max(0.0, end_s - (piece.end_s - piece.start_s))
        laid.append(replace(piece, start_s=next_s, end_s=end_s))
    gaps, last_s = _gaps(union(one.interval for one in laid)), 0.0
    behind: list[LanePiece] = []
    for piece in pieces:
        if piece.activity in BACKGROUND:
            start_s, last_s = max(piece.start_s, last_s), max(piece.end_s, last_s)
            behind.append(replace(piece, start_s=start_s))
    laid += [part for parts in _cut(behind, gaps) for part in parts]
    return sorted(laid, key=lambda one: one.interval)


def _without(intervals: Iterable[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Return what is left of intervals outside of disjoint ordered ones."""
    return intersect(union(intervals), _gaps(taken))


def _gaps(taken: Sequence[Interval]) -> list[Interval]:
    bounds = [float("-inf"), *(edge for interval in taken for edge in interval), float("inf")]
    gaps = zip(bounds[::2], bounds[1::2], strict=True)
    return [one for one in gaps if one[1] > one[0]]


def _rollout_spans(story: Story, lanes: Sequence[Lane]) -> list[LanePiece]:
    """Return when rollouts ran: by the engines' word, and by the loop's, which gathers them."""
    spans = [
        piece.interval for lane in lanes for piece in lane.pieces if piece.activity == "rollout"
    ]
    for told in story.of_kind("phase.ended"):
        if told.row.get("phase") == "rollout":
            spans.append((told.time_s - (as_number(told.row.get("seconds")) or 0.0), told.time_s))
    return [
        LanePiece(activity="rollout", start_s=start_s, end_s=end_s)
        for start_s, end_s in union(spans)
    ]


def _cut(pieces: Sequence[LanePiece], windows: Sequence[Interval]) -> list[list[LanePiece]]:
    """Return, for each window, the parts of pieces in it. Bytes count where a piece ends."""
    found: list[list[LanePiece]] = [[] for _ in windows]
    starts = [start for start, _ in windows]
    for piece in pieces:
        at = max(0, bisect_right(starts, piece.start_s) - 1)
        while at < len(windows) and windows[at][0] < piece.end_s:
            start_s, end_s = max(piece.start_s, windows[at][0]), min(piece.end_s, windows[at][1])
            if end_s > start_s:
                ends_here = piece.end_s <= windows[at][1]
                size = piece.size_bytes if ends_here else None
                found[at].append(replace(piece, start_s=start_s, end_s=end_s, size_bytes=size))
            at += 1
    return found


def _with_waits(lane: Lane, rollouts: Sequence[Interval]) -> Lane:
    taken = union(piece.interval for piece in lane.pieces)
    waits = [
        LanePiece(activity="wait_rollout", start_s=start_s, end_s=end_s)
        for start_s, end_s in _without(rollouts, taken)
    ]
    pieces = sorted((*lane.pieces, *waits), key=lambda piece: piece.interval)
    return replace(lane, pieces=tuple(pieces))


def _times(lanes: Sequence[Lane]) -> dict[Activity, ActivityTime]:
    training = union(
        piece.interval
        for lane in lanes
        if lane.role == "trainer"
        for piece in lane.pieces
        if piece.activity in TRAINING
    )
    times: dict[Activity, ActivityTime] = {}
    for lane in lanes:
        for activity, own in _by_activity(lane.pieces).items():
            spans = union(piece.interval for piece in own)
            sizes = [piece.size_bytes for piece in own if piece.size_bytes is not None]
            here = ActivityTime(
                seconds=length(spans),
                worker=lane.worker,
                size_bytes=sum(sizes) if sizes else None,
                hidden_s=length(intersect(spans, training)),
            )
            times[activity] = _join(times[activity], here) if activity in times else here
    return times


def _by_activity(pieces: Iterable[LanePiece]) -> dict[Activity, list[LanePiece]]:
    found: dict[Activity, list[LanePiece]] = {}
    for piece in pieces:
        found.setdefault(piece.activity, []).append(piece)
    return found


def _join(one: ActivityTime, other: ActivityTime) -> ActivityTime:
    sizes = [time.size_bytes for time in (one, other) if time.size_bytes is not None]
    slowest = max(one, other, key=lambda time: time.seconds)
    return replace(slowest, size_bytes=sum(sizes) if sizes else None)


# The table and the drawing
# --------------------------------------------------------------------------------------------------


def pod_timeline(story: Story) -> dict[str, Any] | None:
    """Return the table by activity and one typical step. None for a run in no pod."""
    lanes = pod_lanes(story)
    if not lanes:
        return None
    steps = pod_steps(story)
    outside = _outside(lanes, [(step.start_s, step.start_s + step.seconds) for step in steps])
    rows = [_table_row(activity, steps, outside) for activity in ORDER]
    step, idle_s = typical_step(steps), _idle(steps)
    shown = None if step is None else _shown(step)
    return {
        "steps": len(steps),
        "rows": rows,
        "idle_s": idle_s,
        "step": shown,
        "table": table_lines(rows, len(steps), idle_s),
        "drawing": [] if shown is None else draw_step(shown),
    }


def _idle(steps: Sequence[PodStep]) -> dict[str, float]:
    """Return the median seconds of a step in which the process of a lane that does most does
    none of the activities."""
    found: dict[str, list[float]] = {}
    for step in steps:
        busy: dict[str, float] = {}
        for lane in step.lanes:
            own_s = length(piece.interval for piece in lane.pieces)
            busy[lane.role] = max(busy.get(lane.role, 0.0), own_s)
        for role, busy_s in busy.items():
            found.setdefault(role, []).append(step.seconds - busy_s)
    return {role: round(max(0.0, median(left_s)), 6) for role, left_s in found.items()}


def typical_step(steps: Sequence[PodStep]) -> PodStep | None:
    """Return the step of median length; a stage's first has more to do, and stands for none."""
    later = [one for at, one in enumerate(steps) if at > 0 and steps[at - 1].stage == one.stage]
    ordered = sorted(later or steps, key=lambda step: step.seconds)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def _outside(lanes: Sequence[Lane], windows: Sequence[Interval]) -> dict[Activity, float]:
    """Return seconds by activity outside of all steps, of the process that took longest."""
    most: dict[Activity, float] = {}
    for lane in lanes:
        for activity, own in _by_activity(lane.pieces).items():
            left_s = length(_without((piece.interval for piece in own), windows))
            most[activity] = max(most.get(activity, 0.0), left_s)
    return most


def _table_row(
    activity: Activity, steps: Sequence[PodStep], outside: Mapping[Activity, float]
) -> dict[str, Any]:
    found = [(step, step.activities[activity]) for step in steps if activity in step.activities]
    sizes = [time.size_bytes for _, time in found if time.size_bytes is not None]
    worst = max(found, key=lambda pair: pair[1].seconds, default=None)
    return {
        "activity": activity,
        "lane": "trainer" if activity in TRAINER else "engine",
        "steps": len(found),
        "median_s": round(median(time.seconds for _, time in found), 6) if found else None,
        "worst_s": None if worst is None else round(worst[1].seconds, 6),
        "worst_step": None if worst is None else worst[0].step,
        "worst_worker": None if worst is None else worst[1].worker,
        "bytes": None if activity in MOVES_NONE or not sizes else int(median(sizes)),
        "hidden_s": None
        if activity in TRAINER or not found
        else round(median(time.hidden_s for _, time in found), 6),
        "outside_s": round(outside.get(activity, 0.0), 6),
        "absent": "" if found else why_absent(activity, steps, outside),
    }


def why_absent(
    activity: Activity, steps: Sequence[PodStep], outside: Mapping[Activity, float]
) -> str:
    """Return why no step has this activity."""
    seen = {one for step in steps for one in step.activities}
    if not steps:
        return "no step is finished"
    if outside.get(activity):
        return "outside of steps only"
    match activity:
        case "offload" | "onload":
            return "what the trainers have stays on their devices"
        case "dummy_start":
            return "no engine was started"
        case "start":
            if seen & {"wake", "dummy_start"}:
                return "engines take all their memory at once, before the update"
            return "engines keep their memory"
        case "terminate" | "park" | "wake":
            others = {"terminate": "park", "park": "terminate", "wake": "dummy_start"}
            instead = others[activity].replace("_", " ")
            if others[activity] in seen:
                return f"engines {instead} instead"
            return "engines keep their processes" + (
                " and their memory" if not seen & {"park", "terminate"} else ""
            )
        case "wait_rollout":
            return "the trainers never waited for rollouts"
        case "score":
            return "the objective needs no pass of a model"
        case _:
            return "no process has told of it"


def _shown(step: PodStep) -> dict[str, Any]:
    """Return one step, by lane, with times from its start."""
    return {
        "stage": step.stage,
        "step": step.step,
        "seconds": round(step.seconds, 6),
        "lanes": [
            {
                "worker": lane.worker,
                "role": lane.role,
                "pieces": [
                    [
                        piece.activity,
                        round(piece.start_s - step.start_s, 6),
                        round(piece.end_s - step.start_s, 6),
                    ]
                    for piece in lane.pieces
                ],
            }
            for lane in step.lanes
        ],
    }
