"""Log-probs of given tokens where each rank holds some rows of the head. In: hidden rows, this
rank's rows of the head, targets, temperatures, optional support. Out: logprobs_N and entropy_N,
equal on every rank, both with a hand-written backward.

A rank's part of the vocabulary is to the others what a block of it is in kernels.logprobs. Forward,
the ranks gather three numbers per row: the log of the part's sum, its mean logit, the target's
logit. Backward, they sum the gradient of the hidden rows. Logits stay on their rank. With Triton
kernels there is no copy of them, and a single block's are kept for the backward pass.
"""

# N rows, E hidden size, V rows of the head: this rank's, S ranks, Z entries of the support

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre.kernels.cpu.chunks import ChunkKernels
from gyre.kernels.dispatch import kernels_for
from gyre.kernels.logprobs import (
    FORBIDDEN,
    FUSED_BLOCK_LOGITS,
    Forward,
    Slopes,
    Support,
    block_logits,
    block_statistics,
    cut_vocabulary,
    fused_backward,
    logprobs_backward,
)
from gyre.models.layers.tensor_parallel import TensorParallel

Blocks = tuple[tuple[int, int], ...]  # (start, stop) of the rank's rows


def vocabulary_logprobs(
    hidden_NE: Tensor,
    head_weight_VE: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    support: Support | None = None,
    *,
    vocab_size: int,
    tensor: TensorParallel,
    chunk: int = 0,
    keep_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what `kernels.logprobs.token_logprobs` does of the whole head. Hidden rows and
    gradients are equal on all ranks. The last ranks' rows past `vocab_size` are padding."""
    rows_Z = ids_Z = None
    if support is not None:
        offsets, ids_Z = support
        row_N = torch.arange(len(hidden_NE), device=ids_Z.device)
        rows_Z = torch.repeat_interleave(row_N, offsets.diff())
    first, own = own_rows(head_weight_VE, vocab_size, tensor)
    fused = hidden_NE.is_cuda and support is None and kernels_for(hidden_NE) is not None
    if fused:
        columns = own if keep_logits and not chunk else chunk
        blocks = cut_vocabulary(own, len(hidden_NE), columns, limit=FUSED_BLOCK_LOGITS)
    else:
        blocks = cut_vocabulary(own, len(hidden_NE), chunk)
    return VocabularyLogprobs.apply(
        tensor,
        blocks,
        fused,
        hidden_NE,
        head_weight_VE,
        targets_N.long() - first,
        temperature_N.float() if fused else temperature_N,
        rows_Z,
        None if ids_Z is None else ids_Z - first,
    )


def vocabulary_logprobs_by(
    forward: Forward,
    hidden_NE: Tensor,
    head_weight_VE: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    *,
    vocab_size: int,
    tensor: TensorParallel,
) -> tuple[Tensor, Tensor]:
    """Return (logprobs_N, entropy_N) as `forward` computes them, on every rank alike; the gradient
    is that of `vocabulary_logprobs`."""
    first, own = own_rows(head_weight_VE, vocab_size, tensor)
    return GivenVocabularyLogprobs.apply(
        forward,
        tensor,
        first,
        cut_vocabulary(own, len(hidden_NE)),
        hidden_NE,
        head_weight_VE,
        targets_N.long(),
        temperature_N,
    )


def own_rows(head_weight_VE: Tensor, vocab_size: int, tensor: TensorParallel) -> tuple[int, int]:
    """Return this rank's first row of the whole head, and how many of its rows are no padding."""
    first = tensor.group.rank * len(head_weight_VE)
    return first, min(len(head_weight_VE), max(0, vocab_size - first))


class VocabularyLogprobs(torch.autograd.Function):
    """Targets and ids of the support count from the rank's first row."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: TensorParallel,
        blocks: Blocks,
        fused: bool,
        *tensors: Any,
    ) -> tuple[Tensor, Tensor]:
        hidden_NE = tensors[0]
        wide = torch.promote_types(hidden_NE.dtype, torch.float32)
        # of a rank that has only padding: its part weighs nothing
        parts = [torch.full((3, len(hidden_NE)), FORBIDDEN, dtype=wide, device=hidden_NE.device)]
        parts[0][1:] = 0.0
        found, kept_NV = (fused_statistics if fused else statistics)(blocks, *tensors)
        total_N, mean_N, target_N = joined(torch.stack([*parts, *found]))
        whole_S3N = total_N.new_empty(tensor.group.size, 3, len(total_N))
        tensor.group.all_gather(
            whole_S3N.view(-1), torch.stack([total_N, mean_N, target_N]).view(-1)
        )
        total_N, mean_N, target_N = joined(whole_S3N)
        entropy_N, logprobs_N = total_N - mean_N, target_N - total_N
        # an unused output has the gradient None, and costs nothing
        ctx.set_materialize_grads(False)
        ctx.tensor, ctx.blocks, ctx.fused, ctx.kept_is_gradient = tensor, blocks, fused, False
        ctx.save_for_backward(*tensors, total_N, logprobs_N, entropy_N, kept_NV)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, total_N, logprobs_N, entropy_N, kept_NV = ctx.saved_tensors
        hidden_NE, weight_VE, targets_N, temperature_N, *_ = tensors
        slopes = Slopes.of(grads, temperature_N, total_N, logprobs_N, entropy_N)
        if ctx.fused and ctx.blocks:
            assert not ctx.kept_is_gradient, "one backward pass per forward pass"
            ctx.kept_is_gradient = kept_NV is not None
            grad_hidden_NE, grad_weight_VE = fused_backward(
                hidden_NE, weight_VE, targets_N, temperature_N, slopes, ctx.blocks, kept_NV
            )
            finish(grad_hidden_NE, grad_weight_VE, ctx.blocks, ctx.tensor)
        else:
            grad_hidden_NE, grad_weight_VE = gradients(ctx.tensor, ctx.blocks, slopes, *tensors)
        return *[None] * 3, grad_hidden_NE, grad_weight_VE, *[None] * 4


class GivenVocabularyLogprobs(torch.autograd.Function):
    """The caller's forward pass with the backward of VocabularyLogprobs, which recomputes
    probabilities. Targets count from the first row of the whole head."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: Forward,
        tensor: TensorParallel,
        first: int,
        blocks: Blocks,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        hidden_NE, weight_VE, targets_N, temperature_N = tensors
        logprobs_N, total_N, entropy_N = forward(hidden_NE, targets_N)
        ctx.set_materialize_grads(False)
        ctx.tensor, ctx.blocks = tensor, blocks
        ctx.save_for_backward(
            hidden_NE, weight_VE, targets_N - first, temperature_N, total_N, logprobs_N, entropy_N
        )  # fmt: skip
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, total_N, logprobs_N, entropy_N = ctx.saved_tensors
        slopes = Slopes.of(grads, tensors[3], total_N, logprobs_N, entropy_N)
        found = gradients(ctx.tensor, ctx.blocks, slopes, *tensors, None, None)
        return *[None] * 4, *found, None, None


def gradients(
    tensor: TensorParallel, blocks: Blocks, slopes: Slopes, *tensors: Any
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the hidden rows and of this rank's rows of the head, in torch."""
    hidden_NE, weight_VE, targets_N, temperature_N, rows_Z, ids_Z = tensors

    def log_probabilities(start: int, stop: int) -> Tensor:
        logits_NW = block_logits(hidden_NE, weight_VE, temperature_N, rows_Z, ids_Z, start, stop)
        return logits_NW.sub_(slopes.total_N[:, None])

    if blocks:
        grad_hidden_NE, grad_weight_VE = logprobs_backward(
            hidden_NE, weight_VE, targets_N, slopes, blocks, log_probabilities
        )
    else:
        grad_hidden_NE, grad_weight_VE = (torch.zeros_like(x) for x in (hidden_NE, weight_VE))
    finish(grad_hidden_NE, grad_weight_VE, blocks, tensor)
    return grad_hidden_NE, grad_weight_VE


def finish(
    grad_hidden_NE: Tensor, grad_weight_VE: Tensor, blocks: Blocks, tensor: TensorParallel
) -> None:
    """Sum what all ranks found of the hidden rows. Padding has no gradient."""
    if blocks:
        grad_weight_VE[blocks[-1][1] :] = 0.0
    tensor.group.all_reduce(grad_hidden_NE)


def statistics(blocks: Blocks, *tensors: Any) -> tuple[list[Tensor], None]:
    """Return three numbers of each row, by block: log of the sum, mean logit, target's logit."""
    hidden_NE, weight_VE, targets_N, temperature_N, rows_Z, ids_Z = tensors
    found = []
    for start, stop in blocks:
        logits_NW = block_logits(hidden_NE, weight_VE, temperature_N, rows_Z, ids_Z, start, stop)
        _, total_N, mean_N = block_statistics(logits_NW)
        place_N = targets_N - start
        inside_N = (place_N >= 0) & (place_N < stop - start)
        found_N1 = logits_NW.gather(1, place_N.clamp(0, stop - start - 1)[:, None])
        target_N = found_N1.squeeze(1).masked_fill(~inside_N, 0.0)
        found.append(torch.stack([total_N, mean_N, target_N]))
    return found, None


def fused_statistics(blocks: Blocks, *tensors: Any) -> tuple[list[Tensor], Tensor | None]:
    """Return what `statistics` does, and the logits of a single block."""
    hidden_NE, weight_VE, targets_N, temperature_N, _, _ = tensors
    kernels, found, logits_NW = kernels_for(hidden_NE), [], None
    assert kernels is not None and not isinstance(kernels, ChunkKernels)
    for start, stop in blocks:
        logits_NW = hidden_NE @ weight_VE[start:stop].t()
        found.append(
            torch.stack(kernels.block_statistics(logits_NW, temperature_N, targets_N, start))
        )
    return found, logits_NW if len(blocks) == 1 else None


def joined(parts_B3N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log of the sum, mean logit and target's logit over parts of the vocabulary. Parts
    without the target have 0 for its logit."""
    totals_BN, means_BN, targets_BN = parts_B3N.unbind(1)
    total_N = totals_BN.logsumexp(0)
    return total_N, ((totals_BN - total_N).exp() * means_BN).sum(0), targets_BN.sum(0)
