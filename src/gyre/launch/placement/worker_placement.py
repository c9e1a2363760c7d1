"""Worker placement: a run on worker processes. In: the config's `[cluster]`, a Fleet. Out: a
Placement whose trainer is a group of ranks and whose engine is a pool.

The fleet is kept over restarts of a run. The workers, the ranks' store and its round are new each
time. Ranks that find addresses of dead ones in an old store hang.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from gyre.cluster.engine_pool.pool import EnginePool, PoolSettings
from gyre.cluster.engine_pool.restarts import RestartPolicy
from gyre.cluster.phase_barrier import ClusterGate
from gyre.cluster.trainer_group import TrainerGroup
from gyre.cluster.worker.rpc import CALLS, STARTS, ask
from gyre.core.contracts import Cluster, WorkerHandle
from gyre.core.events import Emit
from gyre.core.liveness import StallLimit
from gyre.core.records import RoleSpec
from gyre.distributed.environment import child_environment
from gyre.distributed.init import hold_store
from gyre.launch.factories import Facts, Machine, dtype_name, make_facts
from gyre.launch.placement.engine_ranks import EngineRanks, all_or_first_error, name_rank
from gyre.launch.placement.pod_members import PodMembers
from gyre.launch.placement.pod_metadata import PodMetadata, open_rendezvous
from gyre.launch.placement.step_exports import make_exports
from gyre.launch.placement.worker import WorkerSpec
from gyre.launch.sidecar import build_of, check_vllm, ensure_environment, make_vllm_role
from gyre.launch.stages import Stage
from gyre.loop.ports import StageParts
from gyre.observability.hardware import describe_hardware
from gyre.planner.plan import Dtype, Plan
from gyre.runconfig.run_config import RunConfig
from gyre.text.tokenizer import Tokenizer
from gyre.trainer.checkpoint.store import Fault, Snapshot, join_faults

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDevices:
    """The GPUs of one worker."""

    gpus: float = 0.0  # of this worker alone
    devices: tuple[int, ...] = ()  # by number on its host, shared with others that name them


class Fleet(Protocol):
    """Where workers run, and how many of what kind a run has there."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def num_workers(self) -> int:
        """Return the number of trainer ranks."""
        ...

    @property
    def engine_workers(self) -> int:
        """Return the number of workers with an engine alone."""
        ...

    @property
    def ranks_have_engines(self) -> bool:
        """Return whether each trainer rank has an engine beside it, in its process."""
        ...

    @property
    def share(self) -> int:
        """Return the number of workers on one machine."""
        ...

    @property
    def host(self) -> str:
        """Return the address at which workers reach this process."""
        ...

    def devices_of(self, rank: int | None, engine: int, tensor_rank: int = 0) -> WorkerDevices:
        """Return the GPUs of a trainer rank, or of a rank of an engine by its number."""
        ...

    def forward_to(self, emit: Emit) -> None:
        """Send the workers' events to another log from now on."""
        ...

    def open_members(
        self, folder: Path, facts: Facts, dtype: Dtype, metadata: PodMetadata | None
    ) -> PodMembers | None:
        """Listen for members of other hosts; None where the run has none."""
        ...

    async def stop_workers(self) -> None: ...

    async def close(self) -> None: ...


