"""Cases for the batch-invariant mode over tensor ranks: rollouts of an engine, the trainer's view of
them; functions here run in rank processes (rank_pool)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyre.core.records import Request, Sampling, TrainBatch, TrainSequence
from gyre.distributed.config import ParallelConfig
from gyre.distributed.process_group import RankGroup, alone
from gyre.engine.config import EngineConfig
from gyre.engine.scheduler.journal import Add, Entry, Start, Steps
from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.models.layers.tensor_parallel import (
    ReplicatedRows,
    SequenceParallel,
    summed_in_rank_order,
)
from gyre.models.spec import ModelSpec
from gyre.models.tokenwise_forward import TokenwiseForward
from gyre.objectives.config import GrpoConfig
from gyre.trainer.config import TrainerConfig
from gyre.trainer.passes.forward import ChunkLogprobs
from gyre.trainer.passes.tokenwise import attend_packed
from gyre.trainer.trainer import NativeTrainer
from layout_cases import spec_of
from tensor_cases import decoder_of, fill_decoder, played

VOCAB, SCALE = 53, 3.0
SIZES = {"hidden_size": 16, "num_layers": 2, "vocab_size": VOCAB, "mlp_size": 24}
# Four ranks have two neighbors with the same KV head, and padding of the vocabulary.
SPECS: dict[str, ModelSpec] = {
    family: replace(spec_of(family, **SIZES), head_dim=8, context_tokens=128)
    for family in ("llama", "qwen2", "qwen3")
}


# that the fused kernels take
LARGE = {"hidden_size": 256, "num_layers": 2, "vocab_size": 1001, "mlp_size": 512}
ALL_SPECS = SPECS | {
    f"{family}_large": replace(spec_of(family, **LARGE), head_dim=64, context_tokens=256)
    for family in SPECS
}


def requests(temperature: float = 1.0, count: int = 8) -> list[Request]:
    """Some begin alike."""
    rng = np.random.default_rng(5)
    shared = rng.integers(0, VOCAB, 12)
    asked = []
    for number in range(count):
        own = rng.integers(0, VOCAB, int(rng.integers(1, 30)))
        tokens = np.concatenate([shared, own]) if number % 2 else own
        sampling = Sampling(temperature=temperature, max_tokens=int(rng.integers(10, 35)))
        asked.append(
            Request(
                request_id=f"r{number}",
                tokens=tokens.astype(np.int32),
                sampling=sampling,
                seed=number,
            )
        )
    return asked


def journal(asked: Sequence[Request], **settings: Any) -> list[Entry]:
    """The first three requests come earlier than the rest."""
    given = {"page_tokens": 16, "max_running": 8, "token_budget": 64, "num_pages": 64}
    config = EngineConfig.model_validate({**given, "batch_invariant": True, **settings})
    return [
        Start(
            settings=config.model_dump(mode="json"),
            num_pages=config.num_pages,
            num_slots=0,
            version=1,
            eos_ids=(),
        ),
        *map(Add.of, asked[:3]),
        Steps(count=6),
        *map(Add.of, asked[3:]),
        Steps(count=400),
    ]


def rollouts(
    group: RankGroup,
    which: str,
    *,
    temperature: float = 1.0,
    dtype: str = "float32",
    **settings: Any,
) -> tuple[dict[str, tuple[list[int], list[float]]], list[str]]:
    """The tokens of each request and their log-probs; and the kinds of events."""
    entries = journal(requests(temperature), **settings)
    found, kinds = played(group, ALL_SPECS[which], entries, getattr(torch, dtype), SCALE)
    answers = {
        request_id: (
            [token for chunk in chunks for token in chunk[0]],
            [logprob for chunk in chunks for logprob in chunk[1]],
        )
        for (request_id, _), chunks in found.items()
    }
    return answers, kinds


def batch_of(
    answers: dict[str, tuple[list[int], list[float]]], temperature: float = 1.0, order: int = 0
) -> TrainBatch:
    """The rollouts as sequences to train on, in an order of a seed."""
    sequences = []
    for request in requests(temperature):
        tokens, logprobs = answers[request.request_id]
        prompt = np.zeros(len(request.tokens), np.float32)
        advantage = float(request.seed % 2) - 0.5
        columns = {
            "loss_mask": np.concatenate([prompt, np.ones(len(tokens))]) > 0,
            "logprobs": np.concatenate([prompt, logprobs]).astype(np.float32),
            "advantages": np.concatenate([prompt, np.full(len(tokens), advantage, np.float32)]),
        }
        whole = np.concatenate([request.tokens, tokens]).astype(np.int32)
        sequences.append(TrainSequence(tokens=whole, columns=columns, temperature=temperature))
    places = np.random.default_rng(order).permutation(len(sequences))
    return TrainBatch(sequences=tuple(sequences[place] for place in places), step=0)


def trainer_over(
    group: RankGroup,
    which: str,
    logprobs: ChunkLogprobs | None,
    *,
    dtype: str = "float32",
    zero: int = 0,
    **config: Any,
) -> NativeTrainer:
    """A trainer whose ranks all share layers, on the engine's weights; of one rank, too."""
    whole = decoder_of(ALL_SPECS[which], alone(group.device), dtype=getattr(torch, dtype))
    fill_decoder(whole, seed=1, scale=SCALE)
    return NativeTrainer(
        decoder=whole,
        objective=GrpoConfig(kl_coef=0.04, entropy_coef=0.02),
        config=TrainerConfig.model_validate({"learning_rate": 1e-2, **config}),
        compute=ThreadPoolExecutor(1),
        emit=lambda kind, **fields: None,
        seed=0,
        group=group,
        parallel=ParallelConfig.model_validate({"zero": zero, "tensor_ranks": group.size}),
        logprobs=logprobs,
    )


