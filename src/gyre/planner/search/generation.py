"""Generation: predicted seconds of an engine's steps and of an iteration's rollouts, at any number
of tensor ranks. Pure arithmetic.

In: what one rank holds of a model, rows, a Gpu. Out: StepSeconds by cause; seconds. A step reads
the rank's weights and the KV of its heads once; two sums per layer and the logits of all parts go
over the ranks. bench/engine.py measures.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.planner.gpus import DECODE_SHARE, EXCHANGE_S, Gpu
from gyre.planner.memory_model.activations import ITEM_BYTES
from gyre.planner.memory_model.engine import kv_bytes_per_page
from gyre.planner.memory_model.job import TrainingJob
from gyre.planner.plan import Dtype, ModelNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """One step that gives a token to each of some sequences."""

    weights_s: float  # to read them, or to multiply by them where that takes longer
    kv_s: float  # to read the keys and values of all sequences
    sums_s: float  # over tensor ranks, two per layer
    logits_s: float  # to gather the parts of the vocabulary

    @property
    def seconds(self) -> float:
        return self.weights_s + self.kv_s + self.sums_s + self.logits_s


def decode_step(
    part: ModelNumbers,
    dtype: Dtype,
    gpu: Gpu,
    *,
    tensor_ranks: int,
    rows: float,
    context_tokens: float,
    by_peers: bool = True,
) -> StepSeconds:
    """Return the time of a step of `rows` sequences that have `context_tokens` each. `part`: of one
    of the ranks, which sum few rows by peers' memory, or else by NCCL."""
    item, ranks = ITEM_BYTES[dtype], tensor_ranks
    read_bytes_per_s = gpu.hbm_bytes_per_s * DECODE_SHARE
    products_s = 2 * _multiplied(part) * rows / _product_flops(gpu)
    kv_bytes = rows * context_tokens * kv_bytes_per_page(part, dtype, 1)
    weights_s = max(item * _multiplied(part) / read_bytes_per_s, products_s)
    if ranks == 1:
        return StepSeconds(
            weights_s=weights_s, kv_s=kv_bytes / read_bytes_per_s, sums_s=0.0, logits_s=0.0
        )
    row_bytes = item * part.hidden_size * rows
    gathered = (ranks - 1) * rows * part.vocab_size * item
    return StepSeconds(
        weights_s=weights_s,
        kv_s=kv_bytes / read_bytes_per_s,
        sums_s=2
        * part.num_layers
        * gpu.sum_seconds(row_bytes, ranks, rows=rows, by_peers=by_peers),
        logits_s=EXCHANGE_S + gathered / gpu.exchange_bytes_per_s,
    )


def prompt_seconds(
    part: ModelNumbers, dtype: Dtype, gpu: Gpu, *, tensor_ranks: int, tokens: float
) -> float:
    """Return the time of prompts of so many tokens together: products at the rate of large ones,
    and two all-reduces per layer. Attention, and what starts a call, are small beside these."""
    products_s = 2 * _multiplied(part) * tokens / _product_flops(gpu)
    sent = 2 * (tensor_ranks - 1) / tensor_ranks * ITEM_BYTES[dtype] * part.hidden_size * tokens
    return products_s + 2 * part.num_layers * sent / gpu.exchange_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLoad:
    """What one engine generates."""

    sequences: int
    at_once: int  # that have KV pages at the same time
    prompt_tokens: float  # of each, on average
    mean_tokens: float  # that are generated of each
    most_tokens: float  # of the longest one


def generation_seconds(
    part: ModelNumbers,
    dtype: Dtype,
    gpu: Gpu,
    load: RolloutLoad,
    *,
    tensor_ranks: int,
    by_peers: bool = True,
) -> float:
    """Return the time of all prompts and of as many steps as the longest sequence or the room for
    all takes."""
    generated = load.sequences * load.mean_tokens
    steps = max(load.most_tokens, generated / min(load.at_once, load.sequences))
    # Long sequences have more of the steps: of uniform lengths, two thirds of the mean are there.
    context_tokens = load.prompt_tokens + 2 * load.mean_tokens / 3
    step = decode_step(
        part, dtype, gpu, tensor_ranks=tensor_ranks, rows=generated / steps,
        context_tokens=context_tokens, by_peers=by_peers,
    )  # fmt: skip
    given = load.sequences * load.prompt_tokens
    prompts_s = prompt_seconds(part, dtype, gpu, tensor_ranks=tensor_ranks, tokens=given)
    return steps * step.seconds + prompts_s


def rollout_seconds(job: TrainingJob, gpu: Gpu, *, running: int, tensor_ranks: int) -> float:
    """Return the time of an iteration's completions in one engine, `running` at the same time. They
    are half as long as they may be on average."""
    engine = job.engine
    if engine is None or not engine.sequences or not running:
        return 0.0
    part = engine.part or job.engine_model or job.model
    mean_tokens = max(1, job.longest - job.mean_tokens)
    load = RolloutLoad(
        sequences=engine.sequences,
        at_once=running,
        prompt_tokens=max(1, job.mean_tokens - mean_tokens),
        mean_tokens=mean_tokens,
        most_tokens=2 * mean_tokens,
    )
    return generation_seconds(part, job.dtype, gpu, load, tensor_ranks=tensor_ranks)


def _multiplied(part: ModelNumbers) -> int:
    """Return the parameters that a token is multiplied by. An embedding of its own is looked up."""
    return part.num_parameters - (0 if part.tied else part.embedding_parameters)


def _product_flops(gpu: Gpu) -> float:
    return (gpu.bf16_flops or gpu.fp16_flops) * gpu.matmul_share