class WorkerPlacement:
    """Placement over a fleet, for one attempt at a run."""

    def __init__(
        self, config: RunConfig, folder: Path, machine: Machine, emit: Emit, fleet: Fleet
    ) -> None:
        self._config = config
        self._folder = folder
        self._machine = machine
        self._emit = emit
        self._fleet = fleet
        self._settings = config.cluster
        self._handles: list[WorkerHandle] = []  # of the trainer's ranks, by rank
        self._store: Any = None
        self._round = uuid.uuid4().hex
        self._group: TrainerGroup | None = None
        self._pool: EnginePool | None = None
        self._facts: Facts | None = None
        self._gate: ClusterGate | None = None
        self._metadata: PodMetadata | None = None
        self._stage: tuple[Stage, Plan] | None = None
        self._members: PodMembers | None = None  # of other hosts
        self._engines = EngineRanks(fleet.cluster)
        fleet.forward_to(emit)

    @property
    def share(self) -> int:
        return self._fleet.share

    @property
    def ranks(self) -> int:
        return self._fleet.num_workers

    async def open(self, tokenizer: Tokenizer) -> Facts:
        """Start the ranks; each makes the model, without its weights."""
        facts = self._facts = make_facts(self._config, tokenizer)
        dtype = dtype_name(self._machine)
        self._store = hold_store(self._fleet.host, timeout_s=self._settings.start_deadline_s)
        if self._config.engine.kind == "vllm":
            build = build_of(self._config)
            check_vllm(self._config, facts.spec, build)
            # minutes, and no lease is kept alive meanwhile
            ensure_environment(self._config, build, self._emit)
        if not self._fleet.ranks_have_engines:
            await self._join_pod()
        self._members = self._fleet.open_members(self._folder, facts, dtype, self._metadata)
        names = [f"worker-{rank}" for rank in range(self._fleet.num_workers)]
        self._emit("cluster.starting", workers=names, engine_workers=self._fleet.engine_workers)
        starts = [
            self._fleet.cluster.start(self._spec(name, rank)) for rank, name in enumerate(names)
        ]
        self._handles = await all_or_first_error(starts)
        self._emit(
            "cluster.started", workers={handle.name: handle.place for handle in self._handles}
        )
        return facts

    async def _join_pod(self) -> None:
        """Open the rendezvous, where the sidecars meet and versions are recorded."""
        settings, host, port = self._settings.rendezvous, self._fleet.host, self._store.port
        opened = open_rendezvous(
            settings,
            run_id=name_run(self._folder),
            store_host=host,
            store_port=port,
            emit=self._emit,
        )
        place = ", ".join(settings.endpoints) or f"{host}:{port}"
        self._emit("rendezvous.opened", store=settings.kind, place=place)
        self._metadata = PodMetadata(
            opened, name="driver", role="driver", config=settings, emit=self._emit
        )
        await self._metadata.join()

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
        gate = self._gate = ClusterGate(
            self._handles,
            emit=self._emit,
            deadline_s=self._settings.call_deadline_s,
            hang_s=self._settings.hang_s,
            engines=self._engines_in_phases,
            behind=self._engines.behind,
            on_lost=self._lose_engine,
            neighbors=self._neighbors(),
        )
        if plan.kv_pages > 0:
            self._pool = await self._make_pool(group.version)
            if self._members is not None:
                await self._members.begin(stage, plan, self._pool)
        return StageParts(
            trainer=group,
            gate=gate,
            snapshots=SpreadSnapshots(group, stall_limit=self.stall_limit),
            engine=self._pool,
            lifecycle=self._pool,
            versions=self._metadata,
            exports=make_exports(
                self._config, self._folder, self._export_live, lambda: self.version, self._emit
            ),
        )

    def _neighbors(self) -> dict[str, frozenset[str]]:
        """Return, by name, the other workers on the same device."""
        fleet = self._fleet
        places = {
            f"worker-{rank}": fleet.devices_of(rank, 0).devices for rank in range(fleet.num_workers)
        }
        for number in range(fleet.engine_workers):
            for tensor_rank in range(self._config.engine.tensor_ranks):
                name = name_rank(f"engine-{number}", tensor_rank)
                places[name] = fleet.devices_of(None, number, tensor_rank).devices
        shared = {
            name: frozenset(
                other for other, at in places.items() if other != name and {*at} & {*devices}
            )
            for name, devices in places.items()
        }
        return {name: others for name, others in shared.items() if others}

    @property
    def version(self) -> int:
        assert self._group is not None
        return self._group.version

    async def end(self, *, failed: bool, last: bool) -> None:
        """End the stage. After a failure no worker is called any more: `close` ends them."""
        alone = self._engines_alone()
        pool, self._pool = self._pool, None
        if self._members is not None:
            await self._members.leave_pool()
        if pool is not None:
            await pool.close()
        if failed or self._group is None:
            return
        if self._members is not None:
            await self._members.end(last=last)
        await self._group.run("end of the stage", "end", last, stall_limit=self.stall_limit)
        for handle in alone:
            await self._engines.stop(handle)

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
        if self._members is not None:
            await self._members.leave_pool()
        if self._pool is not None:
            await self._pool.close()
        if self._members is not None:
            await self._members.close()
        await self._fleet.stop_workers()
        metadata, self._metadata = self._metadata, None
        if metadata is not None:
            await metadata.leave()
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

    def _engines_in_phases(self) -> list[WorkerHandle]:
        """Engines that share devices, or hosts' memory, with the ranks in turn. One with a device
        of its own keeps what it has, so it may generate while the ranks train."""
        return self._engines_alone() if self._takes_turns else []

    @property
    def _takes_turns(self) -> bool:
        return self._fleet.ranks_have_engines or self._settings.colocated

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
            registers_shards=not self._fleet.ranks_have_engines,
        )

    async def _make_pool(self, version: int) -> EnginePool:
        settings = self._settings
        extra = [f"engine-{number}" for number in range(self._fleet.engine_workers)]
        engines = await all_or_first_error([self.start_engine(name) for name in extra])
        # by its first rank each, which the pool calls
        ranks = self._config.engine.tensor_ranks
        beside = self._handles[::ranks] if self._fleet.ranks_have_engines else []
        others = {
            first.name: self._handles[ranks * number + 1 : ranks * (number + 1)]
            for number, first in enumerate(beside)
        }
        return EnginePool(
            self._fleet.cluster,
            [*beside, *engines],
            settings=PoolSettings(
                call_deadline_s=settings.call_deadline_s,
                hang_s=settings.hang_s,
                progress_tokens=settings.progress_tokens,
                restarts=RestartPolicy(max_restarts=settings.max_restarts),
            ),
            emit=self._emit,
            vital=frozenset(handle.name for handle in beside),
            other_ranks=others,
            revive=self.start_engine,
            version=version,
        )

    async def start_engine(self, name: str) -> WorkerHandle:
        """Start a worker with an engine alone, on dummy weights; of one with several ranks all,
        and return the first."""
        assert self._stage is not None and self._gate is not None
        stage, plan = self._stage
        workers = await self._engines.start(self._engine_specs(name))
        handle = workers[0]
        try:
            limits = {"deadline_s": self._settings.start_deadline_s, "key": STARTS}
            shared, begins = self._neighbors(), []
            for worker in workers:
                beside = shared.get(worker.name, frozenset())
                ranks = [one for one in self._handles if one.name in beside]
                held = [await ask(one, "holdings", **limits) for one in ranks]
                neighbor_bytes = sum(one.process_bytes for one in held)
                begun = (stage.name, plan.to_json(), 0, "", neighbor_bytes)
                begins.append(ask(worker, "begin", *begun, **limits))
            await asyncio.gather(*begins)
            if not self._takes_turns:
                enters = [ask(worker, "enter", "rollout", 0, **limits) for worker in workers]
                await asyncio.gather(*enters)
            for worker in (one for one in workers if one.name in shared):
                self._gate.note(worker.name, await ask(worker, "holdings", **limits))
        except BaseException:  # it would keep its device
            await self._engines.stop(handle)
            raise
        self._emit("cluster.started", workers={one.name: one.place for one in workers})
        return handle

    def _engine_specs(self, name: str) -> list[RoleSpec]:
        """Return the roles of an engine's ranks, which meet as they are built."""
        meeting = uuid.uuid4().hex
        ranks = range(self._config.engine.tensor_ranks)
        return [self._spec(name, None, tensor_rank=rank, meeting=meeting) for rank in ranks]

    def _spec(
        self, name: str, rank: int | None, *, tensor_rank: int = 0, meeting: str = ""
    ) -> RoleSpec:
        fleet = self._fleet
        spec = WorkerSpec(
            config_json=self._config.model_dump_json(),
            folder=str(self._folder.absolute()),
            directory=str(Path.cwd()),
            rank=rank,
            has_engine=rank is None or fleet.ranks_have_engines,
            shares_process=fleet.ranks_have_engines,
            run_id=name_run(self._folder),
            world_size=fleet.num_workers,
            store_host=fleet.host,
            store_port=self._store.port,
            round_id=self._round,
            served_at=() if self._members is None else self._members.served_at,
            tensor_rank=tensor_rank,
            meeting=meeting,
        )
        number = int(name.rpartition("-")[2])
        given = fleet.devices_of(rank, number, tensor_rank)
        if rank is None and self._config.engine.kind == "vllm":
            return replace(self._vllm_role(name), gpus=given.gpus, devices=given.devices)
        return RoleSpec(
            name=name_rank(name, tensor_rank),
            builder="gyre.launch.placement.worker:build_rank",
            arguments=asdict(spec),
            environment=self._environment(),
            gpus=given.gpus,
            devices=given.devices,
            cpus=self._settings.cpus_per_worker,
            deadline_s=self._settings.start_deadline_s,
        )

    def _vllm_role(self, name: str) -> RoleSpec:
        """Return the role of a vLLM engine, whose environment `open` has made."""
        facts = self._facts
        assert facts is not None
        return make_vllm_role(
            self._config,
            facts.spec,
            name=name,
            dtype=dtype_name(self._machine),
            eos_ids=facts.spec.eos_ids,
            scratch=self._folder / "vllm",
            emit=self._emit,
            threads=self._count_threads(),
        )

    def _count_threads(self) -> int:
        cores: int = describe_hardware()["cores"]
        return self._config.run.threads or max(1, cores // self._fleet.share)

    def _environment(self) -> dict[str, str]:
        environment = {
            "OMP_NUM_THREADS": str(self._count_threads()),
            **child_environment(multicast=self._settings.multicast),
        }
        if not self._settings.address:
            environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        return environment | {
            name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ
        }


def name_run(folder: Path) -> str:
    """Return a run's name in shared memory and at a rendezvous: alike in each attempt at it."""
    known = f"{folder.absolute()}:{(folder / 'config.toml').stat().st_mtime_ns}"
    return hashlib.blake2b(known.encode(), digest_size=8).hexdigest()


class SpreadSnapshots:
    """SnapshotPort: every rank writes its part, to a disk that all nodes see."""

    def __init__(self, group: TrainerGroup, *, stall_limit: StallLimit) -> None:
        self._group = group
        self._stall_limit = stall_limit

    async def save(
        self, *, step: int, state: Mapping[str, Any], blobs: Mapping[str, bytes]
    ) -> None:
        await self._group.run(
            f"snapshot of step {step}", "save", step, state, blobs, stall_limit=self._stall_limit
        )
