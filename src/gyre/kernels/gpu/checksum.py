"""Checksums in Triton: one read per number, one launch for any number of runs. In: words of runs,
their places, the weights of a block. Out: the sums of `kernels.checksum`, int64 on the device.

A program takes whole blocks of one run's whole tensor, of which it reads the words that are in the
run. It finds its run by the number of programs of those before. Integers wrap, so the order of
additions is free.
"""

# W words, T weights of a block, R runs

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from gyre.kernels.checksum import WordRun  # which imports this file when it is needed

BLOCK = 1024  # words that one weight M covers
BLOCKS = 16  # of a program


def sum_runs(sums_R: Tensor, runs: Mapping[int, WordRun], weights_T: Tensor) -> None:
    """Add the sums of runs, whose words have one size, to their places in `sums_R`."""
    assert len(weights_T) == BLOCK
    rows: list[tuple[int, ...]] = []
    end, bits = 0, 0  # programs so far; of a word
    for place, (words_W, start, left, width, columns) in runs.items():
        if not len(words_W):
            continue
        bits, stop = 8 * words_W.element_size(), start + len(words_W)
        first = start // width * columns + left + start % width
        last = (stop - 1) // width * columns + left + (stop - 1) % width
        block = first // BLOCK
        end += triton.cdiv(last // BLOCK + 1 - block, BLOCKS)
        rows.append((end, words_W.data_ptr(), place, block, start, stop, left, width, columns))
    if not rows:
        return
    table_RF = torch.tensor(rows, dtype=torch.int64).to(sums_R.device, non_blocking=True)
    with torch.cuda.device(sums_R.device):
        _sum_runs[(end,)](
            table_RF, len(rows), sums_R, weights_T,
            STEPS=len(rows).bit_length(), BITS=bits, BLOCK=BLOCK, BLOCKS=BLOCKS,
            FIELDS=table_RF.shape[1], num_warps=4,
        )  # fmt: skip


@triton.jit
def _mix(index):
    """Return an odd pseudo-random int64; a shift is without the sign."""
    mixed = index * -0x61C8864680B583EB
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) | 1


@triton.jit
def _find_run(table_ptr, num_runs, program, STEPS: tl.constexpr, FIELDS: tl.constexpr):
    """Return the first run whose programs end behind this one."""
    low = program * 0
    high = low + num_runs - 1
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        is_behind = tl.load(table_ptr + middle * FIELDS) > program
        high = tl.where(is_behind, middle, high)
        low = tl.where(is_behind, low, tl.minimum(middle + 1, high))
    return low


@triton.jit
def _sum_runs(
    table_ptr, num_runs, sums_ptr, weights_ptr,
    STEPS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    run = _find_run(table_ptr, num_runs, program, STEPS, FIELDS)
    row_ptr = table_ptr + run * FIELDS
    before = tl.load(row_ptr - FIELDS, mask=run > 0, other=0)  # programs
    words_ptr = tl.load(row_ptr + 1)
    if BITS == 8:
        words_ptr = words_ptr.to(tl.pointer_type(tl.uint8))
    elif BITS == 16:
        words_ptr = words_ptr.to(tl.pointer_type(tl.int16))
    else:
        words_ptr = words_ptr.to(tl.pointer_type(tl.int32))
    place = tl.load(row_ptr + 2)
    block = (program - before) * BLOCKS + tl.load(row_ptr + 3)
    start = tl.load(row_ptr + 4)
    stop = tl.load(row_ptr + 5)
    left = tl.load(row_ptr + 6)
    width = tl.load(row_ptr + 7)
    columns = tl.load(row_ptr + 8)
    within = tl.arange(0, BLOCK)
    # a word's weight T is the same in each block, and is multiplied at the end
    totals = tl.zeros((BLOCK,), dtype=tl.int64)
    for _ in range(BLOCKS):
        at = block * BLOCK + within.to(tl.int64)
        inside = (at >= start) & (at < stop)
        if width != columns:  # divisions would cost more than all else
            column = at % columns - left
            at = at // columns * width + column
            inside = (column >= 0) & (column < width) & (at >= start) & (at < stop)
        word = tl.load(words_ptr + (at - start), mask=inside, other=0).to(tl.int64)
        word = word & ((1 << BITS) - 1)
        totals += word * _mix(block)
        block += 1
    total = tl.sum(totals * tl.load(weights_ptr + within))
    tl.atomic_add(sums_ptr + place, total)
