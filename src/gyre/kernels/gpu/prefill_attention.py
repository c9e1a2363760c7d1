"""Prefill attention over KV pages in Triton: prompt chunks, causal, with keys already in the pages.
In: queries of all chunks in a row, a layer's pages, the block table, a tile list. Out: attended
heads. Oracle: reference_kernels.paged_attention.

FlashAttention-2's loop (Dao 2023, algorithm 1) with one page per round, fetched by the tensor
memory accelerator. The order of addition depends on the query's position alone, not on how the
prompt was chunked.
"""

# T tokens of all chunks, C chunks, H heads, K kv heads, G = H / K, D head dim, M queries of a tile,
# I tiles

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gyre.kernels.gpu.decode_attention import LOG2_E
from gyre.kernels.gpu.work_list import ITEM_BITS

TILE_QUERIES = 128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillWork:
    """The chunks and their tiles, int32 on the device."""

    row_C: Tensor  # row of the block table
    first_C: Tensor  # first token within T
    start_C: Tensor  # position of that token
    count_C: Tensor  # tokens
    item_I: Tensor  # chunk << ITEM_BITS | tile; most work first


def describe_pages(pages: Tensor) -> TensorDescriptor:
    """Return the descriptor of a layer's pages [page, 2, K, page_tokens, D], read a head's page at
    a time."""
    page_tokens, head_dim = pages.shape[3], pages.shape[4]
    return TensorDescriptor.from_tensor(pages.view(-1, head_dim), [page_tokens, head_dim])


def prefill_attention(
    q_THD: Tensor,
    pages: TensorDescriptor,
    table_RP: Tensor,
    work: PrefillWork,
    out_THD: Tensor,
    *,
    num_kv_heads: int,
) -> None:
    """Write attended heads to `out_THD`. The last two axes of `q_THD` are contiguous."""
    _, num_heads, head_dim = q_THD.shape
    assert q_THD.stride(1) == head_dim and out_THD.is_contiguous()
    _attend_tiles[(num_heads, len(work.item_I))](
        q_THD,
        pages,
        out_THD,
        work.row_C,
        work.first_C,
        work.start_C,
        work.count_C,
        work.item_I,
        table_RP,
        q_THD.stride(0),
        table_RP.stride(0),
        LOG2_E / head_dim**0.5,
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        PAGE=pages.block_shape[0],
        M=TILE_QUERIES,
        ITEM_BITS=ITEM_BITS,
        num_warps=4,
        num_stages=3,
    )


@triton.jit
def _attend_page(
    q, acc, best, total_w, pages_desc, table_row, start, head, position_m, scale_log2,
    K: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    first = (tl.load(table_row + start // PAGE) * 2 * K + head) * PAGE
    k = pages_desc.load([first, 0])
    scores = tl.dot(q, tl.trans(k))
    if MASKED:
        seen = position_m[:, None] >= (start + tl.arange(0, PAGE))[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total_w = total_w * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    v = pages_desc.load([first + K * PAGE, 0])
    acc = tl.dot(weights.to(v.dtype), v, acc)
    return acc, new_best, total_w


@triton.jit
def _attend_tiles(
    q_ptr,
    pages_desc,
    out_ptr,
    row_ptr,
    first_ptr,
    start_ptr,
    count_ptr,
    item_ptr,
    table_ptr,
    q_stride,
    table_stride,
    scale_log2,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    ITEM_BITS: tl.constexpr,
):
    head = tl.program_id(0)
    packed = tl.load(item_ptr + tl.program_id(1))
    chunk, tile = packed >> ITEM_BITS, packed & ((1 << ITEM_BITS) - 1)
    chunk_start, count = tl.load(start_ptr + chunk), tl.load(count_ptr + chunk)
    table_row = table_ptr + tl.load(row_ptr + chunk).to(tl.int64) * table_stride
    offs_m, offs_d = tile * M + tl.arange(0, M), tl.arange(0, D)
    token_m = (tl.load(first_ptr + chunk) + offs_m).to(tl.int64)
    real = (offs_m < count)[:, None]
    q = tl.load(
        q_ptr + token_m[:, None] * q_stride + head * D + offs_d[None, :], mask=real, other=0.0
    )
    position_m = chunk_start + offs_m
    kv_head = head // (H // K)
    best = tl.full([M], float("-inf"), tl.float32)
    total_w = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    seen_by_all = (chunk_start + tile * M + 1) // PAGE * PAGE
    end = chunk_start + tl.minimum((tile + 1) * M, count)
    for start in tl.range(0, seen_by_all, PAGE):
        acc, best, total_w = _attend_page(
            q,
            acc,
            best,
            total_w,
            pages_desc,
            table_row,
            start,
            kv_head,
            position_m,
            scale_log2,
            K,
            PAGE,
            False,
        )
    for start in tl.range(seen_by_all, end, PAGE):
        acc, best, total_w = _attend_page(
            q,
            acc,
            best,
            total_w,
            pages_desc,
            table_row,
            start,
            kv_head,
            position_m,
            scale_log2,
            K,
            PAGE,
            True,
        )
    out = (acc / total_w[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token_m[:, None] * (H * D) + head * D + offs_d[None, :], out, mask=real)
