"""Background snapshots: what is saved is the state at the call, one is in flight at most, failures come out, a kill
loses only the one in flight."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gyre.trainer.background import BackgroundSnapshots, StagingBuffers
from trainer_cases import make_trainer

from gyre.core.errors import DeadlineError, SnapshotError
from gyre.trainer.snapshot import SnapshotStore


class SlowStore(SnapshotStore):
    """A store whose disk begins to write when it is let."""

    def __init__(self, folder: Path, **options) -> None:
        super().__init__(folder, **options)
        self.go = threading.Event()

    def save(self, step: int, **parts) -> Path:
        assert self.go.wait(60)
        return super().save(step, **parts)


class Case:
    def __init__(self, folder: Path, *, deadline_s: float = 60.0) -> None:
        self.events: list[tuple[str, Mapping]] = []
        emit = lambda kind, **fields: self.events.append((kind, fields))  # noqa: E731
        self.store = SlowStore(folder, keep=4, emit=emit)
        self.background = BackgroundSnapshots(self.store, pinned=False, deadline_s=deadline_s, emit=emit)
        self.weights = torch.zeros(1000)

    def save(self, step: int) -> None:
        def stage(take):
            copy = take("weights", self.weights.nbytes).view(torch.float32)
            copy.copy_(self.weights)
            return {"tensors": {"weights": copy}, "state": {"version": step}}

        self.background.save(step, stage=stage, state={"loop_step": step}, blobs={"b": b"12"})

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.weights.fill_(7.0)
    case.save(1)
    case.weights.fill_(8.0)  # training goes on before anything is on disk
    assert case.store.steps() == ()
    case.store.go.set()
    case.background.finish()
    found = case.store.load_latest()
    assert found is not None and found.tensors["weights"].eq(7.0).all()
    assert found.state == {"loop": {"loop_step": 1}, "trainer": {"version": 1}} and found.blobs == {"b": b"12"}
    assert case.kinds() == ["snapshot.staged", "snapshot.saved"]


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.weights.fill_(1.0)
    case.save(1)
    case.weights.fill_(2.0)
    waiting = threading.Thread(target=case.save, args=(2,))
    waiting.start()
    while "snapshot.waiting" not in case.kinds():
        waiting.join(0.01)
    assert case.kinds().count("snapshot.staged") == 1, "buffers are not touched while they are written"
    case.store.go.set()
    waiting.join(60)
    case.background.finish()
    assert case.store.steps() == (1, 2)
    found = case.store.load_latest()
    assert found is not None and found.tensors["weights"].eq(2.0).all()
    assert "snapshot.waited" in case.kinds()


def test_waiting_has_a_deadline(tmp_path: Path) -> None:
    case = Case(tmp_path, deadline_s=0.05)
    case.save(1)
    with pytest.raises(DeadlineError, match="snapshot of step 1 is not written"):
        case.save(2)
    with pytest.raises(DeadlineError):
        case.background.finish()
    case.store.go.set()


@pytest.mark.parametrize("by", ["next save", "finish"])
def test_a_failed_write_comes_out_and_leaves_the_one_before(tmp_path: Path, by: str) -> None:
    case = Case(tmp_path)
    case.store.go.set()
    case.save(1)
    case.background.finish()
    (tmp_path / "writing-step-00000002").write_text("a file where the folder should be")
    case.save(2)
    with pytest.raises(SnapshotError, match="step 2 could not be written"):
        case.save(3) if by == "next save" else case.background.finish()
    found = case.store.load_latest()
    assert found is not None and found.step == 1
    (tmp_path / "writing-step-00000002").unlink(missing_ok=True)
    case.save(4)
    case.background.finish()
    assert case.store.steps() == (1, 4), "told once; saves go on"


def test_staging_buffers_are_kept_and_grow() -> None:
    buffers = StagingBuffers(pinned=False)
    first = buffers.take("a", 100)
    assert buffers.take("a", 60).data_ptr() == first.data_ptr()
    assert len(buffers.take("a", 60)) == 60
    assert buffers.take("b", 10).data_ptr() != first.data_ptr()
    assert len(buffers.take("a", 200)) == 200 and buffers.size_bytes == 210


def test_a_trainers_snapshot_lies_in_the_buffers() -> None:
    trainer, buffers = make_trainer("sft"), StagingBuffers(pinned=False)
    plain, staged = trainer.snapshot(), trainer.snapshot(buffers.take)
    assert plain["state"] == staged["state"] and plain["tensors"].keys() == staged["tensors"].keys()
    for name, tensor in plain["tensors"].items():
        assert tensor.equal(staged["tensors"][name]), name
    again = trainer.snapshot(buffers.take)
    for name, tensor in again["tensors"].items():
        assert tensor.data_ptr() == staged["tensors"][name].data_ptr(), name
        assert tensor.data_ptr() != plain["tensors"][name].data_ptr(), name


KILLED = """
import os, signal, sys, threading
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_trainer_background import Case
import gyre.trainer.snapshot as snapshot
case = Case(Path({folder!r}))
case.store.go.set()
case.weights.fill_(1.0)
case.save(1)
case.background.finish()
begun, whole = threading.Event(), snapshot.find_faults
def stop_here(path):  # all files of the second one are there, its name is not
    begun.set()
    threading.Event().wait(60)
snapshot.find_faults = stop_here
case.weights.fill_(2.0)
case.save(2)
assert begun.wait(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_during_a_background_save_keeps_the_one_before(tmp_path: Path) -> None:
    script = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    ran = subprocess.run([sys.executable, "-c", script], env=dict(os.environ), timeout=120, capture_output=True)
    assert ran.returncode == -9, ran.stderr.decode()
    assert (tmp_path / "writing-step-00000002").is_dir()
    case = Case(tmp_path)
    found = case.store.load_latest()
    assert found is not None and found.step == 1 and found.tensors["weights"].eq(1.0).all()
    case.store.go.set()
    case.save(2)
    case.background.finish()
    assert case.store.steps() == (1, 2) and "snapshot.leftover_removed" in case.kinds()
