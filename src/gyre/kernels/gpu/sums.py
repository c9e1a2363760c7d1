"""Sums of rows in float32, in Triton: one read per number, one write per sum. In: consecutive rows
in any float dtype. Out: their sum in row order, float32, in place."""

# R rows, N numbers

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # numbers of a program


def add_up_rows(parts_RN: Tensor, out_N: Tensor) -> None:
    rows, count = parts_RN.shape
    assert parts_RN.is_contiguous() and out_N.is_contiguous() and out_N.shape == (count,)
    assert out_N.dtype == torch.float32
    if count:
        _add_up[(triton.cdiv(count, BLOCK),)](
            parts_RN, out_N, count, rows, BLOCK=BLOCK, num_warps=4
        )


@triton.jit
def _add_up(parts_ptr, out_ptr, count, rows, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < count
    total = tl.load(parts_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    for row in range(1, rows):
        total += tl.load(parts_ptr + row.to(tl.int64) * count + offs, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + offs, total, mask=inside)
