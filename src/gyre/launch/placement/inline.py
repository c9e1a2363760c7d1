"""Placement: where a run's trainer and engine live. In: a stage, its plan. Out: the contracts that
the loop drives. Inline: in this process, on one device. `launch.placement.worker_placement` has
the other one.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Protocol

from gyre.core.events import Emit
from gyre.launch.export import export_live, export_policy
from gyre.launch.factories import Facts, Machine, Policy, make_policy
from gyre.launch.placement.stage_runtime import StageRuntime
from gyre.launch.placement.step_exports import make_exports
from gyre.launch.stages import Stage
from gyre.loop.ports import StageParts
from gyre.models.decoder import ScalarHead
from gyre.planner.plan import Plan
from gyre.runconfig.run_config import RunConfig
from gyre.text.tokenizer import Tokenizer
from gyre.trainer.checkpoint.store import Fault, Snapshot, find_faults


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

    @property
    def version(self) -> int:
        """Return the policy's version in the stage that runs."""
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
        self._config = config
        self._folder = folder
        self._machine = machine
        self._emit = emit
        self._policy: Policy | None = None
        self._head: ScalarHead | None = None  # of a reward model, once its stage is done
        self._device: StageRuntime | None = None

    @property
    def version(self) -> int:
        assert self._device is not None and self._device.trainer is not None
        return self._device.trainer.version

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
        resumes = None if found is None else lambda: found
        self._policy = await device.begin(stage, self._policy, version=version, found=resumes)
        trainer, snapshots, engine = device.trainer, device.snapshots, device.engine
        assert trainer is not None and snapshots is not None
        return StageParts(
            trainer=trainer,
            gate=device,
            snapshots=snapshots,
            engine=engine,
            lifecycle=engine,
            exports=make_exports(
                self._config, self._folder, self._export_live, lambda: self.version, self._emit
            ),
        )

    async def end(self, *, failed: bool, last: bool) -> None:
        device, self._device = self._device, None
        if device is None:
            return
        if device.trainer is not None and not failed:
            self._head = device.trainer.head
        await device.close()

    async def export(self, folder: Path, tokenizer_files: Path) -> None:
        assert self._policy is not None
        export_policy(self._policy, self._head, folder, self._machine, tokenizer_files)

    async def _export_live(self, folder: Path, tokenizer_files: Path) -> None:
        policy, device = self._policy, self._device
        assert policy is not None and device is not None and device.trainer is not None
        work = partial(
            export_live, policy, device.trainer.head, folder, self._machine, tokenizer_files
        )
        await asyncio.get_running_loop().run_in_executor(self._machine.compute, work)

    async def close(self) -> None:
        self._policy = None
