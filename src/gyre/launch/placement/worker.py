"""Workers: the objects in worker processes. In: a config, then calls. Out: endpoints.

RankWorker has a trainer rank and an engine of a training run. Every rank gets every call but those
for one engine. launch.placement.worker_placement starts it, by the name
"gyre.launch.placement.worker:build_rank". ServedEngine has one engine over the weights of a folder.
launch.serving.server starts it, by the name "gyre.launch.placement.worker:build_served_engine".
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from gyre.cluster.worker.endpoints import EngineEndpoint
from gyre.cluster.worker.server import Context
from gyre.cluster.worker.trainer_endpoint import TrainerEndpoint
from gyre.core.errors import GyreError, WorkerLost
from gyre.core.offers import Offer
from gyre.core.records import DeviceHoldings, Phase
from gyre.distributed.init import RankSpec, join, join_neighbors
from gyre.distributed.process_group import RankGroup
from gyre.engine.frontend.admission import RequestLimits
from gyre.launch.export import export_live, export_policy, export_shards
from gyre.launch.factories import (
    Machine,
    Policy,
    load_policy,
    make_engine,
    make_machine,
    make_policy,
)
from gyre.launch.placement.pod_metadata import PodMetadata, open_rendezvous
from gyre.launch.placement.stage_runtime import StageRuntime
from gyre.launch.stage_plan import has_parts
from gyre.launch.stages import plan_stages
from gyre.models.decoder import ScalarHead
from gyre.models.hub.folders import LoadFormat
from gyre.observability.spans import ActivityClock
from gyre.planner.plan import Plan
from gyre.runconfig.run_config import RunConfig
from gyre.text.tokenizer import load_tokenizer
from gyre.trainer.checkpoint.store import Fault, find_faults, load
from gyre.weights.gather import ShardSource
from gyre.weights.transports.addresses import CUDA_IPC, GLOO, NCCL, SHM, host_id
from gyre.weights.transports.device.live_server import LiveServer, live_name
from gyre.weights.transports.device.staging_ring import SEATS
from gyre.weights.transports.opened import Reading
from gyre.weights.transports.publish import PublishedPart, publish_part
from gyre.weights.transports.shared_memory import SharedMemoryStore

Result = TypeVar("Result")
LIVE_DEADLINE_S = 20.0  # of a bucket from device to device; well below cluster.hang_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker is to be. Plain values: it crosses to the worker's process."""

    config_json: str  # a RunConfig
    folder: str  # of the run; on a disk that all nodes see
    directory: str  # where the driver works; paths in the config are relative to it
    rank: int | None  # None: an engine alone
    has_engine: bool  # beside the rank, or alone
    shares_process: bool  # whether a rank has its engine in its own process; in a pod none has
    run_id: str  # of the run's shared memory
    world_size: int
    store_host: str
    store_port: int
    round_id: str  # differs at every start of the ranks
    served_at: Sequence[str] = ()  # "host:port" of servers of the run's registered shards
    tensor_rank: int = 0  # of an engine alone, among engine.tensor_ranks
    meeting: str = ""  # differs at every start of an engine's ranks


async def build_rank(context: Context, **fields: Any) -> RankWorker:
    """Make the model, without its weights, and become a rank; returns when all ranks are there.
    `fields` are those of a WorkerSpec."""
    spec = WorkerSpec(**fields)
    os.chdir(spec.directory)
    config = RunConfig.model_validate_json(spec.config_json)
    machine = make_machine(config)
    tokenizer = load_tokenizer(Path(spec.folder) / "tokenizer")
    loop = asyncio.get_running_loop()
    policy = await loop.run_in_executor(machine.compute, make_policy, config, tokenizer, machine)
    group = tensor_group = None
    if spec.rank is not None:
        seat = _seat(spec, config, machine)
        group = await loop.run_in_executor(machine.compute, join, seat)
        if has_parts(config):
            join_engine = partial(join_neighbors, seat, config.engine.tensor_ranks, name="engine")
            tensor_group = await loop.run_in_executor(machine.compute, join_engine)
    elif config.engine.tensor_ranks > 1:
        seat = replace(
            _seat(spec, config, machine),
            rank=spec.tensor_rank,
            world_size=config.engine.tensor_ranks,
            round_id=spec.meeting,
        )
        tensor_group = await loop.run_in_executor(machine.compute, join, seat)
    is_member = not spec.shares_process and not spec.tensor_rank
    metadata = await _join_pod(context, spec, config) if is_member else None
    # one for each layer that runs
    register_module_forward_pre_hook(lambda module, args: context.tick())
    return RankWorker(context, spec, config, machine, policy, group, metadata, tensor_group)


