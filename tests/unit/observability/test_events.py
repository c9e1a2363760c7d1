"""The event log: kills lose at most the torn last line, and a resume fences exactly what it lives
through again."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.errors import SnapshotError
from gyre.observability.events import EventLog, count_events, next_attempt, read_events
from gyre.observability.jsonl import as_number
from gyre.observability.lineage import trace_lineage
from gyre.observability.samples import SampleLog
from run_logs import read_samples


def open_log(folder: Path, attempt: int | None = None) -> EventLog:
    path = folder / "events.jsonl"
    return EventLog(
        path,
        attempt=next_attempt(path) if attempt is None else attempt,
        clock=lambda: 100.0,
        check_schema=False,
    )


def test_rows_carry_seq_time_attempt_and_kind(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.emit("step.done", step=3, metrics={"loss": 0.5})
    log.emit("eval.done", accuracy=np.float32(0.25), ids=np.array([1, 2]), path=tmp_path)
    first, second = read_events(tmp_path / "events.jsonl")
    assert first == {
        "seq": 1,
        "t": 100.0,
        "attempt": 1,
        "kind": "step.done",
        "step": 3,
        "metrics": {"loss": 0.5},
    }
    assert (second["accuracy"], second["ids"], second["path"]) == (0.25, [1, 2], str(tmp_path))


def test_fields_cannot_hide_the_rows_own(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.emit("retry.sandbox", attempt=7, seq=9, t=1.0, kind="x")
    row = read_events(tmp_path / "events.jsonl").rows[0]
    assert (row["attempt"], row["seq"], row["kind"]) == (1, 1, "retry.sandbox")
    assert (row["attempt_"], row["seq_"], row["t_"], row["kind_"]) == (7, 9, 1.0, "x")


def test_numbers_that_are_not_finite_stay_strict_json_and_come_back(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.emit("step.done", metrics={"a": math.nan, "b": math.inf, "c": [-math.inf, 1.0]})
    text = (tmp_path / "events.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert math.isnan(as_number(row["metrics"]["a"]) or 0)
    assert [as_number(row["metrics"]["b"]), as_number(row["metrics"]["c"][0])] == [
        math.inf,
        -math.inf,
    ]
    assert [as_number(value) for value in ("NaN!", True, None, "3")] == [None] * 4


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text(max_size=8), min_size=1, max_size=4), data=st.data())
def test_any_cut_loses_only_the_line_that_it_cut(texts: list[str], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "events.jsonl"
        log = open_log(Path(name))
        ends = []
        for text in texts:
            log.emit("note", text=text)
            ends.append(path.stat().st_size)
        log.close()
        size = data.draw(st.integers(0, ends[-1]))
        os.truncate(path, size)
        # the newline may be lost
        whole = [text for text, end in zip(texts, ends, strict=True) if size >= end - 1]
        rows = read_events(path)
        assert [row["text"] for row in rows] == whole
        cut = size > 0 and all(size not in (end, end - 1) for end in ends)
        assert rows.num_torn == int(cut)
        again = open_log(Path(name))
        again.emit("note", text="after")
        rows = read_events(path)
        assert [row["text"] for row in rows] == [*whole, "after"]
        assert rows.num_torn == int(cut)


ACTION = st.one_of(
    st.just("emit"),
    st.just("sample"),
    st.just("snapshot"),
    st.tuples(st.just("kill"), st.booleans(), st.integers(0, 20)),
)


@settings(max_examples=60, deadline=None)
@given(actions=st.lists(ACTION, max_size=40))
def test_resumes_leave_one_story(actions: list) -> None:
    """Against a model that forgets, at each resume, all that came after the snapshot."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = open_log(folder)
        samples = SampleLog(folder / "samples.jsonl", log)
        log.emit("note", id=-1)
        story, told = [-1], []  # live ids of events and of samples
        saved: list[tuple[dict, list, list]] = []
        num_torn = 0
        for number, action in enumerate(actions):
            if action == "emit":
                log.emit("note", id=number)
                story.append(number)
            elif action == "sample":
                samples.write({"id": number})
                told.append(number)
            elif action == "snapshot":
                saved.append((log.position(), list(story), list(told)))
            else:
                _, torn, which = action
                if torn:
                    with (folder / "events.jsonl").open("ab") as file:
                        file.write(b'{"seq":5,"attempt":1,"kind":"no')
                    num_torn += 1
                log.close()
                samples.close()
                log = open_log(folder)
                samples = SampleLog(folder / "samples.jsonl", log)
                if saved:
                    position, story, told = saved[which % len(saved)]
                    # Snapshots of a story that is no more are gone too.
                    saved = [entry for entry in saved if entry[1] == story[: len(entry[1])]]
                    saved = [entry for entry in saved if entry[2] == told[: len(entry[2])]]
                    story, told = list(story), list(told)
                    log.fence(position["attempt"], position["seq"], id="fence")
                else:
                    story, told = [], []
                    log.fence(None, id="fence")
                story.append("fence")
        rows = read_events(folder / "events.jsonl")
        assert [row["id"] for row in rows] == story
        assert [row["id"] for row in read_samples(folder / "samples.jsonl", rows.lineage)] == told
        assert rows.num_torn == num_torn


