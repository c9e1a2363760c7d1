"""Stage runtime: what one device holds during one stage: a trainer rank, an engine, the memory
manager over both. In: a policy, a plan, the group of ranks. Out: the live objects, made in order
and closed in reverse.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from gyre.core.errors import ConfigError, InputError
from gyre.core.events import Emit
from gyre.core.records import DeviceHoldings, Phase
from gyre.core.seeds import derive_seed
from gyre.distributed.mesh import shard_size
from gyre.distributed.process_group import RankGroup, alone
from gyre.engine.beside_trainer import RankBesideTrainer
from gyre.engine.engine import NativeEngine
from gyre.engine.tensor_group import EntryStream, Followers, OwnOffer, connect
from gyre.launch.factories import Machine, Policy, make_engine, make_reward_model, make_rows
from gyre.launch.placement.following_rank import FollowingRank
from gyre.launch.placement.snapshots import Snapshots, make_snapshots
from gyre.launch.stage_plan import has_parts
from gyre.launch.stages import Stage, trains_invariant
from gyre.launch.train_args import MAIN
from gyre.memory.config import MemoryConfig
from gyre.memory.manager import MemoryManager
from gyre.memory.phases import default_needs
from gyre.memory.probe import give_back
from gyre.models.decoder import Decoder
from gyre.models.hub.checkpoint import Checkpoint
from gyre.models.layers.tensor_parallel import ReplicatedRows
from gyre.models.spec import ModelSpec
from gyre.planner.gpus import peak_flops
from gyre.planner.plan import Plan
from gyre.runconfig.run_config import RunConfig
from gyre.trainer.checkpoint.store import Snapshot
from gyre.trainer.passes.forward import ChunkLogprobs
from gyre.trainer.passes.tokenwise import tokenwise_logprobs
from gyre.trainer.trainer import NativeTrainer
from gyre.weights.gather import ShardSource
from gyre.weights.transports.addresses import host_id
from gyre.weights.transports.opened import Reading

# context and NCCL's buffers of an engine's rank: 1.5 GiB on an H200 with two ranks, of which the
# default tolerance takes 1 GiB
ENGINE_GROUP_BYTES = 1 << 30
Result = TypeVar("Result")


class StageRuntime:
    """One device during one stage. Without a `group` the trainer is alone."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        folder: Path,
        machine: Machine,
        emit: Emit,
        *,
        group: RankGroup | None = None,
        tensor_group: RankGroup | None = None,
        own_offer: OwnOffer | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`progress` is what the trainer calls where it works for long without running a layer.
        `tensor_group` are the ranks of an engine, of which the first has its contract. `own_offer`
        returns what the trainer of this process has registered, for an engine beside it."""
        self._config = config
        self._plan = plan
        self._folder = folder
        self._machine = machine
        self._emit = emit
        self._group = group
        self._progress = progress
        self._tensor_group = tensor_group
        self._own_offer = own_offer
        self._followers: Followers | None = None  # of the first rank of an engine
        # a rank behind the first: one with an engine alone, and one beside a trainer
        self._following: FollowingRank | None = None
        self._beside: RankBesideTrainer | None = None
        self._manager: MemoryManager | None = None
        self._own_weights = False  # the engine's, beside the trainer's
        self._took_s: dict[str, float] = {}  # to make each part
        self.trainer: NativeTrainer | None = None
        self.engine: NativeEngine | None = None
        self.snapshots: Snapshots | None = None

    async def begin(
        self,
        stage: Stage,
        policy: Policy,
        *,
        version: int,
        found: Callable[[], Snapshot] | None = None,
        trains: bool = True,
        generates: bool = True,
        neighbor_bytes: int = 0,
        reading: Reading | None = None,
    ) -> Policy:
        """Make the stage's objects, in order: trainer, snapshots, engine, memory. `found` loads the
        snapshot that the trainer resumes from. Without `trains` the process has an engine alone,
        and without `generates` a trainer alone. `reading` is how an engine alone reads versions, if
        not from shared memory. Returns the policy without the weights that the trainer has read."""
        if trains:
            trainer = await self._on_compute(
                partial(self._make_trainer, stage, policy, version, resumed=found is not None)
            )
            policy = replace(policy, weights=None)
            # Read: shards of the stage before leave the device now. Their model is a cycle of
            # references.
            await self._on_compute(partial(give_back, self._machine.device, collect=True))
            resumed_step = (
                0 if found is None else await self._on_compute(partial(self._restore, found))
            )
            self.snapshots = make_snapshots(
                self._config,
                self._folder,
                stage.name,
                trainer,
                self._machine,
                self._emit,
                resumed_step=resumed_step,
                group=self._group,
                progress=self._progress,
            )
        if generates and self._plan.kv_pages > 0:
            await self._make_engine(
                policy, own_weights=not trains or not self._shares_weights, reading=reading
            )
        await self._aside(partial(self._manage, neighbor_bytes))
        if self._beside is not None:
            self._beside.listen()
        if self.snapshots is not None:
            # after the engine's graphs are captured
            await self._on_compute(self.snapshots.prepare)
        return policy

    def _restore(self, found: Callable[[], Snapshot]) -> int:
        """Restore the trainer; returns the step that the snapshot is of."""
        assert self.trainer is not None
        snapshot = found()
        self.trainer.restore_now({"tensors": snapshot.tensors, "state": snapshot.state["trainer"]})
        return snapshot.step

    async def _on_compute(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._machine.compute, work)

    async def _aside(self, work: Callable[[], Result]) -> Result:
        """Do work of the memory manager: on the compute thread, unless another rank has that."""
        if self._following is not None:
            return await self._following.ask(work)
        return await self._on_compute(work)

    @property
    def cuts_weights(self) -> bool:
        """Return whether no rank has the actor's weights whole."""
        return self._config.parallel.tensor_ranks > 1 or self._shards_weights

    @property
    def _shards_weights(self) -> bool:
        ranks = 1 if self._group is None else self._group.size
        zero, shard_ranks = self._config.parallel.of("actor")
        return ranks // self._config.parallel.tensor_ranks > 1 and zero >= 2 and shard_ranks != 1

    @property
    def _shares_weights(self) -> bool:
        """Return whether an engine in this process can read the actor's weights in place: they are
        all that it computes with."""
        return not self.cuts_weights or (has_parts(self._config) and not self._shards_weights)

    def _make_trainer(
        self, stage: Stage, policy: Policy, version: int, *, resumed: bool
    ) -> NativeTrainer:
        """Make the trainer on the policy's decoder, which has this rank's part of the weights from
        here on. One that is `resumed` reads none: they come from the snapshot, and until then it
        does nothing."""
        reads = policy.decoder.device.type == "meta" and not resumed
        with self._making("trainer"), contextlib.ExitStack() as files:
            weights = policy.weights if reads else None
            if isinstance(policy.weights, Checkpoint):
                files.callback(policy.weights.close)
            reward, scored, reward_weights = self._config.rewards.model_part(), None, None
            if reward is not None and stage.name == MAIN:
                decoder, head, reward_weights = make_reward_model(
                    reward.path, self._machine, policy
                )
                scored = decoder, head
                files.callback(reward_weights.close)
            for source in (weights, reward_weights):
                if isinstance(source, Checkpoint) and self._group is not None:
                    refuse_other_weights(self._group, source)
            self.trainer = NativeTrainer(
                decoder=policy.decoder,
                objective=stage.objective,
                config=stage.trainer,
                compute=self._machine.compute,
                emit=self._emit,
                seed=derive_seed(self._config.run.seed, "trainer", stage.name),
                reward_model=scored,
                weights=weights,
                reward_weights=reward_weights,
                version=version,
                shared=self._shares_weights,
                in_parts=has_parts(self._config),
                disk_folder=self._disk_folder(),
                parked=self._plan.parked_at_start,
                group=self._group or alone(self._machine.device),
                parallel=self._config.parallel,
                logprobs=self._logprobs(stage),
                peak_flops=self._peak_flops(),
                trace_folder=self._folder / "traces",
                progress=self._progress,
            )
        return self.trainer

    def _peak_flops(self) -> float | None:
        device = self._machine.device
        if device.type != "cuda":
            return None
        return peak_flops(
            torch.cuda.get_device_name(device), str(self._machine.dtype).removeprefix("torch.")
        )

    def _logprobs(self, stage: Stage) -> ChunkLogprobs | None:
        """Return the engine's own kernels in batch-invariant mode, which `check_invariant` has
        found able; over ranks of a CPU its pass token by token."""
        if not trains_invariant(self._config, stage):
            return None
        if self._machine.device.type == "cpu":
            return tokenwise_logprobs
        # here, since a CPU has no Triton
        from gyre.trainer.passes.batch_invariant import InvariantLogprobs

        return InvariantLogprobs(page_tokens=self._plan.page_tokens)

    async def _make_engine(
        self, policy: Policy, *, own_weights: bool, reading: Reading | None
    ) -> None:
        """Make the engine on the trainer's decoder; with `own_weights` on one that hand-overs fill.
        A rank behind the first of a group follows it from here on, and has no engine to offer."""
        plan, self._own_weights = self._plan, own_weights
        sizes = self._config.engine.model_copy(
            update={"num_pages": plan.kv_pages, "page_tokens": plan.page_tokens}
        )
        tensor = await self._on_compute(partial(self._make_rows, policy.spec))
        if own_weights:
            decoder = Decoder(
                policy.spec,
                device=self._machine.device,
                dtype=self._machine.dtype,
                tensor=tensor,
            )
            policy = replace(policy, decoder=decoder)
        elif tensor is not None:
            assert self.trainer is not None, "it has the weights"
            policy = replace(policy, decoder=self.trainer.decoder.sharing(tensor))
        with self._making("engine"):
            followers, stream = await self._on_compute(self._connect)
            engine = make_engine(
                sizes,
                policy,
                self._machine,
                self._emit,
                shared_weights=not own_weights,
                journal_folder=self._folder / "journal" if stream is None else None,
                followers=followers,
            )
            if reading is not None:
                engine.read_parts(reading)
            if stream is not None and self.trainer is not None:
                await self._follow_beside(stream, engine)
                return
            if stream is not None:
                assert self._tensor_group is not None
                compute = self._machine.compute
                following = FollowingRank(stream, engine.worker, self._tensor_group, compute)
                self._following = following
                await following.until_started()
                return
            self.engine = engine
            await engine.start(dummy=own_weights)

    async def _follow_beside(self, stream: EntryStream, engine: NativeEngine) -> None:
        """Follow the first rank from here on, between the trainer's work."""
        assert self._tensor_group is not None and self._own_offer is not None
        self._beside = RankBesideTrainer(
            stream,
            engine.worker,
            self._tensor_group,
            compute=self._machine.compute,
            own_offer=self._own_offer,
        )
        await self._on_compute(self._beside.start)

    def _make_rows(self, spec: ModelSpec) -> ReplicatedRows | None:
        group = self._tensor_group
        return None if group is None else make_rows(group, spec, self._machine, self._emit)

    def _connect(self) -> tuple[Followers | None, EntryStream | None]:
        """Connect the ranks of an engine: the first gets the others, another its way to hear."""
        group = self._tensor_group
        if group is None:
            return None, None
        if has_trainer := self.trainer is not None:
            refuse_hosts(group.share(host_id()))
        self._followers, stream = connect(group, self._emit, have_trainers=has_trainer)
        return self._followers, stream

    def lost_rank(self) -> str:
        """Return why an engine of several ranks has ended for good, or an empty string: after any
        failure its ranks are started again."""
        if self._tensor_group is None or self.engine is None:
            return ""
        return self.engine.failure

    def _manage(self, neighbor_bytes: int) -> None:
        """Take what was made so far under the memory manager."""
        followed = None if self._following is None else self._following.memory
        made = self.engine, self._beside, self.trainer, followed
        tenants = [tenant for tenant in made if tenant is not None]
        budgets = self._budgets()
        raised = budgets.outside_tolerance_bytes > self._config.memory.outside_tolerance_bytes
        if raised and self._machine.device.type == "cuda":
            self._emit("memory.tolerance_raised", size_bytes=budgets.outside_tolerance_bytes)
        with self._making("memory"):
            self._manager = MemoryManager(
                tenants,
                budgets,
                self._machine.device,
                self._emit,
                needs=default_needs(shared_weights=not self._engine_has_weights),
                working=self._plan.working,
                neighbor_bytes=neighbor_bytes,
            )
        self._emit("device.made", seconds=self._took_s)

    @property
    def _engine_has_weights(self) -> bool:
        """Return whether engines have weights of their own, here or in other processes, so that a
        rollout does not want the trainer's. Whole ones of a rank without an engine stay: an export
        reads them where they are."""
        has_engine = self.engine is not None or self._beside is not None
        elsewhere = self.trainer is not None and not has_engine and self._plan.kv_pages > 0
        return self._own_weights or (elsewhere and self.cuts_weights)

    @contextlib.contextmanager
    def _making(self, part: str) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self._took_s[part] = round(time.perf_counter() - started_s, 3)

    async def enter(self, phase: Phase, *, step: int, neighbor_bytes: int | None = None) -> None:
        """PhaseGate over the memory manager. The ranks of an engine enter together, each by its own
        ledger; in a pod one behind the first once that one is in the phase."""
        assert self._manager is not None
        enter = partial(self._manager.enter, phase, step=step, neighbor_bytes=neighbor_bytes)
        if self._following is not None:
            await self._following.enter(phase, step, enter)
            return
        await self._on_compute(partial(self._enter_with_ranks, phase, step, enter))

    def _enter_with_ranks(self, phase: Phase, step: int, enter: Callable[[], object]) -> None:
        """Enter a phase, and tell an engine's other ranks, whatever came of it; or hear of it."""
        if self._beside is not None:
            enter()
            self._beside.entered(phase, step)
            return
        try:
            enter()
        finally:
            if self.engine is not None:
                self.engine.worker.entered(phase, step)

    async def holdings(self) -> DeviceHoldings:
        """Return what this process has on the device."""
        manager = self._manager
        assert manager is not None
        return await self._aside(lambda: manager.holdings)

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.terminate()
        if self._beside is not None:
            await self._beside.close()
        if self._followers is not None:
            self._followers.close()
        if self.trainer is not None:
            await self.trainer.close()
        if self.snapshots is not None:
            await self.snapshots.finish()
            self.snapshots = None  # with its memory

    def left_policy(self, policy: Policy) -> Policy:
        """Return the policy as the next stage begins with it; all ranks call it, before `close`.
        Where critic and reference would be cut like this one, each rank reads its own shards, which
        live until then; else it has the weights whole."""
        assert self.trainer is not None
        if self._group is None or not self.cuts_weights:
            return policy
        alike = self._cuts_alike()
        device = torch.device("meta") if alike else self._machine.device
        decoder = Decoder(policy.spec, device=device, dtype=self._machine.dtype)
        self._emit("policy.left", in_shards=alike)
        if alike:
            return replace(policy, decoder=decoder, weights=self.trained_shards())
        with self._group.guard("end of the stage"):
            home = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
            self.trained_shards().gather_into(home)
        return replace(policy, decoder=decoder)

    def _cuts_alike(self) -> bool:
        """Return whether each model that may start from the policy's weights is sharded like the
        actor."""
        assert self._group is not None
        splits = [self._config.parallel.of(model) for model in ("actor", "critic", "reference")]
        if self._config.parallel.tensor_ranks > 1:
            return False  # the next stage reads whole tensors
        sizes = {shard_size(self._group.size, shard_ranks) for _, shard_ranks in splits}
        return all(zero >= 2 for zero, _ in splits) and len(sizes) == 1

    def trained_shards(self) -> ShardSource:
        """Return this rank's shards of the trained weights, which outlive `close`."""
        assert self.trainer is not None and self.cuts_weights
        self.trainer.move(["actor.params"], "device")  # the last phase may have parked it
        return self.trainer.shards()

    def _disk_folder(self) -> Path | None:
        """Inside the run's folder, or for a folder elsewhere a part of it that no other run
        touches. Ranks do not share one."""
        name = self._config.memory.disk_folder
        if not name:
            return None
        base = Path(name) / self._folder.name if Path(name).is_absolute() else self._folder / name
        return base if self._group is None else base / f"rank-{self._group.rank}"

    def _budgets(self) -> MemoryConfig:
        plan = self._plan
        return self._config.memory.model_copy(
            update={
                "device_budget_bytes": plan.device_budget_bytes,
                "host_budget_bytes": plan.host_budget_bytes,
                "disk_budget_bytes": plan.disk_budget_bytes,
                "residency": plan.residency,
                "outside_tolerance_bytes": outside_tolerance_bytes(
                    self._config, has_trainer=self.trainer is not None
                ),
            }
        )


