"""Pointwise operations between the matrix products of an inference pass, in Triton: norm, per-head
norm + rotation + KV write, gated activation, page bookkeeping. In: activations. Out: activations;
keys and values in their pages. Oracles: kernels.norm, kernels.rope, kernels.silu; each step rounds
where those round."""

# T tokens, E hidden size, H heads, K kv heads, J = H + 2K, D head dim, F = D / 2, M mlp size,
# R table rows, P pages each

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, out_TE: Tensor) -> None:
    width = x_TE.shape[1]
    block = triton.next_power_of_2(width)
    _rms_norm[(len(x_TE),)](
        x_TE, weight_E, out_TE, eps, E=width, BLOCK=block, num_warps=8 if block > 2048 else 4
    )


@triton.jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, eps, E: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    inside = offs < E
    first = tl.program_id(0).to(tl.int64) * E
    x = tl.load(x_ptr + first + offs, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, 0) / E + eps)
    normed = (wide * rstd).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + first + offs, (normed * weight).to(x.dtype), mask=inside)


def add_rms_norm(x_TE: Tensor, y_TE: Tensor, weight_E: Tensor, eps: float, out_TE: Tensor) -> None:
    """Add y to x in place and write the norm of the sum to `out`."""
    width = x_TE.shape[1]
    block = triton.next_power_of_2(width)
    _add_rms_norm[(len(x_TE),)](
        x_TE, y_TE, weight_E, out_TE, eps, E=width, BLOCK=block, num_warps=8 if block > 2048 else 4
    )


@triton.jit
def _add_rms_norm(x_ptr, y_ptr, weight_ptr, out_ptr, eps, E: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    inside = offs < E
    first = tl.program_id(0).to(tl.int64) * E
    x = tl.load(x_ptr + first + offs, mask=inside, other=0.0)
    y = tl.load(y_ptr + first + offs, mask=inside, other=0.0)
    summed = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
    tl.store(x_ptr + first + offs, summed, mask=inside)
    wide = summed.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, 0) / E + eps)
    normed = (wide * rstd).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + first + offs, (normed * weight).to(x.dtype), mask=inside)


