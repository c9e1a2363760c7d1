"""Background snapshots: what is saved is the state at the call, one is in flight at most, failures come out, a kill
loses only the one in flight."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from saver_cases import parts_of, saver_on
from trainer_cases import SPEC, make_trainer

from gyre.core.errors import DeadlineError, SnapshotError
from gyre.objectives.config import PpoConfig
from gyre.planner.memory import staging_bytes
from gyre.planner.shapes import model_numbers
from gyre.trainer.saver import Staging
from gyre.trainer.snapshot import SnapshotStore


class Case:
    """A saver whose disk begins to write when it is let."""

    def __init__(self, folder: Path, *, deadline_s: float = 60.0) -> None:
        self.saver, self.store, self.events = saver_on(None, folder, background=True, deadline_s=deadline_s)
        self.go = threading.Event()
        honest = self.saver._write_files

        def slow(job):
            assert self.go.wait(60)
            return honest(job)

        self.saver._write_files = slow
        self.weights = torch.zeros(1000)

    def save(self, step: int) -> None:
        parts = {"weights": self.weights, "odd": torch.ones(3, dtype=torch.bfloat16)}
        self.saver.save(step, parts=lambda: parts_of(parts), state={"loop_step": step}, blobs={"b": b"12"})

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def weights_in(store: SnapshotStore) -> torch.Tensor:
    found = store.load_latest()
    assert found is not None
    read = torch.empty(1000)
    found.tensors.read("weights", 0, read)
    return read


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.weights.fill_(7.0)
    case.save(1)
    case.weights.fill_(8.0)  # training goes on before anything is on disk
    assert case.store.steps() == ()
    case.go.set()
    case.saver.finish()
    assert weights_in(case.store).eq(7.0).all()
    found = case.store.load_latest()
    assert found.state == {"loop": {"loop_step": 1}, "trainer": {"version": 7}} and found.blobs == {"b": b"12"}
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
    case.go.set()
    waiting.join(60)
    case.saver.finish()
    assert case.store.steps() == (1, 2)
    assert weights_in(case.store).eq(2.0).all()
    assert "snapshot.waited" in case.kinds()


def test_waiting_has_a_deadline(tmp_path: Path) -> None:
    case = Case(tmp_path, deadline_s=0.05)
    case.save(1)
    with pytest.raises(DeadlineError, match="snapshot of step 1 is not written"):
        case.save(2)
    with pytest.raises(DeadlineError):
        case.saver.finish()
    case.go.set()


@pytest.mark.parametrize("by", ["next save", "finish"])
def test_a_failed_write_comes_out_and_leaves_the_one_before(tmp_path: Path, by: str) -> None:
    case = Case(tmp_path)
    case.go.set()
    case.save(1)
    case.saver.finish()
    case.go.clear()
    case.save(2)
    (aside,) = tmp_path.glob("writing-step-00000002-*")
    (aside / "rank-00000.safetensors").mkdir()  # a folder where the file should be
    case.go.set()
    with pytest.raises(SnapshotError, match="step 2 could not be written"):
        case.save(3) if by == "next save" else case.saver.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    case.save(4)
    case.saver.finish()
    assert case.store.steps() == (1, 4), "told once; saves go on"


def test_staging_memory_is_kept_and_grows() -> None:
    staging = Staging(pinned=False)
    tensors = {"a": torch.arange(10.0), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.ones(())}

    def copy(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [part.values_N for part in staging.copy(list(parts_of(tensors)["tensors"].values()))]

    first = copy(tensors)
    for staged, tensor in zip(first, tensors.values(), strict=True):
        assert staged.equal(tensor.reshape(-1)) and staged.data_ptr() != tensor.data_ptr()
        assert staged.data_ptr() % 64 == 0
    assert staging.size_bytes == 3 * 64
    again = copy({"a": torch.zeros(10), "b": tensors["b"]})
    assert again[0].data_ptr() == first[0].data_ptr() and first[0].eq(0.0).all() and staging.size_bytes == 3 * 64
    assert copy({"a": torch.ones(100)})[0].eq(1.0).all() and staging.size_bytes == 448


def test_the_planner_counts_what_is_staged(tmp_path: Path) -> None:
    trainer = make_trainer("ppo", dtype=torch.bfloat16, objective=PpoConfig(kl_coef=0.1), reference_moving_average=0.9)
    saver, _, events = saver_on(None, tmp_path, background=True)
    saver.save(1, parts=trainer.live_snapshot, state={}, blobs={})
    saver.finish()
    (staged,) = [fields["buffer_bytes"] for kind, fields in events if kind == "snapshot.staged"]
    planned = staging_bytes(model_numbers(SPEC), "bfloat16", trained=2, reference=True, average=True, ranks=1)
    assert planned <= staged < planned + 64 * (len(trainer.snapshot()["tensors"]) + 1) + 12 * SPEC.hidden_size


KILLED = """
import os, signal, sys, threading
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_trainer_background import Case
case = Case(Path({folder!r}))
case.go.set()
case.weights.fill_(1.0)
case.save(1)
case.saver.finish()
begun = threading.Event()
def stop_here(aside, manifest):  # all files of the second one are there, its manifest is not
    begun.set()
    threading.Event().wait(60)
case.store.publish = stop_here
case.weights.fill_(2.0)
case.save(2)
assert begun.wait(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_during_a_background_save_keeps_the_one_before(tmp_path: Path) -> None:
    script = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    ran = subprocess.run([sys.executable, "-c", script], env=dict(os.environ), timeout=120, capture_output=True)
    assert ran.returncode == -9, ran.stderr.decode()
    assert len(list(tmp_path.glob("writing-step-00000002-*"))) == 1
    case = Case(tmp_path)
    assert case.store.steps() == (1,) and weights_in(case.store).eq(1.0).all()
    case.go.set()
    case.save(2)
    case.saver.finish()
    assert case.store.steps() == (1, 2) and "snapshot.leftover_removed" in case.kinds()
