"""The timeline of a pod: what the rows of its processes say is cut into steps and lanes, without overlap and
without loss."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.records import Activity
from gyre.observability.report.pod import ORDER, PodStep, pod_lanes, pod_steps, pod_timeline
from gyre.observability.report.pod_text import CODES, IDLE, draw_lane, pod_lines
from gyre.observability.report.story import Story, tell

Row = dict[str, Any]
RANK, ENGINE = "worker-0", "engine-0"


def activity(t: float, worker: str, name: str, seconds: float, size: int | None = None) -> Row:
    sized = {} if size is None else {"size_bytes": size}
    row = {"worker": worker, "activity": name, "seconds": seconds, **sized}
    return {"t": t, "kind": "pod.activity", **row}


def move(t: float, worker: str, way: str, seconds: float, size: int) -> Row:
    source, target = ("device", "host") if way == "out" else ("host", "device")
    row = {"worker": worker, "source": source, "target": target}
    return {"t": t, "kind": "memory.move", **row, "size_bytes": size, "seconds": seconds}


def proof(t: float, worker: str, phase: str, seconds: float) -> Row:
    return {"t": t, "kind": "memory", "worker": worker, "phase": phase, "seconds": seconds}


def done(t: float, step: int, seconds: float) -> Row:
    return {"t": t, "kind": "step.done", "stage": "main", "step": step, "seconds": seconds}


def story(*rows: Row) -> Story:
    first = {"t": 0.0, "kind": "run.started"}
    numbered = [{"seq": at, "attempt": 1, **row} for at, row in enumerate((first, *rows), 1)]
    return tell(numbered)


def colocated(start: float, step: int) -> list[Row]:
    """Ten seconds of a step on shared devices, with a rank and an engine that parks."""
    at = start
    return [
        move(at + 1, ENGINE, "in", 0.5, 700),
        proof(at + 1, ENGINE, "rollout", 1.0),
        activity(at + 4, ENGINE, "rollout", 3.0),
        {
            "t": at + 4,
            "kind": "phase.ended",
            "phase": "rollout",
            "depth": 0,
            "seconds": 3.0,
            "step": step,
        },
        move(at + 4.5, ENGINE, "out", 0.5, 900),
        proof(at + 4.5, ENGINE, "score", 0.5),
        # rows of one phase change come together
        move(at + 5.5, RANK, "out", 0.25, 10),
        move(at + 5.5, RANK, "in", 0.5, 300),
        proof(at + 5.5, RANK, "train", 1.0),
        activity(at + 8, RANK, "train", 2.5),
        move(at + 8.5, RANK, "out", 0.5, 290),
        proof(at + 8.5, RANK, "handover", 0.5),
        move(at + 8.7, ENGINE, "in", 0.2, 200),
        proof(at + 8.7, ENGINE, "handover", 0.2),
        activity(at + 8.8, RANK, "convert", 0.1, 0),
        activity(at + 9.2, RANK, "register", 0.4, 200),
        activity(at + 9.5, ENGINE, "update", 0.2),
        activity(at + 10, ENGINE, "update", 0.4, 200),
        done(at + 10, step, 10.0),
    ]


def times(step: PodStep) -> dict[str, Any]:
    return {name: pytest.approx(time.seconds) for name, time in step.activities.items()}


def test_a_step_on_shared_devices_is_tiled_by_its_activities() -> None:
    (first, second) = pod_steps(story(*colocated(5.0, 1), *colocated(20.0, 2)))
    assert (first.step, second.step, first.seconds) == (1, 2, 10.0)
    expected = {
        "start": 1.0,
        "rollout": 3.0,
        "park": 0.5,
        "wake": 0.2,
        "update": 0.6,
        "wait_rollout": 3.0,
        "offload": 0.75,
        "onload": 0.75,
        "train": 2.5,
        "convert": 0.1,
        "register": 0.4,
    }
    assert times(first) == times(second) == expected
    sizes = {name: time.size_bytes for name, time in first.activities.items() if time.size_bytes}
    assert sizes == {
        "start": 700,
        "park": 900,
        "wake": 200,
        "update": 200,
        "offload": 300,
        "onload": 300,
        "register": 200,
    }
    trainer, engine = first.lanes
    assert [piece.activity for piece in trainer.pieces] == [
        *("wait_rollout", "offload", "onload", "train", "offload", "convert", "register")
    ]
    assert [piece.activity for piece in engine.pieces] == [
        *("start", "rollout", "park", "wake", "update", "update")
    ]


def test_what_a_step_has_not_is_said_by_name() -> None:
    data = pod_timeline(story(*colocated(5.0, 1)))
    assert data is not None and {row["activity"] for row in data["rows"]} == set(get_args(Activity))
    absent = {row["activity"]: row["absent"] for row in data["rows"] if row["absent"]}
    assert absent == {
        "dummy_start": "no engine was started",
        "terminate": "engines park instead",
        "score": "the objective needs no pass of a model",
    }
    table = "\n".join(data["table"])
    assert "X  terminate     engine   -      engines park instead" in table
    assert "0 ms  " not in table.partition("terminate")[2].partition("\n")[0]


def test_an_engine_that_is_terminated_starts_behind_training() -> None:
    """Its start goes on while the rank trains, and what sticks out is not hidden."""
    rows = [
        activity(2, ENGINE, "dummy_start", 2.0, 500),
        activity(7, RANK, "train", 4.0),
        activity(8, ENGINE, "dummy_start", 3.0, 800),
        activity(9.5, ENGINE, "update", 1.0, 200),
        activity(12, ENGINE, "rollout", 2.0),
        activity(12.5, ENGINE, "terminate", 0.5, 800),
        done(13, 1, 10.0),
    ]
    (step,) = pod_steps(story(*rows))
    start = step.activities["dummy_start"]
    assert (start.seconds, start.hidden_s) == (3.0, 2.0) and start.size_bytes == 800
    data = pod_timeline(story(*rows))
    assert data is not None
    told = {row["activity"]: row for row in data["rows"]}
    assert told["dummy_start"]["outside_s"] == 2.0 and told["dummy_start"]["hidden_s"] == 2.0
    assert told["park"]["absent"] == "engines terminate instead"
    assert told["start"]["absent"].startswith("engines take all their memory at once")
    assert told["offload"]["absent"] == "what the trainers have stays on their devices"
    assert told["terminate"]["bytes"] == 800


def test_a_start_behind_training_and_its_end_are_one() -> None:
    """Until it needs memory it runs in the background; the rest may have begun before that ended."""
    rows = [
        activity(6, RANK, "train", 5.0),
        activity(7, ENGINE, "dummy_start", 6.0),
        activity(9, ENGINE, "dummy_start", 2.5, 800),
        done(10, 1, 10.0),
    ]
    (step,) = pod_steps(story(*rows))
    start = step.activities["dummy_start"]
    assert (start.seconds, start.hidden_s, start.size_bytes) == (8.0, 5.0, 800)


def test_rollouts_beside_training_are_hidden_and_cut_at_the_end_of_a_step() -> None:
    """Asynchronous steps: one rollout covers two of them, and an update falls into it."""
    rows = [
        activity(4, RANK, "train", 4.0),
        done(5, 1, 5.0),
        activity(7, ENGINE, "update", 1.0, 200),
        activity(8, ENGINE, "rollout", 6.0),
        activity(9, RANK, "train", 1.0),
        done(10, 2, 5.0),
    ]
    first, second = pod_steps(story(*rows))
    assert times(first) == {"train": 4.0, "rollout": 3.0, "wait_rollout": 1.0}
    assert first.activities["rollout"].hidden_s == 2.0
    # the update's second is not the rollout's; the rank waits through both
    assert times(second) == {"train": 1.0, "rollout": 2.0, "update": 1.0, "wait_rollout": 2.0}
    assert second.activities["rollout"].hidden_s == 0.0


def test_the_slowest_process_and_the_bytes_of_all_count() -> None:
    rows = [
        activity(3, "worker-0", "register", 1.0, 100),
        activity(4, "worker-1", "register", 2.0, 150),
        done(5, 1, 5.0),
    ]
    (step,) = pod_steps(story(*rows))
    register = step.activities["register"]
    assert (register.seconds, register.worker, register.size_bytes) == (2.0, "worker-1", 250)


def test_a_run_in_no_pod_has_no_timeline() -> None:
    assert pod_timeline(story(proof(1, RANK, "train", 0.5), done(2, 1, 1.0))) is None
    unfinished = pod_timeline(story(activity(1, RANK, "train", 1.0)))
    assert unfinished is not None and unfinished["step"] is None
    assert all(row["absent"] == "no step is finished" for row in unfinished["rows"])


def test_the_drawing_has_two_lanes_of_the_typical_step() -> None:
    rows = [*colocated(5.0, 1), *colocated(20.0, 2), *colocated(40.0, 3)]
    data = pod_timeline(story(*rows))
    assert data is not None
    title, trainer, engine, legend = data["drawing"]
    assert title == "A typical step: step 2 of main, 10 s"
    assert trainer.startswith("worker-0  ") and engine.startswith("engine-0  ")
    lane = trainer.removeprefix("worker-0  ")
    assert lane.index("w") < lane.index("F") < lane.index("O") < lane.index("T") < lane.index("G")
    # 3 s of 10 s
    assert lane.count("w") == pytest.approx(72 * 0.3, abs=1)
    assert "T train" in legend and "P park" in legend
    assert pod_lines(data)[-1] == legend


steps_of_rows = st.lists(
    st.tuples(
        st.sampled_from([RANK, "worker-1", ENGINE, "engine-1"]),
        st.sampled_from(["train", "register", "update", "rollout", "in", "out", "wait"]),
        st.floats(0.0, 3.0),
        st.floats(0.0, 2.0),
        st.integers(0, 1000),
    ),
    max_size=40,
)


def drawn_rows(picks: list[tuple[str, str, float, float, int]]) -> list[Row]:
    """Rows in order of time, with a step's end now and then. Seconds may be longer than there was time."""
    rows, t, last, step = [activity(0.5, RANK, "train", 0.1)], 1.0, 0.5, 0
    for worker, what, seconds, pause, size in picks:
        t += pause
        if what == "wait":
            step += 1
            rows.append(done(t, step, t - last))
            last = t
        elif what in ("in", "out"):
            rows += [
                move(t, worker, what, seconds, size),
                proof(t, worker, "train", seconds * 1.5),
            ]
        elif what in ("train", "register") and worker.startswith("worker"):
            rows.append(activity(t, worker, what, seconds, size))
        elif worker.startswith("engine"):
            rows.append(activity(t, worker, what.replace("train", "update"), seconds, size))
    return rows


