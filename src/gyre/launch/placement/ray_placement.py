"""Ray placement: a run on the workers of a Ray cluster. In: the config's `[cluster]`. Out: a
Placement whose trainer is a group of ranks and whose engine is a pool.

Ray is kept over restarts of a run. The workers, the ranks' store and its round are new each time.
Ranks that find addresses of dead ones in an old store hang.
"""

from __future__ import annotations

import asyncio
import math
import os
import uuid
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gyre.cluster.engine_pool.pool import EnginePool, PoolSettings
from gyre.cluster.engine_pool.restarts import RestartPolicy
from gyre.cluster.phase_barrier import ClusterGate
from gyre.cluster.ray_cluster import RayCluster
from gyre.cluster.trainer_group import TrainerGroup
from gyre.cluster.watchdog import GRACE_S, HINT, find_cause
from gyre.cluster.worker.rpc import CALLS, STARTS, ask
from gyre.cluster.worker.server import WorkerFault
from gyre.core.contracts import WorkerHandle
from gyre.core.errors import ConfigError, RankError, WorkerLate
from gyre.core.events import Emit
from gyre.core.liveness import StallLimit
from gyre.core.records import RoleSpec
from gyre.distributed.init import child_environment, hold_store
from gyre.launch.factories import Facts, Machine, make_facts
from gyre.launch.placement.step_exports import make_exports
from gyre.launch.placement.worker import WorkerSpec
from gyre.launch.stages import Stage
from gyre.loop.ports import StageParts
from gyre.observability.hardware import describe_hardware
from gyre.planner.plan import Plan
from gyre.runconfig import RunConfig
from gyre.text.tokenizer import Tokenizer
from gyre.trainer.checkpoint.store import Fault, Snapshot, join_faults

Result = TypeVar("Result")
LOOPBACK = "127.0.0.1"


class RayWorkers:
    """Ray, and how many workers of what kind a run has there."""

    def __init__(self, config: RunConfig) -> None:
        """Start or join Ray. ConfigError when it cannot hold the workers."""
        _refuse_unsupported(config)
        self.config = config.cluster
        self._emit: Emit = lambda kind, **fields: None
        self.cluster = RayCluster(config.cluster, on_event=self._forward)
        self.num_workers = config.cluster.num_workers or max(1, self.cluster.num_gpus)
        self.on_gpus = config.run.device == "cuda" or (
            config.run.device == "auto" and self.cluster.num_gpus > 0
        )
        self._check_room()

    @property
    def host(self) -> str:
        """Return the address at which workers reach this process."""
        return self.cluster.address if self.config.address else LOOPBACK

    @property
    def share(self) -> int:
        """Workers on one machine."""
        return math.ceil((self.num_workers + self.config.engine_workers) / self.cluster.num_nodes)

    def forward_to(self, emit: Emit) -> None:
        """Send the workers' events to another log from now on."""
        self._emit = emit

    async def close(self) -> None:
        await self.cluster.close()

    def _forward(self, worker: str, kind: str, **fields: Any) -> None:
        self._emit(kind, worker=worker, **fields)

    def _check_room(self) -> None:
        wanted = self.num_workers + self.config.engine_workers
        cores, gpus = wanted * self.config.cpus_per_worker, wanted if self.on_gpus else 0
        if cores > self.cluster.num_cpus or gpus > self.cluster.num_gpus:
            offered = f"{self.cluster.num_cpus:g} cores and {self.cluster.num_gpus} GPUs"
            asyncio.run(self.close())
            raise ConfigError(
                f"{wanted} workers need {cores:g} cores and {gpus} GPUs, the cluster offers "
                f"{offered}",
                hint="lower cluster.num_workers, cluster.engine_workers or cluster.cpus_per_worker",
            )
        if self.on_gpus and (
            mixture := find_mixed_types(self.cluster.gpus_by_type, self.num_workers)
        ):
            asyncio.run(self.close())
            raise ConfigError(
                f"{self.num_workers} trainer ranks need GPUs of one type, the cluster has "
                f"{mixture}",
                hint="set cluster.num_workers to what one type has, or join a cluster of one type",
            )


