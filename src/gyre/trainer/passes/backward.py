"""Backward passes: the gradient of one optimizer update, micro-batch by micro-batch. In: packed
micro-batches, trained models, an objective. Out: gradients in the models' buffers, metric sums.

Each micro-batch's loss is a sum; all are divided by one denominator of the whole update, so that
the gradient does not depend on packing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gyre.core.errors import DivergedError
from gyre.objectives.api import add_sums, finish_sums, loss_sum
from gyre.objectives.config import AnyObjective, trains_scores
from gyre.objectives.inputs import LossInputs
from gyre.trainer.batching.microbatch import MicroBatch
from gyre.trainer.parallelize.sharded_module import is_sharded
from gyre.trainer.passes.forward import ChunkLogprobs, chunk_logprobs, chunk_scores, chunk_values
from gyre.trainer.roles.trained_model import TrainedModel

MOST_LOST_STEPS = 3  # in a row, before training is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The trained models of this run, and how the actor's log-probs are computed."""

    actor: TrainedModel
    critic: TrainedModel | None = None
    logprobs: ChunkLogprobs = chunk_logprobs

    @property
    def learners(self) -> tuple[TrainedModel, ...]:
        return (self.actor,) if self.critic is None else (self.actor, self.critic)


@dataclass(slots=True)
class UpdateStats:
    """Statistics of one update's micro-batches besides the gradients."""

    sums: dict[str, Tensor] = field(default_factory=dict)  # objectives' (sum, count) pairs
    max_gap: Tensor | None = None  # largest |trainer - engine| log-prob