@settings(max_examples=200, deadline=None)
@given(steps_of_rows)
def test_lanes_do_not_overlap_and_nothing_is_lost(picks: list[Any]) -> None:
    told = story(*drawn_rows(picks))
    steps, lanes = pod_steps(told), pod_lanes(told)
    for step in steps:
        for lane in step.lanes:
            edges = [edge for piece in lane.pieces for edge in piece.interval]
            assert edges == sorted(edges)
            assert all(-1e-9 <= edge - step.start_s <= step.seconds + 1e-9 for edge in edges)
        for time in step.activities.values():
            assert 0.0 <= time.hidden_s <= time.seconds + 1e-9 <= step.seconds + 2e-9
    data = pod_timeline(told)
    assert data is not None
    # seconds in steps and outside of them are those that the process told of
    for number, lane in enumerate(lanes):
        for name in {piece.activity for piece in lane.pieces}:
            whole_s = sum(p.end_s - p.start_s for p in lane.pieces if p.activity == name)
            inside_s = sum(
                piece.end_s - piece.start_s
                for step in steps
                for piece in step.lanes[number].pieces
                if piece.activity == name
            )
            assert inside_s <= whole_s + 1e-6
            (row,) = [row for row in data["rows"] if row["activity"] == name]
            assert whole_s - inside_s <= row["outside_s"] + 1e-4


@settings(max_examples=200)
@given(
    pieces=st.lists(
        st.tuples(st.sampled_from(ORDER), st.floats(0.001, 1.0), st.floats(0.0, 1.0)),
        max_size=8,
    ),
    width=st.integers(8, 90),
)
def test_a_lane_shows_all_that_is_in_it(pieces: list[Any], width: int) -> None:
    """However short it is, an activity has a cell as long as there are enough."""
    laid, at = [], 0.0
    for name, seconds, pause in pieces:
        laid.append((name, at + pause, at + pause + seconds))
        at += pause + seconds
    drawn = draw_lane(laid, at or 1.0, width)
    assert len(drawn) == width
    assert set(drawn) - {IDLE} == {CODES[name] for name, _, _ in laid}


def test_each_activity_has_a_letter_of_its_own() -> None:
    assert set(CODES) == set(ORDER) == set(get_args(Activity))
    assert len(set(CODES.values())) == len(CODES)
