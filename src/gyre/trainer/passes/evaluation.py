"""Evaluation: outputs of the trainer's models on a batch. In: a batch, the name of a model. Out:
log-probs, values or scores of the whole batch, on every rank. Runs on the compute thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gyre.core.errors import ConfigError
from gyre.core.records import Evaluation, TrainBatch, TrainSequence, Which
from gyre.distributed.process_group import RankGroup
from gyre.models.decoder import NOTHING
from gyre.objectives.config import AnyObjective, needs_old_logprobs, required_columns
from gyre.trainer.batching.epoch_plan import BatchPlanner, EpochPlan
from gyre.trainer.batching.microbatch import check_columns
from gyre.trainer.config import TrainerConfig
from gyre.trainer.metrics.throughput import ThroughputMeter
from gyre.trainer.passes.backward import Models
from gyre.trainer.passes.forward import logprobs_of, scores_of, values_of
from gyre.trainer.roles.memory_components import MemoryComponents, ScoredModel
from gyre.trainer.roles.reference_model import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Runs forward passes over batches, dealt to the ranks as in a step."""

    objective: AnyObjective
    config: TrainerConfig
    models: Models
    reference: Reference | None
    reward_model: ScoredModel | None
    planner: BatchPlanner
    memory: MemoryComponents
    data: RankGroup  # the ranks that computed the other sequences
    meter: ThroughputMeter

    def evaluate(self, batch: TrainBatch, which: Which) -> Evaluation:
        """Run one model over the batch. Log-probs and values are packed as in a step's first epoch,
        so that equal weights give equal bits."""
        sequences = batch.sequences
        if which == "reward":
            return Evaluation(which=which, per_sequence=self._scores(sequences))
        plan = self.planner.plan(sequences, batch.step, 0)
        if which != "critic":
            return Evaluation(which=which, per_token=self._logprobs(which, sequences, plan))
        critic = self.models.critic
        assert critic is not None and critic.head is not None, (
            f"objective {self.objective.kind} has no critic"
        )
        self.memory.need("critic.params")
        self.meter.count(critic.decoder.whole_spec, plan.chunks, scalar=True, backward=False)
        given = sequences, plan.chunks, self.data, critic.float8
        with self.memory.visiting("critic"):
            values, last_values = values_of(critic.decoder, critic.head, *given)
        return Evaluation(which=which, per_token=values, per_sequence=last_values)

    def complete(self, batch: TrainBatch) -> tuple[Sequence[TrainSequence], EpochPlan]:
        """Compute the columns that the objective needs, the batch lacks and the models can
        provide."""
        sequences = batch.sequences
        plan = self.planner.plan(sequences, batch.step, 0)
        required = required_columns(self.objective)
        wanted: dict[str, Which] = (
            {"reference_logprobs": "reference"} if "reference_logprobs" in required else {}
        )
        updates_per_batch = len(plan.updates) * self.config.epochs_per_batch
        if needs_old_logprobs(self.objective, updates_per_batch=updates_per_batch):
            sequences = tuple(_with_old_logprobs(sequence) for sequence in sequences)
            wanted["old_logprobs"] = "policy"
        for column, which in wanted.items():
            if any(column not in sequence.columns for sequence in sequences):
                prefix = "reference" if which == "reference" and self.reference else "actor.params"
                # with its layer buffers, which take no place in the passes to come
                with self.memory.all_on_device(prefix):
                    per_token = self._logprobs(which, sequences, plan)
                sequences = tuple(
                    replace(sequence, columns={**sequence.columns, column: values})
                    for sequence, values in zip(sequences, per_token, strict=True)
                )
        check_columns(sequences, required, self.objective.kind)
        return sequences, plan.with_columns(sequences, self.columns(sequences))

    def columns(self, sequences: Sequence[TrainSequence]) -> list[str]:
        """Return the columns of the micro-batches: those the objective requires, and old log-probs
        if present."""
        has_old = all("old_logprobs" in sequence.columns for sequence in sequences)
        return sorted(required_columns(self.objective) - {"loss_mask"}) + (
            ["old_logprobs"] if has_old else []
        )

    def _logprobs(
        self, which: Which, sequences: Sequence[TrainSequence], plan: EpochPlan
    ) -> tuple[np.ndarray, ...]:
        if which == "policy":
            owner, component, decoder = "actor", "actor.params", self.models.actor.decoder
        elif self.reference is not None:
            owner = component = "reference"
            decoder = self.reference.decoder
        else:
            raise ConfigError(
                f"objective '{self.objective.kind}' has no reference model (trainer.reference = "
                f"'{self.config.reference}'), and its log-probs were asked for",
                hint="set trainer.reference = 'initial', or give each sequence a column "
                "reference_logprobs",
            )
        self.memory.need(component)
        self.meter.count(decoder.whole_spec, plan.chunks, scalar=False, backward=False)
        with self.memory.visiting(owner):
            return logprobs_of(decoder, sequences, plan.chunks, self.data, self.models.logprobs)

    def _scores(self, sequences: Sequence[TrainSequence]) -> np.ndarray:
        """Run the given reward model, or else the one in training."""
        actor = self.models.actor
        decoder, head = self.reward_model or (actor.decoder, actor.head)
        float8 = NOTHING if self.reward_model else actor.float8
        assert head is not None, "this trainer was given no reward model"
        self.memory.need("reward" if self.reward_model else "actor.params")
        chunks = self.planner.whole(sequences, decoder.whole_spec.vocab_size)
        self.meter.count(decoder.whole_spec, chunks, scalar=True, backward=False)
        with self.memory.visiting("reward" if self.reward_model else "actor"):
            return scores_of(decoder, head, len(sequences), chunks, self.data, float8)


def _with_old_logprobs(sequence: TrainSequence) -> TrainSequence:
    """Use the pre-step result of evaluate(…, "policy") as the old policy, if the batch has it."""
    if "old_logprobs" in sequence.columns or "policy_logprobs" not in sequence.columns:
        return sequence
    return replace(
        sequence, columns={**sequence.columns, "old_logprobs": sequence.columns["policy_logprobs"]}
    )
