"""Sinks: what TensorBoard and W&B read back equals the events."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gyre.core.errors import ConfigError
from gyre.observability.config import ObserveConfig
from gyre.observability.events import EventLog, is_counted
from gyre.observability.trackers import TensorBoardSink, WandbSink, refuse_trackers, scalars


def feed(sink: TensorBoardSink | WandbSink, folder: Path) -> None:
    log = EventLog(folder / "events.jsonl", attempt=1, check_schema=False)
    log.subscribe(sink.write)
    log.emit("stage.started", stage="cold_start", steps=2)
    for step in (1, 2):
        log.emit("step.done", step=step, metrics={"loss": 1.0 / step, "odd": float("nan")})
    log.emit("stage.started", stage="main", steps=1)
    log.emit("step.done", step=1, stage="main", metrics={"reward": 0.5})
    log.emit("eval.done", name="held_out", accuracy=0.75, n=512, step=1)
    log.emit("memory", phase="train", bytes={})
    sink.close()
    sink.close()


def test_tensorboard_files_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    feed(TensorBoardSink(tmp_path / "tensorboard"), tmp_path)
    points = {}
    for stage in ("cold_start", "main"):
        seen = EventAccumulator(str(tmp_path / "tensorboard" / stage)).Reload()
        for tag in seen.Tags()["scalars"]:
            points[f"{stage}/{tag}"] = [(event.step, event.value) for event in seen.Scalars(tag)]
    assert points["cold_start/loss"] == [(1, 1.0), (2, 0.5)]
    assert points["main/reward"] == [(1, 0.5)]
    assert points["main/eval/held_out/accuracy"] == [(1, 0.75)]
    assert points["main/eval/held_out/n"] == [(1, 512.0)]


def test_tensorboard_forgets_what_a_resume_lives_through_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "tensorboard"
    # the second is resumed from step 3 of main
    for attempt, steps in ((1, range(1, 6)), (2, range(4, 8))):
        log, sink = (
            EventLog(tmp_path / "events.jsonl", attempt=attempt, check_schema=False),
            TensorBoardSink(folder),
        )
        log.subscribe(sink.write)
        if attempt == 2:
            log.fence(1, 3, step=3, stage="main")
        else:
            log.emit("step.done", step=600, stage="cold_start", metrics={"loss": 0.5})
        for step in steps:
            log.emit("step.done", step=step, stage="main", metrics={"loss": attempt * 10.0 + step})
        sink.close()
    values = {
        stage: [
            event.value for event in EventAccumulator(str(folder / stage)).Reload().Scalars("loss")
        ]
        for stage in ("cold_start", "main")
    }
    assert values == {"cold_start": [0.5], "main": [11.0, 12.0, 13.0, 24.0, 25.0, 26.0, 27.0]}


@pytest.mark.slow
def test_wandb_offline_keeps_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    feed(WandbSink(tmp_path / "run", project="gyre", name="test", config={"seed": 0}), tmp_path)
    files = list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 1
    expected = (b"main/reward", b"cold_start/loss", b"main/eval/held_out/accuracy")
    end = time.monotonic() + 30  # W&B's own process writes the file
    while not all(name in files[0].read_bytes() for name in expected):
        assert time.monotonic() < end, f"{files[0]} does not hold {expected}"
        time.sleep(0.05)


LOGGED_OUT = """
import sys
from pathlib import Path
from gyre.core.errors import ConfigError
from gyre.observability.config import ObserveConfig
from gyre.observability.trackers import WandbSink, refuse_trackers
try:
    refuse_trackers(ObserveConfig(wandb="online"))
except ConfigError as error:
    print("refused:", error.message, error.hint)
refuse_trackers(ObserveConfig(wandb="online", wandb_without_login="offline"))
sink = WandbSink(Path(sys.argv[1]), project="p", name="n", mode="online", emit=lambda kind, **more: print(kind, more))
sink.close()
"""


def test_wandb_without_a_login_is_refused_or_kept_offline_and_never_asks(tmp_path: Path) -> None:
    """On a terminal of its own, where W&B would ask and wait for ever."""
    home = {
        name: str(tmp_path / "home")
        for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")
    }
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "NETRC"))
    } | home
    (tmp_path / "home").mkdir()
    terminal, theirs = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", LOGGED_OUT, str(tmp_path / "run")],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=environment,
            cwd=tmp_path,
            start_new_session=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(theirs)
        os.close(terminal)
    said = done.stdout.decode()
    assert done.returncode == 0, said
    assert (
        "refused: observe.wandb" in said and "wandb login" in said and "wandb_without_login" in said
    )
    assert "fallback.wandb_offline" in said and is_counted({"kind": "fallback.wandb_offline"})
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


def test_trackers_that_are_off_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None)
    refuse_trackers(ObserveConfig())
    for asked in (ObserveConfig(tensorboard=True), ObserveConfig(wandb="offline")):
        with pytest.raises(ConfigError, match="not installed"):
            refuse_trackers(asked)


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_an_absent_package_names_the_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=package) as caught:
        TensorBoardSink(tmp_path) if package == "tensorboard" else WandbSink(
            tmp_path, project="p", name="n"
        )
    assert "gyre-rl[track]" in caught.value.hint


def test_rows_without_curves_have_no_scalars() -> None:
    assert scalars({"kind": "phase.ended", "seconds": 1.0}) == {}
    assert scalars({"kind": "step.done", "metrics": {"a": 1, "b": "x", "c": True}}) == {"a": 1.0}


def test_the_room_needs_neither_torch_nor_a_tracker() -> None:
    """Every module of the room, found by walking it, so that a new one is asked too."""
    program = """
import importlib, pkgutil, sys
import gyre.observability as room
names = [m.name for m in pkgutil.walk_packages(room.__path__, "gyre.observability.")]
assert len(names) > 10, names
for name in names:
    importlib.import_module(name)
print(sorted({"torch", "tensorboard", "wandb", "transformers"} & set(sys.modules)))
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert child.stdout == "[]\n", child.stderr


def test_phases_and_memory_have_curves_of_the_first_worker_only() -> None:
    owners = {
        "actor.params": {"device": 10, "host": 0, "disk": 0},
        "engine.kv": {"device": 0, "host": 7, "disk": 0},
    }
    row = {
        "kind": "memory",
        "phase": "train",
        "left": "score",
        "step": 3,
        "owners": owners,
        "device_peak_bytes": 12,
    }
    curves = {
        "memory_bytes/train/actor.params": 10.0,
        "memory_bytes/train/engine.kv": 0.0,
        "memory_bytes/score/peak": 12.0,
    }
    assert scalars(row) == scalars({**row, "worker": "worker-0"}) == curves
    assert scalars({**row, "worker": "worker-1"}) == {}
    ended = {"kind": "phase.ended", "phase": "rollout", "depth": 0, "step": 3, "seconds": 1.5}
    assert scalars(ended) == {"phase_seconds/rollout": 1.5}
    assert scalars({**ended, "phase": "score/reference", "depth": 1}) == {}
    assert scalars({name: value for name, value in ended.items() if name != "step"}) == {}
