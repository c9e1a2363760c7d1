"""Placement: where a run's trainer and engine live. In: a stage, its plan. Out: the contracts that the loop drives.
Inline: in this process, on one device. `wire.fleet` has the other one. Caller: wire.run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gyre.core.contracts import EngineLifecycle, PolicyTrainer, RolloutEngine
from gyre.loop.ports import PhaseGate, SnapshotPort
from gyre.models.export import export_hub
from gyre.models.heads import ScalarHead
from gyre.models.load import verify_export
from gyre.planner.plan import Plan
from gyre.runconfig import RunConfig
from gyre.text.tokenizer import Tokenizer
from gyre.trainer.background import BackgroundSnapshots
from gyre.trainer.native import NativeTrainer
from gyre.trainer.snapshot import SnapshotStore
from gyre.wire.device import Device
from gyre.wire.make import Emit, Facts, Machine, Policy, make_policy
from gyre.wire.stages import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
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

    async def open(self, tokenizer: Tokenizer) -> Facts | Policy:
        """Make the model, without its weights; say what it is."""
        ...

    async def begin(self, stage: Stage, plan: Plan, *, version: int, found: Mapping[str, Any] | None) -> Placed:
        """Make a stage's objects; the trainer continues from `found`, a snapshot, if there is one."""
        ...

    async def end(self, *, failed: bool) -> None:
        """Close them, and keep the trained model."""
        ...

    async def export(self, folder: Path, tokenizer_files: Path) -> None:
        """Write the model in hub layout and read it back."""
        ...

    async def close(self) -> None:
        """End what `open` made, however the run went."""
        ...


class Inline:
    """All in this process."""

    share = 1

    def __init__(self, config: RunConfig, folder: Path, machine: Machine, emit: Emit) -> None:
        self._config, self._folder, self._machine, self._emit = config, folder, machine, emit
        self._policy: Policy | None = None
        self._head: ScalarHead | None = None  # of a reward model, once its stage is done
        self._device: Device | None = None
        self._snapshots: Snapshots | None = None

    async def open(self, tokenizer: Tokenizer) -> Policy:
        self._policy = make_policy(self._config, tokenizer, self._machine)
        return self._policy

    async def begin(self, stage: Stage, plan: Plan, *, version: int, found: Mapping[str, Any] | None) -> Placed:
        assert self._policy is not None
        device = self._device = Device(self._config, plan, self._folder, self._machine, self._emit)
        trainer = device.make_trainer(stage, self._policy, version, resumed=found is not None)
        if found is not None:
            trainer.restore(found)
        engine = await device.make_engine(self._policy) if plan.kv_pages > 0 else None
        device.manage()
        self._snapshots = make_snapshots(self._config, self._folder, stage.name, trainer, self._machine, self._emit)
        return Placed(
            trainer=trainer,
            gate=device,
            snapshots=self._snapshots,
            engine=engine,
            lifecycle=engine,
            version=lambda: trainer.version,
        )

    async def end(self, *, failed: bool) -> None:
        device, self._device = self._device, None
        if device is None:
            return
        if device.trainer is not None and not failed:
            self._head = device.trainer.head
        await device.close()
        if self._snapshots is not None:
            await self._snapshots.finish()

    async def export(self, folder: Path, tokenizer_files: Path) -> None:
        assert self._policy is not None
        export_policy(self._policy, self._head, folder, self._machine, tokenizer_files)

    async def close(self) -> None:
        self._policy = None


def stage_store(config: RunConfig, folder: Path, stage: str, emit: Emit) -> SnapshotStore:
    return SnapshotStore(folder / "snapshots" / stage, keep=config.snapshot.keep, emit=emit)


def make_snapshots(
    config: RunConfig, folder: Path, stage: str, trainer: NativeTrainer, machine: Machine, emit: Emit
) -> Snapshots:
    """What writes a stage's snapshots, on the process that writes them."""
    store, background = stage_store(config, folder, stage, emit), None
    if config.snapshot.background:
        pinned = machine.device.type == "cuda"
        background = BackgroundSnapshots(store, pinned=pinned, deadline_s=config.snapshot.deadline_s, emit=emit)
    return Snapshots(store, trainer, machine.compute, background)


def export_policy(
    policy: Policy, head: ScalarHead | None, folder: Path, machine: Machine, tokenizer_files: Path
) -> None:
    export_hub(policy.decoder, folder, dtype=machine.dtype, tokenizer_files=tokenizer_files, scalar_head=head)
    verify_export(folder, policy.decoder)


class Snapshots:
    """SnapshotPort: the trainer's tensors and the loop's state in one folder."""

    def __init__(
        self,
        store: SnapshotStore,
        trainer: NativeTrainer,
        compute: ThreadPoolExecutor,
        background: BackgroundSnapshots | None,
    ) -> None:
        """With `background`, `save` returns when the state is staged, and `finish` when the last one is on disk."""
        self._store, self._trainer, self._compute, self._background = store, trainer, compute, background

    async def save(self, *, step: int, state: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._compute, self._save, step, state, blobs)

    async def finish(self) -> None:
        if self._background is not None:
            await asyncio.get_running_loop().run_in_executor(self._compute, self._background.finish)

    def _save(self, step: int, state: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
        if self._background is not None:
            self._background.save(step, stage=self._trainer.snapshot, state=state, blobs=blobs)
            return
        own = self._trainer.snapshot()
        self._store.save(step, tensors=own["tensors"], state={"loop": state, "trainer": own["state"]}, blobs=blobs)
