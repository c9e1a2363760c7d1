"""Whether a snapshot that is being written shows as progress to whoever watches the rank."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from gyre.core.errors import DeadlineError
from gyre.distributed.process_group import alone
from gyre.trainer.checkpoint import shard_file
from gyre.trainer.checkpoint.saver import Saver
from gyre.trainer.checkpoint.store import SnapshotStore
from saver_cases import parts_of


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
    if saver._thread is not None:
        saver._thread.join(60.0)
    assert store.steps() == (1,)
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
    )
    saver._thread = threading.Thread(target=time.sleep, args=(0.3,))
    saver._thread.start()
    saver.finish()
    assert len(ticks) >= 3


@pytest.mark.parametrize("told", ["copied", "outcome"])
def test_a_rank_that_is_late_with_its_copy_hears_that_another_one_was_done(tmp_path, told):
    """The first note goes when the save ends, the second stays: either says that others wait in a
    collective."""
    group = alone()
    group.timeout_s = 0.5
    saver = Saver(
        SnapshotStore(tmp_path, keep=1, emit=lambda *_, **__: None),
        group, background=True, deadline_s=600.0, emit=lambda *_, **__: None,
    )  # fmt: skip
    group.notes.put(f"writing/{told}", "")
    with pytest.raises(DeadlineError, match=r"0\.4 s after another rank's part"):
        saver._hold(1, Path("writing"), threading.Event())
