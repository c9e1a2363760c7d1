"""Batch-invariant forward pass: the kernels of the engine's batch-invariant mode, so that log-probs
equal the engine's to the bit. In: a Decoder on a CUDA device, a micro-batch. Out: (logprobs_N,
entropy_N), differentiable, for any packing.

Keys and values of the current layer are stored in pages of the engine's size. The kernel sums over
tiles of at most a page. Every token is a query of its own. Over tensor ranks each keeps its run of
the residual stream's rows. It gathers the logits of some rows at a time, as the engine does.
"""

# T tokens, S sequences, P pages of the longest one, N targets, H heads, K kv heads, D head dim, E
# hidden size, V vocabulary

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gyre.kernels.gpu.decode_attention import (
    PROGRAMS_PER_SM,
    DecodeScratch,
    Slab,
    cut_slabs,
    decode_attention,
    send,
)
from gyre.kernels.gpu.sample import given_logprobs
from gyre.kernels.gpu.work_list import lay_out_pages
from gyre.models.decoder import Decoder
from gyre.models.fused_forward import FusedForward
from gyre.trainer.batching.microbatch import MicroBatch
from gyre.trainer.passes.recompute import recomputed_logprobs

LOGIT_ROWS = 1024  # rows of logits that exist at a time


class InvariantLogprobs:
    """Computes a micro-batch's log-probs as an engine with pages of `page_tokens` tokens does.
    Holds no memory between calls."""

    def __init__(self, *, page_tokens: int) -> None:
        self._page_tokens = page_tokens

    def __call__(self, decoder: Decoder, chunk: MicroBatch) -> tuple[Tensor, Tensor]:
        return recomputed_logprobs(
            decoder, chunk, InvariantForward(decoder, chunk, self._page_tokens)
        )


class InvariantForward:
    """A ChunkForward of one decoder over one micro-batch."""

    def __init__(self, decoder: Decoder, chunk: MicroBatch, page_tokens: int) -> None:
        self._chunk = chunk
        device = decoder.device
        spec = decoder.spec
        lengths_S = np.asarray(chunk.layout.lengths)
        row_T = np.repeat(np.arange(len(lengths_S)), lengths_S)
        position_T = np.arange(len(row_T)) - (np.cumsum(lengths_S) - lengths_S)[row_T]
        table_SP, num_pages = lay_out_pages(lengths_S, page_tokens)
        self._row_T, self._position_T, table = send(device, row_T, position_T, table_SP.reshape(-1))
        self._table_SP = table.view(table_SP.shape)
        shape = (num_pages, 2, spec.num_kv_heads, page_tokens, spec.head_dim)
        # Zeros, since the kernel multiplies what is past a sequence's end by 0, which must be
        # finite.
        self._pages = pages = torch.zeros(shape, device=device, dtype=decoder.dtype)
        self._slabs = cut_slabs(
            row_T, position_T, longest_tokens=int(lengths_S.max()), device=device
        )
        self._scratch = DecodeScratch.make(
            most_scratch(self._slabs), spec.num_heads, spec.head_dim, device
        )
        self._programs = (
            PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        )
        # Not by way of self: a cycle would keep all this on the device until Python collects it.
        self._fused = FusedForward(decoder, lambda index: pages, self._table_SP, invariant=True)

    def layer(self, index: int, x_TE: Tensor) -> Tensor:
        return self._fused.layer(index, x_TE, self._position_T, self._row_T, self._attend)

    def final_norm(self, x_NE: Tensor) -> Tensor:
        if len(x_NE) == 0:  # a pair may have no target
            return x_NE.clone()
        return self._fused.normed(x_NE, self._fused.decoder.final_norm.weight)

    def logprobs(self, hidden_NE: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute log-probs in independent blocks of rows."""
        inverse_N = self._chunk.inverse_temperature_N
        logprobs_N, total_N, entropy_N = (torch.empty_like(inverse_N) for _ in range(3))
        for at in range(0, len(hidden_NE), LOGIT_ROWS):
            rows = slice(at, at + LOGIT_ROWS)
            found = self._row_logprobs(hidden_NE[rows], targets_N[rows], inverse_N[rows])
            logprobs_N[rows], total_N[rows], entropy_N[rows] = found
        return logprobs_N, total_N, entropy_N

    def _row_logprobs(
        self, hidden_NE: Tensor, targets_N: Tensor, inverse_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits_NV = self._fused.project(hidden_NE)
        given = given_logprobs(logits_NV, inverse_N, targets_N)
        below_NV = logits_NV.float().sub_(given.best_N[:, None]).mul_(inverse_N[:, None])
        probs_NV = (below_NV - given.log_total_N[:, None]).exp_()
        entropy_N = given.log_total_N - torch.linalg.vecdot(probs_NV, below_NV)
        return given.logprobs_N, given.best_N * inverse_N + given.log_total_N, entropy_N

    def _attend(self, index: int, q_THD: Tensor, out_THD: Tensor) -> None:
        for slab in self._slabs:
            decode_attention(
                q_THD[slab.span],
                self._pages,
                self._table_SP,
                slab.work,
                self._scratch,
                out_THD[slab.span],
                num_programs=self._programs,
            )


def most_scratch(slabs: list[Slab]) -> int:
    """Return the number of pieces the scratch must hold. It is zero where each token has one piece
    only."""
    return max(
        (slab.num_items for slab in slabs if slab.num_items > slab.span.stop - slab.span.start),
        default=1,
    )
