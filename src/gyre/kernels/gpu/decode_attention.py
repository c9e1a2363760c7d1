"""Decode attention over KV pages in Triton: one query per sequence, split over its keys. In:
queries, a layer's pages, the block table, a work list. Out: attended heads. Oracle:
reference_kernels.paged_attention.

The keys of a sequence are split into pieces of a fixed size, so that the order of addition depends
on the sequence alone. This is flash-decoding (Dao et al. 2023) with a fixed piece size instead of a
fixed count. The host lists the pieces; a fixed number of programs processes the list, so that one
CUDA graph serves any lengths. A sequence of one piece is finished directly; a second kernel joins
longer ones. `cut_slabs` makes every token of a batch a query of this kernel, in pieces of one size:
each token is then computed in one way only.
"""

# B sequences, H heads, K kv heads, G = H / K, D head dim, I pieces of the work list, R rows of the
# table, P pages each, T tokens of a batch

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gyre.core.rounding import ceil_div
from gyre.kernels.gpu.work_list import INVARIANT_PIECE, ITEM_BITS, cut_pieces, pack

TILE_TOKENS = 64  # keys of a round; 2 warps and 3 stages keep 4 programs busy on a multiprocessor
PROGRAMS_PER_SM = 4
SLAB_ITEMS = 16_384  # pieces that one call of the kernel leaves in its scratch, at most
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeWork:
    """The sequences and their pieces. Device tensors with fixed addresses; all int32."""

    row_B: Tensor  # row of the block table
    # position of the query, whose own key is in the pages; -1: padding, answered with zeros
    position_B: Tensor
    first_B: Tensor  # where the sequence's pieces are in the scratch
    item_I: Tensor  # place << ITEM_BITS | piece, in any order; the longest first balance best
    size_2: Tensor  # items; tokens of a piece, a multiple of page_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeScratch:
    """Partial results of the pieces for the second kernel."""

    out_IHD: Tensor  # float32
    weight_IH: Tensor  # float32, log2 of the piece's softmax sum

    @staticmethod
    def make(num_items: int, num_heads: int, head_dim: int, device: torch.device) -> DecodeScratch:
        assert num_items * num_heads * head_dim < 2**31, "offsets within the scratch are 32-bit"
        return DecodeScratch(
            out_IHD=torch.empty(num_items, num_heads, head_dim, device=device, dtype=torch.float32),
            weight_IH=torch.empty(num_items, num_heads, device=device, dtype=torch.float32),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slab:
    """Tokens of one kernel call."""

    span: slice  # of the tokens that were cut
    work: DecodeWork
    num_items: int


def cut_slabs(
    row_T: np.ndarray, position_T: np.ndarray, *, longest_tokens: int, device: torch.device
) -> list[Slab]:
    """Divide tokens into slabs. No sequence is longer than `longest_tokens`. The keys of every
    token must be in their pages before a slab runs."""
    slab_tokens = max(1, SLAB_ITEMS // ceil_div(longest_tokens, INVARIANT_PIECE))
    slabs: list[Slab] = []
    for begin in range(0, len(row_T), slab_tokens):
        span = slice(begin, min(begin + slab_tokens, len(row_T)))
        first_S, item_I = cut_pieces(position_T[span] + 1, INVARIANT_PIECE)
        size_2 = np.array([len(item_I), INVARIANT_PIECE])
        sent = send(device, row_T[span], position_T[span], first_S, item_I, size_2)
        work = DecodeWork(
            row_B=sent[0], position_B=sent[1], first_B=sent[2], item_I=sent[3], size_2=sent[4]
        )
        slabs.append(Slab(span=span, work=work, num_items=len(item_I)))
    return slabs


def send(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Copy the arrays to the device as int32 in one transfer, aligned as the kernels were compiled
    for."""
    flat, spans = pack(arrays)
    sent = torch.from_numpy(flat).pin_memory().to(device, non_blocking=True)
    return [sent[span] for span in spans]


def decode_attention(
    q_BHD: Tensor,
    pages: Tensor,
    table_RP: Tensor,
    work: DecodeWork,
    scratch: DecodeScratch,
    out_BHD: Tensor,
    *,
    num_programs: int,
) -> None:
    """Write attended heads to `out_BHD`. `pages` is [page, 2, K, page_tokens, D]; the last two axes
    of `q_BHD` are contiguous."""
    batch, num_heads, head_dim = q_BHD.shape
    num_kv, page_tokens = pages.shape[2], pages.shape[3]
    assert q_BHD.stride(1) == head_dim and out_BHD.is_contiguous()
    group = num_heads // num_kv
    shape = {"K": num_kv, "G": group, "D": head_dim, "ITEM_BITS": ITEM_BITS}
    tile = min(page_tokens, TILE_TOKENS)
    _attend_pieces[(num_programs,)](
        q_BHD, pages, out_BHD, scratch.out_IHD, scratch.weight_IH,
        work.row_B, work.position_B, work.first_B, work.item_I, work.size_2, table_RP,
        q_BHD.stride(0), table_RP.stride(0), LOG2_E / head_dim**0.5,
        PAGE=page_tokens, TILE=tile, GP=max(16, triton.next_power_of_2(group)), **shape,
        num_warps=2, num_stages=3, launch_pdl=True,
    )  # fmt: skip
    _join_pieces[(batch, num_kv)](
        out_BHD,
        scratch.out_IHD,
        scratch.weight_IH,
        work.position_B,
        work.first_B,
        work.size_2,
        K=num_kv,
        G=group,
        D=head_dim,
        GP=triton.next_power_of_2(group),
        num_warps=1,
        launch_pdl=True,
    )


@triton.jit(do_not_specialize=["table_stride"])
def _attend_pieces(
    q_ptr,
    pages_ptr,
    out_ptr,
    part_ptr,
    weight_ptr,
    row_ptr,
    position_ptr,
    first_ptr,
    item_ptr,
    size_ptr,
    table_ptr,
    q_stride,
    table_stride,
    scale_log2,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ITEM_BITS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    GP: tl.constexpr,
):
    offs_g, offs_d, offs_t = tl.arange(0, GP), tl.arange(0, D), tl.arange(0, TILE)
    total, piece_tokens = tl.load(size_ptr) * K, tl.load(size_ptr + 1)
    gdc_wait()  # started early: the queries and the newest keys are being written until here
    programs = tl.num_programs(0)
    for round_ in range(tl.cdiv(total, programs)):
        # Items come longest first; alternating the direction evens out what each program gets.
        turn = tl.program_id(0) if round_ % 2 == 0 else programs - 1 - tl.program_id(0)
        is_real = round_ * programs + turn < total
        work = tl.minimum(round_ * programs + turn, total - 1)
        item, head = work // K, work % K
        packed = tl.load(item_ptr + item)
        place, piece = packed >> ITEM_BITS, packed & ((1 << ITEM_BITS) - 1)
        length = tl.load(position_ptr + place) + 1
        table_row = table_ptr + tl.load(row_ptr + place).to(tl.int64) * table_stride
        in_group = (offs_g < G) & is_real
        q_offs = place.to(tl.int64) * q_stride + (head * G + offs_g[:, None]) * D + offs_d[None, :]
        q = tl.load(q_ptr + q_offs, mask=in_group[:, None], other=0.0)
        best = tl.full([GP], float("-inf"), tl.float32)
        total_w = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, D], tl.float32)
        begin = piece * piece_tokens
        end = tl.minimum(begin + piece_tokens, length)
        end = tl.where(is_real, end, begin)
        for start in tl.range(begin, end, TILE):
            page = tl.load(table_row + start // PAGE).to(tl.int64)
            base = ((page * 2 * K + head) * PAGE + start % PAGE) * D
            tile_offs = base + offs_t[:, None] * D + offs_d[None, :]
            k = tl.load(pages_ptr + tile_offs)
            v = tl.load(pages_ptr + tile_offs + K * PAGE * D)
            scores = tl.dot(q, tl.trans(k)) * scale_log2
            scores = tl.where((start + offs_t < end)[None, :], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            shrink = tl.exp2(best - new_best)
            weights = tl.exp2(scores - new_best[:, None])
            total_w = total_w * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc)
            best = new_best
        acc = acc / total_w[:, None]
        out_offs = (head * G + offs_g[:, None]) * D + offs_d[None, :]
        if length <= piece_tokens:
            tl.store(
                out_ptr + place.to(tl.int64) * (K * G * D) + out_offs,
                acc.to(out_ptr.dtype.element_ty),
                mask=in_group[:, None],
            )
        else:
            part = tl.load(first_ptr + place) + piece
            tl.store(part_ptr + part * (K * G * D) + out_offs, acc, mask=in_group[:, None])
            tl.store(
                weight_ptr + part * (K * G) + head * G + offs_g,
                best + tl.log2(total_w),
                mask=in_group,
            )
    gdc_launch_dependents()


@triton.jit
def _join_pieces(
    out_ptr, part_ptr, weight_ptr, position_ptr, first_ptr, size_ptr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    place, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(position_ptr + place) + 1
    offs_g, offs_d = tl.arange(0, GP), tl.arange(0, D)
    in_group = offs_g < G
    heads = head * G + offs_g
    out_offs = place.to(tl.int64) * (K * G * D) + heads[:, None] * D + offs_d[None, :]
    gdc_wait()
    if length <= 0:
        tl.store(
            out_ptr + out_offs, tl.zeros([GP, D], out_ptr.dtype.element_ty), mask=in_group[:, None]
        )
    piece_tokens = tl.load(size_ptr + 1)
    if length > piece_tokens:
        first = tl.load(first_ptr + place)
        best = tl.full([GP], float("-inf"), tl.float32)
        total_w = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, D], tl.float32)
        for item in range(first, first + tl.cdiv(length, piece_tokens)):
            weight = tl.load(weight_ptr + item * (K * G) + heads, mask=in_group, other=0.0)
            part = tl.load(
                part_ptr + item * (K * G * D) + heads[:, None] * D + offs_d[None, :],
                mask=in_group[:, None], other=0.0,
            )  # fmt: skip
            new_best = tl.maximum(best, weight)
            shrink, grow = tl.exp2(best - new_best), tl.exp2(weight - new_best)
            total_w = total_w * shrink + grow
            acc = acc * shrink[:, None] + part * grow[:, None]
            best = new_best
        tl.store(
            out_ptr + out_offs,
            (acc / total_w[:, None]).to(out_ptr.dtype.element_ty),
            mask=in_group[:, None],
        )
