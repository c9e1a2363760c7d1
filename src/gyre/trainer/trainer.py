"""NativeTrainer: actor, critic, reference and reward model in this process. Past 500 lines: one
object implements PolicyTrainer and MemoryTenant over the same models. In: unpacked batches. Out:
new weights, log-probs, values, scores.

Every objective uses one loop: for each epoch, update and micro-batch run forward, loss and
backward; then clip, AdamW, version + 1. Torch work runs on the compute thread: the coroutines go
to it; the other methods, such as `step_now` and `move`, are called on it.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import InitVar, asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from gyre.core.errors import SnapshotError
from gyre.core.events import Emit
from gyre.core.offers import LocalShards, LocalTensors, Offer, SharedStorage
from gyre.core.records import (
    Component,
    Evaluation,
    Manifest,
    StepReport,
    TensorEntry,
    Tier,
    TrainBatch,
    Usage,
    Which,
)
from gyre.distributed.config import ParallelConfig
from gyre.distributed.mesh import Mesh, Splitter
from gyre.distributed.process_group import RankGroup, alone
from gyre.models.decoder import Decoder, ScalarHead
from gyre.objectives.config import AnyObjective, needs_critic, needs_reference, trains_scores
from gyre.trainer.batching.epoch_plan import BatchPlanner, EpochPlan, Update
from gyre.trainer.checkpoint.shards import (
    OTHER_MODEL,
    HeldParts,
    Holding,
    Part,
    PartSource,
    check_kinds,
)
from gyre.trainer.checkpoint.staging import padded
from gyre.trainer.config import TrainerConfig
from gyre.trainer.metrics import startup_events
from gyre.trainer.metrics.profiler import Tracer
from gyre.trainer.metrics.throughput import SENT, ThroughputMeter, join
from gyre.trainer.optim.schedule import LossScale, learning_rate_factor
from gyre.trainer.passes.backward import (
    Models,
    StepStats,
    UpdateStats,
    collect_gradients,
    refuse_divergence,
)
from gyre.trainer.passes.evaluation import Evaluator
from gyre.trainer.passes.forward import ChunkLogprobs, chunk_logprobs
from gyre.trainer.roles.materialize import blank_copy, is_blank, part_of
from gyre.trainer.roles.memory_components import MemoryComponents, ScoredModel
from gyre.trainer.roles.reference_model import Reference
from gyre.trainer.roles.trained_model import HEAD_PREFIX, TrainedModel
from gyre.weights.gather import ShardSource
from gyre.weights.manifest import make_manifest, shard_entries
from gyre.weights.tensor_source import LiveTensors, TensorSource

Result = TypeVar("Result")


@dataclass(kw_only=True, eq=False, repr=False)
class NativeTrainer:
    """Trains `decoder` in place: an engine that shares the Decoder sees each new version at once.

    `weights` fill a meta-device decoder and the models initialized from it (reference, critic).
    Without them it stays uninitialized until `restore`, the only valid next call.
    `reward_weights` fill a meta-device reward model.
    """

    decoder: Decoder
    objective: AnyObjective
    config: TrainerConfig
    compute: Executor
    emit: Emit
    seed: int
    # the actor's scalar head under objective rm, which exports include; a new one starts at zero
    head: ScalarHead | None = None
    # resumes one under ppo; without it the critic's trunk starts as a copy of the actor
    critic: ScoredModel | None = None
    reward_model: ScoredModel | None = None  # that evaluate(…, "reward") runs
    weights: InitVar[TensorSource | None] = None
    reward_weights: InitVar[TensorSource | None] = None
    version: int = 0
    shared: bool = True  # stored in the manifest: the engine reads this trainer's weights
    # each tensor rank's engine has the same cut, in its process: offers are of local tensors
    in_parts: bool = False
    disk_folder: Path | None = None  # gives components a disk tier
    parked: Mapping[str, Tier] | None = None  # components that leave the device once allocated
    # The ranks that train together (`distributed.init.join`). Each has a NativeTrainer with equal
    # arguments and weights, and calls every method with the same global batch.
    group: RankGroup | None = None
    parallel: ParallelConfig | None = None  # the layout of the models over them
    # overrides how actor and reference compute a micro-batch's log-probs
    logprobs: ChunkLogprobs | None = None
    peak_flops: float | None = None  # per second of the device in the compute dtype, for MFU
    trace_folder: Path | None = None  # where the first rank writes configured traces
    # called during steps that take minutes without running layers: updates of offloaded state,
    # writing a trace
    progress: Callable[[], None] = lambda: None

    def __post_init__(
        self, weights: TensorSource | None, reward_weights: TensorSource | None
    ) -> None:
        """Allocate the models and their state."""
        decoder, config = self.decoder, self.config
        self._all_ranks = self.group or alone(decoder.device)
        device = self._all_ranks.device
        assert device.type != "meta", "a trainer of a blank model is told its device by the group"
        startup_events.kernels(self.emit, decoder, device)
        if trains_scores(self.objective) and self.head is None:
            self.head = ScalarHead(decoder.spec.hidden_size, device=device)
        assert self.head is None or trains_scores(self.objective), (
            f"objective {self.objective.kind} trains no scalar head"
        )
        self._steps_done = 0
        # made once, since planning takes longer than a hand-over may
        self._shards: ShardSource | None = None
        self._own_shards: ShardSource | None = None  # of this tensor rank's part, to be offered
        self._shard_entries: tuple[TensorEntry, ...] | None = None
        self._has_gradients = False  # that no update has taken
        self._lost_steps = 0  # in a row, without a finite gradient
        self._model = json.loads(json.dumps(asdict(decoder.whole_spec)))  # as a snapshot says it
        self._filled = weights is not None or not is_blank(decoder)
        self.memory = MemoryComponents(self.disk_folder, self.parked or {})
        splitter = Splitter(self._all_ranks, self.parallel or ParallelConfig())
        with self._all_ranks.guard("start of the trainer"):
            self._start_models(weights, splitter)
            if self.reward_model is not None:
                split = splitter.split("reward")
                if split.mesh.tensor.size > 1:
                    scored, head = self.reward_model
                    part, reward_weights = part_of(scored, split.mesh.tensor, reward_weights)
                    self.reward_model = part, head
                self.memory.take_reward(self.reward_model, config, split, reward_weights)
        for model, stream in self.memory.streams.items():
            self.emit("trainer.offload_parameters", model=model, **stream.sizes())
        self._meter = ThroughputMeter(self._all_ranks, tensor_ranks=splitter.tensor_ranks)
        self._tracer = Tracer(
            self.trace_folder if self._all_ranks.rank == 0 else None,
            config.trace_steps,
            device=device,
            emit=self.emit,
            progress=self.progress,
        )
        self._start_passes(device)

    def _start_models(self, weights: TensorSource | None, splitter: Splitter) -> None:
        """Create the models that a snapshot contains. The actor comes last: models initialized from
        it read it before it is sharded."""
        config, tenancy = self.config, self.memory
        if splitter.tensor_ranks > 1:
            tensor = splitter.split("actor").mesh.tensor
            self.decoder, weights = part_of(self.decoder, tensor, weights)
        decoder = self.decoder
        first = weights if is_blank(decoder) else LiveTensors(dict(decoder.named_parameters()))
        self._reference, learner = None, None
        make = partial(
            TrainedModel,
            config=config,
            folder=self.disk_folder,
            emit=self.emit,
            progress=self.progress,
        )
        if needs_reference(self.objective) and config.reference == "initial":
            own = Reference(blank_copy(decoder), config, splitter.split("reference"), first)
            self._reference = tenancy.take_reference(own)
        if needs_critic(self.objective):
            split = splitter.split("critic")
            if self.critic is not None:
                trunk, scores = self.critic
                own = None
                if split.mesh.tensor.size > 1:
                    trunk, own = part_of(trunk, split.mesh.tensor, None)
                learner = make("critic", trunk, scores, split=split, weights=own)
            else:
                scores = ScalarHead(decoder.spec.hidden_size, device=self._all_ranks.device)
                learner = make("critic", blank_copy(decoder), scores, split=split, weights=first)
            tenancy.take_learner(learner)
        del first  # the actor's storage moves, and no other reference may be left
        actor = tenancy.take_learner(
            make("actor", decoder, self.head, split=splitter.split("actor"), weights=weights)
        )
        assert self.logprobs is None or not actor.float8, (
            "log-probs that are given know nothing of 8 bits"
        )
        logprobs = self.logprobs or partial(
            chunk_logprobs, checkpointing=config.checkpointing, float8=actor.float8
        )
        self.models = Models(actor=actor, critic=learner, logprobs=logprobs)
        self._loss_scale = LossScale() if actor.dtype == torch.float16 else None
        if config.matmul == "fp8":
            startup_events.float8(self.emit, self.models.learners)
        if config.moments == "8_bit":
            startup_events.moments(self.emit, self.models.learners)

    def _start_passes(self, device: torch.device) -> None:
        data = self.mesh.data
        self._planner = BatchPlanner(
            objective=self.objective,
            config=self.config,
            seed=self.seed,
            vocab_size=self.decoder.whole_spec.vocab_size,
            device=device,
            emit=self.emit,
            rank=data.rank,
            num_ranks=data.size,
            tensor_ranks=self.mesh.tensor.size,
        )
        self._evaluator = Evaluator(
            objective=self.objective,
            config=self.config,
            models=self.models,
            reference=self._reference,
            reward_model=self.reward_model,
            planner=self._planner,
            memory=self.memory,
            data=data,
            meter=self._meter,
        )

    # PolicyTrainer
    # ----------------------------------------------------------------------------------------------

    async def step(self, batch: TrainBatch) -> StepReport:
        return await self._computed(self.step_now, batch)

    async def evaluate(self, batch: TrainBatch, which: Which) -> Evaluation:
        return await self._computed(self.evaluate_now, batch, which)

    async def register(self, *, epoch: int = 0) -> Offer:
        return await self._computed(self.register_now, epoch)

    async def snapshot(self) -> Mapping[str, Any]:
        return await self._computed(self.snapshot_now)

    async def restore(self, state: Mapping[str, Any]) -> None:
        await self._computed(self.restore_now, state)

    async def close(self) -> None:
        await self._computed(self.close_now)

    async def _computed(self, run: Callable[..., Result], *given: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.compute, run, *given)

    def register_now(self, epoch: int = 0) -> Offer:
        """Offer the version: its tensors, or, where no rank holds them whole, this rank's
        shards. On the compute thread. In a pod whole tensors are offered as SharedStorage, too,
        though no engine shares them: `publish_part` alone takes this offer."""
        self._assert_filled()
        actor = self.models.actor
        if actor.split.shards_weights or (self.shards_weights and not self.in_parts):
            shards = self._offered_shards()
            if self._shard_entries is None:
                self._shard_entries = shard_entries(shards.layout, actor.dtype)
            manifest = Manifest(
                version=self.version, entries=self._shard_entries, shared=False, epoch=epoch
            )
            return Offer(manifest=manifest, source=LocalShards(shards=shards))
        parameters = actor.optimizer.parameters.items()
        tensors = {name: p.detach() for name, p in parameters if not name.startswith(HEAD_PREFIX)}
        manifest = make_manifest(
            self.version, tensors, shared=self.shared, checksums=not self.shared, epoch=epoch
        )
        kind = SharedStorage if self.shared else LocalTensors
        return Offer(manifest=manifest, source=kind(tensors=tensors))

    @property
    def shards_weights(self) -> bool:
        """Return whether no rank holds the actor's weights whole."""
        return self.models.actor.split.shards_weights or self.mesh.tensor.size > 1

    def shards(self) -> ShardSource:
        """Return this rank's runs of the actor's weights, which are in shards."""
        assert self.shards_weights, "every rank holds the weights whole"
        if self._shards is None:
            self._shards = self.models.actor.shards()
        return self._shards

    def _offered_shards(self) -> ShardSource:
        """Return what this rank has of the whole weights, or of its tensor rank's part."""
        if not self.in_parts:
            return self.shards()
        if self._own_shards is None:
            self._own_shards = self.models.actor.shards(of_part=True)
        return self._own_shards

    def snapshot_now(self) -> Mapping[str, Any]:
        """Return {"tensors": copies of this rank's Parts by key, "state": JSON-able}. The parts of
        all ranks together contain each number once."""
        taken = self.live_snapshot()
        parts = {
            key: replace(part, values_N=_host_copy(part.values_N))
            for key, part in taken["tensors"].items()
        }
        return {"tensors": parts, "state": taken["state"]}

    def live_snapshot(self, no_longer_read: Callable[[], None] | None = None) -> Mapping[str, Any]:
        """Return a snapshot whose parts are read in place, on any tier. They are valid until an
        update, a restore or a move. Each of these first calls `no_longer_read`, which blocks until
        reading is done. Moves nothing and needs no other rank."""
        self._assert_filled()
        parts: dict[str, Part] = {}
        components: dict[str, list[Holding]] = {}
        for holding in self._holdings():
            components.setdefault(holding.component, []).append(holding)
        for component, holdings in components.items():
            named = {
                name: tensor for holding in holdings for name, tensor in holding.named().items()
            }
            readable = self.memory.readable(component, named)
            parts |= {part.key: part for holding in holdings for part in holding.parts(readable)}
        if no_longer_read is not None:
            self.memory.lend(components, no_longer_read)
        state = {
            "objective": self.objective.kind,
            "model": self._model,
            "version": self.version,
            "steps_done": self._steps_done,
            "moments": self.config.moments,
            "num_updates": {
                learner.name: learner.optimizer.num_updates for learner in self.models.learners
            },
        }
        if self._loss_scale is not None:
            state["loss_scale"] = asdict(self._loss_scale)
        return {"tensors": parts, "state": state}

    def restore_now(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `snapshot_now`, on every rank. "tensors" is a PartSource, or
        the Parts of all ranks that took it, any number. Raises SnapshotError, with nothing changed,
        for another model or objective."""
        tensors, numbers = state["tensors"], state["state"]
        source: PartSource = (
            HeldParts(tensors.values()) if isinstance(tensors, Mapping) else tensors
        )
        self._refuse_another(numbers)
        found = source.kinds()
        wanted = [holding.fitting(found) for holding in self._holdings()]
        check_kinds({name: kind for kinds in wanted for name, kind in kinds.items()}, found)
        self.memory.recall()
        self._filled = False  # until all of it is there
        with self._all_ranks.guard("restore"):
            # one at a time: what is parked need not fit beside the others
            for learner in self.models.learners:
                with self.memory.all_on_device(f"{learner.name}."):
                    learner.restore(source, int(numbers["num_updates"][learner.name]))
            if self._reference is not None:
                with self.memory.on_device("reference"):
                    rounded = self._reference.restore(source)
                if rounded and self._all_ranks.rank == 0:
                    self.emit("warn.reference_rounded", dtype=str(self._reference.decoder.dtype))
        self.version, self._steps_done = int(numbers["version"]), int(numbers["steps_done"])
        if self._loss_scale is not None:  # a snapshot of a run in another dtype has none
            self._loss_scale = LossScale(**numbers.get("loss_scale", {}))
        self._filled = True

    def _assert_filled(self) -> None:
        assert self._filled, (
            "the trainer's weights are blank: it was started for a snapshot, and none was restored"
        )

    # MemoryTenant
    # ----------------------------------------------------------------------------------------------

    def components(self) -> Sequence[Component]:
        return self.memory.components()

    def move(self, names: Sequence[str], tier: Tier) -> None:
        self.memory.move(names, tier)

    def measure(self) -> Mapping[str, Usage]:
        return self.memory.measure()

    def keep_pages(self, keep: bool) -> None:
        self.memory.keep_pages(keep)

    # Training, on the compute thread
    # ----------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """The groups that the actor's ranks form."""
        return self.models.actor.split.mesh

    def step_now(self, batch: TrainBatch) -> StepReport:
        self._assert_filled()
        # The trace is around the rest: while it is written no other rank waits for this one.
        with self._tracer.around(batch.step), self._all_ranks.guard(f"step {batch.step}"):
            with self._meter.working():
                started_s = time.perf_counter()
                report, totals = self._step(batch)
                if self._all_ranks.device.type == "cuda":
                    # the last update is only queued
                    torch.cuda.current_stream(self._all_ranks.device).synchronize()
                step_s = time.perf_counter() - started_s
            own = {
                "totals": totals.own(),
                "tensor_rank": self.mesh.coordinate.tensor,
                "meter": self._meter.take(step_s=step_s),
                "moved": self._moved(),
            }
            ranks = self._all_ranks.share(own)
        meters = [rank["meter"] for rank in ranks]
        measured = join(meters, num_tokens=report.num_tokens, peak_flops=self.peak_flops)
        measured |= {name: max(rank["moved"][name] for rank in ranks) for name in own["moved"]}
        # the profiler makes it slower: its times say nothing
        if batch.step in self.config.trace_steps:
            measured = {name: value for name, value in measured.items() if name.startswith(SENT)}
        # ranks of one tensor group counted the same data
        totals_of_data = [rank["totals"] for rank in ranks if rank["tensor_rank"] == 0]
        metrics = totals.finish(totals_of_data)
        return replace(report, metrics={**metrics, **report.metrics}, measured=measured)

    def _step(self, batch: TrainBatch) -> tuple[StepReport, StepStats]:
        """Run one step. Counts in the report cover the plan of all ranks; the totals are this
        rank's."""
        self.memory.need("actor.", "critic.")
        self._drop_leftovers()
        sequences, plan = self._evaluator.complete(batch)
        factor = learning_rate_factor(self.config, self._steps_done)
        totals, before = StepStats(), self.version
        if not plan.updates:
            self.emit("trainer.nothing_to_train", step=batch.step, sequences=len(batch.sequences))
        for epoch in range(self.config.epochs_per_batch):
            if epoch and len(plan.updates) > 1:
                bare = self._planner.plan(sequences, batch.step, epoch)
                plan = bare.with_columns(sequences, self._evaluator.columns(sequences))
            for update in plan.updates:
                self._update(update, factor, totals, batch.step)
        self._steps_done += 1
        self._lost_steps = self._lost_steps + 1 if plan.updates and self.version == before else 0
        # one that still falls is finding its size
        if self._loss_scale is None or self._loss_scale.factor <= 1.0:
            rates = {
                learner.name: self._peak_rate(learner.name) for learner in self.models.learners
            }
            refuse_divergence(self._lost_steps, rates, step=batch.step)
        self._planner.forget()
        self._follow_policy(batch.step)
        report = StepReport(
            step=batch.step,
            version=self.version,
            metrics=self._numbers(plan, factor),
            num_tokens=plan.num_tokens * self.config.epochs_per_batch,
            num_updates=self.version - before,
        )
        return report, totals

    def plan(self, batch: TrainBatch) -> EpochPlan:
        """Return the updates of a batch's first epoch, with every column that the objective
        needs."""
        return self._evaluator.complete(batch)[1]

    def forward_backward(self, update: Update, *, loss_scale: float = 1.0) -> UpdateStats:
        """Add this rank's gradients × loss_scale to the buffers of the models' optimizers. A step
        drops gradients that no update has taken."""
        self._has_gradients = True
        given = self.models, self.objective, update.chunks, update.denominator
        with self.memory.visiting("actor", "critic"):
            return collect_gradients(*given, loss_scale=loss_scale)

    def _update(self, update: Update, factor: float, totals: StepStats, step: int) -> None:
        """Run one optimizer update of every trained model, or of none when a gradient is not
        finite."""
        scale = 1.0 if self._loss_scale is None else self._loss_scale.factor
        found = self.forward_backward(update, loss_scale=scale)
        for learner in self.models.learners:
            spec, scalar = learner.decoder.whole_spec, learner.head is not None
            self._meter.count(spec, update.chunks, scalar=scalar, backward=True)
            learner.optimizer.reduce()
        norms = {
            learner.name: learner.optimizer.grad_norm() / scale for learner in self.models.learners
        }
        # a sum over ranks that were lost looks like any other number
        self._all_ranks.check(f"update of step {step}")
        finite = all(math.isfinite(norm) for norm in norms.values())
        self._follow_loss_scale(finite, step)
        if not finite:
            totals.skip()
            self.emit("trainer.update_skipped", step=step, reason=f"gradient norm is {norms}")
            self._clear_gradients()
            return
        totals.add(found, norms)
        self.memory.recall()
        for learner in self.models.learners:
            clip, norm = self.config.grad_clip, norms[learner.name]
            clipped = clip / norm if clip and norm > clip else 1.0
            learner.update(
                learning_rate=factor * self._peak_rate(learner.name), grad_scale=clipped / scale
            )
        self._has_gradients = False
        self.version += 1

    def _follow_loss_scale(self, finite: bool, step: int) -> None:
        """Adjust the loss scale. The gradient norm, and therefore the result, is equal on all
        ranks."""
        if self._loss_scale is None:
            return
        left, self._loss_scale = self._loss_scale, self._loss_scale.after(finite=finite)
        if self._loss_scale.factor != left.factor:
            self.emit(
                "trainer.loss_scale", step=step, factor=self._loss_scale.factor, was=left.factor
            )

    def _follow_policy(self, step: int) -> None:
        """Update the reference when due, on any tier."""
        due = self._reference.due(self._steps_done) if self._reference is not None else None
        if self._reference is None or due is None:
            return
        self.memory.recall()
        with self.memory.on_device("reference"):
            self._reference.follow(self.models.actor.optimizer, due)
        if due == "refresh":
            self.emit("trainer.reference_refreshed", step=step, version=self.version)

    def _moved(self) -> dict[str, float]:
        """Return this rank's offload transfers and waits since the last step; empty without
        offloading."""
        taken = [
            learner.home.take_traffic()
            for learner in self.models.learners
            if learner.home.stream is not None
        ]
        taken += [stream.take_traffic() for stream in self.memory.streams.values()]
        if not taken:
            return {}
        return {
            "offload_in_bytes": float(sum(one.in_bytes for one in taken)),
            "offload_out_bytes": float(sum(one.out_bytes for one in taken)),
            "offload_wait_seconds": sum(one.waited_s for one in taken),
        }

    def _drop_leftovers(self) -> None:
        """Free the leftovers of an interrupted step or evaluation."""
        for learner in self.models.learners:
            learner.let_go()
        if self._has_gradients:
            self._clear_gradients()

    def _clear_gradients(self) -> None:
        for learner in self.models.learners:
            learner.optimizer.zero_grad()
        self._has_gradients = False

    def _peak_rate(self, learner: str) -> float:
        own = self.config.critic_learning_rate if learner == "critic" else None
        return self.config.learning_rate if own is None else own

    def _numbers(self, plan: EpochPlan, factor: float) -> dict[str, float]:
        scale = {} if self._loss_scale is None else {"loss_scale": self._loss_scale.factor}
        return scale | {
            "learning_rate": factor * self.config.learning_rate,
            "tokens": float(plan.num_tokens),
            "target_tokens": float(plan.num_targets),
            "sequences_left_out": float(plan.num_left_out),
            "padding_share": plan.padding_share,
        }

    # Evaluation, on the compute thread
    # ----------------------------------------------------------------------------------------------

    def evaluate_now(self, batch: TrainBatch, which: Which) -> Evaluation:
        self._assert_filled()
        with self._all_ranks.guard(f"evaluation of '{which}'"), self._meter.working():
            return self._evaluator.evaluate(batch, which)

    def snapshot_bytes(self) -> int:
        """Return the bytes of this rank's part of a snapshot."""
        sizes = [holding.sizes_bytes() for holding in self._holdings()]
        return sum(padded(size) for found in sizes for size in found)

    def _holdings(self) -> list[Holding]:
        found = [holding for learner in self.models.learners for holding in learner.holdings()]
        return found + (self._reference.holdings() if self._reference is not None else [])

    def _refuse_another(self, numbers: Mapping[str, Any]) -> None:
        """Raise SnapshotError if a snapshot belongs to another objective or model."""
        if numbers["objective"] != self.objective.kind:
            raise SnapshotError(
                f"the snapshot is of objective '{numbers['objective']}', this run has "
                f"'{self.objective.kind}'",
                hint="resume with the config that the run was started with",
            )
        if (its := numbers.get("moments", "float32")) != self.config.moments:
            raise SnapshotError(
                f'the snapshot is of a run with trainer.moments = "{its}", this run has '
                f'"{self.config.moments}"',
                hint=f'resume with trainer.moments = "{its}", or begin a new run from its weights',
            )
        for key, mine in self._model.items():
            if (its := numbers["model"].get(key)) != mine:
                raise SnapshotError(
                    f"the snapshot is of another model: its {key} is {its}, this run's is {mine}",
                    hint=OTHER_MODEL,
                )

    def close_now(self) -> None:
        """Free everything but the actor's compute weights and the reward model, which the caller
        owns."""
        self.memory.recall()
        for learner in self.models.learners:
            learner.optimizer.close()
        for stream in self.memory.streams.values():
            stream.close()
        for name in self.memory.tiers():
            if name not in ("actor.params", "reward"):
                self.memory.remove(name)


def _host_copy(values_N: Tensor) -> Tensor:
    return torch.empty(values_N.shape, dtype=values_N.dtype).copy_(values_N)
