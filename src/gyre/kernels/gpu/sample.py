"""Sampling without truncation in Triton: one token per row by inverse CDF, with one read of the
logits. In: logits, inverse temperatures, uniforms. Out: tokens and their log-probs, plain and after
temperature; log-probs of given tokens to the same bits. Oracle: engine.sampling.sampler.choose.

Each vocabulary block stores its maximum and its sums of exponentials. One program per row then
finds the block in float64 and the token within it. Blocks are fixed, so a row's token does not
depend on other rows. The same program computes the normalizer for given tokens: a separate kernel
might add in another order.
"""

# N rows of logits, R rows of the engine, V vocabulary, S blocks of the vocabulary

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleScratch:
    """Partial results of the blocks, and the normalizers of the rows."""

    best_NS: Tensor  # float32
    where_NS: Tensor  # int32, the first best token
    sum_NS: Tensor  # float32, after temperature
    raw_sum_NS: Tensor  # float32
    # float32, of the whole row; with the next one only written where the temperature is above 0
    best_N: Tensor
    # float32, log of the sum of exponentials of what is below the best, after temperature
    log_total_N: Tensor

    @staticmethod
    def make(num_rows: int, vocab_size: int, device: torch.device) -> SampleScratch:
        shape = (num_rows, triton.cdiv(vocab_size, BLOCK_TOKENS))
        best, total, raw = (
            torch.empty(shape, device=device, dtype=torch.float32) for _ in range(3)
        )
        where = torch.empty(shape, device=device, dtype=torch.int32)
        best_N, log_total_N = (
            torch.empty(num_rows, device=device, dtype=torch.float32) for _ in range(2)
        )
        return SampleScratch(
            best_NS=best,
            where_NS=where,
            sum_NS=total,
            raw_sum_NS=raw,
            best_N=best_N,
            log_total_N=log_total_N,
        )


