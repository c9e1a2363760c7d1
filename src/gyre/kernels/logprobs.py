"""Log-probs of given tokens. In: hidden rows, head weight, targets, temperatures, optional
truncation support. Out: logprobs_N and entropy_N, both with a hand-written backward.

The vocabulary is processed in blocks, so that the full logits of a large one are never in memory. A
block's head gradient is then complete at once, and only that of the hidden rows is summed over
blocks. The softmax is float32 (float64 for float64 rows) for any weight dtype. With Triton kernels
logits keep the product's dtype. The forward pass reads them once, and their gradient overwrites
them.

p is the distribution after temperature T and truncation, x its logits before T, H its entropy. The
gradients are:

    d log p_t / dx_j = (1[j = t] - p_j) / T;
    dH / dx_j = -p_j (log p_j + H) / T.

The second is free where the entropy is unused: its upstream gradient is then None.
"""

# N rows, E hidden size, V vocabulary, W tokens of a vocabulary block, Z entries of the support

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre.kernels.cpu.chunks import ChunkKernels
from gyre.kernels.dispatch import kernels_for

BLOCK_LOGITS = 2**24  # logits alive at a time
FUSED_BLOCK_LOGITS = 2**27  # likewise with Triton kernels, which make no copies: 256 MiB
FEWEST_COLUMNS = 1024  # of a vocabulary block: below it products are too thin to be fast
WHOLE_COLUMNS = (
    # blocks are multiples of: rows of logits that begin at odd addresses cost products half their
    # speed
    128
)
# logit outside the support: far below any other, and 0 · FORBIDDEN is 0, unlike with -inf
FORBIDDEN = -1e30