def gaps(
    group: RankGroup,
    which: str,
    batches: Sequence[TrainBatch],
    logprobs: ChunkLogprobs | None,
    **config: Any,
) -> tuple[int, int, float]:
    """How many targets of the policy and of the reference have other bits than the engine's; how
    many there are; the largest difference."""
    trainer = trainer_over(group, which, logprobs, **config)
    other, count, largest = 0, 0, 0.0
    for batch in batches:
        for model in ("policy", "reference"):
            per_token = trainer.evaluate_now(batch, model).per_token
            for sequence, found in zip(batch.sequences, per_token, strict=True):
                mask = sequence.columns["loss_mask"]
                ours, theirs = found[mask], sequence.columns["logprobs"][mask]
                other += int((ours.view(np.int32) != theirs.view(np.int32)).sum())
                count += len(ours)
                largest = max(largest, float(np.abs(ours - theirs).max()))
    return other, count, largest


def stepped(
    group: RankGroup, which: str, batch: TrainBatch, logprobs: ChunkLogprobs | None, **config: Any
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Metrics of two steps on one batch; and this rank's gradients of the first update."""
    trainer = trainer_over(group, which, logprobs, **config)
    (update,) = trainer.plan(batch).updates
    trainer.forward_backward(update)
    grads = {name: grad.clone() for name, grad in trainer.models.actor.optimizer.grads().items()}
    trainer = trainer_over(group, which, logprobs, **config)
    steps = [trainer.step_now(replace(batch, step=step)) for step in range(2)]
    return [dict(step.metrics) for step in steps], grads


def joined(results: Sequence[tuple[Any, dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """Each rank's gradients; those of the stream's norms are of a rank's own rows, and summed."""
    norms = ("attn_norm.weight", "mlp_norm.weight", "final_norm.weight")
    every = [grads for _, grads in results]
    return [
        {
            name: torch.stack([each[name].cpu() for each in every]).sum(0)
            if name.endswith(norms)
            else grad.cpu()
            for name, grad in grads.items()
        }
        for grads in every
    ]


def summed(group: RankGroup, rows: int, dtype: str) -> dict[str, Tensor]:
    """The sum of random partial rows of each rank: as the engine's ranks hold it, and the trainer's
    runs of it joined; alone, the parts."""

    def part(rank: int) -> Tensor:
        draw = torch.Generator().manual_seed(rank)
        scale = 10.0 ** torch.randint(-3, 4, (rows, 6), generator=draw)
        return (torch.randn(rows, 6, generator=draw) * scale).to(getattr(torch, dtype))

    own_TE, sequence = part(group.rank), SequenceParallel(group)
    return {
        "parts": torch.stack([part(rank) for rank in range(group.size)]),
        "replicated": summed_in_rank_order(own_TE.clone(), ReplicatedRows(group)),
        "sequence": sequence.gather_rows(summed_in_rank_order(own_TE.clone(), sequence)),
    }


@torch.inference_mode()
def passes(
    group: RankGroup,
    which: str,
    lengths: Sequence[int],
    kind: type[ReplicatedRows | SequenceParallel],
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and logits of a sequence of six tokens that shares a batch, token by token; and
    the decoder's own hidden states. The batch is padded to equal runs of the ranks."""
    decoder = decoder_of(ALL_SPECS[which], group, dtype=torch.float32, scale=SCALE, kind=kind)
    layout = PackedLayout.of(lengths, group.device, multiple_of=group.size)
    tokens_T = torch.cat([torch.arange(length) * 7 % VOCAB for length in layout.lengths])
    forward = TokenwiseForward(decoder)
    given = tokens_T, layout.positions_T
    hidden_TE = forward.hidden(*given, partial(attend_packed, layout))
    plain_TE = decoder.hidden(
        *given, lambda _, q_THD, k_TKD, v_TKD: varlen_attention(q_THD, k_TKD, v_TKD, layout)
    )
    if kind is SequenceParallel:
        hidden_TE = SequenceParallel(group).gather_rows(hidden_TE)
    first = sum(lengths[: lengths.index(6)])
    hidden_LE = hidden_TE[first : first + 6]
    return hidden_LE, forward.logits(hidden_LE), plain_TE[first : first + 6]
