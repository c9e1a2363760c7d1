"""Cases for snapshots by several ranks; functions here run in rank processes (rank_pool), or in the
test's own."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gyre.core.errors import GyreError
from gyre.distributed import failure_detector
from gyre.distributed.process_group import RankGroup, alone
from gyre.memory.pools.host_buffer import HostBuffer
from gyre.trainer.checkpoint import saver as saver_module
from gyre.trainer.checkpoint import shard_file, staging
from gyre.trainer.checkpoint.saver import Saver
from gyre.trainer.checkpoint.shards import Part
from gyre.trainer.checkpoint.staging import StagedParts, StagingBuffer
from gyre.trainer.checkpoint.store import Snapshot, SnapshotStore, find_faults, load
from gyre.trainer.trainer import NativeTrainer
from trainer_cases import whole_tensors
from zero_cases import batch_for, gathered_parts, trainer_on

Events = list[tuple[str, dict[str, Any]]]


class SlowDisk:
    """Writes a rank's file when it is let; may have a fault."""

    def __init__(self) -> None:
        self.go, self.fault = threading.Event(), None

    def __call__(self, path: Path, parts: Sequence[Part], check: Callable[[], None]) -> list:
        assert self.go.wait(60)
        if self.fault is not None:
            raise self.fault
        return shard_file.write_shard(path, parts, check)


class SlowStaging(StagingBuffer):
    """Copies when it is let; may have a fault."""

    def __init__(self, *, deadline_s: float = 60.0) -> None:
        super().__init__(torch.device("cpu"), deadline_s=deadline_s)
        self.begun, self.go, self.fault = threading.Event(), threading.Event(), None

    def fill(self, placed: StagedParts) -> None:
        self.begun.set()
        assert self.go.wait(60)
        if self.fault is not None:
            raise self.fault
        super().fill(placed)


def saver_on(
    group: RankGroup | None,
    folder: Path,
    *,
    background: bool = False,
    keep: int = 4,
    deadline_s: float = 60.0,
    resumed_step: int | None = None,
    **given: Any,
) -> tuple[Saver, SnapshotStore, Events]:
    events: Events = []

    def emit(kind: str, **fields: Any) -> None:
        events.append((kind, fields))

    store = SnapshotStore(folder, keep=keep, emit=emit, resumed_step=resumed_step)
    made = Saver(
        store, group or alone(), background=background, deadline_s=deadline_s, emit=emit, **given
    )
    return made, store, events


def part_of(name: str, whole: torch.Tensor, start: int = 0, stop: int | None = None) -> Part:
    return Part(
        name=name, shape=tuple(whole.shape), start=start, values_N=whole.reshape(-1)[start:stop]
    )


def parts_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    parts = [part_of(name, tensor) for name, tensor in tensors.items()]
    return {"tensors": {part.key: part for part in parts}, "state": {"version": 7}}


def thirds(group: RankGroup, value: float) -> dict[str, Any]:
    """A tensor of which each rank has a run, as long as its number + 1 in units."""
    sizes = [1000 * (rank + 1) for rank in range(group.size)]
    start = sum(sizes[: group.rank])
    own = Part(
        name="weights",
        shape=(sum(sizes),),
        start=start,
        values_N=torch.full((sizes[group.rank],), value),
    )
    return {"tensors": {own.key: own}, "state": {}}


def save_trained(
    group: RankGroup | None, folder: str, kind: str, *, steps: range, **settings: Any
) -> dict[str, Any]:
    """Train some steps and save; the whole state, on rank 0, as it was saved."""
    trainer = trainer_on(group, kind, **settings)
    for step in steps:
        trainer.step_now(batch_for(12, seed=step))
    return _save(group, Path(folder), trainer, steps.stop)


def load_and_save(
    group: RankGroup | None,
    source: str,
    target: str,
    kind: str,
    *,
    steps: range = range(0),
    **settings: Any,
) -> dict[str, Any]:
    """Continue from the newest snapshot of `source` and save into `target`."""
    trainer = trainer_on(group, kind, **settings)
    found = load_latest(SnapshotStore(Path(source), keep=1, emit=lambda *_, **__: None))
    assert found is not None
    trainer.restore_now({"tensors": found.tensors, "state": found.state["trainer"]})
    for step in steps:
        trainer.step_now(batch_for(12, seed=step))
    return _save(group, Path(target), trainer, found.step + len(steps))


def _save(
    group: RankGroup | None, folder: Path, trainer: NativeTrainer, step: int
) -> dict[str, Any]:
    made, _, _ = saver_on(group, folder, background=True)
    made.save(step, parts=trainer.live_snapshot, state={"step": step}, blobs={"b": b"12"})
    made.finish()
    whole = whole_tensors(
        gathered_parts(group or alone(), trainer.snapshot_now()["tensors"]).values()
    )
    return {name: tensor.float().numpy() for name, tensor in whole.items()}


def written_by(folder: Path) -> dict[str, int]:
    """Bytes of tensors in each rank's file."""
    found = {}
    for path in sorted(folder.glob("rank-*")):
        header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
        found[path.name] = path.stat().st_size - header_bytes - 8
    return found


