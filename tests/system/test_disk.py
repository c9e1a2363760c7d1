"""Disks that fill up and bytes that flip: a clear error, the snapshot before it whole, and going on
afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from system_runs import Answer, Fault, Story, events_of, gyre, read_story, write_config

from gyre.observability.events import EventLog
from gyre.trainer.checkpoint.store import find_faults

pytestmark = pytest.mark.slow

EVERY_STEP = {"snapshot.every_steps": 1}
AFTER_STEP_2 = Fault(point="event", match="phase.started rollout", number=3)  # of the main stage


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("whole")
    answer = gyre("train", write_config(folder, EVERY_STEP), "--plain", folder=folder)
    assert answer.code == 0, answer.err
    return read_story(folder / "runs" / "tiny")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    try:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", mount], capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if made.returncode:
        pytest.skip(f"cannot mount a small file system here: {made.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def snapshots_of(run: Path) -> list[Path]:
    return sorted((run / "snapshots" / "main").glob("step-*"))


def begin(folder: Path) -> Path:
    """A run that was killed with snapshots of steps 1 and 2 on disk."""
    answer = gyre(
        "train", write_config(folder, EVERY_STEP), "--plain", folder=folder, fault=AFTER_STEP_2
    )
    assert answer.code == -9, answer.err
    run = folder / "runs" / "tiny"
    assert [path.name for path in snapshots_of(run)] == ["step-00000001", "step-00000002"]
    return run


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begin(tmp_path_factory.mktemp("killed"))


@pytest.fixture
def run(tmp_path: Path, killed: Path) -> Path:
    """A copy of such a run."""
    return shutil.copytree(killed, tmp_path / "tiny")


def go_on(run: Path, folder: Path, *argv: str, file_bytes: int = 0) -> Answer:
    return gyre("train", "--resume", run, "--plain", *argv, folder=folder, file_bytes=file_bytes)


def check_refusal(answer: Answer, run: Path) -> None:
    assert answer.code == 2, answer.err
    assert not answer.left_behind
    assert "Traceback" not in answer.err, answer.err
    error = answer.json["error"]
    assert error["kind"] == "snapshot"
    assert "free space" in error["hint"]
    assert [path.name for path in snapshots_of(run)] == ["step-00000001", "step-00000002"]
    assert all(find_faults(path) == [] for path in snapshots_of(run))
    assert not list(run.rglob("writing-*"))


def test_disk_fills_during_a_snapshot(small_disk: Path, whole: Story) -> None:
    run = begin(small_disk)
    filler = small_disk / "filler"
    state = os.statvfs(small_disk)
    filler.write_bytes(b"\0" * (state.f_bavail * state.f_frsize - 120_000))
    answer = go_on(run, small_disk, "--json")
    check_refusal(answer, run)
    assert "snapshot of step 3 could not be written" in answer.err and "No space left" in answer.err
    filler.unlink()
    again = go_on(run, small_disk)
    assert again.code == 0, again.err
    assert read_story(run) == whole


def test_disk_is_full_to_the_last_byte(small_disk: Path, whole: Story) -> None:
    """Not even an event can be written any more."""
    run = begin(small_disk)
    filler = small_disk / "filler"
    state = os.statvfs(small_disk)
    filler.write_bytes(b"\0" * (state.f_bavail * state.f_frsize))
    answer = go_on(run, small_disk, "--json")
    filler.unlink()
    check_refusal(answer, run)
    again = go_on(run, small_disk)
    assert again.code == 0, again.err
    assert read_story(run) == whole


def test_disk_fills_during_the_export(small_disk: Path, whole: Story) -> None:
    config = write_config(small_disk, EVERY_STEP)
    at_export = Fault(point="event", match="phase.started export")
    assert gyre("train", config, "--plain", folder=small_disk, fault=at_export).code == -9
    run, filler, state = small_disk / "runs" / "tiny", small_disk / "filler", os.statvfs(small_disk)
    filler.write_bytes(b"\0" * (state.f_bavail * state.f_frsize - 60_000))
    answer = go_on(run, small_disk, "--json")
    filler.unlink()
    assert answer.code == 2, answer.err
    assert "Traceback" not in answer.err, answer.err
    assert answer.json["error"]["kind"] == "snapshot" and "free" in answer.json["error"]["hint"]
    assert not (run / "export").exists() and not list(run.glob(".export*")), "whole or not there"
    again = go_on(run, small_disk)
    assert again.code == 0, again.err
    assert read_story(run) == whole


def test_a_file_may_grow_no_further(tmp_path: Path, run: Path, whole: Story) -> None:
    answer = go_on(run, tmp_path, "--json", file_bytes=200_000)
    check_refusal(answer, run)
    assert "File too large" in answer.err
    again = go_on(run, tmp_path)
    assert again.code == 0, again.err
    assert read_story(run) == whole


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name",
    [
        "rank-00000.safetensors",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("state.json", "blobs/in_flight.msgpack", "manifest.json")
        ),
    ],
)
def test_a_damaged_snapshot_is_passed_over(
    tmp_path: Path, run: Path, whole: Story, name: str
) -> None:
    flip_a_byte(snapshots_of(run)[-1] / name)
    answer = go_on(run, tmp_path)
    assert answer.code == 0, answer.err
    skipped = events_of(run, "snapshot.skipped")
    assert [row["path"] for row in skipped] == ["step-00000002"] and name.split("/")[0] in skipped[
        0
    ]["reason"]
    assert read_story(run) == whole


def test_without_a_whole_snapshot_it_goes_back_to_the_stage_before(
    tmp_path: Path, run: Path, whole: Story
) -> None:
    for snapshot in snapshots_of(run):
        (snapshot / "state.json").unlink()
    answer = go_on(run, tmp_path)
    assert answer.code == 0, answer.err
    assert len(events_of(run, "snapshot.skipped")) == 2
    assert read_story(run) == whole


def test_without_any_whole_snapshot_the_run_says_what_to_do(tmp_path: Path, run: Path) -> None:
    for snapshot in run.glob("snapshots/*/step-*"):
        flip_a_byte(snapshot / "rank-00000.safetensors")
    answer = go_on(run, tmp_path, "--json")
    assert answer.code == 2, answer.err
    error = answer.json["error"]
    assert (
        error["kind"] == "snapshot"
        and "snapshots" in error["message"]
        and "is whole" in error["message"]
    )
    assert (
        "rank-00000.safetensors, actor." in error["message"]
        and "put the damaged files back" in error["hint"]
    )


def old_report(folder: Path) -> Path:
    """A run folder with a report from before."""
    (folder / "runs" / "old").mkdir(parents=True)
    run = folder / "runs" / "old"
    EventLog(run / "events.jsonl", attempt=1, check_schema=False).emit(
        "run.started", name="old", stages=[]
    )
    (run / "report.html").write_text("as it was", encoding="utf-8")
    return run


def check_report_refusal(answer: Answer, run: Path, reason: str) -> None:
    assert answer.code == 2, answer.err
    assert "Traceback" not in answer.err, answer.err
    assert f"cannot write {run / 'report.html'}: {reason}" in answer.err
    assert "hint: free space there" in answer.err and f"gyre report {run}" in answer.err
    assert answer.json["error"]["kind"] == "input"
    assert (run / "report.html").read_text(encoding="utf-8") == "as it was"
    assert sorted(path.name for path in run.iterdir() if path.name != "fill") == [
        "events.jsonl",
        "report.html",
    ]


def test_a_report_that_a_disk_has_no_room_for(small_disk: Path, tmp_path: Path) -> None:
    run = old_report(small_disk)
    with (run / "fill").open("wb") as fill:
        size = os.statvfs(run).f_bavail * os.statvfs(run).f_frsize
        fill.write(bytes(size - 8192))
    check_report_refusal(
        gyre("report", run, "--json", folder=tmp_path), run, "No space left on device"
    )


def test_a_report_past_the_largest_file(tmp_path: Path) -> None:
    run = old_report(tmp_path)
    answer = gyre("report", run, "--json", folder=tmp_path, file_bytes=16_384)
    check_report_refusal(answer, run, "File too large")
