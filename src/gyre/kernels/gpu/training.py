"""Operations between the matrix products of a training pass, in Triton. Past 500 lines: each kernel
is next to its launch. Norm, per-head norm + rotation, gated activation, each forward and backward.
In: BF16 or FP16 rows. Out: new tensors of that dtype. Oracles: the torch code next to each call.

Arithmetic is float32. The forward kernels round where torch's operations would, the backward ones
only at the end. Every kernel reads and writes each row once. Gradients of norm weights are sums per
program, then one sum over programs. There are no atomics, so a gradient depends on shapes and the
device alone.

Where the rows become 8-bit operands, `amax` requests their largest magnitude after rounding. It
costs at most one atomic per program, which is exact in any order (kernels.gpu.float8).

Triton specializes a kernel for numbers that are 1 or multiples of 16, and for addresses aligned to
16 bytes. The number of tokens only masks whole rows, so it is not specialized. Widths, which masks
along a row need for wide loads, are constants. Addresses are those of whole tensors or of their
rows.
"""

# N rows, E features of a row, T tokens, H heads, K kv heads, J = H + K heads that turn, R = (H +
# 2K)·D rows of qkv, D head dim, F = D / 2, G heads of a group, M mlp size, P programs

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from gyre.kernels.gpu.float8 import raise_to, sizes
from gyre.kernels.gpu.token_logprobs import block_statistics, logits_gradient

if TYPE_CHECKING:
    from gyre.kernels.float8 import Amax

DTYPES = (torch.bfloat16, torch.float16)
PROGRAMS_PER_SM = 4  # of the kernels that walk over rows with sums of their own
# head rows of a tile: each of 128 threads then loads 16 bytes per half of a head of 128
TILE_ROWS = 16
SILU_BLOCK = 2048


