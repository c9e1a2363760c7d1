"""Snapshots of a stage: the trainer's parts and the loop's state in one folder. In: a trainer, and
where its run writes. Out: the SnapshotPort of a loop. Every rank has one; its calls run on the
compute thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gyre.core.events import Emit
from gyre.distributed.process_group import RankGroup, alone
from gyre.launch.factories import Machine
from gyre.runconfig.run_config import RunConfig
from gyre.trainer.checkpoint.saver import Saver
from gyre.trainer.checkpoint.store import SnapshotStore
from gyre.trainer.trainer import NativeTrainer


def stage_store(
    config: RunConfig, folder: Path, stage: str, emit: Emit, *, resumed_step: int | None = None
) -> SnapshotStore:
    where = folder / "snapshots" / stage
    return SnapshotStore(where, keep=config.snapshot.keep, emit=emit, resumed_step=resumed_step)


def make_snapshots(
    config: RunConfig,
    folder: Path,
    stage: str,
    trainer: NativeTrainer,
    machine: Machine,
    emit: Emit,
    *,
    resumed_step: int,
    group: RankGroup | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Snapshots:
    """Make the writer of a stage's snapshots. Every rank has one. `resumed_step` is that of the
    snapshot that the stage resumes from, 0 without one."""
    saver = Saver(
        stage_store(config, folder, stage, emit, resumed_step=resumed_step),
        group or alone(machine.device),
        background=config.snapshot.background,
        deadline_s=config.snapshot.deadline_s,
        emit=emit,
        progress=progress,
    )
    return Snapshots(saver, trainer, machine.compute, prepares=config.snapshot.every_steps > 0)


class Snapshots:
    """SnapshotPort: the trainer's parts and the loop's state in one folder."""

    def __init__(
        self, saver: Saver, trainer: NativeTrainer, compute: ThreadPoolExecutor, *, prepares: bool
    ) -> None:
        """Make the writer. Without `prepares` the only save is the last one, which may wait for its
        memory."""
        self._saver = saver
        self._trainer = trainer
        self._compute = compute
        self._prepares = prepares

    def prepare(self) -> None:
        """Begin to make the memory that saves need; after the engine's graphs are captured."""
        if self._prepares:
            self._saver.prepare(self._trainer.snapshot_bytes())

    async def save(
        self, *, step: int, state: Mapping[str, Any], blobs: Mapping[str, bytes]
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(
            self._compute, self._save, step, state, blobs
        )

    async def finish(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._compute, self._saver.finish)

    def _save(self, step: int, state: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
        self._saver.save(step, parts=self._trainer.live_snapshot, state=state, blobs=blobs)