class StepStats:
    """Metrics of a loop step, accumulated over its updates."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._gaps: list[Tensor] = []
        self._norms: list[Mapping[str, float]] = []
        self._skipped = 0

    def add(self, found: UpdateStats, norms: Mapping[str, float]) -> None:
        """Count an update, with the gradient norm of each trained model."""
        self._sums = add_sums(self._sums, found.sums)
        self._gaps += [] if found.max_gap is None else [found.max_gap]
        self._norms.append(norms)

    def skip(self) -> None:
        """Count an update that was skipped because a gradient was not finite."""
        self._skipped += 1

    def own(self) -> dict[str, Any]:
        """Return this rank's statistics for `finish`; JSON-able."""
        gap = largest(float(gap) for gap in self._gaps)
        return {"gap": gap, "sums": {name: pair.tolist() for name, pair in self._sums.items()}}

    def finish(self, ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Compute metrics over all ranks from the `own` of each. Equal on every rank."""
        gap, sums = largest(one["gap"] for one in ranks if one["gap"] is not None), {}
        for one in ranks:
            sums = add_sums(
                sums,
                {name: torch.tensor(p, dtype=torch.float64) for name, p in one["sums"].items()},
            )
        metrics = finish_sums(sums) | {"skipped_updates": float(self._skipped)}
        if gap is not None:
            metrics["logprob_gap_max"] = gap
        for learner in self._norms[0] if self._norms else ():
            name = "grad_norm" if learner == "actor" else f"{learner}_grad_norm"
            metrics[name] = sum(norms[learner] for norms in self._norms) / len(self._norms)
        return metrics


def refuse_divergence(lost_steps: int, rates: Mapping[str, float], *, step: int) -> None:
    """Raise DivergedError after MOST_LOST_STEPS consecutive steps without a finite gradient.
    `rates`: peak learning rate by model."""
    if lost_steps < MOST_LOST_STEPS:
        return
    told = " and ".join(f"{rate:g} of the {name}" for name, rate in rates.items())
    raise DivergedError(
        f"no update of the last {lost_steps} steps, up to step {step}, had a finite gradient: "
        f"training has diverged, with a learning rate of {told}",
        hint="lower trainer.learning_rate (of a cold start: cold_start.learning_rate), and begin "
        "anew or resume from "
        "a snapshot before it; events.jsonl has the first trainer.update_skipped",
    )


def collect_gradients(
    models: Models,
    objective: AnyObjective,
    chunks: Sequence[MicroBatch],
    denominator: float,
    *,
    loss_scale: float = 1.0,
) -> UpdateStats:
    """Run forward and backward over the micro-batches of one update. Accumulates gradients ×
    loss_scale in the models' buffers."""
    assert denominator > 0.0
    found = UpdateStats()
    for index, chunk in enumerate(chunks):
        for learner in models.learners:
            learner.begin_chunk(last=index == len(chunks) - 1)
        if not chunk.members:
            _keep_in_step(models, objective, chunk)
            continue
        _add_actor_gradient(models, objective, chunk, denominator / loss_scale, found)
        if models.critic is not None:
            _add_critic_gradient(models.critic, objective, chunk, denominator / loss_scale, found)
    return found


# Nothing of a chunk's graph outlives these two: what it still held would be beside the next
# chunk's.
def _add_actor_gradient(
    models: Models,
    objective: AnyObjective,
    chunk: MicroBatch,
    denominator: float,
    found: UpdateStats,
) -> None:
    actor, inputs = models.actor, _inputs(chunk)
    if trains_scores(objective):
        assert actor.head is not None
        scores_S = chunk_scores(actor.decoder, actor.head, chunk, actor.checkpointing, actor.float8)
        inputs = replace(inputs, scores_S=scores_S)
    else:
        logprobs_N, entropy_N = models.logprobs(actor.decoder, chunk)
        inputs = replace(inputs, logprobs_N=logprobs_N, entropy_N=entropy_N)
        _note_gap(inputs, logprobs_N.detach(), found)
    _backward(objective, inputs, denominator, found)


def _add_critic_gradient(
    critic: TrainedModel,
    objective: AnyObjective,
    chunk: MicroBatch,
    denominator: float,
    found: UpdateStats,
) -> None:
    assert critic.head is not None
    values_N = chunk_values(critic.decoder, critic.head, chunk, critic.checkpointing, critic.float8)
    _backward(objective, replace(_inputs(chunk), values_N=values_N), denominator, found)


def _keep_in_step(models: Models, objective: AnyObjective, chunk: MicroBatch) -> None:
    """Run the collectively gathered layers with a gradient of zero."""
    for learner in models.learners:
        if not is_sharded(learner.decoder):
            continue
        if learner.head is None:
            outputs = chunk_logprobs(learner.decoder, chunk, float8=learner.float8)[0]
        else:
            compute = chunk_scores if trains_scores(objective) else chunk_values
            outputs = compute(learner.decoder, learner.head, chunk, float8=learner.float8)
        (outputs.sum() * 0.0).backward()


def _inputs(chunk: MicroBatch) -> LossInputs:
    """Return the loss inputs that come from the batch; results of the forward pass are added
    later."""
    columns, pairs = chunk.columns, chunk.pairs
    return LossInputs(
        num_sequences=len(chunk.members),
        sequence_index_N=chunk.sequence_index_N,
        target_counts_S=chunk.target_counts_S,
        advantages_N=columns.get("advantages"),
        behavior_logprobs_N=columns.get("logprobs"),
        old_logprobs_N=columns.get("old_logprobs"),
        reference_logprobs_N=columns.get("reference_logprobs"),
        old_values_N=columns.get("values"),
        returns_N=columns.get("returns"),
        chosen_P=pairs.chosen_P if pairs else None,
        rejected_P=pairs.rejected_P if pairs else None,
        margins_P=pairs.margins_P if pairs else None,
    )


def _backward(
    objective: AnyObjective, inputs: LossInputs, denominator: float, found: UpdateStats
) -> None:
    loss, sums = loss_sum(objective, inputs)
    (loss / denominator).backward()
    found.sums = add_sums(found.sums, {name: pair.detach() for name, pair in sums.items()})


def _note_gap(inputs: LossInputs, logprobs_N: Tensor, found: UpdateStats) -> None:
    """Record the largest |trainer - engine| log-prob, by the policy before the step where it is
    known."""
    if inputs.behavior_logprobs_N is None or len(logprobs_N) == 0:
        return
    trainer_N = logprobs_N if inputs.old_logprobs_N is None else inputs.old_logprobs_N
    gap = (trainer_N - inputs.behavior_logprobs_N).abs().max()
    found.max_gap = gap if found.max_gap is None else torch.maximum(found.max_gap, gap)


def largest(values: Iterable[float]) -> float | None:
    """Return the maximum, or NaN if any value is NaN; None without values. Python's max depends on
    the position of a NaN."""
    seen = tuple(values)
    if not seen:
        return None
    return math.nan if any(math.isnan(value) for value in seen) else max(seen)
