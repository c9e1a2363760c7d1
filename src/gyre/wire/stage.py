"""Stage: the live objects of one stage, made in order and closed in reverse. In: Stage, policy, plan. Out: a loop.

With wire.make, the only place that names concrete classes. Caller: wire.run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gyre.core.records import Phase
from gyre.core.seeds import derive_seed
from gyre.engine.native import NativeEngine
from gyre.loop.controller import Ring, RingConfig
from gyre.loop.offline import OfflineConfig, OfflineLoop
from gyre.loop.ports import Observers, Parts, StageSpec
from gyre.objectives.config import needs_rollouts
from gyre.planner.plan import Plan
from gyre.rewards.score import RuleScorer
from gyre.runconfig import RunConfig
from gyre.trainer.background import BackgroundSnapshots
from gyre.trainer.native import NativeTrainer
from gyre.trainer.passes import ChunkLogprobs, chunk_logprobs
from gyre.trainer.snapshot import SnapshotStore
from gyre.vram.config import MemoryConfig
from gyre.vram.manager import MemoryManager
from gyre.vram.phases import default_needs
from gyre.wire.make import (
    Emit,
    Machine,
    Policy,
    accuracy_part,
    load_reward_model,
    make_engine,
    make_judge,
    make_scorer,
)
from gyre.wire.order import MAIN
from gyre.wire.stages import Stage, StageData, trains_invariant


class Built:
    """The live objects of one stage, made in order and closed in reverse."""

    def __init__(self, config: RunConfig, plan: Plan, folder: Path, machine: Machine, emit: Emit) -> None:
        self._config, self._plan, self._folder, self._machine, self._emit = config, plan, folder, machine, emit
        self._trainer: NativeTrainer | None = None
        self._snapshots: Snapshots | None = None
        self._engine: NativeEngine | None = None
        self._scorer: RuleScorer | None = None

    def trainer(self, stage: Stage, policy: Policy, version: int) -> NativeTrainer:
        reward, reward_model = self._config.rewards.model_part(), None
        if reward is not None and stage.name == MAIN:
            reward_model = load_reward_model(reward.path, self._machine, policy)
        self._trainer = NativeTrainer(
            decoder=policy.decoder,
            objective=stage.objective,
            config=stage.trainer,
            compute=self._machine.compute,
            emit=self._emit,
            seed=derive_seed(self._config.run.seed, "trainer", stage.name),
            reward_model=reward_model,
            version=version,
            shared=True,
            disk_folder=self._disk_folder(),
            logprobs=self._logprobs(stage),
            parallel=self._config.parallel,
        )
        return self._trainer

    def _logprobs(self, stage: Stage) -> ChunkLogprobs:
        """The engine's own kernels in batch-invariant mode, which `check_invariant` has found able."""
        if not trains_invariant(self._config, stage):
            return chunk_logprobs
        from gyre.trainer.invariant import InvariantLogprobs  # here, since a CPU has no Triton

        return InvariantLogprobs(page_tokens=self._plan.page_tokens)

    async def parts(
        self,
        policy: Policy,
        trainer: NativeTrainer,
        data: StageData,
        observers: Observers,
        store: SnapshotStore,
    ) -> Parts:
        with_engine = self._plan.kv_pages > 0
        if with_engine:
            self._scorer = make_scorer(self._config, self._emit)
            sizes = {"num_pages": self._plan.kv_pages, "page_tokens": self._plan.page_tokens}
            engine = self._config.engine.model_copy(update=sizes)
            self._engine = make_engine(engine, policy, self._machine, self._emit)
            await self._engine.start(dummy=False)
        gate = Gate(self._manager(trainer), self._machine.compute)
        self._snapshots = Snapshots(store, trainer, self._machine.compute, self._background(store))
        return Parts(
            source=data.source,
            trainer=trainer,
            gate=gate,
            snapshots=self._snapshots,
            observers=observers,
            text=policy.tokenizer,
            engine=self._engine,
            lifecycle=self._engine,
            scorer=self._scorer,
            eval_prompts=data.eval_prompts if with_engine else (),
            eval_batch=data.eval_batch,
        )

    def loop(self, stage: Stage, parts: Parts) -> Ring | OfflineLoop:
        config = self._config
        spec = StageSpec(
            name=stage.name,
            objective=stage.objective,
            steps=stage.trainer.steps,
            seed=derive_seed(config.run.seed, "stage", stage.name),
        )
        if needs_rollouts(stage.objective):
            reward = config.rewards.model_part()
            ring = RingConfig(
                rollout=config.rollout,
                evaluation=config.eval,
                snapshot_every_steps=config.snapshot.every_steps,
                accuracy_part=accuracy_part(config),
                reward_model=(reward.name, reward.weight) if reward else None,
                restart_engine=config.memory.leave.get("engine") == "destroy",
            )
            return Ring(spec, parts, ring, compute=self._machine.compute)
        judge = None
        if self._engine is not None and self._scorer is not None:
            judge = make_judge(config, self._engine, self._scorer, parts.text, self._emit)
        offline = OfflineConfig(
            records_per_step=stage.records_per_step,
            snapshot_every_steps=config.snapshot.every_steps,
            eval_every_steps=config.eval.every_steps,
        )
        return OfflineLoop(spec, parts, offline, judge=judge, compute=self._machine.compute)

    async def close(self) -> None:
        if self._scorer is not None:
            await self._scorer.close()
        if self._engine is not None:
            await self._engine.terminate()
        if self._trainer is not None:
            await self._trainer.close()
        if self._snapshots is not None:
            await self._snapshots.finish()

    def _background(self, store: SnapshotStore) -> BackgroundSnapshots | None:
        config = self._config.snapshot
        if not config.background:
            return None
        pinned = self._machine.device.type == "cuda"
        return BackgroundSnapshots(store, pinned=pinned, deadline_s=config.deadline_s, emit=self._emit)

    def _disk_folder(self) -> Path | None:
        """Inside the run's folder, or for a folder elsewhere a part of it that no other run touches."""
        name = self._config.memory.disk_folder
        if not name:
            return None
        return Path(name) / self._folder.name if Path(name).is_absolute() else self._folder / name

    def _manager(self, trainer: NativeTrainer) -> MemoryManager:
        tenants = [trainer] if self._engine is None else [self._engine, trainer]
        return MemoryManager(
            tenants,
            self._budgets(),
            self._machine.device,
            self._emit,
            needs=default_needs(shared_weights=True),
            working=self._plan.working,
        )

    def _budgets(self) -> MemoryConfig:
        plan = self._plan
        return self._config.memory.model_copy(
            update={
                "device_budget_bytes": plan.device_budget_bytes,
                "host_budget_bytes": plan.host_budget_bytes,
                "disk_budget_bytes": plan.disk_budget_bytes,
                "residency": plan.residency,
            }
        )


class Gate:
    """PhaseGate over the memory manager, on the compute thread."""

    def __init__(self, manager: MemoryManager, compute: ThreadPoolExecutor) -> None:
        self._manager, self._compute = manager, compute

    async def enter(self, phase: Phase, *, step: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._compute, lambda: self._manager.enter(phase, step=step))


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