class RayPlacement:
    """Placement over a fleet, for one attempt at a run."""

    def __init__(
        self, config: RunConfig, folder: Path, machine: Machine, emit: Emit, fleet: RayWorkers
    ) -> None:
        self._config, self._folder, self._machine, self._emit, self._fleet = (
            config,
            folder,
            machine,
            emit,
            fleet,
        )
        self._settings = fleet.config
        self._handles: list[WorkerHandle] = []  # of the trainer's ranks, by rank
        self._store: Any = None
        self._round = uuid.uuid4().hex
        self._group: TrainerGroup | None = None
        self._pool: EnginePool | None = None
        self._stage: tuple[Stage, Plan] | None = None
        fleet.forward_to(emit)

    @property
    def share(self) -> int:
        return self._fleet.share

    @property
    def ranks(self) -> int:
        return self._fleet.num_workers

    async def open(self, tokenizer: Tokenizer) -> Facts:
        """Start the ranks; each makes the model, without its weights."""
        facts = make_facts(self._config, tokenizer)
        self._store = hold_store(self._fleet.host, timeout_s=self._settings.start_deadline_s)
        names = [f"worker-{rank}" for rank in range(self._fleet.num_workers)]
        self._emit("cluster.starting", workers=names, engine_workers=self._settings.engine_workers)
        starts = [
            self._fleet.cluster.start(self._spec(name, rank)) for rank, name in enumerate(names)
        ]
        self._handles = await all_or_first_error(starts)
        self._emit(
            "cluster.started", workers={handle.name: handle.place for handle in self._handles}
        )
        return facts

    async def look_through(self, path: Path) -> list[Fault]:
        what = f"looking through {path.name}"
        return join_faults(
            await self.make_group().run(
                what, "look_through", str(path.absolute()), stall_limit=self.stall_limit
            )
        )

    async def begin(
        self, stage: Stage, plan: Plan, *, version: int, found: Snapshot | None
    ) -> StageParts:
        self._stage = (stage, plan)
        group = self._group = self.make_group()
        snapshot = "" if found is None else str(found.path.absolute())
        begun = (stage.name, plan.to_json(), version, snapshot)
        versions = await group.run(
            f"start of stage {stage.name}", "begin", *begun, stall_limit=self.stall_limit
        )
        group.version = versions[0]
        if plan.kv_pages > 0:
            self._pool = await self._make_pool(group.version)
        gate = ClusterGate(
            self._handles,
            emit=self._emit,
            deadline_s=self._settings.call_deadline_s,
            hang_s=self._settings.hang_s,
            engines=self._engines_alone,
            on_lost=self._lose_engine,
        )
        return StageParts(
            trainer=group,
            gate=gate,
            snapshots=SpreadSnapshots(group, stall_limit=self.stall_limit),
            engine=self._pool,
            lifecycle=self._pool,
            exports=make_exports(
                self._config, self._folder, self._export_live, lambda: self.version, self._emit
            ),
        )

    @property
    def version(self) -> int:
        assert self._group is not None
        return self._group.version

    async def end(self, *, failed: bool, last: bool) -> None:
        """End the stage. After a failure no worker is called any more: `close` ends them."""
        alone = self._engines_alone()
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()
        if failed or self._group is None:
            return
        await self._group.run("end of the stage", "end", last, stall_limit=self.stall_limit)
        for handle in alone:
            await self._fleet.cluster.stop(handle)

    async def export(self, folder: Path, tokenizer_files: Path) -> None:
        where = (str(folder.absolute()), str(tokenizer_files.absolute()))
        assert self._group is not None
        await self._group.run("export", "export", *where, stall_limit=self.stall_limit)

    async def _export_live(self, folder: Path, tokenizer_files: Path) -> None:
        where = (str(folder.absolute()), str(tokenizer_files.absolute()))
        assert self._group is not None
        await self._group.run("export", "export_live", *where, stall_limit=self.stall_limit)

    async def close(self) -> None:
        """End the workers of this attempt."""
        if self._pool is not None:
            await self._pool.close()
        await self._fleet.cluster.stop_all()
        self._store = None

    @property
    def stall_limit(self) -> StallLimit:
        """Return the deadline of calls that write or read a snapshot or an export."""
        calls = StallLimit(key=CALLS, seconds=self._settings.call_deadline_s)
        snapshots = StallLimit(key="snapshot.deadline_s", seconds=self._config.snapshot.deadline_s)
        return max(calls, snapshots, key=lambda stall_limit: stall_limit.seconds)

    def _engines_alone(self) -> list[WorkerHandle]:
        """Workers with an engine and no rank that are there now."""
        engines = [] if self._pool is None else self._pool.handles
        return [handle for handle in engines if handle not in self._handles]

    def _lose_engine(self, handle: WorkerHandle, cause: str) -> None:
        assert self._pool is not None
        self._pool.lose(handle, cause)

    def make_group(self) -> TrainerGroup:
        return TrainerGroup(
            self._fleet.cluster,
            self._handles,
            emit=self._emit,
            call_deadline_s=self._settings.call_deadline_s,
            hang_s=self._settings.hang_s,
        )

    async def _make_pool(self, version: int) -> EnginePool:
        settings = self._settings
        extra = [f"engine-{number}" for number in range(settings.engine_workers)]
        engines = await all_or_first_error([self.start_engine(name) for name in extra])
        return EnginePool(
            self._fleet.cluster,
            [*self._handles, *engines],
            settings=PoolSettings(
                call_deadline_s=settings.call_deadline_s,
                hang_s=settings.hang_s,
                progress_tokens=settings.progress_tokens,
                restarts=RestartPolicy(max_restarts=settings.max_restarts),
            ),
            emit=self._emit,
            vital=frozenset(handle.name for handle in self._handles),
            revive=self.start_engine,
            version=version,
        )

    async def start_engine(self, name: str) -> WorkerHandle:
        """Start a worker with an engine alone, on dummy weights."""
        assert self._stage is not None
        stage, plan = self._stage
        handle = await self._fleet.cluster.start(self._spec(name, None))
        try:
            limits = {"deadline_s": self._settings.start_deadline_s, "key": STARTS}
            await ask(handle, "begin", stage.name, plan.to_json(), 0, "", **limits)
        except BaseException:  # it would keep its device
            await self._fleet.cluster.stop(handle)
            raise
        self._emit("cluster.started", workers={name: handle.place})
        return handle

    def _spec(self, name: str, rank: int | None) -> RoleSpec:
        fleet = self._fleet
        spec = WorkerSpec(
            config=self._config,
            folder=self._folder.absolute(),
            directory=Path.cwd(),
            rank=rank,
            world_size=fleet.num_workers,
            store_host=fleet.host,
            store_port=self._store.port,
            round_id=self._round,
        )
        return RoleSpec(
            name=name,
            builder="gyre.launch.placement.worker:build_rank",
            arguments={"spec": spec},
            environment=self._environment(),
            gpus=1.0 if fleet.on_gpus else 0.0,
            cpus=self._settings.cpus_per_worker,
            deadline_s=self._settings.start_deadline_s,
        )

    def _environment(self) -> dict[str, str]:
        threads = self._config.run.threads or max(
            1, describe_hardware()["cores"] // self._fleet.share
        )
        environment = {
            "OMP_NUM_THREADS": str(threads),
            **child_environment(multicast=self._settings.multicast),
        }
        if not self._settings.address:
            environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        return environment | {
            name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ
        }


