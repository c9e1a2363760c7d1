"""AdamW in one pass over its flat float32 buffers, in Triton. In: weights, gradients and moments. Out: the same, in
place; gradients are zero afterwards. Caller: trainer.optim, whose torch operations are the oracle, in the same order.
"""

# N numbers in a flat buffer

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def adamw(
    weight_N: Tensor, grad_N: Tensor, exp_avg_N: Tensor, exp_avg_sq_N: Tensor, *,
    decay_stop: int, learning_rate: float, grad_scale: float, betas: tuple[float, float], eps: float,
    weight_decay: float, num_updates: int,
) -> None:  # fmt: skip
    """One update, the `num_updates`-th. The first `decay_stop` numbers decay. Reads and writes 16 bytes per number."""
    buffers, (beta1, beta2) = (weight_N, grad_N, exp_avg_N, exp_avg_sq_N), betas
    assert all(part.is_contiguous() and part.numel() == weight_N.numel() for part in buffers)
    if count := weight_N.numel():
        _adamw[(triton.cdiv(count, BLOCK),)](
            *buffers, count, decay_stop, grad_scale, 1.0 - learning_rate * weight_decay,
            1.0 - beta1, beta2, 1.0 - beta2, math.sqrt(1.0 - beta2**num_updates), eps,
            -learning_rate / (1.0 - beta1**num_updates),
            FROM_END=1.0 - beta1 >= 0.5, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit
def _adamw(
    weight_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, count, decay_stop, grad_scale, keep, share, beta2, rest,
    correction, eps, rate, FROM_END: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < count
    grad = tl.load(grad_ptr + offs, mask=inside, other=0.0) * grad_scale
    weight = tl.load(weight_ptr + offs, mask=inside, other=0.0)
    exp_avg = tl.load(exp_avg_ptr + offs, mask=inside, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offs, mask=inside, other=0.0)
    weight = tl.where(offs < decay_stop, weight * keep, weight)
    if FROM_END:  # as torch.lerp does from a half on
        exp_avg = grad - (grad - exp_avg) * (1.0 - share)
    else:
        exp_avg = exp_avg + share * (grad - exp_avg)
    exp_avg_sq = exp_avg_sq * beta2 + rest * (grad * grad)
    bound = tl.div_rn(tl.sqrt_rn(exp_avg_sq), correction) + eps
    weight += rate * tl.div_rn(exp_avg, bound)
    tl.store(weight_ptr + offs, weight, mask=inside)
    tl.store(exp_avg_ptr + offs, exp_avg, mask=inside)
    tl.store(exp_avg_sq_ptr + offs, exp_avg_sq, mask=inside)
    tl.store(grad_ptr + offs, tl.zeros([BLOCK], tl.float32), mask=inside)
