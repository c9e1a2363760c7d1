"""Loss head in Triton: statistics of a block of logits, and their gradient in place. In: BF16 or
FP16 logits of a block of the vocabulary. Out: float32 numbers per row; gradients. Oracle:
TokenLogprobs there. No float32 copy of logits is ever made.

The block width follows from the number of rows, so widths and strides vary. Triton specializes on
divisibility by 16, for wide loads. Callers split at multiples of 128, so only the end of a
vocabulary that 16 does not divide is specialized separately.
"""

# N rows, W tokens of a vocabulary block that begins at `start`

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# logits of a row that one program holds at a time; of narrow blocks too, or each width had its
# kernel
BLOCK = 4096


def block_statistics(
    logits_NW: Tensor, temperature_N: Tensor, targets_N: Tensor, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three float32 statistics of each row, after temperature: log Σ exp, the mean of its
    logits under its own softmax, and its target's logit if the block contains it."""
    assert logits_NW.stride(1) == 1 and targets_N.dtype == torch.int64
    total_N, mean_N, found_N = (
        logits_NW.new_empty(len(logits_NW), dtype=torch.float32) for _ in range(3)
    )
    if len(logits_NW):
        width = logits_NW.shape[1]
        _statistics[(len(logits_NW),)](
            logits_NW, temperature_N.contiguous(), targets_N.contiguous(), total_N, mean_N, found_N,
            logits_NW.stride(0), start, width, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return total_N, mean_N, found_N


def logits_gradient(
    logits_NW: Tensor,
    temperature_N: Tensor,
    targets_N: Tensor,
    total_N: Tensor,
    scale_N: Tensor,
    at_target_N: Tensor,
    bonus_N: Tensor | None,
    entropy_N: Tensor | None,
    start: int,
) -> None:
    """Overwrite logits by their gradient, computed from `kernels.logprobs.Slopes`. `total_N` and
    `entropy_N` are over the whole vocabulary."""
    assert logits_NW.stride(1) == 1 and targets_N.dtype == torch.int64
    if len(logits_NW):
        width, total_N = logits_NW.shape[1], total_N.contiguous()
        with_entropy = bonus_N is not None and entropy_N is not None
        bonus_N, entropy_N = (
            (bonus_N.contiguous(), entropy_N.contiguous()) if with_entropy else (total_N, total_N)
        )
        _gradient[(len(logits_NW), triton.cdiv(width, BLOCK))](
            logits_NW,
            temperature_N.contiguous(),
            targets_N.contiguous(),
            total_N,
            scale_N.contiguous(),
            at_target_N.contiguous(),
            bonus_N,
            entropy_N,
            logits_NW.stride(0),
            start,
            width,
            BLOCK=BLOCK,
            ENTROPY=with_entropy,
            num_warps=8,
        )


@triton.jit(do_not_specialize=["start"])
def _statistics(
    logits_ptr,
    temperature_ptr,
    targets_ptr,
    total_ptr,
    mean_ptr,
    found_ptr,
    stride,
    start,
    width,
    BLOCK: tl.constexpr,
):
    row, offs = tl.program_id(0), tl.arange(0, BLOCK)
    first = logits_ptr + row.to(tl.int64) * stride
    temperature = tl.load(temperature_ptr + row)
    largest, total, weighted = -float("inf"), 0.0, 0.0
    for begin in tl.range(0, width, BLOCK):
        inside = begin + offs < width
        x = (
            tl.load(first + begin + offs, mask=inside, other=-float("inf")).to(tl.float32)
            / temperature
        )
        higher = tl.maximum(largest, tl.max(x, 0))
        shrink = tl.exp(largest - higher)
        power = tl.exp(x - higher)
        total = total * shrink + tl.sum(power, 0)
        weighted = weighted * shrink + tl.sum(tl.where(inside, power * x, 0.0), 0)
        largest = higher
    tl.store(total_ptr + row, largest + tl.log(total))
    tl.store(mean_ptr + row, weighted / total)
    target = tl.load(targets_ptr + row) - start
    here = (target >= 0) & (target < width)
    found = tl.load(first + tl.where(here, target, 0)).to(tl.float32) / temperature
    tl.store(found_ptr + row, tl.where(here, found, 0.0))


@triton.jit(do_not_specialize=["start"])
def _gradient(
    logits_ptr,
    temperature_ptr,
    targets_ptr,
    total_ptr,
    scale_ptr,
    at_target_ptr,
    bonus_ptr,
    entropy_ptr,
    stride,
    start,
    width,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    row, offs = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = offs < width, logits_ptr + row.to(tl.int64) * stride + offs
    temperature, total = tl.load(temperature_ptr + row), tl.load(total_ptr + row)
    scale, at_target = tl.load(scale_ptr + row), tl.load(at_target_ptr + row)
    x = tl.load(at, mask=inside, other=0.0)
    log_p = x.to(tl.float32) / temperature - total
    factor = scale
    if ENTROPY:
        factor = scale + tl.load(bonus_ptr + row) * (log_p + tl.load(entropy_ptr + row))
    grad = -factor * tl.exp(log_p)
    grad = tl.where(offs == tl.load(targets_ptr + row) - start, at_target, grad)
    tl.store(at, grad.to(x.dtype), mask=inside)
