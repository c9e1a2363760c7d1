"""Forward passes over packed micro-batches. In: a Decoder, an optional ScalarHead, micro-batches.
Out: log-probs, values or scores: per micro-batch, under autograd when enabled, or forward-only for
a whole batch, joined over ranks.

T tokens, N targets, S sequences, E hidden size, as in trainer.batching.microbatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gyre.core.records import Checkpointing, Projection, TrainSequence
from gyre.distributed.process_group import RankGroup
from gyre.kernels.attention import varlen_attention
from gyre.kernels.logprobs import token_logprobs
from gyre.models.decoder import NOTHING, Decoder, ScalarHead
from gyre.models.layers.vocabulary_logprobs import vocabulary_logprobs
from gyre.trainer.batching.microbatch import MicroBatch, target_mask
from gyre.trainer.parallelize.sharded_module import is_sharded, reshard

# → (logprobs_N, entropy_N), differentiable
ChunkLogprobs = Callable[[Decoder, MicroBatch], tuple[Tensor, Tensor]]


def hidden_states(
    decoder: Decoder,
    chunk: MicroBatch,
    rows_N: Tensor | None = None,
    checkpointing: Checkpointing = "none",
    float8: frozenset[Projection] = NOTHING,
) -> Tensor:
    """Run the decoder over a micro-batch; each sequence attends only to itself. With `rows_N`,
    returns hidden states of those tokens. `checkpointing` and `float8` as in `Decoder.hidden`, here
    and below."""

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        return varlen_attention(q_THD, k_TKD, v_TKD, chunk.layout, decoder.spec.window_of(layer))

    positions_T = chunk.layout.positions_T
    return decoder.hidden(
        chunk.tokens_T, positions_T, attend, rows_N, checkpointing=checkpointing, float8=float8
    )


def chunk_logprobs(
    decoder: Decoder,
    chunk: MicroBatch,
    checkpointing: Checkpointing = "none",
    float8: frozenset[Projection] = NOTHING,
) -> tuple[Tensor, Tensor]:
    """Return (logprobs_N, entropy_N) of the micro-batch's targets."""
    hidden_NE = hidden_states(decoder, chunk, chunk.rows_N, checkpointing, float8)
    keep_logits = checkpointing == "none" and torch.is_grad_enabled()
    tensor, vocab_size = decoder.tensor, decoder.whole_spec.vocab_size
    given = chunk.targets_N, chunk.temperature_N, chunk.support

    def run(hidden_NE: Tensor, weight_VE: Tensor) -> tuple[Tensor, Tensor]:
        if tensor is None:
            return token_logprobs(hidden_NE, weight_VE, *given, keep_logits=keep_logits)
        return vocabulary_logprobs(
            hidden_NE,
            weight_VE,
            *given,
            vocab_size=vocab_size,
            tensor=tensor,
            keep_logits=keep_logits,
        )

    return decoder.through_head(hidden_NE, run)


def chunk_values(
    decoder: Decoder,
    head: ScalarHead,
    chunk: MicroBatch,
    checkpointing: Checkpointing = "none",
    float8: frozenset[Projection] = NOTHING,
) -> Tensor:
    """Return values_N, the critic's value before each target."""
    return head(hidden_states(decoder, chunk, chunk.rows_N, checkpointing, float8))


def chunk_scores(
    decoder: Decoder,
    head: ScalarHead,
    chunk: MicroBatch,
    checkpointing: Checkpointing = "none",
    float8: frozenset[Projection] = NOTHING,
) -> Tensor:
    """Return scores_S, the reward model's score at each sequence's last token."""
    return head(hidden_states(decoder, chunk, chunk.last_row_S, checkpointing, float8))


def logprobs_of(
    decoder: Decoder,
    sequences: Sequence[TrainSequence],
    chunks: Sequence[MicroBatch],
    data: RankGroup,
    compute: ChunkLogprobs = chunk_logprobs,
) -> tuple[np.ndarray, ...]:
    """Run forward only. Returns float32 [T] per sequence in batch order: log-probs at targets, 0.0
    elsewhere."""
    results = _blank(sequences)
    with _reading(decoder):
        for chunk in chunks:
            _scatter(compute(decoder, chunk)[0], chunk, sequences, results)
    return _joined(results, data)


def values_of(
    decoder: Decoder,
    head: ScalarHead,
    sequences: Sequence[TrainSequence],
    chunks: Sequence[MicroBatch],
    data: RankGroup,
    float8: frozenset[Projection] = NOTHING,
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Run forward only. Returns values before each target (0.0 elsewhere), and the value after each
    last token."""
    results, last_values = _blank(sequences), np.zeros(len(sequences), dtype=np.float32)
    with _reading(decoder):
        for chunk in chunks:
            values_T = head(hidden_states(decoder, chunk, float8=float8))
            _scatter(values_T[chunk.rows_N], chunk, sequences, results)
            if chunk.members:
                last_values[list(chunk.members)] = values_T[chunk.last_row_S].cpu().numpy()
    *per_token, last_values = _joined((*results, last_values), data)
    return tuple(per_token), last_values


def scores_of(
    decoder: Decoder,
    head: ScalarHead,
    num_sequences: int,
    chunks: Sequence[MicroBatch],
    data: RankGroup,
    float8: frozenset[Projection] = NOTHING,
) -> np.ndarray:
    """Run forward only. Returns float32 [sequences], the scores in batch order."""
    scores = np.zeros(num_sequences, dtype=np.float32)
    with _reading(decoder):
        for chunk in chunks:
            scores_S = chunk_scores(decoder, head, chunk, float8=float8)
            if chunk.members:
                scores[list(chunk.members)] = scores_S.cpu().numpy()
    return _joined((scores,), data)[0]


@contextlib.contextmanager
def _reading(decoder: Decoder) -> Iterator[None]:
    """Run a block of forward passes, then free the gathered weights: the next update changes the
    shards."""
    with torch.no_grad() if is_sharded(decoder) else torch.inference_mode():
        try:
            yield
        finally:
            reshard(decoder)


def _blank(sequences: Sequence[TrainSequence]) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(len(sequence.tokens), dtype=np.float32) for sequence in sequences)


def _scatter(
    values_N: Tensor,
    chunk: MicroBatch,
    sequences: Sequence[TrainSequence],
    results: tuple[np.ndarray, ...],
) -> None:
    """Scatter a micro-batch's numbers to the target positions of its sequences."""
    if not chunk.members:
        return
    stops = np.cumsum(chunk.target_counts_S.cpu().numpy())[:-1]
    for index, part in zip(
        chunk.members, np.split(values_N.float().cpu().numpy(), stops), strict=True
    ):
        results[index][target_mask(sequences[index])] = part


def _joined(parts: tuple[np.ndarray, ...], data: RankGroup) -> tuple[np.ndarray, ...]:
    """Join the ranks' results. One rank has each number and the others 0.0, so the sum is exact."""
    if data.size == 1 or not parts:
        return parts
    joined = torch.from_numpy(np.concatenate(parts)).to(data.device)
    data.all_reduce(joined)
    return tuple(np.split(joined.cpu().numpy(), np.cumsum([len(part) for part in parts])[:-1]))
