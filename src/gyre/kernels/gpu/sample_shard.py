"""Sampling without truncation in Triton where each rank has some columns of the logits. In: this
rank's logits, inverse temperatures, uniforms, the ranks' all-gather. Out: what `sample` gives of
the whole rows, the same bits on every rank.

Two gathers of fixed sizes, which a CUDA graph may hold. The first is of four numbers for each block
of the vocabulary, by which every rank finds the block of a draw. The second is of the token, found
by the rank that has the block. Where a rank's columns are whole blocks, blocks and results are
those of `sample`. Elsewhere the blocks differ, and so does the rounding of sums.
"""

# N rows of logits, R rows of the engine, V columns of this rank, S blocks of them, P ranks

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gyre.kernels.gpu.sample import BLOCK_TOKENS, _logprob_of

# of a block: best logit, where it is (int32 bits), sum after temperature, plain sum
BLOCK_NUMBERS = 4
# of a row: which block the token is in (int32 bits), best logit, log of the sum after temperature,
# log of the plain sum
ROW_NUMBERS = 4
AllGather = Callable[[Tensor, Tensor], None]  # every rank's numbers, this rank's


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardScratch:
    """Partial results, flat: the rows of a call take the beginning. All float32."""

    own_blocks: Tensor  # [BLOCK_NUMBERS, N, S]
    blocks: Tensor  # [P, BLOCK_NUMBERS, N, S]
    rows: Tensor  # [ROW_NUMBERS, N]
    own_found: Tensor  # [2, N]: token (int32 bits), its logit; of other ranks' tokens 0
    found: Tensor  # [P, 2, N]
    rank: int
    ranks: int
    vocab_size: int  # of the whole

    @staticmethod
    def make(
        num_rows: int, vocab_size: int, rank: int, ranks: int, device: torch.device
    ) -> ShardScratch:
        width = triton.cdiv(vocab_size, ranks)
        per_rank = BLOCK_NUMBERS * num_rows * triton.cdiv(width, BLOCK_TOKENS)

        def flat(size: int) -> Tensor:
            return torch.empty(size, device=device, dtype=torch.float32)

        return ShardScratch(
            own_blocks=flat(per_rank),
            blocks=flat(ranks * per_rank),
            rows=flat(ROW_NUMBERS * num_rows),
            own_found=flat(2 * num_rows),
            found=flat(ranks * 2 * num_rows),
            rank=rank,
            ranks=ranks,
            vocab_size=vocab_size,
        )