def _seat(spec: WorkerSpec, config: RunConfig, machine: Machine) -> RankSpec:
    """Return the seat of a trainer's rank."""
    return RankSpec(
        rank=spec.rank or 0,
        world_size=spec.world_size,
        store_host=spec.store_host,
        store_port=spec.store_port,
        round_id=spec.round_id,
        backend="nccl" if machine.device.type == "cuda" else "gloo",
        device=torch.device("cuda", 0) if machine.device.type == "cuda" else machine.device,
        timeout_s=config.parallel.timeout_s,
    )


async def _join_pod(context: Context, spec: WorkerSpec, config: RunConfig) -> PodMetadata:
    """Become a member of the pod, for as long as this process shows signs of life."""
    settings = config.cluster.rendezvous
    metadata = PodMetadata(
        open_rendezvous(
            settings,
            run_id=spec.run_id,
            store_host=spec.store_host,
            store_port=spec.store_port,
            emit=context.emit,
        ),
        name=context.name,
        role="engine" if spec.rank is None else "trainer",
        config=settings,
        emit=context.emit,
    )
    await metadata.join()
    return metadata


class RankWorker:
    """`trainer` and `engine` are there from `begin` to `end`; an engine worker has no trainer."""

    def __init__(
        self,
        context: Context,
        spec: WorkerSpec,
        config: RunConfig,
        machine: Machine,
        policy: Policy,
        group: RankGroup | None,
        metadata: PodMetadata | None,
        tensor_group: RankGroup | None = None,
    ) -> None:
        self._tensor_group = tensor_group  # of the ranks of an engine
        self._metadata = metadata  # of this process at the pod's rendezvous
        self._activities = ActivityClock(None if spec.shares_process else context.emit)
        self._context = context
        self._spec = spec
        self._machine = machine
        self._config = config
        self._policy = policy
        self._group = group
        self._device: StageRuntime | None = None
        self._head: ScalarHead | None = None
        self._store: SharedMemoryStore | None = None  # of versions that engines elsewhere take
        self._live: LiveServer | None = None  # of the version that the trainer has on its device
        self._shards: ShardSource | None = None  # of the trained model, where no rank has it whole
        if spec.rank is None:
            ago_s = time.time() - psutil.Process().create_time()
            self._activities.begin("dummy_start", ago_s=ago_s).end()
        self.trainer: TrainerEndpoint | None = None
        self.engine: EngineEndpoint | None = None

    async def begin(
        self,
        stage_name: str,
        plan_json: str,
        version: int,
        snapshot: str,
        neighbor_bytes: int = 0,
    ) -> int:
        """Make the stage's objects and return the trainer's version. With `snapshot`, a path, the
        trainer resumes from it. `neighbor_bytes` are other workers' on the same device."""
        starting = self._activities.begin("dummy_start")
        stage = next(
            stage for stage in plan_stages(self._config, "all") if stage.name == stage_name
        )
        plan = Plan.from_json(plan_json)
        device = self._device = StageRuntime(
            self._config,
            plan,
            Path(self._spec.folder),
            self._machine,
            self._context.emit,
            group=self._group,
            tensor_group=self._tensor_group,
            own_offer=self._own_offer,
            progress=self._context.tick,
        )
        self._policy = await device.begin(
            stage,
            self._policy,
            version=version,
            found=partial(load, Path(snapshot)) if snapshot else None,
            trains=self._spec.rank is not None,
            generates=self._spec.has_engine,
            neighbor_bytes=neighbor_bytes,
            reading=self._reading() if self._spec.rank is None else None,
        )
        self._make_endpoints(device)
        if self._spec.rank is None:
            starting.size_bytes = await self._held_bytes()
            starting.end()
        return version if device.trainer is None else device.trainer.version

    def _make_endpoints(self, device: StageRuntime) -> None:
        """Make what the driver calls, of the trainer and the engine that the stage has here."""
        if device.trainer is not None:
            assert self._spec.rank is not None
            self.trainer = TrainerEndpoint(
                device.trainer,
                rank=self._spec.rank,
                compute=self._machine.compute,
                publish=None if self._spec.has_engine else self._open_store(self._spec.rank),
                withdraw=self._withdraw,
                activities=self._activities,
            )
        if device.engine is not None:
            self.engine = EngineEndpoint(
                device.engine,
                trainer=self.trainer,
                ticks=lambda: self._context.ticks,
                on_commit=self._note_serving,
                activities=self._activities,
                held_bytes=self._held_bytes,
                lost=device.lost_rank,
            )

    def _own_offer(self, version: int) -> Offer:
        """Return what this rank's trainer has registered."""
        assert self.trainer is not None
        return self.trainer.offer(version)

    async def _held_bytes(self) -> int:
        return (await self.holdings()).component_bytes

    def _reading(self) -> Reading | None:
        """Return how an engine reads from the ranks' devices where the config says so. Where that
        ends, the slots have the same bytes."""
        if (scheme := self._live_scheme()) is None:
            return None
        return Reading(host_id=host_id(), preference=(scheme, SHM), deadline_s=LIVE_DEADLINE_S)

    def _live_scheme(self) -> str | None:
        """Return how engines read from the ranks' devices; None where they read shared memory."""
        match self._config.cluster.weight_transport:
            case "shm":
                return None
            case "cuda-ipc":
                return CUDA_IPC
            case "nccl":
                return NCCL if self._machine.device.type == "cuda" else GLOO

    def _withdraw(self) -> None:
        """End what reads the trainer's tensors, before they change or leave the device."""
        if self._live is not None:
            self._live.withdraw()

    def _note_serving(self, epoch: int, version: int) -> None:
        if self._metadata is not None:
            self._metadata.note_serving(epoch, version)

    def _open_store(self, rank: int) -> Callable[[Offer], PublishedPart]:
        """Return how this rank registers its part of a version for other processes."""
        self._store = store = SharedMemoryStore(
            run_id=self._spec.run_id,
            owner=rank,
            emit=self._context.emit,
            served_at=tuple(self._spec.served_at),
            pin=self._machine.device.type == "cuda",
        )
        if (scheme := self._live_scheme()) is not None:
            num_engines = self._config.count_pod_engines(self._spec.world_size)
            self._live = LiveServer(
                name=live_name(self._spec.run_id, rank),
                host=host_id(),
                device=self._machine.device,
                emit=self._context.emit,
                schemes=(scheme,),
                # members of other hosts read slots as soon as a version is offered
                writes_behind=not self._spec.served_at,
                num_seats=min(SEATS, num_engines * self._config.engine.tensor_ranks),
                deadline_s=LIVE_DEADLINE_S,
            )
        return partial(
            publish_part,
            rank=rank,
            num_ranks=self._spec.world_size,
            store=store,
            activities=self._activities,
            live=self._live,
        )

    async def end(self, last: bool) -> None:
        """Close the stage's objects, and keep the policy for the next stage, or shards for an
        export after the last."""
        device, self._device = self._device, None
        assert device is not None
        self.trainer = self.engine = None
        if self._live is not None:
            await self._on_compute(self._live.close)
            self._live = None
        if self._store is not None:
            self._store.close()
            self._store = None
        if device.trainer is not None:
            if last and device.cuts_weights:
                self._shards = await self._on_compute(device.trained_shards)
            else:
                self._policy = await self._on_compute(lambda: device.left_policy(self._policy))
            self._head = device.trainer.head
        await device.close()

    async def enter(
        self, phase: Phase, step: int, neighbor_bytes: int | None = None
    ) -> DeviceHoldings:
        """Move this worker's memory on its device for a phase; return what it has there
        afterwards. `neighbor_bytes` are those of other workers on the same device. WorkerLost where
        this is an engine's first rank, and one of its ranks was lost."""
        device = self._device
        assert device is not None
        if self._live is not None:  # an engine's rank behind the first has no free compute thread
            await self._on_compute(self._live.withdraw)
        try:
            await device.enter(phase, step=step, neighbor_bytes=neighbor_bytes)
        except GyreError as error:
            if cause := device.lost_rank():
                raise WorkerLost(cause) from error
            raise
        if cause := device.lost_rank():
            raise WorkerLost(cause)
        return await device.holdings()

    async def holdings(self) -> DeviceHoldings:
        """Return what this worker has on its device."""
        assert self._device is not None
        return await self._device.holdings()

    async def save(self, step: int, state: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
        """Write this rank's part of a snapshot."""
        assert self._device is not None and self._device.snapshots is not None
        await self._device.snapshots.save(step=step, state=state, blobs=blobs)

    async def look_through(self, path: str) -> list[Fault]:
        """Return what is wrong with this rank's share of a snapshot's bytes."""
        share, shares = self._spec.rank, self._spec.world_size
        assert share is not None
        return await self._on_compute(
            lambda: find_faults(Path(path), share=share, num_shares=shares)
        )

    async def export(self, folder: str, tokenizer_files: str) -> None:
        """Write the model in hub layout. Every rank gets the call; the first one writes."""
        where, files = Path(folder), Path(tokenizer_files)
        shards, group, spec = self._shards, self._group, self._policy.spec
        if shards is not None and group is not None:
            given = {"deadline_s": self._config.snapshot.deadline_s, "progress": self._context.tick}
            work = partial(
                export_shards, spec, self._head, shards, group, where, self._machine, files, **given
            )
            await self._on_compute(work)
        elif self._spec.rank == 0:
            await self._on_compute(
                lambda: export_policy(self._policy, self._head, where, self._machine, files)
            )

    async def export_live(self, folder: str, tokenizer_files: str) -> None:
        """Write the model that is being trained, like `export`, within a stage."""
        device, where, files = self._device, Path(folder), Path(tokenizer_files)
        assert device is not None and device.trainer is not None
        head = device.trainer.head
        if device.cuts_weights:
            assert self._group is not None
            given = {"deadline_s": self._config.snapshot.deadline_s, "progress": self._context.tick}
            shards = await self._on_compute(device.trained_shards)
            work = partial(
                export_shards,
                self._policy.spec,
                head,
                shards,
                self._group,
                where,
                self._machine,
                files,
                **given,
            )
            await self._on_compute(work)
        elif self._spec.rank == 0:
            await self._on_compute(
                lambda: export_live(self._policy, head, where, self._machine, files)
            )

    async def _on_compute(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._machine.compute, work)


class ServedEngine:
    """One engine over the weights of a folder."""

    def __init__(self, engine: EngineEndpoint, limits: RequestLimits) -> None:
        self.engine = engine
        self._limits = limits

    def limits(self) -> RequestLimits:
        """Return what bounds a request."""
        return self._limits


async def build_served_engine(
    context: Context,
    *,
    folder: str,
    version: int,
    config_json: str,
    load_format: LoadFormat = "auto",
    kept_tokenizer: str = "",
) -> ServedEngine:
    """Load the weights, which are of `version`, and make the engine; `start` allocates its KV
    cache. `kept_tokenizer` is a file where the server leaves what it reads of a hub tokenizer."""
    imports_s, begun_s = time.time() - psutil.Process().create_time(), time.monotonic()
    config = RunConfig.model_validate_json(config_json)
    machine = make_machine(config)
    policy = await asyncio.get_running_loop().run_in_executor(
        machine.compute,
        partial(
            load_policy,
            Path(folder),
            machine,
            end_token=config.tokenizer.end_token,
            load_format=load_format,
            kept_tokenizer=Path(kept_tokenizer) if kept_tokenizer else None,
        ),
    )
    seconds = time.monotonic() - begun_s
    context.emit("engine.loaded", load_format=load_format, imports_s=imports_s, seconds=seconds)
    # one for each layer that runs
    register_module_forward_pre_hook(lambda module, args: context.tick())
    engine = make_engine(
        config.engine, policy, machine, context.emit, shared_weights=False, version=version
    )
    endpoint = EngineEndpoint(engine, ticks=lambda: context.ticks)
    return ServedEngine(endpoint, engine.limits)
