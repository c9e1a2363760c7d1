"""8-bit operands of matrix products, in Triton. In: rows in BF16, FP16 or FP32. Out: their largest
absolute number; the rows scaled, rounded and, where asked, transposed.

Each kernel reads its input once, for rows and columns together. Atomics find the largest magnitude,
which is exact in any order. Kernels of `training` and `adamw` that write an operand use the same
two functions.
"""

# N rows, K features of a row, M rows padded with zeros to a multiple of 16

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, STEPS = 1024, 8  # numbers of a reading, readings of a program
TILE = 64  # rows and features of a tile: columns are written 64 bytes at a time
MULTIPLE = 16
SMALLEST_AMAX = 1e-12


class Float8Kernels:
    @staticmethod
    def largest(x_NK: Tensor) -> Tensor:
        amax, count = torch.zeros((), dtype=torch.float32, device=x_NK.device), x_NK.numel()
        _largest[(triton.cdiv(count, BLOCK * STEPS),)](
            x_NK.contiguous(), amax, count, BLOCK=BLOCK, STEPS=STEPS
        )
        return amax

    @staticmethod
    def quantize(
        x_NK: Tensor, amax: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Return rows_NK, columns_KM (None unless requested) and the inverse of the scale."""
        # Triton 3.6 transposes such a tile wrongly: odd features are lost
        if columns and x_NK.dtype == torch.float32:
            rows_NK, _, inverse = Float8Kernels.quantize(
                x_NK, amax, dtype, rows=True, columns=False
            )
            assert rows_NK is not None
            return rows_NK if rows else None, Float8Kernels.transposed(rows_NK), inverse
        count, width = x_NK.shape
        longer = triton.cdiv(count, MULTIPLE) * MULTIPLE
        rows_NK = torch.empty(count, width, dtype=dtype, device=x_NK.device) if rows else None
        columns_KM = (
            torch.empty(width, longer, dtype=dtype, device=x_NK.device) if columns else None
        )
        inverse = torch.empty((), dtype=torch.float32, device=x_NK.device)
        some = rows_NK if rows_NK is not None else columns_KM
        _quantize[(triton.cdiv(longer, TILE), triton.cdiv(width, TILE))](
            x_NK,
            amax,
            some if rows_NK is None else rows_NK,
            some if columns_KM is None else columns_KM,
            inverse,
            count,
            width,
            longer,
            MOST=torch.finfo(dtype).max,
            SMALLEST=SMALLEST_AMAX,
            ROWS=rows,
            COLUMNS=columns,
            TILE=TILE,
            num_warps=4,
        )
        return rows_NK, columns_KM, inverse

    @staticmethod
    def transposed(data_NK: Tensor) -> Tensor:
        """Return columns_KM, as `quantize` does."""
        (count, width), longer = data_NK.shape, triton.cdiv(len(data_NK), MULTIPLE) * MULTIPLE
        columns_KM = torch.empty(width, longer, dtype=data_NK.dtype, device=data_NK.device)
        _transposed[(triton.cdiv(longer, TILE), triton.cdiv(width, TILE))](
            data_NK.contiguous().view(torch.int8),
            columns_KM.view(torch.int8),
            count,
            width,
            longer,
            TILE=TILE,
            num_warps=4,
        )
        return columns_KM


@triton.jit
def _largest(x_ptr, amax_ptr, count, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK * STEPS + tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.float32)
    for step in range(STEPS):
        at = offs + step * BLOCK
        found = tl.maximum(found, sizes(tl.load(x_ptr + at, mask=at < count, other=0.0)))
    raise_to(amax_ptr, found)


@triton.jit
def sizes(x):
    """Return |x|, or 0 for NaN, which stays NaN in 8 bits under any scale."""
    size = tl.abs(x.to(tl.float32))
    return tl.where(size == size, size, 0.0)


@triton.jit
def raise_to(amax_ptr, found):
    """Raise the cell to the largest of these magnitudes.

    The cell is read first, bypassing the multiprocessor's cache. It only grows, so soon few
    programs exceed it, and a stale value costs only a needless atomic. Without the read, tens of
    thousands of atomics on one cell took as long as half of their kernel. The cell is not read
    before the kernel ends, so no fence is needed.
    """
    most = tl.max(found)
    if most > tl.load(amax_ptr, cache_modifier=".cg"):
        tl.atomic_max(amax_ptr, most, sem="relaxed")


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["amax_ptr"])
def _quantize(
    x_ptr,
    amax_ptr,
    rows_ptr,
    columns_ptr,
    inverse_ptr,
    count,
    width,
    longer,
    MOST: tl.constexpr,
    SMALLEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    k = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (n[:, None] < count) & (k[None, :] < width)
    amax = tl.load(amax_ptr)
    scale = tl.div_rn(tl.full((), MOST, tl.float32), tl.maximum(amax, SMALLEST))
    x = (
        tl.load(x_ptr + n[:, None] * width + k[None, :], mask=inside, other=0.0).to(tl.float32)
        * scale
    )
    # not min and max: what is no number stays none
    x = tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))
    if ROWS:
        tl.store(
            rows_ptr + n[:, None] * width + k[None, :], x.to(rows_ptr.dtype.element_ty), mask=inside
        )
    if COLUMNS:
        wanted = (k[:, None] < width) & (n[None, :] < longer)
        rounded = tl.trans(x).to(columns_ptr.dtype.element_ty)
        tl.store(columns_ptr + k[:, None] * longer + n[None, :], rounded, mask=wanted)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse_ptr, tl.div_rn(tl.full((), 1.0, tl.float32), scale))


@triton.jit(do_not_specialize=["count"])
def _transposed(rows_ptr, columns_ptr, count, width, longer, TILE: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    k = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (n[:, None] < count) & (k[None, :] < width)
    tile = tl.load(rows_ptr + n[:, None] * width + k[None, :], mask=inside, other=0)
    wanted = (k[:, None] < width) & (n[None, :] < longer)
    tl.store(columns_ptr + k[:, None] * longer + n[None, :], tl.trans(tile), mask=wanted)
