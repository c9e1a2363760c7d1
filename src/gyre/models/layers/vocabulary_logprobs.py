"""Log-probs of given tokens where each rank holds some rows of the head. In: hidden rows, this
rank's rows of the head, targets, temperatures, optional support. Out: logprobs_N and entropy_N,
equal on every rank, both with a hand-written backward.

A rank's part of the vocabulary is to the others what a block of it is in kernels.logprobs. Forward,
the ranks gather three numbers per row: the log of the part's sum, its mean logit, the target's
logit. Backward, they sum the gradient of the hidden rows. Logits stay on their rank.
"""

# N rows, E hidden size, V rows of the head: this rank's, S ranks, Z entries of the support

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre.kernels.logprobs import (
    FORBIDDEN,
    Slopes,
    Support,
    block_logits,
    block_statistics,
    cut_vocabulary,
    logprobs_backward,
)
from gyre.models.layers.tensor_parallel import ReplicatedRows


def vocabulary_logprobs(
    hidden_NE: Tensor,
    head_weight_VE: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    support: Support | None = None,
    *,
    vocab_size: int,
    tensor: ReplicatedRows,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return what `kernels.logprobs.token_logprobs` does of the whole head. The last ranks' rows
    past `vocab_size` are padding."""
    rows_Z = ids_Z = None
    if support is not None:
        offsets, ids_Z = support
        row_N = torch.arange(len(hidden_NE), device=ids_Z.device)
        rows_Z = torch.repeat_interleave(row_N, offsets.diff())
    first = tensor.group.rank * len(head_weight_VE)
    own = min(len(head_weight_VE), max(0, vocab_size - first))
    blocks = cut_vocabulary(own, len(hidden_NE), chunk)
    tensors = hidden_NE, head_weight_VE, targets_N.long() - first, temperature_N
    return VocabularyLogprobs.apply(
        tensor, blocks, *tensors, rows_Z, None if ids_Z is None else ids_Z - first
    )


class VocabularyLogprobs(torch.autograd.Function):
    """Targets and ids of the support count from the rank's first row."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: ReplicatedRows,
        blocks: tuple[tuple[int, int], ...],
        *tensors: Any,
    ) -> tuple[Tensor, Tensor]:
        hidden_NE, weight_VE, targets_N, temperature_N, rows_Z, ids_Z = tensors
        wide = torch.promote_types(hidden_NE.dtype, torch.float32)
        # of a rank that has only padding: its part weighs nothing
        parts = [torch.full((3, len(hidden_NE)), FORBIDDEN, dtype=wide, device=hidden_NE.device)]
        parts[0][1:] = 0.0
        for start, stop in blocks:
            logits_NW = block_logits(
                hidden_NE, weight_VE, temperature_N, rows_Z, ids_Z, start, stop
            )
            _, total_N, mean_N = block_statistics(logits_NW)
            place_N = targets_N - start
            inside_N = (place_N >= 0) & (place_N < stop - start)
            found_N1 = logits_NW.gather(1, place_N.clamp(0, stop - start - 1)[:, None])
            target_N = found_N1.squeeze(1).masked_fill(~inside_N, 0.0)
            parts.append(torch.stack([total_N, mean_N, target_N]))
        total_N, mean_N, target_N = joined(torch.stack(parts))
        whole_S3N = total_N.new_empty(tensor.group.size, 3, len(total_N))
        tensor.group.all_gather(
            whole_S3N.view(-1), torch.stack([total_N, mean_N, target_N]).view(-1)
        )
        total_N, mean_N, target_N = joined(whole_S3N)
        entropy_N, logprobs_N = total_N - mean_N, target_N - total_N
        # an output that nobody uses has the gradient None, and costs nothing
        ctx.set_materialize_grads(False)
        ctx.tensor, ctx.blocks = tensor, blocks
        ctx.save_for_backward(*tensors, total_N, logprobs_N, entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NE, weight_VE, targets_N, temperature_N, rows_Z, ids_Z, *found = ctx.saved_tensors
        slopes = Slopes.of(grads, temperature_N, *found)

        def log_probabilities(start: int, stop: int) -> Tensor:
            logits_NW = block_logits(
                hidden_NE, weight_VE, temperature_N, rows_Z, ids_Z, start, stop
            )
            return logits_NW.sub_(slopes.total_N[:, None])

        if ctx.blocks:
            grad_hidden_NE, grad_weight_VE = logprobs_backward(
                hidden_NE, weight_VE, targets_N, slopes, ctx.blocks, log_probabilities
            )
            grad_weight_VE[ctx.blocks[-1][1] :] = 0.0  # padding
        else:
            grad_hidden_NE, grad_weight_VE = (torch.zeros_like(x) for x in (hidden_NE, weight_VE))
        return (
            None,
            None,
            ctx.tensor.reduce_rows(grad_hidden_NE),
            grad_weight_VE,
            None,
            None,
            None,
            None,
        )


def joined(parts_B3N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log of the sum, mean logit and target's logit over parts of the vocabulary. Parts
    without the target have 0 for its logit."""
    totals_BN, means_BN, targets_BN = parts_B3N.unbind(1)
    total_N = totals_BN.logsumexp(0)
    return total_N, ((totals_BN - total_N).exp() * means_BN).sum(0), targets_BN.sum(0)