class SpreadSnapshots:
    """SnapshotPort: every rank writes its part, to a disk that all nodes see."""

    def __init__(self, group: TrainerGroup, *, stall_limit: StallLimit) -> None:
        self._group, self._stall_limit = group, stall_limit

    async def save(
        self, *, step: int, state: Mapping[str, Any], blobs: Mapping[str, bytes]
    ) -> None:
        await self._group.run(
            f"snapshot of step {step}", "save", step, state, blobs, stall_limit=self._stall_limit
        )


async def all_or_first_error(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results of all. When one fails, that error: the others have a moment to say what they saw,
    and are ended then, since they may wait for the one that failed. A worker that breaks or does
    not come up in time is a lost rank: its node may be gone, and another attempt finds it so."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        _, late = (
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION) if tasks else ((), ())
        )
        if late:
            await asyncio.wait(late, timeout=GRACE_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    errors = [
        error for task in tasks if not task.cancelled() and (error := task.exception()) is not None
    ]
    if errors:
        _, error = find_cause(dict(enumerate(errors)))
        if isinstance(error, WorkerFault | WorkerLate):
            hint = f"{error.hint}. {HINT}" if isinstance(error, WorkerLate) else HINT
            raise RankError(f"a worker could not be started: {error}", hint=hint) from error
        raise error
    return [task.result() for task in tasks]


def find_mixed_types(gpus_by_type: Mapping[str, int], num_ranks: int) -> str:
    """Return what the cluster has of each GPU type, when no type has enough for all ranks; "" when
    one has. Pure. Ray may still place ranks on two types where one has enough: then they refuse it
    themselves when they join."""
    if len(gpus_by_type) < 2 or max(gpus_by_type.values()) >= num_ranks:
        return ""
    return ", ".join(f"{count} × {kind}" for kind, count in sorted(gpus_by_type.items()))


def _refuse_unsupported(config: RunConfig) -> None:
    zero, _ = config.parallel.of("actor")
    if config.cluster.engine_workers and zero >= 2:
        raise ConfigError(
            f"cluster.engine_workers = {config.cluster.engine_workers} with parallel.zero = "
            f"{zero}: "
            "shards reach only engines beside a trainer rank",
            hint="set parallel.zero = 1, or cluster.engine_workers = 0",
        )
