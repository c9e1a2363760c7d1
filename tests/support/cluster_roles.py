"""Roles for the cluster's tests: workers' objects made of the shipped fakes or of tiny real parts.
In: a Context, plain arguments. Out: an object with seats. Workers import it by name:
"cluster_roles:FUNCTION"."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fakes.config import FakeEngineConfig, FakeTrainerConfig
from fakes.engine import Faults, ScriptedEngine
from fakes.trainer import CountingTrainer
from gyre.cluster.worker.endpoints import EngineEndpoint
from gyre.cluster.worker.server import Context
from gyre.cluster.worker.trainer_endpoint import TrainerEndpoint
from gyre.core.contracts import WorkerHandle
from gyre.core.errors import MemoryBudgetError
from gyre.core.records import DeviceHoldings, Request, RoleSpec
from gyre.core.seeds import derive_seed
from local_cluster import LocalCluster

VOCAB = 48
HERE = str(Path(__file__).parent)


def start_workers(cluster: LocalCluster, specs: Sequence[RoleSpec]) -> list[WorkerHandle]:
    """Start them from anywhere, a running event loop included."""

    async def start() -> list[WorkerHandle]:
        return [await cluster.start(spec) for spec in specs]

    with ThreadPoolExecutor(1) as aside:
        return aside.submit(asyncio.run, start()).result(60)


def end_thread(cluster: LocalCluster, name: str) -> None:
    cluster.handles[name].kill("killed by a test")


def recite(request: Request, index: int, version: int) -> list[int]:
    return [derive_seed(request.seed, index, place) % VOCAB for place in range(200)]


class Frozen(ScriptedEngine):
    """Takes requests, and its steps do not go on."""

    async def stats(self) -> Any:
        return replace(await super().stats(), steps=7)


def fake_engine(
    context: Context, *, token_delay_s: float = 0.002, stalled: tuple[str, ...] = ()
) -> Any:
    engine = (Frozen if stalled else ScriptedEngine)(
        recite,
        emit=context.emit,
        config=FakeEngineConfig(context_tokens=128, max_running=6, token_delay_s=token_delay_s),
        faults=Faults(stalled=frozenset(stalled)),
    )
    return SimpleNamespace(engine=EngineEndpoint(engine))


def native_engine(context: Context, *, shared: bool = False) -> Any:
    from test_rollout_engine import build_native

    return SimpleNamespace(engine=EngineEndpoint(build_native(shared).engine))


def fake_trainer(
    context: Context, *, rank: int, shapes: dict[str, tuple[int, ...]] | None = None, **fields: Any
) -> Any:
    trainer = CountingTrainer(
        emit=context.emit, config=FakeTrainerConfig(sequences_per_update=4), shapes=shapes, **fields
    )
    return SimpleNamespace(
        trainer=TrainerEndpoint(trainer, rank=rank, compute=ThreadPoolExecutor(1))
    )


class Stuck(CountingTrainer):
    """A trainer whose step blocks its compute thread on one rank, or ticks while it is slow."""

    def __init__(self, context: Context, *, stuck: bool, slow_s: float) -> None:
        super().__init__(emit=context.emit)
        self._context, self._stuck, self._slow_s = context, stuck, slow_s
        self._forever = threading.Event()

    async def step(self, batch: Any) -> Any:
        def work() -> None:
            if self._stuck:
                self._forever.wait(60)
            end = time.monotonic() + self._slow_s
            while time.monotonic() < end:
                self._context.tick()
                time.sleep(0.02)

        await asyncio.get_running_loop().run_in_executor(None, work)
        return await super().step(batch)


def stuck_trainer(context: Context, *, rank: int, stuck: bool = False, slow_s: float = 0.0) -> Any:
    trainer = Stuck(context, stuck=stuck, slow_s=slow_s)
    return SimpleNamespace(
        trainer=TrainerEndpoint(trainer, rank=rank, compute=ThreadPoolExecutor(1))
    )


class FullDisk(CountingTrainer):
    """A trainer that cannot write what its step wants to keep."""

    async def step(self, batch: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full")


def full_disk_trainer(context: Context, *, rank: int) -> Any:
    trainer = FullDisk(emit=context.emit)
    return SimpleNamespace(
        trainer=TrainerEndpoint(trainer, rank=rank, compute=ThreadPoolExecutor(1))
    )


class Gated:
    """A worker's memory: no room for `score` on the second one, and broken at `handover` on the
    first."""

    def __init__(self, rank: int, held_bytes: int) -> None:
        self._rank, self._held_bytes = rank, held_bytes

    async def enter(
        self, phase: str, step: int, neighbor_bytes: int | None = None
    ) -> DeviceHoldings:
        if phase == "score" and self._rank == 1:
            raise MemoryBudgetError("no room on rank-1", hint="give it more")
        assert phase != "handover" or self._rank == 1, "told to break"
        return await self.holdings()

    async def holdings(self) -> DeviceHoldings:
        return DeviceHoldings(component_bytes=self._held_bytes, process_bytes=self._held_bytes + 7)


def gated(context: Context, *, rank: int, held_bytes: int) -> Gated:
    return Gated(rank, held_bytes)
