"""Optimizer state and gradients away from the device: cuts, files and their faults, memory,
overlap."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.errors import (
    ConfigError,
    DeadlineError,
    InputError,
    MemoryBudgetError,
    SnapshotError,
)
from gyre.memory.config import MemoryConfig
from gyre.memory.manager import MemoryManager
from gyre.memory.phases import default_needs
from gyre.planner.model_zoo import model_numbers
from gyre.planner.plan import PlanInputs
from gyre.trainer.adamw.adamw import Span
from gyre.trainer.config import TrainerConfig
from gyre.trainer.offload import host_gradients, state_file, state_stream
from gyre.trainer.offload.host_gradients import HostGradients
from gyre.trainer.offload.slices import BLOCK, numbers_per_cut, plan_cuts, staging_bytes
from gyre.trainer.offload.state_file import StateFile
from gyre.trainer.offload.state_placement import StatePlacement
from gyre.trainer.trainer import NativeTrainer
from planner_cases import assert_planned
from trainer_cases import (
    CPU,
    assert_bits_equal,
    make_batch,
    make_decoder,
    make_trainer,
    saved_tensors,
    weights_of,
    whole_tensors,
)
from zero_cases import AWAY, equal_away

SMALL = {"offload_cut_bytes": 8192, "offload_deadline_s": 60.0}


@st.composite
def spans(draw) -> list[tuple[int, int]]:
    """Ascending runs with gaps, as the tensors of a shard lie."""
    at, found = 0, []
    for gap, length in draw(
        st.lists(st.tuples(st.integers(0, 700), st.integers(0, 3000)), max_size=12)
    ):
        found.append((at + gap, at + gap + length))
        at += gap + length
    return found


@settings(max_examples=200, deadline=None)
@given(found=spans(), blocks=st.integers(1, 9))
def test_cuts_hold_each_number_once_and_begin_on_the_grid(found, blocks) -> None:
    cuts = plan_cuts(found, numbers=blocks * BLOCK)
    seen: dict[int, int] = {}
    for cut in cuts:
        assert cut.first % BLOCK == 0 and 0 < cut.size <= blocks * BLOCK and cut.pieces
        assert cut.size == blocks * BLOCK or cut is cuts[-1]
        for piece in cut.pieces:
            assert cut.first <= piece.first < piece.last <= cut.last
            for number in range(piece.first, piece.last):
                assert number not in seen
                seen[number] = piece.span
    assert seen == {
        number: index for index, (first, last) in enumerate(found) for number in range(first, last)
    }
    assert [cut.first for cut in cuts] == sorted({cut.first for cut in cuts})


@given(cut_bytes=st.integers(4096, 1 << 30), fields=st.integers(1, 4), size=st.integers(1, 1 << 34))
def test_cuts_are_no_larger_than_was_said(cut_bytes, fields, size) -> None:
    numbers = numbers_per_cut(cut_bytes, block_bytes=fields * 4 * BLOCK, size=size)
    assert numbers % BLOCK == 0 and BLOCK <= numbers < size / 3 + BLOCK
    assert numbers * fields * 4 <= max(cut_bytes, BLOCK * fields * 4)
    assert (
        staging_bytes(cut_bytes, block_bytes=fields * 4 * BLOCK, size=size)
        == 3 * numbers * fields * 4
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_process_trains_to_the_same_bits(tmp_path, dtype) -> None:
    assert equal_away(None, "ppo", list(AWAY), str(tmp_path), dtype=dtype) == []


@pytest.mark.parametrize("how", AWAY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_planner_knows_what_is_where(tmp_path, how, dtype) -> None:
    """Names, tiers and, but for the padding of small tensors, bytes of the components that a
    trainer has."""
    decoder = make_decoder(getattr(torch, dtype))
    trainer = make_trainer("ppo", decoder=decoder, disk_folder=tmp_path, **SMALL, **AWAY[how])
    inputs = PlanInputs(
        model=model_numbers(decoder.spec),
        objective="ppo",
        online=False,
        prompts_per_step=1,
        completions_per_prompt=1,
        max_prompt_tokens=8,
        max_completion_tokens=8,
        critic=True,
        disk_tier=True,
        offload_optimizer=AWAY[how].get("offload_optimizer", "none"),
        offload_gradients=AWAY[how].get("offload_gradients", False),
        offload_cut_bytes=SMALL["offload_cut_bytes"],
    )
    assert_planned(trainer.components(), inputs, dtype, relative=0.05, pages=2)
    trainer.close_now()


def test_parked_between_phases_bytes_are_counted_once(tmp_path) -> None:
    """Through the memory manager, which measures after each phase change and refuses what is not
    where it says."""
    trainer = make_trainer(
        "grpo", dtype=torch.bfloat16, disk_folder=tmp_path, **SMALL, **AWAY["host and gradients"]
    )
    whole = make_trainer("grpo", dtype=torch.bfloat16)
    budgets = MemoryConfig(
        device_budget_bytes=1 << 30,
        host_budget_bytes=1 << 30,
        disk_budget_bytes=0,
        residency="phase",
    )
    needs, events = default_needs(shared_weights=True), []
    manager = MemoryManager(
        [trainer], budgets, CPU, lambda name, **fields: events.append((name, fields)), needs=needs
    )
    sizes = {component.name: component.size_bytes for component in trainer.components()}
    away = sum(sizes[f"actor.{part}"] for part in ("optimizer", "master", "grads", "staging_host"))
    for step in range(2):
        manager.enter("score")
        manager.enter("train")
        usage = manager.ledger.usage()
        assert usage.host_bytes == away + sizes["reference"]
        assert usage.device_bytes == sizes["actor.params"] + sizes["actor.staging"]
        trainer.step_now(make_batch(seed=step, step=step))
        whole.step_now(make_batch(seed=step, step=step))
        manager.enter("rollout")
        assert manager.ledger.usage().device_bytes == sizes["actor.params"]
    assert not any(fields.get("component") == "actor.optimizer" for _, fields in events)
    assert_bits_equal(weights_of(trainer), weights_of(whole))


@pytest.mark.parametrize("how", ["host", "disk and gradients"])
def test_snapshots_go_both_ways(tmp_path, how) -> None:
    plain = make_trainer("ppo", dtype=torch.bfloat16)
    plain.step_now(make_batch())
    offloaded = make_trainer(
        "ppo", dtype=torch.bfloat16, disk_folder=tmp_path, **SMALL, **AWAY[how]
    )
    offloaded.restore_now(plain.snapshot_now())
    for trainer in (plain, offloaded):
        trainer.step_now(make_batch(seed=1))
    state = offloaded.snapshot_now()
    assert_bits_equal(whole_tensors(state["tensors"].values()), saved_tensors(plain))
    again = make_trainer("ppo", dtype=torch.bfloat16)
    again.restore_now(state)
    for trainer in (plain, again):
        trainer.step_now(make_batch(seed=2))
    assert_bits_equal(weights_of(again), weights_of(plain))


def test_a_file_is_there_while_it_is_needed_and_no_other_run_may_have_it(tmp_path) -> None:
    events: list = []
    left = tmp_path / "rank-3" / "critic.optimizer.offload"  # of a run that had more ranks
    left.parent.mkdir()
    left.write_bytes(b"x" * 100)
    folder = tmp_path / "rank-0"
    trainer = make_trainer(
        "grpo", disk_folder=folder, events=events, **SMALL, offload_optimizer="disk"
    )
    assert ("trainer.offload_leftover_removed", {"path": str(left), "size_bytes": 100}) in events
    assert not left.exists() and (folder / "actor.optimizer.offload").stat().st_size > 0
    with pytest.raises(InputError, match=r"actor.optimizer.offload is in use"):
        make_trainer("grpo", disk_folder=folder, **SMALL, offload_optimizer="disk")
    trainer.step_now(make_batch())
    trainer.close_now()
    assert list(folder.iterdir()) == []


def test_a_rank_that_looks_for_leftovers_is_waited_for(tmp_path, monkeypatch):
    """It may find another rank's file between its making and its lock, and holds it while it
    looks."""
    path = tmp_path / "actor.optimizer.offload"
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    waits = []

    def look_ends(seconds: float) -> None:
        waits.append(seconds)
        path.unlink()
        os.close(handle)

    monkeypatch.setattr(state_file.time, "sleep", look_ends)
    file = StateFile(
        tmp_path, "actor.optimizer", {"exp_avg": (10, torch.float32)}, lambda *_, **__: None
    )
    assert len(waits) == 1 and path.exists()
    file.close()
    assert not path.exists()


def test_a_disk_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="has no folder"):
        make_trainer("grpo", offload_optimizer="disk")


@contextlib.contextmanager
def files_of_at_most(size_bytes: int):
    """The system refuses what would make a file longer, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_before_training(tmp_path) -> None:
    with files_of_at_most(10_000), pytest.raises(MemoryBudgetError) as caught:
        make_trainer("grpo", disk_folder=tmp_path, **SMALL, offload_optimizer="disk")
    assert (
        "could not be reserved" in caught.value.message
        and "actor.optimizer.offload" in caught.value.message
    )
    assert "free" in caught.value.hint and "bytes there" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def spoilt(trainer: NativeTrainer) -> None:
    """After an update that was cut short nothing is read from the state any more."""
    with pytest.raises(SnapshotError, match="was cut short"):
        trainer.step_now(make_batch(seed=1))
    with pytest.raises(SnapshotError, match="was cut short"):
        trainer.snapshot_now()