def sample_shard(
    logits_NV: Tensor,
    inverse_temperature_N: Tensor,
    uniform_N: Tensor,
    scratch: ShardScratch,
    row_N: Tensor,
    last_R: Tensor,
    token_N: Tensor,
    logprobs_2N: Tensor,
    all_gather: AllGather,
) -> None:
    """Write tokens and log-probs as `sample` does. The last ranks' columns past the vocabulary are
    padding, which is not read."""
    num_rows, width = logits_NV.shape
    blocks, ranks = triton.cdiv(width, BLOCK_TOKENS), scratch.ranks
    assert logits_NV.is_contiguous() and width == triton.cdiv(scratch.vocab_size, ranks)
    first = scratch.rank * width
    own = max(0, min(width, scratch.vocab_size - first))
    per_rank = BLOCK_NUMBERS * num_rows * blocks
    all_blocks, found = scratch.blocks[: ranks * per_rank], scratch.found[: ranks * 2 * num_rows]
    _scan_shard[(num_rows, blocks)](
        logits_NV,
        inverse_temperature_N,
        scratch.own_blocks,
        num_rows,
        V=width,
        OWN=own,
        S=blocks,
        BLOCK=BLOCK_TOKENS,
        num_warps=4,
    )
    all_gather(all_blocks, scratch.own_blocks[:per_rank])
    _find[(num_rows,)](
        logits_NV,
        inverse_temperature_N,
        uniform_N,
        all_blocks,
        scratch.rows,
        scratch.own_found,
        num_rows,
        RANK=scratch.rank,
        V=width,
        OWN=own,
        S=blocks,
        ALL=ranks * blocks,
        ALLP=triton.next_power_of_2(ranks * blocks),
        BLOCK=BLOCK_TOKENS,
        num_warps=4,
    )
    all_gather(found, scratch.own_found[: 2 * num_rows])
    _finish[(num_rows,)](
        inverse_temperature_N,
        scratch.rows,
        found,
        row_N,
        last_R,
        token_N,
        logprobs_2N,
        logprobs_2N.stride(0),
        num_rows,
        S=blocks,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _scan_shard(
    logits_ptr, inverse_ptr, block_ptr, num_rows,
    V: tl.constexpr, OWN: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * V + offs, mask=offs < OWN, other=float("-inf")).to(tl.float32)
    best, where = tl.max(x, 0, return_indices=True)
    inverse = tl.load(inverse_ptr + row)
    # a block of padding alone has no best one; its sums are 0
    below = tl.where(offs < OWN, x - best, float("-inf"))
    scaled = tl.where(offs < OWN, below * inverse, float("-inf"))
    at, step = block_ptr + row * S + block, num_rows.to(tl.int64) * S
    tl.store(at, best)
    tl.store(at + step, (where + block * BLOCK).to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(at + 2 * step, tl.sum(tl.exp(scaled), 0))
    tl.store(at + 3 * step, tl.sum(tl.exp(below), 0))


@triton.jit(do_not_specialize=["num_rows"])
def _find(
    logits_ptr,
    inverse_ptr,
    uniform_ptr,
    block_ptr,
    row_ptr,
    found_ptr,
    num_rows,
    RANK: tl.constexpr,
    V: tl.constexpr,
    OWN: tl.constexpr,
    S: tl.constexpr,
    ALL: tl.constexpr,
    ALLP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do what `sample._choose` does, over the blocks of all ranks in vocabulary order."""
    row, count = tl.program_id(0).to(tl.int64), num_rows.to(tl.int64)
    offs_s = tl.arange(0, ALLP)
    inside = offs_s < ALL
    inverse = tl.load(inverse_ptr + row)
    step = count * S
    at_s = block_ptr + (offs_s // S) * 4 * step + row * S + offs_s % S
    best_s = tl.load(at_s, mask=inside, other=float("-inf"))
    best = tl.max(best_s, 0)
    below_s = tl.where(inside & (best_s > float("-inf")), best_s - best, -1e30)
    raw_total = tl.sum(tl.load(at_s + 3 * step, mask=inside, other=0.0) * tl.exp(below_s), 0)
    if inverse == 0.0:
        first_s = tl.where(best_s == best, offs_s, ALLP)
        block = tl.minimum(tl.min(first_s, 0), ALL - 1)
        where_s = tl.load(at_s + step, mask=inside, other=0.0).to(tl.int32, bitcast=True)
        token = tl.sum(tl.where(offs_s == block, where_s, 0), 0)
        logit = best
        log_total = 0.0
    else:
        mass_s = tl.load(at_s + 2 * step, mask=inside, other=0.0) * tl.exp(below_s * inverse)
        mass_s = mass_s.to(tl.float64)
        sums_s = tl.cumsum(mass_s, 0)
        total = tl.sum(mass_s, 0)
        target = tl.load(uniform_ptr + row) * total
        last = tl.max(tl.where(mass_s > 0, offs_s, 0), 0)
        block = tl.minimum(tl.sum((sums_s <= target).to(tl.int32), 0), last)
        before = tl.sum(tl.where(offs_s < block, mass_s, 0.0), 0)
        block_best = tl.max(tl.where(offs_s == block, best_s, float("-inf")), 0)
        rest = ((target - before) / tl.exp((block_best - best) * inverse).to(tl.float64)).to(
            tl.float32
        )
        # of another rank's block nothing is loaded, and what follows is not sent
        offs = (block % S) * BLOCK + tl.arange(0, BLOCK)
        end = tl.where(block // S == RANK, OWN, 0)
        x = tl.load(logits_ptr + row * V + offs, mask=offs < end, other=float("-inf"))
        weights = tl.exp((x.to(tl.float32) - block_best) * inverse)
        last = tl.max(tl.where(weights > 0, tl.arange(0, BLOCK), 0), 0)
        inner = tl.minimum(tl.sum((tl.cumsum(weights, 0) <= rest).to(tl.int32), 0), last)
        token = (block % S) * BLOCK + inner
        logit = tl.sum(tl.where(tl.arange(0, BLOCK) == inner, x.to(tl.float32), 0.0), 0)
        log_total = tl.log(total).to(tl.float32)
    tl.store(row_ptr + row, block.to(tl.float32, bitcast=True))
    tl.store(row_ptr + count + row, best)
    tl.store(row_ptr + 2 * count + row, log_total)
    tl.store(row_ptr + 3 * count + row, tl.log(raw_total))
    mine = block // S == RANK
    tl.store(found_ptr + row, tl.where(mine, RANK * V + token, 0).to(tl.float32, bitcast=True))
    tl.store(found_ptr + count + row, tl.where(mine, logit, 0.0))


@triton.jit(do_not_specialize=["logprob_stride", "num_rows"])
def _finish(
    inverse_ptr,
    row_numbers_ptr,
    found_ptr,
    row_ptr,
    last_ptr,
    token_ptr,
    logprob_ptr,
    logprob_stride,
    num_rows,
    S: tl.constexpr,
):
    row, count = tl.program_id(0).to(tl.int64), num_rows.to(tl.int64)
    inverse = tl.load(inverse_ptr + row)
    block = tl.load(row_numbers_ptr + row).to(tl.int32, bitcast=True)
    best = tl.load(row_numbers_ptr + count + row)
    log_total = tl.load(row_numbers_ptr + 2 * count + row)
    raw_log_total = tl.load(row_numbers_ptr + 3 * count + row)
    at = found_ptr + (block // S) * 2 * count + row
    token = tl.load(at).to(tl.int32, bitcast=True)
    logit = tl.load(at + count)
    logprob = 0.0
    if inverse != 0.0:
        logprob = _logprob_of(logit, best, inverse, log_total)
    tl.store(token_ptr + row, token)
    tl.store(last_ptr + tl.load(row_ptr + row), token)
    tl.store(logprob_ptr + row, logprob)
    tl.store(logprob_ptr + logprob_stride + row, logit - best - raw_log_total)