Support = tuple[Tensor, Tensor]
# hidden_NE, targets_N → logprobs, total, entropy
Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def token_logprobs(
    hidden_NE: Tensor,
    head_weight_VE: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    support: Support | None = None,
    *,
    chunk: int = 0,
    keep_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (logprobs_N, entropy_N) of the distribution after temperature and truncation, entropy
    in nats.

    temperature_N is above 0. `support` is (offsets int64 [N + 1], ids int64 [Z]): row n may only
    choose ids[offsets[n]:offsets[n + 1]], which must include its target. `chunk` is the number of
    columns of a vocabulary block; 0 derives it from the number of rows. `keep_logits` keeps all
    logits for Triton's backward pass instead of recomputing each block.
    """
    fused = hidden_NE.is_cuda and support is None and kernels_for(hidden_NE) is not None
    vocab_size = len(head_weight_VE)
    if fused:
        columns = vocab_size if keep_logits and not chunk else chunk
        blocks = cut_vocabulary(vocab_size, len(hidden_NE), columns, limit=FUSED_BLOCK_LOGITS)
        return FusedLogprobs.apply(
            hidden_NE, head_weight_VE, targets_N.long(), temperature_N.float(), blocks
        )
    blocks = cut_vocabulary(vocab_size, len(hidden_NE), chunk)
    rows_Z = ids_Z = None
    if support is not None:
        offsets, ids_Z = support
        rows_Z = torch.repeat_interleave(
            torch.arange(len(hidden_NE), device=ids_Z.device), offsets.diff()
        )
    return TokenLogprobs.apply(
        hidden_NE, head_weight_VE, targets_N.long(), temperature_N, rows_Z, ids_Z, blocks
    )


def logprobs_by(
    forward: Forward,
    hidden_NE: Tensor,
    head_weight_VE: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return (logprobs_N, entropy_N) as `forward` computes them; the gradient is that of
    `token_logprobs`."""
    return GivenLogprobs.apply(forward, hidden_NE, head_weight_VE, targets_N.long(), temperature_N)


def cut_vocabulary(
    vocab_size: int, num_rows: int, columns: int = 0, *, limit: int = BLOCK_LOGITS
) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of vocabulary blocks. The default width follows from the number of rows,
    so that `limit` logits exist at a time."""
    columns = columns or max(
        FEWEST_COLUMNS, limit // max(1, num_rows) // WHOLE_COLUMNS * WHOLE_COLUMNS
    )
    return tuple(
        (start, min(start + columns, vocab_size)) for start in range(0, vocab_size, columns)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """Coefficients of a row's logits gradient: -p (scale + bonus (log p + entropy)), and at_target
    at its target. Without a gradient of the entropy, bonus and entropy are None."""

    total_N: Tensor  # log Σ exp of the logits after temperature
    scale_N: Tensor  # upstream gradient of the log-prob / temperature
    at_target_N: Tensor
    bonus_N: Tensor | None = None  # upstream gradient of the entropy / temperature
    entropy_N: Tensor | None = None

    @classmethod
    def of(
        cls,
        grads: Sequence[Tensor | None],
        temperature_N: Tensor,
        total_N: Tensor,
        logprobs_N: Tensor,
        entropy_N: Tensor,
    ) -> Slopes:
        """Build from `grads` of the log-probs and of the entropies; None where unused."""
        of_logprobs_N, of_entropy_N = grads
        scale_N = (
            torch.zeros_like(logprobs_N) if of_logprobs_N is None else of_logprobs_N / temperature_N
        )
        # 1 - p of the target from the log-prob: p itself, rounded to bfloat16, would lose it when p
        # is near 1.
        at_target_N = -scale_N * torch.expm1(logprobs_N)
        if of_entropy_N is None:
            return cls(total_N=total_N, scale_N=scale_N, at_target_N=at_target_N)
        bonus_N = of_entropy_N / temperature_N
        at_target_N = at_target_N - bonus_N * logprobs_N.exp() * (logprobs_N + entropy_N)
        return cls(
            total_N=total_N,
            scale_N=scale_N,
            at_target_N=at_target_N,
            bonus_N=bonus_N,
            entropy_N=entropy_N,
        )

    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the arguments in the kernels' order."""
        return self.total_N, self.scale_N, self.at_target_N, self.bonus_N, self.entropy_N


class TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        head_weight_VE: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
        rows_Z: Tensor | None,
        ids_Z: Tensor | None,
        blocks: tuple[tuple[int, int], ...],
    ) -> tuple[Tensor, Tensor]:
        kernels = (
            kernels_for(hidden_NE, len(head_weight_VE))
            if rows_Z is None and len(blocks) == 1
            else None
        )
        if isinstance(kernels, ChunkKernels):
            logits_NV = hidden_NE @ head_weight_VE.t()
            logprobs_N, entropy_N, total_N = kernels.logprobs(
                logits_NV, temperature_N.float(), targets_N
            )
            return keep(
                ctx,
                None,
                hidden_NE,
                head_weight_VE,
                targets_N,
                temperature_N,
                total_N,
                logprobs_N,
                entropy_N,
                None,
                None,
                logits_NV,
            )
        logprobs_N, entropy_N, total_N, kept_NV = logprobs_forward(
            hidden_NE, head_weight_VE, targets_N, temperature_N, rows_Z, ids_Z, blocks
        )
        return keep(
            ctx,
            blocks,
            hidden_NE,
            head_weight_VE,
            targets_N,
            temperature_N,
            total_N,
            logprobs_N,
            entropy_N,
            rows_Z,
            ids_Z,
            kept_NV,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NE, weight_VE, targets_N, temperature_N, *found, rows_Z, ids_Z, kept_NV = (
            ctx.saved_tensors
        )
        slopes = Slopes.of(grads, temperature_N, *found)
        if ctx.blocks is None:
            kernels, grad_NV = kernels_for(hidden_NE), kept_NV.clone()
            assert isinstance(kernels, ChunkKernels)
            kernels.logits_gradient(grad_NV, temperature_N.float(), targets_N, *slopes.rows(), 0)
            return grad_NV @ weight_VE, grad_NV.t() @ hidden_NE, None, None, None, None, None

        def log_probabilities(start: int, stop: int) -> Tensor:
            logits_NW = block_logits(
                hidden_NE, weight_VE, temperature_N, rows_Z, ids_Z, start, stop
            )
            return logits_NW.sub_(slopes.total_N[:, None])

        pair = logprobs_backward(
            hidden_NE, weight_VE, targets_N, slopes, ctx.blocks, log_probabilities, kept_NV
        )
        return *pair, None, None, None, None, None


class GivenLogprobs(torch.autograd.Function):
    """The caller's forward pass with the backward of TokenLogprobs, which recomputes
    probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: Forward,
        hidden_NE: Tensor,
        head_weight_VE: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
    ) -> tuple[Tensor, Tensor]:
        logprobs_N, total_N, entropy_N = forward(hidden_NE, targets_N)
        blocks = cut_vocabulary(len(head_weight_VE), len(hidden_NE))
        return keep(
            ctx,
            blocks,
            hidden_NE,
            head_weight_VE,
            targets_N,
            temperature_N,
            total_N,
            logprobs_N,
            entropy_N,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NE, weight_VE, targets_N, temperature_N, *found = ctx.saved_tensors
        slopes = Slopes.of(grads, temperature_N, *found)

        def log_probabilities(start: int, stop: int) -> Tensor:
            logits_NW = block_logits(hidden_NE, weight_VE, temperature_N, None, None, start, stop)
            return logits_NW.sub_(slopes.total_N[:, None])

        pair = logprobs_backward(
            hidden_NE, weight_VE, targets_N, slopes, ctx.blocks, log_probabilities
        )
        return None, *pair, None, None


def keep(
    ctx: Any,
    blocks: tuple[tuple[int, int], ...] | None,
    hidden_NE: Tensor,
    weight_VE: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    total_N: Tensor,
    logprobs_N: Tensor,
    entropy_N: Tensor,
    *more: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Save the tensors of all paths for the backward pass, in this order, followed by `more`.
    `blocks` is None where the C kernels have the whole logits. Returns the forward result."""
    # an unused output has the gradient None, and costs nothing
    ctx.set_materialize_grads(False)
    ctx.blocks = blocks
    ctx.save_for_backward(
        hidden_NE, weight_VE, targets_N, temperature_N, total_N, logprobs_N, entropy_N, *more
    )  # fmt: skip
    return logprobs_N, entropy_N


def logprobs_forward(
    hidden_NE: Tensor,
    head_weight_VE: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    rows_Z: Tensor | None,
    ids_Z: Tensor | None,
    blocks: tuple[tuple[int, int], ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return logprobs_N, entropy_N and total_N, the log of the sum over the vocabulary, of which
    one block is there at a time. Also returns the probabilities where there is one block."""
    totals, means, kept_NV = [], [], None
    target_N = None
    for start, stop in blocks:
        logits_NW = block_logits(
            hidden_NE, head_weight_VE, temperature_N, rows_Z, ids_Z, start, stop
        )
        probs_NW, total_N, mean_N = block_statistics(logits_NW)
        totals.append(total_N)
        means.append(mean_N)
        found_N = logits_NW.gather(
            1, (targets_N - start).clamp(0, stop - start - 1)[:, None]
        ).squeeze(1)
        target_N = (
            found_N if target_N is None else torch.where(targets_N < start, target_N, found_N)
        )
        if len(blocks) == 1:
            kept_NV = probs_NW.to(hidden_NE.dtype)
    assert target_N is not None
    totals_BN = torch.stack(totals)
    total_N = totals_BN.logsumexp(0)
    entropy_N = total_N - ((totals_BN - total_N).exp() * torch.stack(means)).sum(0)
    return target_N - total_N, entropy_N, total_N, kept_NV


def logprobs_backward(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    targets_N: Tensor,
    slopes: Slopes,
    blocks: tuple[tuple[int, int], ...],
    log_probabilities: Callable[[int, int], Tensor],
    probs_NV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the hidden rows and of the head. `log_probabilities` recomputes those
    of a vocabulary block. It is skipped where `probs_NV`, in the hidden rows' dtype, was kept and
    the entropy has no gradient."""
    at_target_N = slopes.at_target_N.to(hidden_NE.dtype)
    grad_weight_VE = torch.empty_like(weight_VE)
    grad_hidden_NE = None
    for start, stop in blocks:
        if slopes.bonus_N is not None:
            grad_NW = with_entropy(log_probabilities(start, stop), slopes).to(hidden_NE.dtype)
        else:
            probs_NW = (
                log_probabilities(start, stop).exp_().to(hidden_NE.dtype)
                if probs_NV is None
                else probs_NV
            )
            grad_NW = probs_NW * -slopes.scale_N[:, None].to(hidden_NE.dtype)
        inside_M = ((targets_N >= start) & (targets_N < stop)).nonzero().squeeze(1)
        grad_NW[inside_M, targets_N[inside_M] - start] = at_target_N[inside_M]
        torch.mm(grad_NW.t(), hidden_NE, out=grad_weight_VE[start:stop])
        part_NE = grad_NW @ weight_VE[start:stop]
        if len(blocks) > 1:
            part_NE = part_NE.to(slopes.total_N.dtype)
        grad_hidden_NE = part_NE if grad_hidden_NE is None else grad_hidden_NE.add_(part_NE)
    assert grad_hidden_NE is not None
    return grad_hidden_NE.to(hidden_NE.dtype), grad_weight_VE


def with_entropy(log_probs_NW: Tensor, slopes: Slopes) -> Tensor:
    """Return -p (scale + bonus (log p + H)), over the log-probs in place. p is the first factor:
    outside a support it is 0, and log p the finite FORBIDDEN."""
    assert slopes.bonus_N is not None and slopes.entropy_N is not None
    probs_NW = log_probs_NW.exp()
    surplus_NW = (
        log_probs_NW.add_(slopes.entropy_N[:, None]).mul_(probs_NW).mul_(slopes.bonus_N[:, None])
    )
    return surplus_NW.addcmul_(probs_NW, slopes.scale_N[:, None]).neg_()


class FusedLogprobs(torch.autograd.Function):
    """Log-probs by Triton kernels, without a support. A single block is kept for the backward pass;
    several are recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        head_weight_VE: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
        blocks: tuple[tuple[int, int], ...],
    ) -> tuple[Tensor, Tensor]:
        kernels, kept_NV, columns = kernels_for(hidden_NE), None, []
        assert kernels is not None and not isinstance(kernels, ChunkKernels)
        for start, stop in blocks:
            logits_NW = hidden_NE @ head_weight_VE[start:stop].t()
            columns.append(kernels.block_statistics(logits_NW, temperature_N, targets_N, start))
            kept_NV = logits_NW if len(blocks) == 1 else None
        totals_BN, means_BN, found_BN = (torch.stack(parts) for parts in zip(*columns, strict=True))
        total_N = totals_BN.logsumexp(0)
        entropy_N = total_N - ((totals_BN - total_N).exp() * means_BN).sum(0)
        logprobs_N = found_BN.sum(0) - total_N  # a target is in one block; the others say 0
        ctx.kept_is_gradient = False
        return keep(
            ctx,
            blocks,
            hidden_NE,
            head_weight_VE,
            targets_N,
            temperature_N,
            total_N,
            logprobs_N,
            entropy_N,
            kept_NV,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NE, weight_VE, targets_N, temperature_N, *found, kept_NV = ctx.saved_tensors
        assert not ctx.kept_is_gradient, (
            "the kept logits became their gradient: one backward pass per forward pass"
        )
        ctx.kept_is_gradient = kept_NV is not None
        slopes = Slopes.of(grads, temperature_N, *found)
        pair = fused_backward(
            hidden_NE, weight_VE, targets_N, temperature_N, slopes, ctx.blocks, kept_NV
        )
        return *pair, None, None, None


def fused_backward(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    slopes: Slopes,
    blocks: tuple[tuple[int, int], ...],
    kept_NV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the hidden rows and of the head, by Triton kernels. Logits that were
    kept are overwritten."""
    kernels = kernels_for(hidden_NE)
    assert kernels is not None and not isinstance(kernels, ChunkKernels)
    grad_weight_VE, grad_hidden_NE = torch.empty_like(weight_VE), None
    for start, stop in blocks:
        grad_NW = hidden_NE @ weight_VE[start:stop].t() if kept_NV is None else kept_NV
        kernels.logits_gradient(grad_NW, temperature_N, targets_N, *slopes.rows(), start)
        torch.mm(grad_NW.t(), hidden_NE, out=grad_weight_VE[start:stop])
        part_NE = grad_NW @ weight_VE[start:stop]
        if len(blocks) > 1:
            part_NE = part_NE.float()
        grad_hidden_NE = part_NE if grad_hidden_NE is None else grad_hidden_NE.add_(part_NE)
    assert grad_hidden_NE is not None
    return grad_hidden_NE.to(hidden_NE.dtype), grad_weight_VE


def block_statistics(logits_NW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the softmax within a vocabulary block, the log of its sum, and the mean logit."""
    probs_NW = torch.softmax(logits_NW, -1)
    # The largest probability never underflows, so log of it and its logit give the log of the sum.
    total_N = logits_NW.amax(-1) - probs_NW.amax(-1).log()
    return probs_NW, total_N, torch.linalg.vecdot(probs_NW, logits_NW)


def block_logits(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    temperature_N: Tensor,
    rows_Z: Tensor | None,
    ids_Z: Tensor | None,
    start: int,
    stop: int,
) -> Tensor:
    """Return float logits_NW of tokens [start, stop), after temperature; FORBIDDEN outside the
    support."""
    logits_NW = hidden_NE @ weight_VE[start:stop].t()
    wide = torch.promote_types(logits_NW.dtype, torch.float32)
    logits_NW = logits_NW.to(wide).div_(temperature_N.to(wide)[:, None])
    if rows_Z is None or ids_Z is None:
        return logits_NW
    here_Z = (ids_Z >= start) & (ids_Z < stop)
    forbidden_NW = torch.ones_like(logits_NW, dtype=torch.bool)
    forbidden_NW[rows_Z[here_Z], ids_Z[here_Z].long() - start] = False
    return logits_NW.masked_fill_(forbidden_NW, FORBIDDEN)