class TrainingKernels:
    """The calls of ChunkKernels of kernels.cpu, for CUDA tensors."""

    @staticmethod
    def norm(
        x_NE: Tensor, weight_E: Tensor, eps: float, amax: Amax | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the normalized rows and rstd with a last axis of 1."""
        x_NE, width = x_NE.contiguous(), x_NE.shape[-1]
        y_NE = torch.empty_like(x_NE)
        rstd_N1 = torch.empty(*x_NE.shape[:-1], 1, dtype=torch.float32, device=x_NE.device)
        cell = _cell(amax, rstd_N1)
        if rows := rstd_N1.numel():
            block = triton.next_power_of_2(width)
            _norm[(rows,)](
                x_NE,
                weight_E.contiguous(),
                y_NE,
                rstd_N1,
                cell,
                eps,
                E=width,
                BLOCK=block,
                AMAX=amax is not None,
                num_warps=row_warps(block),
            )
        return y_NE, rstd_N1

    @staticmethod
    def norm_backward(
        grad_NE: Tensor, x_NE: Tensor, rstd_N1: Tensor, weight_E: Tensor, through_NE: Tensor | None,
        amax: Amax | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the gradients of x (plus through_NE) and of the weight."""
        grad_NE, x_NE, width = grad_NE.contiguous(), x_NE.contiguous(), x_NE.shape[-1]
        grad_x_NE, rows, cell = torch.empty_like(x_NE), rstd_N1.numel(), _cell(amax, rstd_N1)
        if rows == 0:
            return grad_x_NE, torch.zeros_like(weight_E)
        programs = min(rows, PROGRAMS_PER_SM * multiprocessors(x_NE.device))
        partial_PE = torch.empty(programs, width, dtype=torch.float32, device=x_NE.device)
        block = triton.next_power_of_2(width)
        _norm_backward[(programs,)](
            grad_NE,
            x_NE,
            weight_E.contiguous(),
            rstd_N1.contiguous(),
            grad_NE if through_NE is None else through_NE.contiguous(),
            grad_x_NE,
            partial_PE,
            cell,
            rows,
            E=width,
            BLOCK=block,
            THROUGH=through_NE is not None,
            AMAX=amax is not None,
            num_warps=row_warps(block),
        )
        return grad_x_NE, partial_PE.sum(0).to(weight_E.dtype)

    @staticmethod
    def heads(
        qkv_TR: Tensor,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        heads: tuple[int, int],
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return q_THD and k_TKD, normalized and rotated, and rstd_TJ1."""
        tokens, dim, (num_heads, num_kv) = len(qkv_TR), cos_T1D.shape[-1], heads
        q_THD, k_TKD = (qkv_TR.new_empty(tokens, count, dim) for count in heads)
        norms = q_norm_D is not None and k_norm_D is not None
        rstd_TJ1 = (
            qkv_TR.new_empty(tokens, num_heads + num_kv, 1, dtype=torch.float32) if norms else None
        )
        if tokens:
            group, tile = head_tile(heads, dim)
            _heads[(triton.cdiv(tokens, tile), (num_heads + num_kv) // group)](
                qkv_TR.contiguous(),
                q_norm_D if norms else qkv_TR,
                k_norm_D if norms else qkv_TR,
                cos_T1D.contiguous(),
                sin_T1D.contiguous(),
                q_THD,
                k_TKD,
                rstd_TJ1 if norms else qkv_TR,
                tokens,
                eps,
                H=num_heads,
                K=num_kv,
                G=group,
                D=dim,
                TILE=tile,
                NORM=norms,
                num_warps=4,
            )
        return q_THD, k_TKD, rstd_TJ1

    @staticmethod
    def heads_backward(
        grads: tuple[Tensor, Tensor, Tensor],
        qkv_TR: Tensor,
        rstd_TJ1: Tensor | None,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        heads: tuple[int, int],
        amax: Amax | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of qkv and of both norm weights."""
        tokens, dim, (num_heads, num_kv) = len(qkv_TR), cos_T1D.shape[-1], heads
        norms = rstd_TJ1 is not None and q_norm_D is not None and k_norm_D is not None
        group, tile = head_tile(heads, dim)
        groups, grad_qkv_TR = (num_heads + 2 * num_kv) // group, qkv_TR.new_empty(qkv_TR.shape)
        enough = triton.cdiv(2 * PROGRAMS_PER_SM * multiprocessors(qkv_TR.device), groups)
        programs = min(triton.cdiv(tokens, tile), enough)
        partial_PD = torch.empty(groups, programs, dim, dtype=torch.float32, device=qkv_TR.device)
        cell = _cell(amax, partial_PD)
        if tokens:
            _heads_backward[(programs, groups)](
                *(grad.contiguous() for grad in grads),
                qkv_TR.contiguous(),
                rstd_TJ1 if norms else qkv_TR,
                q_norm_D if norms else qkv_TR,
                k_norm_D if norms else qkv_TR,
                cos_T1D.contiguous(),
                sin_T1D.contiguous(),
                grad_qkv_TR,
                partial_PD,
                cell,
                tokens,
                H=num_heads,
                K=num_kv,
                G=group,
                D=dim,
                TILE=tile,
                NORM=norms,
                AMAX=amax is not None,
                num_warps=4,
            )
        if not norms:
            return grad_qkv_TR, None, None
        of_q, of_k, _ = partial_PD.split([num_heads // group, num_kv // group, num_kv // group])
        return grad_qkv_TR, of_q.sum((0, 1)).to(qkv_TR.dtype), of_k.sum((0, 1)).to(qkv_TR.dtype)

    @staticmethod
    def silu(gate_up_T2M: Tensor, amax: Amax | None = None) -> Tensor:
        tokens, width = len(gate_up_T2M), gate_up_T2M.shape[1] // 2
        product_TM = gate_up_T2M.new_empty(tokens, width)
        cell = _cell(amax, product_TM)
        if tokens:
            _silu[(tokens, triton.cdiv(width, SILU_BLOCK))](
                gate_up_T2M.contiguous(),
                product_TM,
                cell,
                M=width,
                BLOCK=SILU_BLOCK,
                AMAX=amax is not None,
                num_warps=4,
            )
        return product_TM

    @staticmethod
    def silu_backward(
        grad_TM: Tensor, gate_up_T2M: Tensor, amax: Amax | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of gate_up, and the product, recomputed and written over grad_TM."""
        grad_TM, gate_up_T2M = grad_TM.contiguous(), gate_up_T2M.contiguous()
        grad_gate_up_T2M, (tokens, width) = torch.empty_like(gate_up_T2M), grad_TM.shape
        cell = _cell(amax, grad_TM)
        if tokens:
            _silu_backward[(tokens, triton.cdiv(width, SILU_BLOCK))](
                grad_TM,
                gate_up_T2M,
                grad_gate_up_T2M,
                cell,
                M=width,
                BLOCK=SILU_BLOCK,
                AMAX=amax is not None,
                num_warps=4,
            )
        return grad_gate_up_T2M, grad_TM

    block_statistics = staticmethod(block_statistics)
    logits_gradient = staticmethod(logits_gradient)


def _cell(amax: Amax | None, other: Tensor) -> Tensor:
    """Return the cell for `amax`; without a request, kernels write nothing to `other`."""
    return other if amax is None else amax.cell(other.device)


def row_warps(block: int) -> int:
    """Return the warps of a row at sixteen numbers per thread."""
    return min(max(block // 512, 1), 16)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a CUDA device; 1 under Triton's interpreter."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )


def head_tile(heads: tuple[int, int], dim: int) -> tuple[int, int]:
    """Return heads per group and tokens per tile. The group is a power of two that divides both
    head counts, so that a program's heads are of one kind."""
    common = math.gcd(*heads)
    group = min(common & -common, 8)
    return group, max(TILE_ROWS * 128 // dim // group, 1)


@triton.jit
def _norm(
    x_ptr,
    weight_ptr,
    out_ptr,
    rstd_ptr,
    amax_ptr,
    eps,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    AMAX: tl.constexpr,
):
    row, offs = tl.program_id(0), tl.arange(0, BLOCK)
    inside = offs < E
    first = row.to(tl.int64) * E
    x = tl.load(x_ptr + first + offs, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, 0) / E + eps)
    normed = (wide * rstd).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    scaled = (normed * weight).to(x.dtype)
    tl.store(out_ptr + first + offs, scaled, mask=inside)
    tl.store(rstd_ptr + row, rstd)
    if AMAX:
        raise_to(amax_ptr, sizes(scaled))


@triton.jit(do_not_specialize=["num_rows"])
def _norm_backward(
    grad_ptr, x_ptr, weight_ptr, rstd_ptr, through_ptr, out_ptr, partial_ptr, amax_ptr, num_rows,
    E: tl.constexpr, BLOCK: tl.constexpr, THROUGH: tl.constexpr, AMAX: tl.constexpr,
):  # fmt: skip
    """Run program p on rows p, p + P, …, with its part of the weight's gradient in registers."""
    program, programs, offs = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    inside = offs < E
    weight = tl.load(weight_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    # of eight neighbors, which one thread holds: a whole row of them would take a quarter more
    # registers
    if AMAX:
        found = tl.zeros([BLOCK // 8], tl.float32)
    at = program.to(tl.int64) * E + offs
    for row in tl.range(program, num_rows, programs):
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        scaled = x * rstd
        acc += grad * scaled
        grad *= weight
        total = (grad - scaled * (tl.sum(grad * scaled, 0) / E)) * rstd
        if THROUGH:
            total += tl.load(through_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, rounded, mask=inside)
        if AMAX:
            found = tl.maximum(found, tl.max(tl.reshape(sizes(rounded), [BLOCK // 8, 8]), 1))
        at += programs.to(tl.int64) * E
    tl.store(partial_ptr + program * E + offs, acc, mask=inside)
    if AMAX:
        raise_to(amax_ptr, found)


@triton.jit(do_not_specialize=["num_tokens"])
def _heads(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    rstd_ptr,
    num_tokens,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Run program (t, g) on heads from g · G of TILE tokens. A row of the tile is one head of one
    token."""
    F: tl.constexpr = D // 2
    group, offs_r, offs_f = tl.program_id(1), tl.arange(0, TILE * G), tl.arange(0, F)
    token = tl.program_id(0) * TILE + offs_r // G
    inside, head, is_key = token < num_tokens, group * G + offs_r % G, group >= H // G
    token = token.to(tl.int64)
    at, mask = (
        qkv_ptr + (token * ((H + 2 * K) * D) + head * D)[:, None] + offs_f[None, :],
        inside[:, None],
    )
    first, second = tl.load(at, mask=mask, other=0.0), tl.load(at + F, mask=mask, other=0.0)
    kind = first.dtype
    wide_1, wide_2 = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        norm_ptr = tl.where(is_key, k_norm_ptr, q_norm_ptr)
        rstd = tl.rsqrt((tl.sum(wide_1 * wide_1, 1) + tl.sum(wide_2 * wide_2, 1)) / D + eps)
        tl.store(rstd_ptr + token * (H + K) + head, rstd, mask=inside)
        weight_1 = tl.load(norm_ptr + offs_f).to(tl.float32)[None, :]
        weight_2 = tl.load(norm_ptr + F + offs_f).to(tl.float32)[None, :]
        wide_1 = (
            ((wide_1 * rstd[:, None]).to(kind).to(tl.float32) * weight_1).to(kind).to(tl.float32)
        )
        wide_2 = (
            ((wide_2 * rstd[:, None]).to(kind).to(tl.float32) * weight_2).to(kind).to(tl.float32)
        )
    angles = (token * D)[:, None] + offs_f[None, :]
    cos = tl.load(cos_ptr + angles, mask=mask, other=0.0).to(tl.float32)
    # the first half is the negative of it
    sin = tl.load(sin_ptr + angles + F, mask=mask, other=0.0).to(tl.float32)
    turned_1 = ((wide_1 * cos).to(kind).to(tl.float32) - wide_2 * sin).to(kind)
    turned_2 = ((wide_2 * cos).to(kind).to(tl.float32) + wide_1 * sin).to(kind)
    count, local = tl.where(is_key, K, H), head - tl.where(is_key, H, 0)
    to = tl.where(is_key, k_ptr, q_ptr) + ((token * count + local) * D)[:, None] + offs_f[None, :]
    tl.store(to, turned_1, mask=mask)
    tl.store(to + F, turned_2, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _heads_backward(
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    qkv_ptr,
    rstd_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    partial_ptr,
    amax_ptr,
    num_tokens,
    H: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    AMAX: tl.constexpr,
):
    """Run program (p, g) on heads from g · G of every P-th tile of tokens; the last groups are
    values, which are only copied."""
    F: tl.constexpr = D // 2
    program, programs, group = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    offs_r, offs_f = tl.arange(0, TILE * G), tl.arange(0, F)
    head = group * G + offs_r % G
    is_query, is_value, found = (
        group < H // G,
        group >= (H + K) // G,
        tl.zeros([TILE * G, F], tl.float32),
    )
    grad_ptr = tl.where(is_query, grad_q_ptr, tl.where(is_value, grad_v_ptr, grad_k_ptr))
    count, local = (
        tl.where(is_query, H, K),
        head - tl.where(is_query, 0, tl.where(is_value, H + K, H)),
    )
    if NORM:
        norm_ptr = tl.where(is_query, q_norm_ptr, k_norm_ptr)
        weight_1 = tl.load(norm_ptr + offs_f).to(tl.float32)[None, :]
        weight_2 = tl.load(norm_ptr + F + offs_f).to(tl.float32)[None, :]
        acc_1, acc_2 = tl.zeros([TILE * G, F], tl.float32), tl.zeros([TILE * G, F], tl.float32)
    for tile in tl.range(program, tl.cdiv(num_tokens, TILE), programs):
        token = tile * TILE + offs_r // G
        inside = token < num_tokens
        token, mask = token.to(tl.int64), inside[:, None]
        source = grad_ptr + ((token * count + local) * D)[:, None] + offs_f[None, :]
        grad_1 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        grad_2 = tl.load(source + F, mask=mask, other=0.0).to(tl.float32)
        place = (token * ((H + 2 * K) * D) + head * D)[:, None] + offs_f[None, :]
        if not is_value:
            angles = (token * D)[:, None] + offs_f[None, :]
            cos = tl.load(cos_ptr + angles, mask=mask, other=0.0).to(tl.float32)
            sin = tl.load(sin_ptr + angles + F, mask=mask, other=0.0).to(tl.float32)
            back_1, back_2 = grad_1 * cos + grad_2 * sin, grad_2 * cos - grad_1 * sin
            if NORM:
                rstd = tl.load(rstd_ptr + token * (H + K) + head, mask=inside, other=0.0)[:, None]
                scaled_1 = tl.load(qkv_ptr + place, mask=mask, other=0.0).to(tl.float32) * rstd
                scaled_2 = tl.load(qkv_ptr + place + F, mask=mask, other=0.0).to(tl.float32) * rstd
                acc_1 += back_1 * scaled_1
                acc_2 += back_2 * scaled_2
                back_1 *= weight_1
                back_2 *= weight_2
                mean = ((tl.sum(back_1 * scaled_1, 1) + tl.sum(back_2 * scaled_2, 1)) / D)[:, None]
                back_1, back_2 = (
                    (back_1 - scaled_1 * mean) * rstd,
                    (back_2 - scaled_2 * mean) * rstd,
                )
            grad_1, grad_2 = back_1, back_2
        rounded_1, rounded_2 = (
            grad_1.to(out_ptr.dtype.element_ty),
            grad_2.to(out_ptr.dtype.element_ty),
        )
        tl.store(out_ptr + place, rounded_1, mask=mask)
        tl.store(out_ptr + place + F, rounded_2, mask=mask)
        if AMAX:
            found = tl.maximum(found, tl.maximum(sizes(rounded_1), sizes(rounded_2)))
    if AMAX:
        raise_to(amax_ptr, found)
    if NORM:
        to = partial_ptr + (group * programs + program) * D + offs_f
        tl.store(to, tl.sum(acc_1, 0))
        tl.store(to + F, tl.sum(acc_2, 0))


@triton.jit
def _silu(gate_up_ptr, out_ptr, amax_ptr, M: tl.constexpr, BLOCK: tl.constexpr, AMAX: tl.constexpr):
    token, offs = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < M
    gate = tl.load(gate_up_ptr + token * (2 * M) + offs, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + token * (2 * M) + M + offs, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    product = (activated * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + token * M + offs, product, mask=inside)
    if AMAX:
        raise_to(amax_ptr, sizes(product))


@triton.jit
def _silu_backward(
    grad_ptr,
    gate_up_ptr,
    out_ptr,
    amax_ptr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    AMAX: tl.constexpr,
):
    token, offs = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = offs < M, token * (2 * M) + offs
    grad = tl.load(grad_ptr + token * M + offs, mask=inside, other=0.0)
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + M, mask=inside, other=0.0).to(tl.float32)
    kind = grad.dtype
    wide = grad.to(tl.float32)
    gain = 1.0 / (1.0 + tl.exp(-gate))
    activated = gate * gain
    grad_gate = (wide * up * (gain * (1.0 + gate * (1.0 - gain)))).to(kind)
    if AMAX:
        found = sizes(grad_gate)
    tl.store(out_ptr + at, grad_gate, mask=inside)
    grad_up = (wide * activated).to(kind)
    if AMAX:
        raise_to(amax_ptr, tl.maximum(found, sizes(grad_up)))
    tl.store(out_ptr + at + M, grad_up, mask=inside)
    tl.store(
        grad_ptr + token * M + offs, (activated.to(kind).to(tl.float32) * up).to(kind), mask=inside
    )