def fail_on(
    group: RankGroup, folder: str, how: str, *, victim: int, background: bool
) -> dict[str, Any]:
    """A good save, then one that fails on one rank, then a good one. Returns what each rank was
    told, and when."""
    disk = SlowDisk()
    disk.go.set()
    made, store, _ = saver_on(group, Path(folder), background=background, write=disk)
    made.save(1, parts=lambda _: thirds(group, 1.0), state={}, blobs={})
    made.finish()
    began = time.monotonic()
    try:
        with _fault(how, group.rank == victim, disk):
            made.save(2, parts=lambda _: _breaking(group, how, victim), state={}, blobs={})
            made.finish()
        told, hint = "", ""
    except Exception as error:  # noqa: BLE001  the test reads it
        told, hint = f"{type(error).__name__}: {error}", getattr(error, "hint", "")
    seconds = time.monotonic() - began
    group.barrier()  # the first rank has removed what there was
    steps, left = store.steps(), sorted(path.name for path in Path(folder).iterdir())
    group.barrier()
    made.save(3, parts=lambda _: thirds(group, 3.0), state={}, blobs={})
    made.finish()
    return {
        "told": told,
        "hint": hint,
        "seconds": seconds,
        "steps": steps,
        "left": left,
        "after": store.steps(),
    }


def _breaking(group: RankGroup, how: str, victim: int) -> dict[str, Any]:
    if how == "copy" and group.rank == victim:
        raise OSError("a file that state is mapped from is gone")
    return thirds(group, 2.0)


class _fault:
    """On the victim, files may not grow, or the writer has a bug; elsewhere nothing."""

    def __init__(self, how: str, here: bool, disk: SlowDisk) -> None:
        self._active, self._disk = here and how == "full", disk
        self._bug = here and how == "bug"

    def __enter__(self) -> None:
        if self._active:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, self._limits[1]))
        if self._bug:
            self._disk.fault = ValueError("a fault of our own")

    def __exit__(self, *_: object) -> None:
        if self._active:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
        if self._bug:
            self._disk.fault = None


def die_in_a_save(group: RankGroup, folder: str, *, victim: int, background: bool) -> str:
    """A rank is killed while it writes its file; what the others are told by the save, or by the
    step after it."""
    # a wait for notes ends no sooner than the dead rank's signs of life
    failure_detector.LIFE_S = 6.0
    made, _, _ = saver_on(group, Path(folder), background=background)
    trainer = trainer_on(group, "sft", layout="zero3")
    made.save(1, parts=trainer.live_snapshot, state={}, blobs={})
    made.finish()
    if group.rank == victim:
        honest = shard_file.os.fsync

        def killed(handle: int) -> None:
            honest(handle)
            os.kill(os.getpid(), signal.SIGKILL)

        shard_file.os.fsync = killed  # type: ignore[assignment]
    try:
        made.save(2, parts=trainer.live_snapshot, state={}, blobs={})
        trainer.step_now(batch_for(8, seed=0))
        made.finish()
    except Exception as error:  # noqa: BLE001  the test reads it
        return f"{type(error).__name__}: {error}"
    return ""


def shares_of_faults(group: RankGroup, path: str) -> list[str]:
    return [
        str(fault) for fault in find_faults(Path(path), share=group.rank, num_shares=group.size)
    ]


def bytes_read_to_restore(group: RankGroup | None, path: str, kind: str, **settings: Any) -> int:
    """From the shard files, while the trainer's tensors are filled."""
    trainer, total = trainer_on(group, kind, **settings), [0]
    honest = shard_file.zlib.crc32
    lock = threading.Lock()

    class Counting:
        @staticmethod
        def crc32(data: Any) -> int:
            with lock:
                total[0] += len(data)
            return honest(data)

    snapshot = load(Path(path))
    shard_file.zlib = Counting  # type: ignore[assignment]
    try:
        trainer.restore_now({"tensors": snapshot.tensors, "state": snapshot.state["trainer"]})
    finally:
        import zlib

        shard_file.zlib = zlib
    return total[0]


def wait_for_a_slow_copy(group: RankGroup, folder: str, *, victim: int, what: str) -> str:
    """A step behind a save whose copy does not end on one rank (-1: takes 8 s on all), or a save
    whose memory does not come there."""
    deadline_s = 9.0 if what == "memory" else 60.0
    staged, never = SlowStaging(deadline_s=deadline_s), threading.Event()
    made, _, _ = saver_on(
        group, Path(folder), background=True, deadline_s=deadline_s, staging=staged
    )
    trainer = trainer_on(group, "sft", layout="zero1")
    if victim == -1:
        threading.Timer(8.0, staged.go.set).start()
    elif group.rank != victim or what != "copy":
        staged.go.set()
    if group.rank == victim and what == "memory":
        staging.HostBuffer = lambda *_, **__: never.wait(60)  # type: ignore[assignment]
    try:
        made.prepare(trainer.snapshot_bytes())
        made.save(1, parts=trainer.live_snapshot, state={}, blobs={})
        trainer.step_now(batch_for(8, seed=0))
    except GyreError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        staging.HostBuffer = HostBuffer
        never.set()
        staged.go.set()
    return ""


def save_behind_a_stuck_disk(
    group: RankGroup, folder: str, *, victim: int, pause_s: float, deadline_s: float
) -> str:
    """A save, `pause_s` after one whose file one rank cannot get written."""
    saver_module.LAST_WORDS_S = 0.5
    disk = SlowDisk()
    made, _, _ = saver_on(group, Path(folder), background=True, deadline_s=deadline_s, write=disk)
    if group.rank != victim:
        disk.go.set()
    try:
        made.save(1, parts=lambda _: thirds(group, 1.0), state={}, blobs={})
        time.sleep(pause_s)
        made.save(2, parts=lambda _: thirds(group, 2.0), state={}, blobs={})
    except GyreError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        disk.go.set()
    return ""


def load_latest(store: SnapshotStore) -> Snapshot | None:
    """The newest intact snapshot, as one process finds it."""
    for path in reversed(store.paths()):
        if not (faults := find_faults(path)):
            return load(path)
        store.skip(path, faults)
    return None