def sample(
    logits_NV: Tensor,
    inverse_temperature_N: Tensor,
    uniform_N: Tensor,
    scratch: SampleScratch,
    row_N: Tensor,
    last_R: Tensor,
    token_N: Tensor,
    logprobs_2N: Tensor,
) -> None:
    """Write tokens (int32), also to their rows in `last_R`, and log-probs (float32; after
    temperature, then plain). An inverse temperature of 0 means greedy: the first maximal token,
    with log-prob 0. A row with a non-finite logit gets a NaN plain log-prob."""
    num_rows, vocab_size = logits_NV.shape
    blocks = triton.cdiv(vocab_size, BLOCK_TOKENS)
    assert logits_NV.is_contiguous()
    _scan_blocks[(num_rows, blocks)](
        logits_NV,
        inverse_temperature_N,
        scratch.best_NS,
        scratch.where_NS,
        scratch.sum_NS,
        scratch.raw_sum_NS,
        V=vocab_size,
        S=blocks,
        BLOCK=BLOCK_TOKENS,
        num_warps=4,
    )
    _choose[(num_rows,)](
        logits_NV,
        inverse_temperature_N,
        uniform_N,
        scratch.best_NS,
        scratch.where_NS,
        scratch.sum_NS,
        scratch.raw_sum_NS,
        scratch.best_N,
        scratch.log_total_N,
        row_N,
        last_R,
        token_N,
        logprobs_2N,
        logprobs_2N.stride(0),
        V=vocab_size,
        S=blocks,
        SP=triton.next_power_of_2(blocks),
        BLOCK=BLOCK_TOKENS,
        num_warps=4,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """Log-probs of given tokens, and their normalizers. Float32."""

    logprobs_N: Tensor
    best_N: Tensor  # largest logit, before temperature
    log_total_N: Tensor  # (logit - best) / temperature - log_total is a token's log-prob


def given_logprobs(logits_NV: Tensor, inverse_temperature_N: Tensor, target_N: Tensor) -> Given:
    """Return for given tokens what `sample` returns for chosen ones. Temperatures are above 0."""
    (num_rows, vocab_size), device = logits_NV.shape, logits_NV.device
    scratch = SampleScratch.make(num_rows, vocab_size, device)
    nothing_2N = torch.zeros(2, num_rows, device=device)
    token_N, last_1 = (
        torch.zeros(count, dtype=torch.int32, device=device) for count in (num_rows, 1)
    )
    uniform_N = torch.zeros(num_rows, dtype=torch.float64, device=device)
    row_N = torch.zeros(num_rows, dtype=torch.int32, device=device)
    sample(logits_NV, inverse_temperature_N, uniform_N, scratch, row_N, last_1, token_N, nothing_2N)
    logprobs_N = torch.empty(num_rows, device=device, dtype=torch.float32)
    _look_up[(num_rows,)](
        logits_NV,
        inverse_temperature_N,
        target_N,
        scratch.best_N,
        scratch.log_total_N,
        logprobs_N,
        V=vocab_size,
        num_warps=1,
    )
    return Given(logprobs_N=logprobs_N, best_N=scratch.best_N, log_total_N=scratch.log_total_N)


@triton.jit
def _logprob_of(logit, best, inverse, log_total):
    """Compute product and difference with one explicit rounding, so that the compiler cannot
    choose."""
    return tl.fma(logit - best, inverse, -log_total)


@triton.jit
def _look_up(
    logits_ptr, inverse_ptr, target_ptr, best_ptr, log_total_ptr, logprob_ptr, V: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logit = tl.load(logits_ptr + row * V + tl.load(target_ptr + row)).to(tl.float32)
    inverse, best, log_total = (
        tl.load(inverse_ptr + row),
        tl.load(best_ptr + row),
        tl.load(log_total_ptr + row),
    )
    tl.store(logprob_ptr + row, _logprob_of(logit, best, inverse, log_total))


@triton.jit
def _scan_blocks(
    logits_ptr, inverse_ptr, best_ptr, where_ptr, sum_ptr, raw_ptr,
    V: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * V + offs, mask=offs < V, other=float("-inf")).to(tl.float32)
    best, where = tl.max(x, 0, return_indices=True)
    inverse = tl.load(inverse_ptr + row)
    below = x - best
    tl.store(best_ptr + row * S + block, best)
    tl.store(where_ptr + row * S + block, where + block * BLOCK)
    tl.store(sum_ptr + row * S + block, tl.sum(tl.exp(below * inverse), 0))
    tl.store(raw_ptr + row * S + block, tl.sum(tl.exp(below), 0))


@triton.jit(do_not_specialize=["logprob_stride"])
def _choose(
    logits_ptr,
    inverse_ptr,
    uniform_ptr,
    best_ptr,
    where_ptr,
    sum_ptr,
    raw_ptr,
    row_best_ptr,
    log_total_ptr,
    row_ptr,
    last_ptr,
    token_ptr,
    logprob_ptr,
    logprob_stride,
    V: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_s = tl.arange(0, SP)
    inside = offs_s < S
    inverse = tl.load(inverse_ptr + row)
    best_s = tl.load(best_ptr + row * S + offs_s, mask=inside, other=float("-inf"))
    best, _ = tl.max(best_s, 0, return_indices=True)
    below_s = tl.where(inside, best_s - best, -1e30)
    raw_total = tl.sum(
        tl.load(raw_ptr + row * S + offs_s, mask=inside, other=0.0) * tl.exp(below_s), 0
    )
    if inverse == 0.0:
        first_s = tl.where(best_s == best, offs_s, SP)
        block = tl.minimum(tl.min(first_s, 0), S - 1)
        token = tl.load(where_ptr + row * S + block)
        logprob = 0.0
    else:
        mass_s = tl.load(sum_ptr + row * S + offs_s, mask=inside, other=0.0) * tl.exp(
            below_s * inverse
        )
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
        offs = tl.arange(0, BLOCK)
        x = tl.load(
            logits_ptr + row * V + block * BLOCK + offs,
            mask=block * BLOCK + offs < V,
            other=float("-inf"),
        )
        weights = tl.exp((x.to(tl.float32) - block_best) * inverse)
        last = tl.max(tl.where(weights > 0, offs, 0), 0)
        inner = tl.minimum(tl.sum((tl.cumsum(weights, 0) <= rest).to(tl.int32), 0), last)
        token = block * BLOCK + inner
        chosen = tl.load(logits_ptr + row * V + token).to(tl.float32)
        log_total = tl.log(total).to(tl.float32)
        tl.store(row_best_ptr + row, best)
        tl.store(log_total_ptr + row, log_total)
        logprob = _logprob_of(chosen, best, inverse, log_total)
    chosen = tl.load(logits_ptr + row * V + token).to(tl.float32)
    tl.store(token_ptr + row, token)
    tl.store(last_ptr + tl.load(row_ptr + row), token)
    tl.store(logprob_ptr + row, logprob)
    tl.store(logprob_ptr + logprob_stride + row, chosen - best - tl.log(raw_total))
