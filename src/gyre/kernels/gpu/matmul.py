"""Matrix products in Triton: those whose rows do not depend on other rows, and that of one row. In:
activations, a weight, optionally a bias or a residual. Out: products. Oracle:
torch.nn.functional.linear.

A library selects another kernel, and so another order of addition, for another number of rows. Here
every tile shape adds along the columns in the same order. It adds sixteen at a time into one
float32 accumulator per element, by Hopper's 64-row instruction, and never splits the columns. The
tile may therefore follow the number of rows without changing a bit.

The product of one row costs what reading the weight costs. A program reads a few rows of the weight
from end to end in wide loads and adds up in registers. It uses no tensor cores, so nothing is
padded to their tiles. Its order of addition is its own.
"""

# M rows, N columns of the product, K columns of the input

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One shape of the kernel."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


SMALL = Tile(m=64, n=32, k=128, warps=4, stages=4)
MIDDLE = Tile(m=64, n=64, k=128, warps=4, stages=4)
LARGE = Tile(m=128, n=128, k=64, warps=8, stages=4)
GROUP = 8  # row tiles that share a sweep over the columns, for the L2 cache


TILES = {1: SMALL, 65: MIDDLE, 513: LARGE}  # by the fewest rows that take it


def choose_tile(num_rows: int) -> Tile:
    return TILES[max(fewest for fewest in TILES if fewest <= max(1, num_rows))]


def invariant_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    residual_MN: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Return x · weightᵀ (+ bias) (+ residual), rounded once. All bfloat16 or all float16; rows
    contiguous."""
    (num_rows, depth), width = x_MK.shape, weight_NK.shape[0]
    assert x_MK.stride(1) == 1 and weight_NK.is_contiguous() and depth % 16 == 0, (
        x_MK.stride(),
        depth,
    )
    assert residual_MN is None or residual_MN.is_contiguous()
    tile = tile or choose_tile(num_rows)
    out_MN = torch.empty(num_rows, width, device=x_MK.device, dtype=x_MK.dtype)
    if num_rows == 0:
        return out_MN
    _linear[(triton.cdiv(num_rows, tile.m) * triton.cdiv(width, tile.n),)](
        x_MK, weight_NK, bias_N if bias_N is not None else out_MN,
        residual_MN if residual_MN is not None else out_MN, out_MN, num_rows, x_MK.stride(0),
        N=width, K=depth, TM=tile.m, TN=tile.n, TK=tile.k, GROUP=GROUP,
        BIAS=bias_N is not None, RESIDUAL=residual_MN is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_MN


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(num_rows, TM), tl.cdiv(N, TN)
    first_m = program // (GROUP * tiles_n) * GROUP
    group_m = tl.minimum(tiles_m - first_m, GROUP)
    tile_m = first_m + (program % (GROUP * tiles_n)) % group_m
    tile_n = (program % (GROUP * tiles_n)) // group_m
    offs_m, offs_n, offs_k = (
        tile_m * TM + tl.arange(0, TM),
        tile_n * TN + tl.arange(0, TN),
        tl.arange(0, TK),
    )
    rows = (offs_m % num_rows).to(tl.int64)  # rows past the end repeat others and are not stored
    columns = (offs_n % N).to(tl.int64)
    x_ptrs = x_ptr + rows[:, None] * x_stride + offs_k[None, :]
    weight_ptrs = weight_ptr + columns[:, None] * K + offs_k[None, :]
    acc = tl.zeros([TM, TN], tl.float32)
    for start in tl.range(0, K, TK):
        if K % TK == 0:
            x, weight = tl.load(x_ptrs + start), tl.load(weight_ptrs + start)
        else:
            inside = (start + offs_k < K)[None, :]
            x = tl.load(x_ptrs + start, mask=inside, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=inside, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc)
    inside = (offs_m < num_rows)[:, None] & (offs_n < N)[None, :]
    offs = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + columns).to(tl.float32)[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty), mask=inside)


VECTOR_OUTPUTS = 4  # of a program
# inputs read at once, warps; measured on an H200 over the shapes of 8B and of 32B at two ranks
VECTOR_READS = ((2048, 8), (512, 4))


def is_vector_product(x_TK: Tensor, weight_NK: Tensor) -> bool:
    """Return whether this kernel is the faster one: with one row, whole reads, 16-bit numbers."""
    return (
        len(x_TK) == 1
        and weight_NK.shape[1] % VECTOR_READS[-1][0] == 0
        and x_TK.element_size() == 2
    )


def vector_linear(x_1K: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x · weightᵀ of one row."""
    (count, width), (rows, _) = weight_NK.shape, x_1K.shape
    assert rows == 1 and x_1K.stride(1) == 1 and weight_NK.is_contiguous()
    block, warps = next(read for read in VECTOR_READS if width % read[0] == 0)
    out_1N = torch.empty(1, count, device=x_1K.device, dtype=x_1K.dtype)
    _vector_linear[(triton.cdiv(count, VECTOR_OUTPUTS),)](
        x_1K,
        weight_NK,
        out_1N,
        N=count,
        K=width,
        BLOCK_N=VECTOR_OUTPUTS,
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
