"""Whether a snapshot that is being written shows as progress to whoever watches the rank."""

from __future__ import annotations

import time

import pytest
import torch

from gyre.core.errors import DeadlineError
from gyre.distributed.process_group import alone
from gyre.trainer.checkpoint import shard_file
from gyre.trainer.checkpoint.saver import Saver
from gyre.trainer.checkpoint.shard_file import write_shard
from gyre.trainer.checkpoint.store import SnapshotStore
from saver_cases import SlowStaging, parts_of, saver_on


@pytest.mark.parametrize("background", [False, True])
def test_writing_between_two_steps_is_progress_and_writing_beside_them_is_not(
    tmp_path, background, monkeypatch
):
    """A step that hangs beside a snapshot must not be taken for one that goes on."""
    monkeypatch.setattr(shard_file, "BLOCK_BYTES", 1 << 12)
    ticks: list[int] = []
    store = SnapshotStore(tmp_path, keep=1, emit=lambda *_, **__: None)
    saver = Saver(
        store,
        alone(),
        background=background,
        deadline_s=60.0,
        emit=lambda *_, **__: None,
        progress=lambda: ticks.append(1),
    )
    saver.save(1, parts=lambda _: parts_of({"weights": torch.zeros(10_000)}), state={}, blobs={})
    until = time.monotonic() + 60.0
    while store.steps() != (1,):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert len(ticks) == 0 if background else len(ticks) >= 10
    saver.finish()


def test_waiting_for_a_snapshot_s_end_is_progress(tmp_path):
    """A save waits for the one before as long as the disk takes, up to its deadline."""
    ticks: list[int] = []
    store = SnapshotStore(tmp_path, keep=1, emit=lambda *_, **__: None)
    saver = Saver(
        store,
        alone(),
        background=True,
        deadline_s=60.0,
        emit=lambda *_, **__: None,
        progress=lambda: ticks.append(1),
        write=lambda *given: (time.sleep(0.3), write_shard(*given))[1],
    )
    saver.save(1, parts=lambda _: parts_of({"weights": torch.zeros(10)}), state={}, blobs={})
    ticks.clear()
    saver.finish()
    assert len(ticks) >= 3


@pytest.mark.parametrize("told", ["copied", "outcome"])
def test_a_rank_that_is_late_with_its_copy_hears_that_another_one_was_done(tmp_path, told):
    """The first note goes when the save ends, the second stays: either says that others wait in a
    collective."""
    group, staging, begun = alone(), SlowStaging(), []
    group.timeout_s = 0.5
    saver, _, _ = saver_on(group, tmp_path, background=True, deadline_s=600.0, staging=staging)

    def parts(no_longer_read):
        begun.append(no_longer_read)
        return parts_of({"weights": torch.zeros(10)})

    saver.save(1, parts=parts, state={}, blobs={})
    (aside,) = tmp_path.glob("writing-*")
    group.notes.put(f"{aside.name}/{told}", "")
    (no_longer_read,) = begun
    with pytest.raises(DeadlineError, match=r"0\.4 s after another rank's part"):
        no_longer_read()
    staging.go.set()
