"""Job: what is trained and generated, and how its models are spread over ranks.

In: a run's PlanInputs and what was decided beside them. Out: a TrainingJob, a Layout. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gyre.core.records import Matmul, Moments
from gyre.core.rounding import ceil_div
from gyre.distributed.config import SumGradients
from gyre.memory.config import Leave
from gyre.planner.batch_sizes import longest_sequence
from gyre.planner.memory_model.engine import EngineDemand
from gyre.planner.memory_model.states import Layout, most_chunks
from gyre.planner.plan import Dtype, ModelNumbers, PlanInputs, Saving, Shards

ModelName = Literal["actor", "critic", "reference", "reward"]
MODELS: tuple[ModelName, ...] = ("actor", "critic", "reference", "reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What one of several tensor ranks holds of the models that it trains or asks."""

    model: ModelNumbers
    reward_model: ModelNumbers | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What is trained, whatever it runs on. Its models are whole, or one rank's part of them."""

    model: ModelNumbers
    dtype: Dtype
    saving: Saving
    longest: int  # tokens of the longest sequence; a chunk holds at least one
    mean_tokens: int  # of a sequence: attention's share of the work
    tokens_per_update: int  # over all ranks, expected
    most_tokens_per_update: int  # when every sequence is as long as it may be
    updates_per_step: int = 1  # between two hand-overs to the engine
    target_share: float = 1.0  # of the tokens that have a loss
    matmul: Matmul = "same"
    moments: Moments = "float32"
    critic: bool = False
    reference: bool = False
    reward_model: ModelNumbers | None = None
    engine: EngineDemand | None = None  # None: nothing is generated
    # whole, where `model` is the part of it that a tensor rank trains; None: the same
    engine_model: ModelNumbers | None = None
    snapshot_background: bool = False  # snapshots are staged in host memory, which stays taken
    reference_average: bool = False
    offload_parameters: tuple[str, ...] = ()  # models whose weights live in host memory
    offload_cut_bytes: int = 128 << 20  # of offloaded state that visits the device at a time
    sum_gradients: SumGradients = "chunk"  # when ranks that hold shards sum their gradients
    leave: Mapping[str, Leave] = field(default_factory=dict)  # the config's `memory.leave`
    # of whole models: by the tensor ranks of the trainer above one, and by those of an engine, what
    # a search may choose
    parts: Mapping[int, RankPart] = field(default_factory=dict)
    engines: Mapping[int, EngineDemand] = field(default_factory=dict)

    @property
    def trained(self) -> tuple[str, ...]:
        return ("actor", "critic") if self.critic else ("actor",)

    @property
    def frozen(self) -> dict[str, ModelNumbers]:
        """Return the models that are asked and not trained."""
        found = {"reference": self.model} if self.reference else {}
        return found | ({"reward": self.reward_model} if self.reward_model is not None else {})

    @property
    def copies(self) -> int:
        """Models that are trained."""
        return len(self.trained)

    def of_rank(self, layout: Layout) -> TrainingJob:
        """Return what one rank of a layout does of a job with whole models. Engines of several
        ranks, and those beside a trainer's, have weights of their own."""
        trained, served = layout.tensor_ranks, layout.engine_tensor_ranks
        if (trained, served) == (1, 1) or not (self.parts or self.engines):
            return self
        engine = self.engines[served] if served > 1 else self.engine
        if engine is not None:
            engine = replace(engine, own_weights=True)
        job = replace(self, engine=engine, engine_model=self.model, parts={}, engines={})
        if trained == 1:
            return job
        part = self.parts[trained]
        return replace(job, model=part.model, reward_model=part.reward_model)

    def chunk_tokens(self, layout: Layout) -> int:
        """Return the tokens of a rank's fullest chunk: an update may be too small to fill one."""
        share = max(self.longest, ceil_div(self.most_tokens_per_update, layout.data_ranks))
        return min(layout.tokens_per_chunk, share)

    def most_chunks(self, layout: Layout) -> int:
        """Return the most chunks that a rank has in an update."""
        tokens, room = self.most_tokens_per_update, layout.tokens_per_chunk
        ranks = layout.data_ranks
        return most_chunks(tokens, longest=self.longest, ranks=ranks, tokens_per_chunk=room)

    def own_weights(self, layout: Layout) -> bool:
        """Return whether the engine has weights that are not the trainer's: it reads whole ones."""
        return self.engine is not None and (self.engine.own_weights or layout.zero >= 2)

    @property
    def engine_parameters(self) -> int:
        """Return the parameters that one rank of an engine with weights of its own holds."""
        part = None if self.engine is None else self.engine.part
        return (part or self.engine_model or self.model).num_parameters


def make_job(
    inputs: PlanInputs, *, dtype: Dtype, saving: Saving, engine: EngineDemand | None
) -> TrainingJob:
    """Return a stage as a job. Completions are expected to be half as long as they may be."""
    longest = longest_sequence(inputs)
    sequences = inputs.prompts_per_step * inputs.completions_per_prompt
    per_update = inputs.sequences_per_update or sequences
    mean = inputs.max_prompt_tokens + inputs.max_completion_tokens // 2
    return TrainingJob(
        model=inputs.trained_part or inputs.model,
        engine_model=inputs.model,
        dtype=dtype,
        saving=saving,
        longest=longest,
        mean_tokens=mean,
        tokens_per_update=per_update * mean,
        most_tokens_per_update=per_update * longest,
        updates_per_step=ceil_div(sequences, per_update) * inputs.epochs_per_batch,
        matmul=inputs.matmul,
        moments=inputs.moments,
        critic=inputs.critic,
        reference=inputs.reference,
        reward_model=inputs.reward_model,
        engine=engine,
        snapshot_background=inputs.snapshot_background,
        reference_average=inputs.reference_average,
        offload_parameters=inputs.offload_parameters,
        offload_cut_bytes=inputs.offload_cut_bytes,
        sum_gradients=inputs.sum_gradients,
        leave=inputs.leave,
    )


def layout_of(inputs: PlanInputs, tokens_per_chunk: int) -> Layout:
    """Return how a run's models are spread over its ranks. One that no ranks share is whole,
    whatever its ZeRO stage."""
    shards = {model: inputs.shards.get(model, Shards()) for model in MODELS}
    whole = {model: one if one.ranks > 1 else Shards() for model, one in shards.items()}
    tensor_ranks = 1 if inputs.trained_part is None else inputs.trained_part.row_ranks
    return Layout(
        gpus=inputs.ranks * tensor_ranks,
        tensor_ranks=tensor_ranks,
        zero=whole["actor"].zero,
        shard_ranks=whole["actor"].ranks,
        checkpointing=inputs.checkpointing,
        tokens_per_chunk=tokens_per_chunk,
        offload_optimizer=inputs.offload_optimizer,
        offload_gradients=inputs.offload_gradients,
        offload_parameters=inputs.offload_parameters,
        moments=inputs.moments,
        sum_gradients=inputs.sum_gradients,
        apart={model: one for model, one in whole.items() if one != whole["actor"]},
    )
