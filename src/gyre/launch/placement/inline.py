"""Placement: where a run's trainer and engine live. In: a stage, its plan. Out: the contracts that
the loop drives. Inline: in this process, on one device. `launch.placement.ray_placement` has the
other one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gyre.core.contracts import EngineLifecycle, PolicyTrainer, RolloutEngine
from gyre.core.events import Emit
from gyre.distributed.process_group import RankGroup, alone
from gyre.launch.export import export_policy
from gyre.launch.factories import Facts, Machine, Policy, make_policy
from gyre.launch.placement.stage_runtime import StageRuntime
from gyre.launch.stages import Stage
from gyre.loop.ports import PhaseGate, SnapshotPort
from gyre.models.scalar_head import ScalarHead
from gyre.planner.plan import Plan
from gyre.runconfig import RunConfig
from gyre.text.tokenizer import Tokenizer
from gyre.trainer.checkpoint.saver import Saver
from gyre.trainer.checkpoint.store import Fault, Snapshot, SnapshotStore, find_faults
from gyre.trainer.trainer import NativeTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """What a stage is driven through."""

    trainer: PolicyTrainer
    gate: PhaseGate
    snapshots: SnapshotPort
    engine: RolloutEngine | None = None
    lifecycle: EngineLifecycle | None = None
    version: Callable[[], int]  # of the policy, now


class Placement(Protocol):
    """Begin and end of each stage, in order."""

    @property
    def share(self) -> int:
        """Into how many parts the memory and cores of one machine are cut."""
        ...

    @property
    def ranks(self) -> int:
        """Return how many ranks train together, on all machines."""
        ...

    async def open(self, tokenizer: Tokenizer) -> Facts | Policy:
        """Make the model, without its weights; say what it is."""
        ...

    async def look_through(self, path: Path) -> list[Fault]:
        """Return what is wrong with a snapshot. All ranks together read every byte."""
        ...

    async def begin(
        self, stage: Stage, plan: Plan, *, version: int, found: Snapshot | None
    ) -> StageParts:
        """Make a stage's objects; the trainer continues from `found` if there is one."""
        ...

    async def end(self, *, failed: bool, last: bool) -> None:
        """Close them, and keep the trained model; after the last stage only to export it."""
        ...

    async def export(self, folder: Path, tokenizer_files: Path) -> None:
        """Write the model in hub layout and read it back."""
        ...

    async def close(self) -> None:
        """End what `open` made, however the run went."""
        ...


class Inline:
    """All in this process."""

    share = ranks = 1

    def __init__(self, config: RunConfig, folder: Path, machine: Machine, emit: Emit) -> None:
        self._config, self._folder, self._machine, self._emit = config, folder, machine, emit
        self._policy: Policy | None = None
        self._head: ScalarHead | None = None  # of a reward model, once its stage is done
        self._device: StageRuntime | None = None
        self._snapshots: Snapshots | None = None

    async def open(self, tokenizer: Tokenizer) -> Policy:
        self._policy = make_policy(self._config, tokenizer, self._machine)
        return self._policy

    async def look_through(self, path: Path) -> list[Fault]:
        return await asyncio.get_running_loop().run_in_executor(
            self._machine.compute, find_faults, path
        )

    async def begin(
        self, stage: Stage, plan: Plan, *, version: int, found: Snapshot | None
    ) -> StageParts:
        assert self._policy is not None
        device = self._device = StageRuntime(
            self._config, plan, self._folder, self._machine, self._emit
        )
        trainer = device.make_trainer(stage, self._policy, version, resumed=found is not None)
        if found is not None:
            await trainer.restore({"tensors": found.tensors, "state": found.state["trainer"]})
        engine = await device.make_engine(self._policy) if plan.kv_pages > 0 else None
        device.manage()
        where, resumed_step = (
            (self._config, self._folder, stage.name),
            0 if found is None else found.step,
        )
        self._snapshots = make_snapshots(
            *where, trainer, self._machine, self._emit, resumed_step=resumed_step
        )
        self._snapshots.prepare()
        return StageParts(
            trainer=trainer,
            gate=device,
            snapshots=self._snapshots,
            engine=engine,
            lifecycle=engine,
            version=lambda: trainer.version,
        )

    async def end(self, *, failed: bool, last: bool) -> None:
        device, self._device = self._device, None
        if device is None:
            return
        if device.trainer is not None and not failed:
            self._head = device.trainer.head
        await device.close()
        if self._snapshots is not None:
            await self._snapshots.finish()
            self._snapshots = None  # with its memory

    async def export(self, folder: Path, tokenizer_files: Path) -> None:
        assert self._policy is not None
        export_policy(self._policy, self._head, folder, self._machine, tokenizer_files)

    async def close(self) -> None:
        self._policy = None


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
        self._saver, self._trainer, self._compute, self._prepares = (
            saver,
            trainer,
            compute,
            prepares,
        )

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
