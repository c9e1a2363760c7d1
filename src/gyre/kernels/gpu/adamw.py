"""AdamW in one pass over float32 weights, gradients and moments in any number of buffers, in
Triton. In: parts, each four tensors of one length. Out: the same, updated in place, with zeroed
gradients; optionally the largest magnitude of each part's new weights.

One launch updates all parts. A rank has some hundreds of shards; with eight ranks per host,
launching each separately costs more than the updates. A program looks up its part in a table of
addresses.
"""

# N numbers of a part, P parts, C columns of the table

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gyre.core.rounding import ceil_div
from gyre.kernels.gpu.float8 import raise_to, sizes

BLOCK = 1024  # numbers of a program: with more it is slower
COLUMNS = 7  # of the table: four addresses, numbers, whether they decay, the first program
WIDE_BYTES, WIDE_NUMBERS = 16, 4  # of a load, where all addresses and counts are multiples of them

Part = tuple[Tensor, Tensor, Tensor, Tensor]  # weight_N, grad_N, exp_avg_N, exp_avg_sq_N


def adamw(
    parts: Sequence[Part],
    decays: Sequence[bool],
    *,
    learning_rate: float,
    grad_scale: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    num_updates: int,
    find_largest: bool = False,
) -> Tensor | None:
    """Apply the `num_updates`-th update. Reads and writes 16 bytes per number. With `find_largest`
    returns the largest magnitude of each part's new weights, float32, [P]."""
    counts = np.array([part[0].numel() for part in parts], dtype=np.int64)
    for part in parts:
        assert all(
            x.is_contiguous() and x.numel() == part[0].numel() and x.dtype == torch.float32
            for x in part
        )
    device, beta1, beta2 = parts[0][0].device, *betas
    largest_P = torch.zeros(len(parts), device=device) if find_largest else None
    programs = ceil_div(counts, BLOCK)
    if not (total := int(programs.sum())):
        return largest_P
    addresses = np.array([[x.data_ptr() for x in part] for part in parts], dtype=np.int64)
    first = np.cumsum(programs) - programs
    wide = not (addresses % WIDE_BYTES).any() and not (counts % WIDE_NUMBERS).any()
    table = np.column_stack([addresses, counts, np.array(decays, dtype=np.int64), first])
    # Nothing is waited for: a copy from memory that is not pinned has taken its bytes when the call
    # returns.
    table_PC = torch.from_numpy(table).to(device, non_blocking=True)
    programs_P = torch.from_numpy(programs.astype(np.int32)).to(device, non_blocking=True)
    owner = torch.repeat_interleave(programs_P, output_size=total)  # the part of each program
    _adamw[(total,)](
        table_PC,
        owner,
        table_PC if largest_P is None else largest_P,
        grad_scale,
        1.0 - learning_rate * weight_decay,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        math.sqrt(1.0 - beta2**num_updates),
        eps,
        -learning_rate / (1.0 - beta1**num_updates),
        FROM_END=1.0 - beta1 >= 0.5,
        FINDS=find_largest,
        WIDE=wide,
        COLUMNS=COLUMNS,
        WIDE_BYTES=WIDE_BYTES,
        WIDE_NUMBERS=WIDE_NUMBERS,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return largest_P


@triton.jit
def _at(entry_ptr, offs, WIDE: tl.constexpr, WIDE_BYTES: tl.constexpr):
    """Return a pointer to numbers of the part at that address."""
    found = tl.load(entry_ptr).to(tl.pointer_type(tl.float32)) + offs
    if WIDE:
        found = tl.multiple_of(found, [WIDE_BYTES])
    return found


@triton.jit
def _adamw(
    table_ptr,
    owner_ptr,
    largest_ptr,
    grad_scale,
    keep,
    share,
    beta2,
    rest,
    correction,
    eps,
    rate,
    FROM_END: tl.constexpr,
    FINDS: tl.constexpr,
    WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE_BYTES: tl.constexpr,
    WIDE_NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.load(owner_ptr + tl.program_id(0))
    entry_ptr = table_ptr + part * COLUMNS
    count, decays = tl.load(entry_ptr + 4), tl.load(entry_ptr + 5)
    if WIDE:
        count = tl.multiple_of(count, WIDE_NUMBERS)
    kept = tl.where(decays != 0, keep, 1.0)
    offs = (tl.program_id(0) - tl.load(entry_ptr + 6)) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < count
    weights, grads = (
        _at(entry_ptr, offs, WIDE, WIDE_BYTES),
        _at(entry_ptr + 1, offs, WIDE, WIDE_BYTES),
    )
    averages, squares = (
        _at(entry_ptr + 2, offs, WIDE, WIDE_BYTES),
        _at(entry_ptr + 3, offs, WIDE, WIDE_BYTES),
    )
    grad = tl.load(grads, mask=inside, other=0.0) * grad_scale
    weight = tl.load(weights, mask=inside, other=0.0) * kept
    exp_avg = tl.load(averages, mask=inside, other=0.0)
    exp_avg_sq = tl.load(squares, mask=inside, other=0.0)
    if FROM_END:  # as torch.lerp does from a half on
        exp_avg = grad - (grad - exp_avg) * (1.0 - share)
    else:
        exp_avg = exp_avg + share * (grad - exp_avg)
    exp_avg_sq = exp_avg_sq * beta2 + rest * (grad * grad)
    bound = tl.div_rn(tl.sqrt_rn(exp_avg_sq), correction) + eps
    weight += rate * tl.div_rn(exp_avg, bound)
    tl.store(weights, weight, mask=inside)
    tl.store(averages, exp_avg, mask=inside)
    tl.store(squares, exp_avg_sq, mask=inside)
    tl.store(grads, tl.zeros([BLOCK], tl.float32), mask=inside)
    if FINDS:
        raise_to(largest_ptr + part, tl.where(inside, sizes(weight), 0.0))