def test_an_attempt_without_a_fence_goes_on_after_all(tmp_path: Path) -> None:
    open_log(tmp_path).emit("run.done")
    open_log(tmp_path).emit("eval.done")
    rows = read_events(tmp_path / "events.jsonl")
    assert [row["kind"] for row in rows] == ["run.done", "eval.done"]
    assert (rows.lineage.num_attempts, rows.num_dead) == (2, 0)


def test_attempts_that_led_nowhere_are_dead() -> None:
    rows = [
        {"attempt": 1, "seq": 1, "kind": "a"},
        {
            "attempt": 2,
            "seq": 1,
            "kind": "attempt.started",
            "resumed_from": {"attempt": 1, "seq": 1},
        },
        {
            "attempt": 3,
            "seq": 1,
            "kind": "attempt.started",
            "resumed_from": {"attempt": 1, "seq": 1},
        },
    ]
    lineage = trace_lineage(rows)
    assert [lineage.is_live(row) for row in rows] == [True, False, True]


def test_an_attempt_number_is_used_once(tmp_path: Path) -> None:
    open_log(tmp_path).emit("run.started")
    assert next_attempt(tmp_path / "events.jsonl") == 2
    with pytest.raises(AssertionError, match="next_attempt"):
        open_log(tmp_path, attempt=1)


def test_kill_9_loses_nothing_that_emit_returned_from(tmp_path: Path) -> None:
    program = (
        "import sys; from gyre.observability.events import EventLog\n"
        f"log = EventLog({str(tmp_path / 'events.jsonl')!r}, attempt=1, check_schema=False)\n"
        "for n in range(10**9):\n    log.emit('note', n=n); print(n, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = 0
    while last < 50:
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    seen = [int(line) for line in process.stdout.read().splitlines()]
    process.wait()
    rows = read_events(tmp_path / "events.jsonl")
    assert [row["n"] for row in rows] == list(range(len(rows)))
    assert len(rows) > max([last, *seen])
    assert rows.num_torn <= 1


def test_threads_share_one_count(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    threads = [
        threading.Thread(target=lambda: [log.emit("note") for _ in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row["seq"] for row in read_events(tmp_path / "events.jsonl")] == list(range(1, 801))


def test_a_listener_that_fails_is_dropped_and_counted(tmp_path: Path) -> None:
    log, heard = open_log(tmp_path), []

    def broken(row: object) -> None:
        raise ValueError("no screen")

    log.subscribe(broken)
    log.subscribe(heard.append)
    log.emit("step.done")
    log.emit("step.done")
    rows = read_events(tmp_path / "events.jsonl")
    assert [row["kind"] for row in rows] == ["step.done", "warn.listener_failed", "step.done"]
    assert "no screen" in rows.rows[1]["error"]
    assert count_events(rows) == {"warn.listener_failed": 1}
    assert len(heard) == 3


def find_open(path: Path) -> int:
    """The descriptor by which this process has a file open."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the listing itself
            if link.readlink() == path.resolve():
                return int(link.name)
    raise AssertionError(f"{path} is not open")


def test_a_full_disk_is_the_users_to_mend_and_the_file_stays_whole(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.emit("note", n=1)
    fd = find_open(tmp_path / "events.jsonl")
    kept, full = os.dup(fd), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, fd)
    with pytest.raises(SnapshotError, match="No space left") as caught:
        log.emit("note", n=2)
    assert "--resume" in caught.value.hint
    os.dup2(kept, fd)  # somebody made room
    log.emit("note", n=3)
    assert [row["n"] for row in read_events(tmp_path / "events.jsonl")] == [1, 3]
