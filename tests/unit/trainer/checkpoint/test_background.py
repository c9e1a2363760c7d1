"""Background snapshots: what is saved is the state at the call, one is in flight at most, failures
come out, a kill loses only the one in flight."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.core.errors import DeadlineError, MemoryBudgetError, SnapshotError
from gyre.distributed.layout import BoxRun
from gyre.objectives.config import PpoConfig
from gyre.planner.memory_model.components import staging_bytes
from gyre.planner.model_zoo import model_numbers
from gyre.trainer.checkpoint import staging
from gyre.trainer.checkpoint.staging import StagingBuffer
from gyre.trainer.checkpoint.store import SnapshotStore
from saver_cases import SlowDisk, SlowStaging, load_latest, parts_of, saver_on
from trainer_cases import SPEC, make_batch, make_trainer


class Case:
    """A saver whose disk begins to write when it is let."""

    def __init__(self, folder: Path, *, deadline_s: float = 60.0) -> None:
        disk = SlowDisk()
        self.saver, self.store, self.events = saver_on(
            None, folder, background=True, deadline_s=deadline_s, write=disk
        )
        self.go = disk.go
        self.weights = torch.zeros(1000)

    def save(self, step: int) -> None:
        tensors = {"weights": self.weights, "odd": torch.ones(3, dtype=torch.bfloat16)}

        def parts(no_longer_read):
            self.no_longer_read = no_longer_read
            return parts_of(tensors)

        self.saver.save(step, parts=parts, state={"loop_step": step}, blobs={"b": b"12"})

    def train(self, value: float) -> None:
        self.no_longer_read()
        self.weights.fill_(value)

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def weights_in(store: SnapshotStore) -> torch.Tensor:
    found = load_latest(store)
    assert found is not None
    read = torch.empty(1000)
    found.tensors.read("weights", BoxRun(start=0, stop=len(read)), read)
    return read


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.weights.fill_(7.0)
    case.save(1)
    case.train(8.0)  # before anything is on disk
    assert case.store.steps() == ()
    case.go.set()
    case.saver.finish()
    assert weights_in(case.store).eq(7.0).all()
    found = load_latest(case.store)
    assert found.state == {"loop": {"loop_step": 1}, "trainer": {"version": 7}} and found.blobs == {
        "b": b"12"
    }
    assert [kind for kind in case.kinds() if kind != "snapshot.held"] == [
        "snapshot.begun",
        "snapshot.copied",
        "snapshot.saved",
    ]


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.weights.fill_(1.0)
    case.save(1)
    case.train(2.0)
    waiting = threading.Thread(target=case.save, args=(2,))
    waiting.start()
    while "snapshot.waiting" not in case.kinds():
        waiting.join(0.01)
    assert case.kinds().count("snapshot.begun") == 1, (
        "buffers are not touched while they are written"
    )
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


class Copying:
    """A trainer and a saver that copies when it is let."""

    def __init__(self, folder: Path, *, deadline_s: float = 60.0, **settings: Any) -> None:
        self.trainer = make_trainer("sft", **settings)
        self.staging, self.held = SlowStaging(), threading.Event()
        self.go, self.begun = self.staging.go, self.staging.begun
        self.saver, self.store, self.events = saver_on(
            None,
            folder,
            background=True,
            deadline_s=deadline_s,
            staging=self.staging,
            progress=self.note_wait,
        )

    def note_wait(self) -> None:
        """Once a copy has begun, only a wait for it is shown."""
        if self.begun.is_set():
            self.held.set()

    def save(self, step: int) -> None:
        self.saver.save(step, parts=self.trainer.live_snapshot, state={}, blobs={})


def test_training_goes_on_while_the_state_is_copied_until_it_changes_it(tmp_path: Path) -> None:
    case = Copying(tmp_path)
    case.trainer.step_now(make_batch(4, step=1))
    before = case.trainer.snapshot_now()["tensors"]
    case.save(1)
    assert case.begun.wait(60), "in a thread of its own"
    case.trainer.evaluate_now(make_batch(4, step=2), "policy")  # reads only
    step = threading.Thread(target=case.trainer.step_now, args=(make_batch(4, step=2),))
    step.start()
    assert case.held.wait(60)
    assert case.trainer.models.actor.optimizer.grad_N.any(), "both passes are done"
    step.join(0.1)
    assert step.is_alive() and case.trainer.version == 1, "the update waits"
    case.go.set()
    step.join(60)
    case.saver.finish()
    assert case.trainer.version == 2 and "snapshot.held" in [kind for kind, _ in case.events]
    found = load_latest(case.store)
    for part in before.values():
        read = torch.empty_like(part.values_N)
        found.tensors.read(part.name, part.run, read)
        assert torch.equal(read, part.values_N), part.name


@pytest.mark.parametrize("how", ["move", "restore", "close"])
def test_nothing_that_changes_the_state_comes_before_the_copy(tmp_path: Path, how: str) -> None:
    case = Copying(tmp_path)
    state = case.trainer.snapshot_now()
    case.save(1)
    change = {
        "move": lambda: case.trainer.move(["actor.optimizer"], "host"),
        "restore": lambda: case.trainer.restore_now(state),
        "close": case.trainer.close_now,
    }[how]
    changing = threading.Thread(target=change)
    changing.start()
    assert case.held.wait(60)
    changing.join(0.1)
    assert changing.is_alive()
    case.go.set()
    changing.join(60)
    case.saver.finish()
    assert not changing.is_alive() and case.store.steps() == (1,)


def test_waiting_for_a_copy_has_a_deadline(tmp_path: Path) -> None:
    case = Copying(tmp_path, deadline_s=0.05)
    case.save(1)
    assert case.begun.wait(60) and not case.held.is_set()
    with pytest.raises(DeadlineError, match="snapshot of step 1 is not copied"):
        case.trainer.step_now(make_batch(4, step=1))
    assert case.trainer.version == 0 and case.held.is_set(), (
        "who watches for a hang sees that it waits"
    )
    case.go.set()


def test_a_copy_that_fails_comes_out_and_training_goes_on(tmp_path: Path) -> None:
    case = Copying(tmp_path)
    case.go.set()
    case.save(1)
    case.saver.finish()
    case.staging.fault = RuntimeError("the device is gone")
    case.save(2)
    case.trainer.step_now(make_batch(4, step=1))
    with pytest.raises(
        SnapshotError, match="step 2 could not be copied to the host: the device is gone"
    ):
        case.saver.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_memory_is_made_before_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path)
    case.saver.prepare(1 << 16)
    case.go.set()
    case.save(1)
    (begun,) = [fields for kind, fields in case.events if kind == "snapshot.begun"]
    assert begun["buffer_bytes"] == 1 << 16
    case.saver.finish()

    asked: list[int] = []

    def refuse(size_bytes: int, **_: object) -> None:
        asked.append(size_bytes)
        raise MemoryBudgetError("no memory is left", hint="buy some")

    monkeypatch.setattr(staging, "HostBuffer", refuse)
    other = Case(tmp_path / "other")
    other.saver.prepare(1 << 16)
    with pytest.raises(SnapshotError, match="no memory is left"):
        other.save(1)
    assert asked == [1 << 16], "by prepare, not by the save"


def test_memory_that_does_not_come_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    go, buffer = threading.Event(), StagingBuffer(torch.device("cpu"), deadline_s=0.05)
    monkeypatch.setattr(staging, "HostBuffer", lambda *_, **__: go.wait(60))
    buffer.prepare(64)
    try:
        with pytest.raises(DeadlineError, match="staged in is not there"):
            buffer.place([])
    finally:
        go.set()


@pytest.mark.parametrize("background", [True, False])
def test_pages_of_a_parked_component_are_free_once_they_are_copied(
    tmp_path: Path, background: bool
) -> None:
    """The ledger proves that a component has left the host: a file that is still written must not
    hold its pages."""
    trainer, disk = make_trainer("sft"), SlowDisk()
    saver, store, _ = saver_on(None, tmp_path, background=background, write=disk)
    if not background:
        disk.go.set()
    trainer.move(["actor.optimizer"], "host")
    saver.save(1, parts=trainer.live_snapshot, state={}, blobs={})
    trainer.move(["actor.optimizer"], "device")
    assert trainer.measure()["actor.optimizer"].host_bytes == 0
    disk.go.set()
    saver.finish()
    assert store.steps() == (1,)


def test_a_wait_that_fails_leaves_a_trainer_as_it_was(tmp_path: Path) -> None:
    case = Copying(tmp_path, deadline_s=0.05)
    state = case.trainer.snapshot_now()
    case.save(1)
    with pytest.raises(DeadlineError):
        case.trainer.restore_now(state)
    case.go.set()
    case.trainer.step_now(make_batch(4, step=1))
    assert case.trainer.version == 1


def test_staging_memory_is_kept_and_grows() -> None:
    buffer = StagingBuffer(torch.device("cpu"), deadline_s=60.0)
    tensors = {
        "a": torch.arange(10.0),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.ones(()),
    }

    def copy(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        placed = buffer.place(list(parts_of(tensors)["tensors"].values()))
        buffer.fill(placed)
        return [part.values_N for part in placed.staged]

    first = copy(tensors)
    for staged, tensor in zip(first, tensors.values(), strict=True):
        assert staged.equal(tensor.reshape(-1)) and staged.data_ptr() != tensor.data_ptr()
        assert staged.data_ptr() % 64 == 0
    assert buffer.size_bytes == 3 * 64
    again = copy({"a": torch.zeros(10), "b": tensors["b"]})
    assert (
        again[0].data_ptr() == first[0].data_ptr()
        and first[0].eq(0.0).all()
        and buffer.size_bytes == 3 * 64
    )
    assert copy({"a": torch.ones(100)})[0].eq(1.0).all() and buffer.size_bytes == 448


def test_the_planner_counts_what_is_staged(tmp_path: Path) -> None:
    trainer = make_trainer(
        "ppo", dtype=torch.bfloat16, objective=PpoConfig(kl_coef=0.1), reference_moving_average=0.9
    )
    saver, _, events = saver_on(None, tmp_path, background=True)
    saver.save(1, parts=trainer.live_snapshot, state={}, blobs={})
    saver.finish()
    (staged,) = [fields["buffer_bytes"] for kind, fields in events if kind == "snapshot.begun"]
    planned = staging_bytes(
        model_numbers(SPEC), "bfloat16", trained=2, reference=True, average=True, ranks=1
    )
    assert staged == trainer.snapshot_bytes()
    assert (
        planned
        <= staged
        < planned + 64 * (len(trainer.snapshot_now()["tensors"]) + 1) + 12 * SPEC.hidden_size
    )


KILLED = """
import os, signal, sys, threading
sys.path[:0] = {path!r}
from pathlib import Path
from unit.trainer.checkpoint.test_background import Case
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
case.train(2.0)
case.save(2)
assert begun.wait(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_during_a_background_save_keeps_the_one_before(tmp_path: Path) -> None:
    script = KILLED.format(path=sys.path, folder=str(tmp_path))
    ran = subprocess.run(
        [sys.executable, "-c", script], env=dict(os.environ), timeout=120, capture_output=True
    )
    assert ran.returncode == -9, ran.stderr.decode()
    assert len(list(tmp_path.glob("writing-step-00000002-*"))) == 1
    case = Case(tmp_path)
    assert case.store.steps() == (1,) and weights_in(case.store).eq(1.0).all()
    case.go.set()
    case.save(2)
    case.saver.finish()
    assert case.store.steps() == (1, 2) and "snapshot.leftover_removed" in case.kinds()
