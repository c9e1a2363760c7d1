"""Batch-invariant log-probs token by token: the trainer's side of the mode over several ranks on a
CPU, as trainer.passes.batch_invariant is on GPUs. In: a Decoder over ranks, a micro-batch. Out:
(logprobs_N, entropy_N), differentiable, for any packing.
"""

# T tokens, N targets, E hidden size, H heads, K kv heads, D head dim

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gyre.kernels.layout import PackedLayout
from gyre.kernels.tokenwise import attend_one, drawn_logprobs
from gyre.models.decoder import Decoder
from gyre.models.tokenwise_forward import TokenwiseForward
from gyre.trainer.batching.microbatch import MicroBatch
from gyre.trainer.passes.recompute import recomputed_logprobs


def tokenwise_logprobs(decoder: Decoder, chunk: MicroBatch) -> tuple[Tensor, Tensor]:
    """Compute a micro-batch's log-probs as an engine over as many ranks does."""
    return recomputed_logprobs(decoder, chunk, TokenwiseChunk(decoder, chunk))


class TokenwiseChunk:
    """A ChunkForward of one decoder over one micro-batch."""

    def __init__(self, decoder: Decoder, chunk: MicroBatch) -> None:
        self._forward = TokenwiseForward(decoder)
        self._chunk = chunk

    def layer(self, index: int, x_TE: Tensor) -> Tensor:
        layout = self._chunk.layout
        return self._forward.layer(index, x_TE, layout.positions_T, partial(attend_packed, layout))

    def final_norm(self, x_NE: Tensor) -> Tensor:
        return self._forward.normed(x_NE, self._forward.decoder.final_norm.weight)

    def logprobs(self, hidden_NE: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute log-probs row by row."""
        inverse_N = self._chunk.inverse_temperature_N
        if len(hidden_NE) == 0:  # a pair may have no target
            return inverse_N.clone(), inverse_N.clone(), inverse_N.clone()
        logits_NV = self._forward.logits(hidden_NE)
        rows = zip(logits_NV.split(1), inverse_N.split(1), targets_N.split(1), strict=True)
        found = [drawn_logprobs(*row) for row in rows]
        logprobs_N, total_N, entropy_N = (torch.cat(column) for column in zip(*found, strict=True))
        return logprobs_N, total_N, entropy_N


def attend_packed(
    layout: PackedLayout, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor
) -> Tensor:
    """Attend causally within each sequence, in any layer: each token to the keys that it sees."""
    out_THD, first = torch.empty_like(q_THD), 0
    for length in layout.lengths:
        k_KLD, v_KLD = (x_TKD[first : first + length].transpose(0, 1) for x_TKD in (k_TKD, v_TKD))
        for seen in range(1, length + 1):
            token = first + seen - 1
            out_THD[token] = attend_one(q_THD[token], k_KLD[:, :seen], v_KLD[:, :seen])
        first += length
    return out_THD
