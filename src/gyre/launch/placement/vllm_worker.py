"""vLLM worker: the object in a sidecar's process, in vLLM's environment. In: a VllmRole as JSON,
then calls. Out: an EngineEndpoint, as in any other engine's worker.

launch.sidecar starts it, by the name "gyre.launch.placement.vllm_worker:build_vllm_engine". Imports
nothing that vLLM's environment lacks.
"""

from __future__ import annotations

import asyncio
import time

import psutil

from gyre.cluster.worker.endpoints import EngineEndpoint
from gyre.cluster.worker.server import Context
from gyre.core.codec import decode_json
from gyre.core.offers import Offer
from gyre.core.records import DeviceHoldings, Phase
from gyre.observability.spans import ActivityClock
from gyre.sidecars.vllm.device_memory import VllmMemory, open_nvml
from gyre.sidecars.vllm.engine import VllmEngine
from gyre.sidecars.vllm.llm import VllmRole, import_vllm
from gyre.sidecars.vllm.versions import VllmBuild


async def build_vllm_engine(context: Context, *, role_json: str) -> VllmWorker:
    """Import vLLM and check its version. No device memory is taken before the engine's start."""
    role = decode_json(role_json, VllmRole)
    imports_s, begun_s = time.time() - psutil.Process().create_time(), time.monotonic()
    build = await asyncio.to_thread(import_vllm)
    seconds = time.monotonic() - begun_s
    context.emit("engine.loaded", load_format="vllm", imports_s=imports_s, seconds=seconds)
    ActivityClock(context.emit).begin("dummy_start", ago_s=imports_s + seconds).end()
    return VllmWorker(context, role, build)


class VllmWorker:
    """vLLM as an engine without a trainer rank. `engine` is there from the start of the process,
    and its memory from the first phase that needs it until one that does not."""

    def __init__(self, context: Context, role: VllmRole, build: VllmBuild) -> None:
        self._role = role
        self._activities = ActivityClock(context.emit)
        self._vllm = VllmEngine(
            role.settings,
            build,
            role.limits,
            emit=context.emit,
            drain_deadline_s=role.drain_deadline_s,
            version=role.version,
        )
        self._memory = VllmMemory(
            self._vllm.device_bytes,
            begun_bytes=lambda: self._vllm.begun_bytes,
            emit=context.emit,
            limits=role.proof,
            open_device=open_nvml if build.device == "cuda" else None,
        )
        self.engine = EngineEndpoint(
            self._vllm,
            ticks=lambda: context.ticks,
            activities=self._activities,
            held_bytes=self._held_bytes,
        )
        self._beginning: asyncio.Task[None] | None = None
        self._receive = self.engine.prepare
        self.engine.prepare = self._prepare
        self._start_engine = self.engine.start
        self.engine.start = self._start

    async def begin(
        self,
        stage_name: str,
        plan_json: str,
        version: int,
        snapshot: str,
        neighbor_bytes: int = 0,
    ) -> int:
        """Begin a stage, and vLLM's start; the weights come by the first hand-over."""
        await self._memory.begin(neighbor_bytes)
        self._begin_start()
        return version

    async def enter(
        self, phase: Phase, step: int, neighbor_bytes: int | None = None
    ) -> DeviceHoldings:
        """Take or give back memory for a phase, and prove it by the device's own reading."""
        begun_s = time.monotonic()
        self._memory.note_neighbors(neighbor_bytes)
        if phase in ("handover", "rollout", "evaluate"):
            await self._take_memory()
        elif phase == "train":
            await self._give_back()
        held = await self._memory.prove(phase, step, begun_s=begun_s)
        if phase == "train" and self._begin_start():
            held = await self.holdings()
        return held

    async def holdings(self) -> DeviceHoldings:
        return await self._memory.holdings()

    async def _held_bytes(self) -> int:
        return (await self._memory.holdings()).process_bytes

    async def end(self, last: bool) -> None:
        """End a stage."""
        await self.engine.terminate()

    async def park(self, level: int) -> None:
        before = await self._held_bytes()
        with self._activities.timing("park") as parking:
            await self._vllm.park(level)
            parking.size_bytes = before - await self._held_bytes()

    async def wake(self) -> None:
        before = await self._held_bytes()
        with self._activities.timing("wake") as waking:
            await self._vllm.wake()
            waking.size_bytes = await self._held_bytes() - before

    async def _prepare(self, offer: Offer) -> None:
        """Start vLLM where it is not: one that was started anew catches up without a phase."""
        await self._take_memory()
        await self._receive(offer)

    def _begin_start(self) -> bool:
        """Let processes, imports and initialization go on while the policy trains; return whether
        it is under way."""
        if not self._vllm.begin_start():
            return False
        self._beginning = asyncio.create_task(self._dummy_start())
        return True

    async def _dummy_start(self) -> None:
        with self._activities.timing("dummy_start"):
            await self._vllm.wait_until_begun()

    async def _start(self, dummy: bool) -> None:
        await self._start_engine(dummy)
        await self._memory.note_start()

    async def _take_memory(self) -> None:
        if self._beginning is not None and self._beginning.done():
            self._beginning.result()  # it may have raised
        if not self._vllm.is_started:
            await self._start(True)
        elif self._vllm.is_parked:
            await self.wake()

    async def _give_back(self) -> None:
        match self._role.during_training:
            case "terminate":
                await self.engine.terminate()
            case "sleep" if self._vllm.is_started and not self._vllm.is_parked:
                await self.park(2)
