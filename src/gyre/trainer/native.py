"""NativeTrainer: actor, critic, reference and reward model in this process. In: unpacked batches. Out: new weights,
log-probs, values, scores. Implements PolicyTrainer and MemoryTenant. Caller: loop, through wire.

Every objective goes through one loop: for each epoch, for each update, for each chunk: forward, loss, backward; then
clip, AdamW, version + 1. Torch work runs on the compute thread that the constructor is given; `register`, `snapshot`,
`restore`, `move` are called on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gyre.core.errors import ConfigError, SnapshotError
from gyre.core.records import (
    Component,
    Evaluation,
    Manifest,
    StepReport,
    Tier,
    TrainBatch,
    TrainSequence,
    Usage,
    Which,
)
from gyre.kernels.cpu.build import Unavailable
from gyre.kernels.cpu.chunks import load_chunks
from gyre.models.decoder import Decoder
from gyre.models.heads import ScalarHead
from gyre.objectives.api import (
    AnyObjective,
    needs_critic,
    needs_old_logprobs,
    needs_reference,
    required_columns,
    trains_scores,
)
from gyre.trainer.batches import EpochPlan, Planner, Update
from gyre.trainer.chunk import check_columns
from gyre.trainer.config import TrainerConfig
from gyre.trainer.learner import HEAD_PREFIX, Learner, copy_in
from gyre.trainer.passes import logprobs_of, scores_of, values_of
from gyre.trainer.reference import Reference, frozen_copy
from gyre.trainer.schedule import learning_rate_factor
from gyre.trainer.tenancy import ScoredModel, Tenancy
from gyre.trainer.update import Models, Totals, collect_gradients
from gyre.vram.pools import Take
from gyre.weights.manifest import make_manifest


class NativeTrainer:
    """Trains `decoder` in place: an engine that reads the same Decoder has each new version at once."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        objective: AnyObjective,
        config: TrainerConfig,
        compute: Executor,
        emit: Callable[..., None],
        seed: int,
        head: ScalarHead | None = None,
        critic: ScoredModel | None = None,
        reward_model: ScoredModel | None = None,
        version: int = 0,
        shared: bool = True,
        disk_folder: Path | None = None,
    ) -> None:
        """`head` continues a reward model under objective rm; `critic` one under ppo: without them the head starts at
        zero and the critic's trunk as a copy of the actor. `reward_model` is what evaluate(…, "reward") asks.
        `shared` goes into the manifest: the engine reads this trainer's own weights. `disk_folder` gives components
        a disk tier."""
        self._objective, self._config, self._seed = objective, config, seed
        self._compute, self._emit, self._shared = compute, emit, shared
        if decoder.device.type == "cpu" and isinstance(kernels := load_chunks(decoder.dtype), Unavailable):
            emit("trainer.torch_kernels", reason=kernels.reason)
        if trains_scores(objective) and head is None:
            head = ScalarHead(decoder.spec.hidden_size, device=decoder.device)
        assert head is None or trains_scores(objective), f"objective {objective.kind} trains no scalar head"
        self._models = Models(
            actor=Learner("actor", decoder, head, config),
            critic=_make_critic(decoder, critic, config) if needs_critic(objective) else None,
        )
        wants_reference = needs_reference(objective) and config.reference == "initial"
        self._reference = Reference(decoder, config) if wants_reference else None
        self._reward_model = reward_model
        self._version, self._steps_done = version, 0
        self._planner = Planner(
            objective=objective,
            config=config,
            seed=seed,
            vocab_size=decoder.spec.vocab_size,
            device=decoder.device,
            emit=emit,
        )
        self._tenancy = Tenancy(self._models.learners, self._reference, reward_model, disk_folder)

    # PolicyTrainer ---------------------------------------------------------------------------------------------------

    async def step(self, batch: TrainBatch) -> StepReport:
        return await asyncio.get_running_loop().run_in_executor(self._compute, self.step_now, batch)

    async def evaluate(self, batch: TrainBatch, which: Which) -> Evaluation:
        return await asyncio.get_running_loop().run_in_executor(self._compute, self.evaluate_now, batch, which)

    async def close(self) -> None:
        """Free everything but the actor's compute weights and the reward model, which belong to the caller."""
        await asyncio.get_running_loop().run_in_executor(self._compute, self._close)

    def register(self) -> tuple[Manifest, Mapping[str, Any]]:
        parameters = self._models.actor.optimizer.parameters.items()
        tensors = {name: p.detach() for name, p in parameters if not name.startswith(HEAD_PREFIX)}
        manifest = make_manifest(self._version, tensors, shared=self._shared, checksums=not self._shared)
        return manifest, tensors

    def snapshot(self, take: Take | None = None) -> Mapping[str, Any]:
        """Return {"tensors": by name, "state": JSON-able}. Tensors are copies on the CPU, taken from the tier where
        each component is: a snapshot moves nothing and needs no room on the device. `take` gives the memory for
        them."""
        tensors: dict[str, Tensor] = {}
        for component, parts in self._state_tensors().items():
            tensors |= self._tenancy.copies(component, parts, take)
        state = {
            "objective": self._objective.kind,
            "version": self._version,
            "steps_done": self._steps_done,
            "num_updates": {learner.name: learner.optimizer.num_updates for learner in self._models.learners},
        }
        return {"tensors": tensors, "state": state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `snapshot` returned, read back. SnapshotError if it is of another model or objective."""
        tensors, numbers = state["tensors"], state["state"]
        if numbers["objective"] != self._objective.kind:
            raise SnapshotError(
                f"the snapshot is of objective '{numbers['objective']}', this run has '{self._objective.kind}'",
                hint="resume with the config that the run was started with",
            )
        with contextlib.ExitStack() as stack:
            for component in self._tenancy.tiers():
                if not component.endswith(".grads"):
                    stack.enter_context(self._tenancy.on_device(component))
            for learner in self._models.learners:
                learner.restore(tensors, int(numbers["num_updates"][learner.name]))
            if self._reference is not None:
                copy_in(self._reference.state_tensors(), tensors)
        self._version, self._steps_done = int(numbers["version"]), int(numbers["steps_done"])

    # MemoryTenant ----------------------------------------------------------------------------------------------------

    def components(self) -> Sequence[Component]:
        return self._tenancy.components()

    def move(self, names: Sequence[str], tier: Tier) -> None:
        self._tenancy.move(names, tier)

    def measure(self) -> Mapping[str, Usage]:
        return self._tenancy.measure()

    def keep_pages(self, keep: bool) -> None:
        self._tenancy.keep_pages(keep)

    # Training, on the compute thread ---------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    @property
    def trained(self) -> tuple[Decoder, ScalarHead | None]:
        """What an export holds: the actor, with its scalar head under objective rm."""
        return self._models.actor.decoder, self._models.actor.head

    def step_now(self, batch: TrainBatch) -> StepReport:
        """The body of `step`."""
        self._tenancy.need("actor.", "critic.")
        self._clear_gradients()  # a step that was cut short may have left some
        sequences, plan = self._complete(batch)
        factor = learning_rate_factor(self._config, self._steps_done)
        totals, before = Totals(), self._version
        if not plan.updates:
            self._emit("trainer.nothing_to_train", step=batch.step, sequences=len(batch.sequences))
        for epoch in range(self._config.epochs_per_batch):
            if epoch and len(plan.updates) > 1:
                bare = self._planner.plan(sequences, batch.step, epoch)
                plan = bare.with_columns(sequences, self._columns(sequences))
            for update in plan.updates:
                self._update(update, factor, totals, batch.step)
        self._steps_done += 1
        self._planner.forget()
        self._follow_policy(batch.step)
        return StepReport(
            step=batch.step,
            version=self._version,
            metrics=totals.finish() | self._numbers(plan, factor),
            num_tokens=plan.num_tokens * self._config.epochs_per_batch,
            num_updates=self._version - before,
        )

    def _update(self, update: Update, factor: float, totals: Totals, step: int) -> None:
        """One optimiser update of every learner, or of none when a gradient is not finite."""
        found = collect_gradients(self._models, self._objective, update.chunks, update.denominator)
        norms = {learner.name: learner.optimizer.grad_norm() for learner in self._models.learners}
        if not all(math.isfinite(norm) for norm in norms.values()):
            totals.skip()
            self._emit("trainer.update_skipped", step=step, reason=f"gradient norm is {norms}")
            self._clear_gradients()
            return
        totals.add(found, norms)
        for learner in self._models.learners:
            clip, norm = self._config.grad_clip, norms[learner.name]
            scale = clip / norm if clip and norm > clip else 1.0
            learner.optimizer.update(learning_rate=factor * self._peak_rate(learner.name), grad_scale=scale)
        self._version += 1

    def _follow_policy(self, step: int) -> None:
        """Renew the reference when that is due, wherever it is parked."""
        due = self._reference.due(self._steps_done) if self._reference is not None else None
        if self._reference is None or due is None:
            return
        with self._tenancy.on_device("reference"):
            self._reference.follow(self._models.actor.optimizer, due)
        if due == "refresh":
            self._emit("trainer.reference_refreshed", step=step, version=self._version)

    def _clear_gradients(self) -> None:
        for learner in self._models.learners:
            learner.optimizer.zero_grad()

    def _peak_rate(self, learner: str) -> float:
        critic_rate = self._config.critic_learning_rate
        return self._config.learning_rate if learner == "actor" or critic_rate is None else critic_rate

    def _numbers(self, plan: EpochPlan, factor: float) -> dict[str, float]:
        return {
            "learning_rate": factor * self._config.learning_rate,
            "tokens": float(plan.num_tokens),
            "target_tokens": float(plan.num_targets),
            "sequences_left_out": float(plan.num_left_out),
            "padding_share": plan.padding_share,
        }

    def _complete(self, batch: TrainBatch) -> tuple[Sequence[TrainSequence], EpochPlan]:
        """Compute the columns that the objective needs, the batch lacks and this trainer can give."""
        sequences = batch.sequences
        plan = self._planner.plan(sequences, batch.step, 0)
        required = required_columns(self._objective)
        wanted: dict[str, Which] = {"reference_logprobs": "reference"} if "reference_logprobs" in required else {}
        updates_per_batch = len(plan.updates) * self._config.epochs_per_batch
        if needs_old_logprobs(self._objective, updates_per_batch=updates_per_batch):
            wanted["old_logprobs"] = "policy"
        for column, which in wanted.items():
            if any(column not in sequence.columns for sequence in sequences):
                component = "reference" if which == "reference" and self._reference else "actor.params"
                with self._tenancy.on_device(component):
                    per_token = self._logprobs(which, sequences, plan)
                sequences = tuple(
                    replace(sequence, columns={**sequence.columns, column: values})
                    for sequence, values in zip(sequences, per_token, strict=True)
                )
        check_columns(sequences, required, self._objective.kind)
        return sequences, plan.with_columns(sequences, self._columns(sequences))

    def _columns(self, sequences: Sequence[TrainSequence]) -> list[str]:
        """Columns that chunks carry: what the objective requires, and old log-probs where there are some."""
        has_old = all("old_logprobs" in sequence.columns for sequence in sequences)
        return sorted(required_columns(self._objective) - {"loss_mask"}) + (["old_logprobs"] if has_old else [])

    # Evaluation, on the compute thread -------------------------------------------------------------------------------

    def evaluate_now(self, batch: TrainBatch, which: Which) -> Evaluation:
        """The body of `evaluate`. Log-probs and values are packed as by the first epoch of `step`, so that equal
        weights give equal bits."""
        sequences = batch.sequences
        if which == "reward":
            return Evaluation(which=which, per_sequence=self._scores(sequences))
        plan = self._planner.plan(sequences, batch.step, 0)
        if which != "critic":
            return Evaluation(which=which, per_token=self._logprobs(which, sequences, plan))
        critic = self._models.critic
        assert critic is not None and critic.head is not None, f"objective {self._objective.kind} has no critic"
        self._tenancy.need("critic.params")
        values, last_values = values_of(critic.decoder, critic.head, sequences, plan.chunks)
        return Evaluation(which=which, per_token=values, per_sequence=last_values)

    def _logprobs(self, which: Which, sequences: Sequence[TrainSequence], plan: EpochPlan) -> tuple[np.ndarray, ...]:
        if which == "policy":
            self._tenancy.need("actor.params")
            return logprobs_of(self._models.actor.decoder, sequences, plan.chunks)
        if self._reference is None:
            raise ConfigError(
                f"objective '{self._objective.kind}' has no reference model (trainer.reference = "
                f"'{self._config.reference}'), and its log-probs were asked for",
                hint="set trainer.reference = 'initial', or give each sequence a column reference_logprobs",
            )
        self._tenancy.need("reference")
        return logprobs_of(self._reference.decoder, sequences, plan.chunks)

    def _scores(self, sequences: Sequence[TrainSequence]) -> np.ndarray:
        """Ask the reward model that was given, or else the one that is being trained."""
        actor = self._models.actor
        decoder, head = self._reward_model or (actor.decoder, actor.head)
        assert head is not None, "this trainer was given no reward model"
        self._tenancy.need("reward" if self._reward_model else "actor.params")
        chunks = self._planner.whole(sequences, decoder.spec.vocab_size)
        return scores_of(decoder, head, len(sequences), chunks)

    def _state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything that a snapshot holds, by component."""
        parts: dict[str, dict[str, Tensor]] = {}
        for learner in self._models.learners:
            parts |= learner.state_tensors()
        if self._reference is not None:
            parts["reference"] = self._reference.state_tensors()
        return parts

    def _close(self) -> None:
        for learner in self._models.learners:
            learner.optimizer.close()
        for name in self._tenancy.tiers():
            if name not in ("actor.params", "reward"):
                self._tenancy.remove(name)


def _make_critic(actor: Decoder, critic: ScoredModel | None, config: TrainerConfig) -> Learner:
    """Take the critic given, or start one from the actor's weights with a head that says 0."""
    if critic is None:
        trunk = frozen_copy(actor).requires_grad_(True)
        critic = (trunk, ScalarHead(actor.spec.hidden_size, device=actor.device))
    return Learner("critic", *critic, config)
