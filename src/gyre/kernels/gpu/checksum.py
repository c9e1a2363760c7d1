"""Checksum in Triton: one read per number. In: words of a run, its place, the weights of a
block. Out: the sum of `kernels.checksum`, an int64 scalar on the device.

A program takes whole blocks of the whole tensor, of which it reads the words that are in the run.
Integers wrap, so the order of additions is free.
"""

# W words, T weights of a block

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # words that one weight M covers
BLOCKS = 8  # of a program


def sum_words(
    words_W: Tensor, start: int, left: int, width: int, columns: int, weights_T: Tensor
) -> Tensor:
    """Sum the words [start, …) of `width` columns, from `left` on, of a tensor of `columns`."""
    assert words_W.is_contiguous() and len(weights_T) == BLOCK
    total = torch.zeros((), dtype=torch.int64, device=words_W.device)
    stop = start + len(words_W)
    if start < stop:
        first = start // width * columns + left + start % width
        last = (stop - 1) // width * columns + left + (stop - 1) % width
        block, end = first // BLOCK, last // BLOCK + 1
        _sum_words[(triton.cdiv(end - block, BLOCKS),)](
            words_W, total, weights_T, block, start, stop, left, width, columns,
            ALL_COLUMNS=width == columns, BITS=8 * words_W.element_size(), BLOCK=BLOCK,
            BLOCKS=BLOCKS, num_warps=4,
        )  # fmt: skip
    return total


@triton.jit
def _mix(index):
    """Return an odd pseudo-random int64; a shift is without the sign."""
    mixed = index * -0x61C8864680B583EB
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) | 1


@triton.jit
def _sum_words(
    words_ptr, total_ptr, weights_ptr, first_block, start, stop, left, width, columns,
    ALL_COLUMNS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    within = tl.arange(0, BLOCK)
    weight = tl.load(weights_ptr + within)
    total = tl.zeros((1,), dtype=tl.int64)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + first_block
    for _ in range(BLOCKS):
        whole = block * BLOCK + within.to(tl.int64)
        at = whole
        inside = (at >= start) & (at < stop)
        if not ALL_COLUMNS:  # divisions would cost more than all else
            column = whole % columns - left
            at = whole // columns * width + column
            inside = (column >= 0) & (column < width) & (at >= start) & (at < stop)
        word = tl.load(words_ptr + (at - start), mask=inside, other=0).to(tl.int64)
        word = word & ((1 << BITS) - 1)
        total += tl.sum(word * weight) * _mix(block)
        block += 1
    tl.atomic_add(total_ptr + tl.arange(0, 1), total)