def silu_mul(gate_up_T2M: Tensor, out_TM: Tensor) -> None:
    num_tokens, width = out_TM.shape
    _silu_mul[(num_tokens, triton.cdiv(width, 1024))](
        gate_up_T2M, out_TM, M=width, BLOCK=1024, num_warps=4
    )


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, M: tl.constexpr, BLOCK: tl.constexpr):
    token, offs = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < M
    gate = tl.load(gate_up_ptr + token * 2 * M + offs, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + token * 2 * M + M + offs, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(
        out_ptr + token * M + offs, (activated * up.to(tl.float32)).to(gate.dtype), mask=inside
    )


def turn_and_write(
    qkv_TJD: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    cos_PF: Tensor,
    sin_PF: Tensor,
    row_T: Tensor,
    position_T: Tensor,
    table_RP: Tensor,
    pages: Tensor,
    *,
    num_heads: int,
    eps: float,
) -> None:
    """Normalize (where weights are given) and rotate the query heads in place. Normalize and rotate
    the keys, and write them and the values to their slots. Tokens with a negative position are
    padding and write nothing."""
    num_kv, page_tokens, head_dim = pages.shape[2:]
    weights = (q_norm_D, k_norm_D) if q_norm_D is not None else (qkv_TJD, qkv_TJD)
    _turn_and_write[(len(qkv_TJD), num_heads // num_kv + 1)](
        qkv_TJD,
        *weights,
        cos_PF,
        sin_PF,
        row_T,
        position_T,
        table_RP,
        pages,
        table_RP.stride(0),
        eps,
        H=num_heads,
        K=num_kv,
        KP=triton.next_power_of_2(num_kv),
        D=head_dim,
        PAGE=page_tokens,
        NORM=q_norm_D is not None,
        num_warps=4 if num_kv * head_dim >= 1024 else 2,
    )


@triton.jit(do_not_specialize=["table_stride"])
def _turn_and_write(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    row_ptr,
    position_ptr,
    table_ptr,
    pages_ptr,
    table_stride,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Run program (t, g): K query heads from g · K; the last g handles keys and values."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # attention may get ready meanwhile; it waits for our end before it reads
    gdc_launch_dependents()
    position = tl.load(position_ptr + token)
    if position < 0:
        return
    F: tl.constexpr = D // 2
    is_key = part == H // K
    offs_k, offs_f = tl.arange(0, KP), tl.arange(0, F)
    inside = (offs_k < K)[:, None]
    offs = offs_k[:, None] * D + offs_f[None, :]
    base = qkv_ptr + token * ((H + 2 * K) * D) + part * (K * D)
    first = tl.load(base + offs, mask=inside, other=0.0)
    second = tl.load(base + offs + F, mask=inside, other=0.0)
    kind = first.dtype
    if NORM:
        norm_ptr = k_norm_ptr if is_key else q_norm_ptr
        wide_1, wide_2 = first.to(tl.float32), second.to(tl.float32)
        rstd = tl.rsqrt((tl.sum(wide_1 * wide_1, 1) + tl.sum(wide_2 * wide_2, 1)) / D + eps)[
            :, None
        ]
        weight_1 = tl.load(norm_ptr + offs_f).to(tl.float32)[None, :]
        weight_2 = tl.load(norm_ptr + F + offs_f).to(tl.float32)[None, :]
        first = ((wide_1 * rstd).to(kind).to(tl.float32) * weight_1).to(kind)
        second = ((wide_2 * rstd).to(kind).to(tl.float32) * weight_2).to(kind)
    cos = tl.load(cos_ptr + position.to(tl.int64) * F + offs_f).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + position.to(tl.int64) * F + offs_f).to(tl.float32)[None, :]
    wide_1, wide_2 = first.to(tl.float32), second.to(tl.float32)
    turned_1 = ((wide_1 * cos).to(kind).to(tl.float32) - wide_2 * sin).to(kind)
    turned_2 = ((wide_2 * cos).to(kind).to(tl.float32) + wide_1 * sin).to(kind)
    if is_key:
        page = tl.load(
            table_ptr + tl.load(row_ptr + token).to(tl.int64) * table_stride + position // PAGE
        ).to(tl.int64)
        slot = (
            pages_ptr
            + (page * 2 * K * PAGE + position % PAGE) * D
            + offs_k[:, None] * (PAGE * D)
            + offs_f[None, :]
        )
        tl.store(slot, turned_1, mask=inside)
        tl.store(slot + F, turned_2, mask=inside)
        value_1 = tl.load(base + K * D + offs, mask=inside, other=0.0)
        value_2 = tl.load(base + K * D + offs + F, mask=inside, other=0.0)
        tl.store(slot + K * PAGE * D, value_1, mask=inside)
        tl.store(slot + K * PAGE * D + F, value_2, mask=inside)
    else:
        tl.store(base + offs, turned_1, mask=inside)
        tl.store(base + offs + F, turned_2, mask=inside)


def enter_pages(table_RP: Tensor, entries_3N: Tensor) -> None:
    """Set table[entries[0], entries[1]] = entries[2]."""
    count = entries_3N.shape[1]
    _enter_pages[(triton.cdiv(count, 256),)](
        table_RP, entries_3N, table_RP.stride(0), count, BLOCK=256
    )


@triton.jit(do_not_specialize=["count"])
def _enter_pages(table_ptr, entries_ptr, table_stride, count, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < count
    row = tl.load(entries_ptr + offs, mask=inside, other=0).to(tl.int64)
    column = tl.load(entries_ptr + count + offs, mask=inside, other=0)
    page = tl.load(entries_ptr + 2 * count + offs, mask=inside, other=0)
    tl.store(table_ptr + row * table_stride + column, page, mask=inside)
