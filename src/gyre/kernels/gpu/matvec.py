"""Matrix times vector: a product with one row, whose cost is reading the weight. In: a row, a
weight. Out: a row in the compute dtype, summed in float32. Oracle: torch.nn.functional.linear.

A program reads a few rows of the weight from end to end in wide loads and adds up in registers. It
uses no tensor cores, so nothing is padded to their tiles.
"""

# N outputs, K inputs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTPUTS = 4  # of a program
# inputs read at once, warps; measured on an H200 over the shapes of 8B and of 32B at two ranks
READS = ((2048, 8), (512, 4))


def is_vector_product(x_TK: Tensor, weight_NK: Tensor) -> bool:
    """Return whether this kernel is the faster one: with one row, whole reads, 16-bit numbers."""
    return len(x_TK) == 1 and weight_NK.shape[1] % READS[-1][0] == 0 and x_TK.element_size() == 2


def vector_linear(x_1K: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x · weightᵀ of one row."""
    (count, width), (rows, _) = weight_NK.shape, x_1K.shape
    assert rows == 1 and x_1K.stride(1) == 1 and weight_NK.is_contiguous()
    block, warps = next(read for read in READS if width % read[0] == 0)
    out_1N = torch.empty(1, count, device=x_1K.device, dtype=x_1K.dtype)
    _vector_linear[(triton.cdiv(count, OUTPUTS),)](
        x_1K,
        weight_NK,
        out_1N,
        N=count,
        K=width,
        BLOCK_N=OUTPUTS,
        BLOCK_K=block,
        num_warps=warps,
    )
    return out_1N


@triton.jit
def _vector_linear(
    x_ptr,
    weight_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs = tl.arange(0, BLOCK_K)
    there = rows < N
    base = weight_ptr + rows.to(tl.int64)[:, None] * K + offs[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        weight = tl.load(
            base + start, mask=there[:, None], other=0.0, eviction_policy="evict_first"
        )
        x = tl.load(x_ptr + start + offs)
        sums += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(out_ptr + rows, tl.sum(sums, 1).to(out_ptr.dtype.element_ty), mask=there)