def test_a_write_that_fails_is_told_as_one(tmp_path) -> None:
    """Not as a failure of the read that waits for it."""
    trainer = make_trainer("grpo", disk_folder=tmp_path, **SMALL, offload_optimizer="disk")
    with (
        files_of_at_most(1000),
        pytest.raises(MemoryBudgetError, match=r"could not be written to .*optimizer.offload"),
    ):
        trainer.step_now(make_batch())
    spoilt(trainer)


def test_a_write_that_the_disk_refuses_later_is_told_before_it_is_read(
    tmp_path, monkeypatch
) -> None:
    """The page cache takes what the disk then does not."""

    def refuse(handle: int) -> None:
        raise OSError(5, "Input/output error")

    trainer = make_trainer("grpo", disk_folder=tmp_path, **SMALL, offload_optimizer="disk")
    monkeypatch.setattr(os, "fdatasync", refuse)
    trainer.step_now(make_batch())
    monkeypatch.setattr(StateFile, "read", lambda *_: pytest.fail("read too early"))
    refusal = pytest.raises(
        MemoryBudgetError, match=r"could not be written to .*optimizer.offload: Input/output error"
    )
    with refusal:
        trainer.snapshot_now()
    with refusal:
        trainer.step_now(make_batch(seed=1))


def test_a_file_that_lost_its_end_is_told(tmp_path) -> None:
    trainer = make_trainer("grpo", disk_folder=tmp_path, **SMALL, offload_optimizer="disk")
    trainer.step_now(make_batch())
    trainer.snapshot_now()  # waits for the disk
    os.truncate(tmp_path / "actor.optimizer.offload", 50_000)
    with pytest.raises(
        SnapshotError, match=r"optimizer.offload cannot be read: it has 50000 bytes"
    ):
        trainer.snapshot_now()
    with pytest.raises(
        SnapshotError,
        match=r"optimizer.offload cannot be read: it ended at byte \d+, \d+ bytes early",
    ):
        trainer.step_now(make_batch(seed=1))
    spoilt(trainer)


