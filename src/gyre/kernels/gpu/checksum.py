"""Checksums in Triton: one read per number, one launch for any number of runs. In: words of runs,
their places, the weights of a block. Out: the sums of `kernels.checksum`, int64 on the device.

A run is rows of words that follow each other in the whole tensor: one row where it has all columns.
A program takes some blocks of the whole tensor in one row. It finds its run by the number of
programs of those before. Integers wrap, so the order of additions is free.
"""

# W words, T weights of a block, R runs, F fields

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # words that one weight M covers
BLOCKS = 16  # of a program
VECTOR_BYTES = 16  # that a thread loads at once
WordRun = tuple[Tensor, int, int, int, int]  # words; their start, left, width, columns
Rows = tuple[int, int, int, int, int]  # address, first word, words of a row, rows, words between


def sum_runs(sums_R: Tensor, runs: Mapping[int, WordRun], weights_T: Tensor) -> None:
    """Add the sums of runs, whose words have one size, to their places in `sums_R`."""
    assert len(weights_T) == BLOCK
    tables: dict[bool, list[Sequence[int]]] = {}  # by whether rows begin and end at vectors
    ends = {True: 0, False: 0}  # programs so far
    size_bytes = 0
    for place, run in runs.items():
        size_bytes = run[0].element_size()
        for address, first, width, rows, columns in _rows_of(run):
            lines = (first, width, columns if rows > 1 else 0)
            is_aligned = not any(one * size_bytes % VECTOR_BYTES for one in lines)
            is_aligned &= address % VECTOR_BYTES == 0
            per_row = triton.cdiv(triton.cdiv(width, BLOCK) + 1, BLOCKS)
            ends[is_aligned] += per_row * rows
            fields = ends[is_aligned], address, place, first, width, columns, per_row
            tables.setdefault(is_aligned, []).append(fields)
    for is_aligned, table in tables.items():
        table_RF = torch.tensor(table, dtype=torch.int64).to(sums_R.device, non_blocking=True)
        with torch.cuda.device(sums_R.device):
            _sum_rows[(ends[is_aligned],)](
                table_RF, len(table), sums_R, weights_T,
                STEPS=len(table).bit_length(), BITS=8 * size_bytes, BLOCK=BLOCK, BLOCKS=BLOCKS,
                FIELDS=table_RF.shape[1], VECTOR=VECTOR_BYTES // size_bytes if is_aligned else 1,
                num_warps=4,
            )  # fmt: skip


def _rows_of(run: WordRun) -> Iterator[Rows]:
    """Yield the rows that a run consists of: the rest of a row, whole ones, and part of one."""
    words_W, start, left, width, columns = run
    address, at, stop = words_W.data_ptr(), start, start + len(words_W)
    while at < stop:
        row, column = divmod(at, width)
        rows = (stop - at) // width if column == 0 else 0  # whole ones
        count = width if rows else min(stop - at, width - column)
        here = address + (at - start) * words_W.element_size()
        yield here, row * columns + left + column, count, max(1, rows), columns
        at += max(1, rows) * count


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
def _sum_rows(
    table_ptr, num_runs, sums_ptr, weights_ptr,
    STEPS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    FIELDS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    run = _find_run(table_ptr, num_runs, tl.program_id(0), STEPS, FIELDS)
    row_ptr = table_ptr + run * FIELDS
    before = tl.load(row_ptr - FIELDS, mask=run > 0, other=0)  # programs
    words_ptr = tl.load(row_ptr + 1)
    place = tl.load(row_ptr + 2)
    first = tl.load(row_ptr + 3)
    width = tl.load(row_ptr + 4)
    columns = tl.load(row_ptr + 5)
    per_row = tl.load(row_ptr + 6)
    program = tl.program_id(0) - before
    row = program // per_row
    first += row * columns
    words_ptr += row * width * (BITS // 8)
    stop = first + width
    begin = first // BLOCK + program % per_row * BLOCKS
    end = tl.minimum(begin + BLOCKS, (stop + BLOCK - 1) // BLOCK)
    within = tl.arange(0, BLOCK)
    # a word's weight T is the same in each block, and is multiplied at the end
    totals = tl.zeros((BLOCK,), dtype=tl.int64)
    for block in range(begin, end):
        at = block * BLOCK
        low = tl.multiple_of(tl.maximum(first - at, 0).to(tl.int32), VECTOR)
        high = tl.multiple_of(tl.minimum(stop - at, BLOCK).to(tl.int32), VECTOR)
        block_ptr = words_ptr + (at - first) * (BITS // 8)
        if BITS == 8:
            block_ptr = block_ptr.to(tl.pointer_type(tl.uint8))
        elif BITS == 16:
            block_ptr = block_ptr.to(tl.pointer_type(tl.int16))
        else:
            block_ptr = block_ptr.to(tl.pointer_type(tl.int32))
        block_ptr = tl.multiple_of(block_ptr, VECTOR * (BITS // 8))
        word = tl.load(block_ptr + within, mask=(within >= low) & (within < high), other=0)
        totals += (word.to(tl.int64) & ((1 << BITS) - 1)) * _mix(block)
    total = tl.sum(totals * tl.load(weights_ptr + within))
    tl.atomic_add(sums_ptr + place, total)