def outside_tolerance_bytes(config: RunConfig, *, has_trainer: bool) -> int:
    """Return by how much device memory outside torch may grow. A trainer's rank takes its first
    reading before an engine over ranks comes to its device. NCCL's buffers of that engine are in no
    process's report. Pure."""
    shares = config.cluster.kind == "pod" and config.cluster.colocated
    with_group = has_trainer and shares and config.engine.tensor_ranks > 1
    return config.memory.outside_tolerance_bytes + (ENGINE_GROUP_BYTES if with_group else 0)


def refuse_other_weights(group: RankGroup, weights: Checkpoint) -> None:
    """Raise InputError on every rank unless all have opened the same weights. Collective."""
    told = group.share([platform.node(), weights.origin, weights.sample_digest()])
    if len({digest for _, _, digest in told}) > 1:
        ranks = "; ".join(
            f"rank {rank} ({host}): {origin} is {digest[:12]}"
            for rank, (host, origin, digest) in enumerate(told)
        )
        raise InputError(
            f"the ranks have different weights to begin with: {ranks}",
            hint="give all nodes one folder on a disk that they share, or copy it again",
        )


def refuse_hosts(hosts: Sequence[str]) -> None:
    """Raise ConfigError unless all ranks of an engine are on one host. Pure."""
    apart = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
    if apart:
        raise ConfigError(
            f"engine.tensor_ranks = {len(hosts)}: ranks {apart} of an engine are on another host "
            "than rank 0, and its ranks share one",
            hint="start Ray on nodes with room for whole groups, or set engine.tensor_ranks = 1",
        )
