"""Ctrl-C at any time: exit 130, one sentence that says how to go on, nothing left running, and
going on works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from system_runs import (
    Command,
    Fault,
    Story,
    events_of,
    gyre,
    processes_with,
    read_story,
    write_config,
)

pytestmark = pytest.mark.slow

MOMENTS = {
    "at the start": Fault(point="event", match="run.started", action="interrupt"),
    "cold start": Fault(point="event", match="phase.started train", number=2, action="interrupt"),
    "rollout": Fault(
        point="event", match="phase.started rollout", number=3, action="interrupt_group"
    ),
    "score": Fault(point="event", match="phase.started score", number=1, action="interrupt"),
    "train": Fault(point="event", match="phase.started train", number=7, action="interrupt_group"),
    "handover": Fault(point="event", match="engine.committed", number=2, action="interrupt"),
    "evaluate": Fault(
        point="event", match="phase.started evaluate", number=3, action="interrupt_group"
    ),
    "snapshot": Fault(point="fsync", number=11, action="interrupt"),
    "stages": Fault(point="event", match="stage.done", number=1, action="interrupt"),
    "export": Fault(point="event", match="phase.started export", number=1, action="interrupt"),
}
QUICK = ("rollout",)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("whole")
    answer = gyre("train", write_config(folder), "--plain", folder=folder)
    assert answer.code == 0, answer.err
    return read_story(folder / "runs" / "tiny")


@pytest.mark.parametrize("moment", QUICK)
def test_stops_and_goes_on(tmp_path: Path, whole: Story, moment: str) -> None:
    stop_and_go_on(tmp_path, whole, moment)


@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment not in QUICK])
def test_stops_and_goes_on_elsewhere(tmp_path: Path, whole: Story, moment: str) -> None:
    stop_and_go_on(tmp_path, whole, moment)


def stop_and_go_on(folder: Path, whole: Story, moment: str) -> None:
    stopped = gyre(
        "train", write_config(folder), "--plain", "--json", folder=folder, fault=MOMENTS[moment]
    )
    run = folder / "runs" / "tiny"
    assert stopped.code == 130, stopped.err
    assert not stopped.left_behind
    assert f"gyre train --resume {run}" in stopped.err
    assert "Traceback" not in stopped.err, stopped.err
    error = stopped.json["error"]
    assert error["kind"] == "stopped" and str(run) in error["hint"]
    assert not list(run.rglob("writing-*")), "a snapshot that was being written is gone"
    resumed = gyre("train", "--resume", run, "--plain", folder=folder)
    assert resumed.code == 0, resumed.err
    assert not resumed.left_behind
    assert read_story(run) == whole


@pytest.mark.parametrize(
    ("action", "code", "name"),
    [("terminate", 143, "SIGTERM"), pytest.param("hang_up", 129, "SIGHUP", marks=pytest.mark.slow)],
)
def test_other_signals_save_too(
    tmp_path: Path, whole: Story, action: Any, code: int, name: str
) -> None:
    """The step in flight ends and is saved, although no snapshot is due after it."""
    fault = Fault(point="event", match="phase.started rollout", number=3, action=action)
    stopped = gyre("train", write_config(tmp_path), "--plain", folder=tmp_path, fault=fault)
    run = tmp_path / "runs" / "tiny"
    assert (
        stopped.code == code and f"stopped by {name} after step 3 of stage main" in stopped.err
    ), stopped.err
    assert f"gyre train --resume {run}" in stopped.err and not stopped.left_behind
    assert (
        sorted(path.name for path in (run / "snapshots" / "main").iterdir())[-1] == "step-00000003"
    )
    resumed = gyre("train", "--resume", run, "--plain", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert read_story(run) == whole
    assert not events_of(run, "warn.steps_lost")


def test_past_its_deadline_a_stop_saves_the_rollouts(tmp_path: Path) -> None:
    sets = {
        "run.stop_deadline_s": 0.0,
        "rollout.max_tokens": 64,
        "rollout.ignore_eos": True,
        "cold_start": None,
    }
    fault = Fault(point="event", match="phase.started rollout", number=3, action="interrupt")
    stopped = gyre("train", write_config(tmp_path, sets), "--plain", folder=tmp_path, fault=fault)
    run = tmp_path / "runs" / "tiny"
    assert stopped.code == 130 and "after step 2 of stage main; 4 groups" in stopped.err, (
        stopped.err
    )
    (broken_off,) = events_of(run, "step.broken_off")
    assert (broken_off["step"], broken_off["groups"]) == (3, 4)
    resumed = gyre("train", "--resume", run, "--plain", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert [step["step"] for step in read_story(run).steps] == [1, 2, 3, 4, 5]
    assert not events_of(run, "warn.steps_lost")


def test_what_cannot_be_ended_is_bounded(tmp_path: Path, whole: Story) -> None:
    """A process that is still at it ends all the same; what no snapshot has is done again, and
    counted."""
    # step 4 of main
    fault = Fault(point="event", match="phase.started train", number=8, action="interrupt_busy")
    config = write_config(tmp_path, {"run.stop_deadline_s": 0.2})
    stopped = gyre("train", config, "--plain", "--json", folder=tmp_path, fault=fault)
    assert stopped.code == 130 and "run.stop_deadline_s" in stopped.err, stopped.err
    assert (
        stopped.json["error"]["kind"] == "stopped" and "--resume" in stopped.json["error"]["hint"]
    )
    assert not stopped.left_behind
    run = tmp_path / "runs" / "tiny"
    resumed = gyre("train", "--resume", run, "--plain", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert [row["count"] for row in events_of(run, "warn.steps_lost")] == [1]
    assert read_story(run) == whole


def test_two_signals_at_once(tmp_path: Path) -> None:
    """A second Ctrl-C while the first is being obeyed still ends everything."""
    command = Command(
        "train", write_config(tmp_path, {"trainer.steps": 500}), "--plain", folder=tmp_path
    )
    events = tmp_path / "runs" / "tiny" / "events.jsonl"
    while not (
        events.exists()
        and b"phase.started" in events.read_bytes()
        and b'"main"' in events.read_bytes()
    ):
        assert command.process.exitcode is None
        time.sleep(0.02)
    time.sleep(0.5)
    command.kill(signal.SIGINT)
    time.sleep(0.02)
    command.kill(signal.SIGINT)
    answer = command.wait()
    assert answer.code == 130, (answer.code, answer.err)
    assert not answer.left_behind


@pytest.mark.parametrize(
    "argv", [["chat"], pytest.param(["eval", "--json"], marks=pytest.mark.slow)]
)
def test_other_commands_stop_too(tmp_path: Path, argv: list[str]) -> None:
    gyre("train", write_config(tmp_path, {"eval.num_problems": 0}), "--plain", folder=tmp_path)
    if argv[0] == "chat":
        argv = [*argv, "--prompt", "What is 1 + 1?", "--max-tokens", "100"]
    answer = gyre(
        argv[0],
        tmp_path / "runs" / "tiny",
        *argv[1:],
        folder=tmp_path,
        fault=Fault(point="burst", number=1, action="interrupt"),
    )
    assert answer.code == 130, (answer.code, answer.err)
    assert "Traceback" not in answer.err, answer.err
    assert not answer.left_behind


def test_while_it_is_loading(tmp_path: Path) -> None:
    """The real command from a shell, stopped while torch is being imported."""
    mark = f"loading-{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from gyre.cli.main import main; main()",
            "train",
            write_config(tmp_path),
            "--json",
        ],
        cwd=tmp_path,
        env={**os.environ, "GYRE_SYSTEM_TEST": mark, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    while b"libtorch" not in Path(f"/proc/{process.pid}/maps").read_bytes():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    assert json.loads(out)["error"]["kind"] == "stopped"
    assert not processes_with(mark, gone_within_s=20.0)