def test_a_read_that_fails_is_told(tmp_path) -> None:
    trainer = make_trainer("grpo", disk_folder=tmp_path, **SMALL, offload_optimizer="disk")
    path, own = str(tmp_path / "actor.optimizer.offload"), Path("/proc/self/fd")
    opened = [int(entry.name) for entry in own.iterdir() if os.path.realpath(entry) == path]
    handle = os.open(tmp_path, os.O_RDONLY)  # a folder, which the system reads no bytes of
    assert opened
    for number in opened:
        os.dup2(handle, number)
    os.close(handle)
    with pytest.raises(SnapshotError, match=r"optimizer.offload cannot be read: Is a directory"):
        trainer.step_now(make_batch())


def test_a_disk_that_does_not_answer_ends_the_step(tmp_path, monkeypatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(StateFile, "read", lambda *_: answered.wait(60.0))
    trainer = make_trainer(
        "grpo",
        disk_folder=tmp_path,
        offload_cut_bytes=8192,
        offload_deadline_s=0.1,
        offload_optimizer="disk",
    )
    with pytest.raises(
        DeadlineError, match=r"a read of .*optimizer.offload did not end within 0.1 s"
    ):
        trainer.step_now(make_batch())
    answered.set()


def test_a_long_update_shows_that_it_goes_on(tmp_path, monkeypatch) -> None:
    """To whoever takes a rank that runs no layer for a while for hung: cut by cut, and while the
    disk is slow."""
    signs: list[int] = []
    seen, read = threading.Event(), StateFile.read

    cuts: set[int] = set()

    def slow(file: StateFile, name: str, first: int, target_N: torch.Tensor) -> None:
        assert seen.wait(60.0), "a read is waited for, and nobody hears of it"
        cuts.add(first)
        read(file, name, first, target_N)

    trainer = make_trainer(
        "grpo",
        disk_folder=tmp_path,
        **SMALL,
        offload_optimizer="disk",
        progress=lambda: (signs.append(1), seen.set()),
    )
    monkeypatch.setattr(state_stream, "LOOK_S", 0.05)
    monkeypatch.setattr(StateFile, "read", slow)
    trainer.step_now(make_batch())
    assert len(signs) > len(cuts) > 3


def test_the_next_cut_comes_and_the_last_one_goes_while_one_is_updated(
    tmp_path, monkeypatch
) -> None:
    """Each update of a cut waits until the read of the next has begun, and the write of the one
    before has; and never is a cut read that would have no place."""
    config = TrainerConfig(
        offload_optimizer="disk", offload_cut_bytes=4096, offload_deadline_s=60.0
    )
    home = StatePlacement("actor", CPU, config, folder=tmp_path)
    size = 8 * 512
    made = home.make(size, gradient_size=size, keeps_master=False)
    begun: dict[tuple[str, int], threading.Event] = {
        (what, first): threading.Event()
        for what in ("read", "write")
        for first in range(0, size, 512)
    }
    updated: list[int] = []
    read, write = StateFile.read, StateFile.write

    def note_read(file: StateFile, name: str, first: int, target_N: torch.Tensor) -> None:
        assert first // 512 <= len(updated) + 2, "three places"
        begun["read", first].set()
        read(file, name, first, target_N)

    def note_write(file: StateFile, name: str, first: int, source_N: torch.Tensor) -> None:
        begun["write", first].set()
        write(file, name, first, source_N)

    monkeypatch.setattr(StateFile, "read", note_read)
    monkeypatch.setattr(StateFile, "write", note_write)
    weight_N = torch.zeros(size)
    span = Span(
        first=0,
        weight_N=weight_N,
        grad_N=made["grad"],
        exp_avg_N=made["exp_avg"],
        exp_avg_sq_N=made["exp_avg_sq"],
        decays=True,
    )

    def update(part: Span) -> None:
        if part.first + 512 < size:
            assert begun["read", part.first + 512].wait(60.0)
        if part.first:
            assert begun["write", part.first - 512].wait(60.0)
        part.exp_avg_N.add_(1.0)
        part.weight_N.copy_(part.exp_avg_N)
        updated.append(part.first)

    stream = home.stream
    assert stream is not None
    for count in (1.0, 2.0):
        updated.clear()
        for event in begun.values():
            event.clear()
        stream.run([span], update)
        assert updated == list(range(0, size, 512)) and bool((weight_N == count).all())
    home.check()
    assert bool((home.buffers["exp_avg"] == 2.0).all()) and not home.buffers["exp_avg_sq"].any()
    traffic = home.take_traffic()
    assert (
        traffic.in_bytes == traffic.out_bytes == 2 * 2 * 4 * size
        and home.take_traffic().in_bytes == 0
    )
    home.close()


def test_gradients_add_up_in_host_memory_in_float32() -> None:
    """Through buffers that are smaller than a gradient; 300 is beyond what bfloat16 counts to one
    by one."""
    sums_N, buffers = torch.zeros(1000), [torch.zeros(512, dtype=torch.uint8) for _ in range(2)]
    sums = HostGradients(sums_N, buffers, CPU, 60.0)
    for _ in range(300):
        sums.add(sums_N[100:900], torch.ones(20, 40, dtype=torch.bfloat16))
    sums.settle()
    assert (
        bool((sums_N[100:900] == 300.0).all()) and not sums_N[:100].any() and not sums_N[900:].any()
    )
    assert sums.out_bytes == 300 * 800 * 2
    sums.zero()
    sums.add(sums_N[:10], torch.ones(10))
    sums.settle()
    assert float(sums_N.sum()) == 10.0
    sums.close()


def test_a_backward_pass_waits_for_buffers_no_longer_than_its_deadline(monkeypatch) -> None:
    sums_N, added = torch.zeros(64), threading.Event()
    sums = HostGradients(sums_N, [torch.zeros(128, dtype=torch.uint8)], CPU, 0.1)
    # the one buffer, of half the gradient, is taken and does not come back
    monkeypatch.setattr(host_gradients, "wait_for", lambda *_, **__: added.wait(60.0))
    with pytest.raises(DeadlineError, match=r"were not added in host memory within 0.1 s"):
        sums.add(sums_N, torch.ones(64))
    added.set()
    sums.settle()
    sums.close()


def test_a_gradient_that_cannot_be_added_is_told_before_the_sum_is_used() -> None:
    sums = HostGradients(torch.zeros(8), [torch.zeros(64, dtype=torch.uint8)], CPU, 60.0)
    sums.add(torch.zeros(3), torch.ones(8))
    with pytest.raises(RuntimeError, match="must match"):
        sums.settle()
    sums.close()
