"""How a step's attention is cut for the GPU kernels, and what the GPU runner keeps beside weights
and pages. In: positions and chunks; sizes. Out: work lists; bytes. Pure (numpy).
"""

# C chunks, I items of a work list

from __future__ import annotations

import numpy as np

from gyre.core.rounding import ceil_div
from gyre.kernels.gpu.work_list import INVARIANT_PIECE, ITEM_BITS

PEER_ROWS = 256  # most that peers sum; it beats NCCL up to there, and was not measured with more
SLAB_ITEMS = 16_384  # as in kernels.gpu.decode_attention, which needs Triton
SAMPLE_BLOCK_TOKENS = 2048  # as in kernels.gpu.sample
SMALLEST_PIECE, LARGEST_PIECE = 128, 1024
MIN_WORK = 400  # (piece, kv head) pairs that keep an H200 busy; measured


def plan_piece(num_tokens: int, num_kv_heads: int, page_tokens: int, *, pool_tokens: int) -> int:
    """Return how many keys a piece has, so that there is work for every program without a second
    pass for short sequences. Powers of two from 128 to 1,024, page_tokens at least; more where
    sequences share so many pages that together they are longer than the pool, and 1,024 would leave
    more pieces than the scratch holds."""
    wanted, piece = num_tokens * num_kv_heads // MIN_WORK, LARGEST_PIECE
    while piece > max(wanted, SMALLEST_PIECE):
        piece //= 2
    piece = max(piece, page_tokens)
    most = most_pieces(pool_tokens, num_kv_heads, invariant=False)
    while num_tokens // piece > most:
        piece *= 2
    return piece


def most_pieces(num_tokens: int, num_kv_heads: int, *, invariant: bool) -> int:
    """Return a bound of the whole pieces of any step; each sequence may add one partial piece.
    `num_tokens` is the pool's size, which `plan_piece` uses. In invariant mode pieces have one
    size, and the bound is all rows at full length."""
    if invariant:
        return num_tokens // INVARIANT_PIECE
    return num_tokens // LARGEST_PIECE + 2 * MIN_WORK // num_kv_heads + 1


def cut_tiles(start_C: np.ndarray, count_C: np.ndarray, tile_queries: int) -> np.ndarray:
    """Cut each chunk into tiles of queries. Returns item_I, those that look back furthest first."""
    tiles_C = ceil_div(count_C, tile_queries)
    chunk_I = np.repeat(np.arange(len(count_C)), tiles_C)
    tile_I = np.arange(len(chunk_I)) - (np.cumsum(tiles_C) - tiles_C)[chunk_I]
    order_I = np.argsort(-(start_C[chunk_I] + tile_I * tile_queries), kind="stable")
    return (chunk_I << ITEM_BITS | tile_I)[order_I]


def plan_graph_batches(max_running: int) -> tuple[int, ...]:
    """Batch sizes to capture: few, and close enough that padding costs little. The largest is
    max_running."""
    sizes = [
        1,
        2,
        4,
        *range(8, 64, 8),
        *range(64, 256, 16),
        *range(256, 512, 32),
        *range(512, 4097, 128),
    ]
    return (*(size for size in sizes if size < max_running), max_running)


def buffer_bytes(
    *,
    max_running: int,
    token_budget: int,
    pool_tokens: int,
    page_tokens: int,
    context_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    logit_bytes: int,
    invariant: bool,
) -> int:
    """Device bytes that the GPU runner has from its start to its end, as gpu_runner and
    gpu_attention make them: the attention's scratch, the block table, what a step is sent in, the
    sampler's scratch, logits, tokens on their way to the host."""
    rows, pages_per_row = max_running, ceil_div(context_tokens, page_tokens)
    bound_tokens = rows * context_tokens if invariant else pool_tokens
    items = rows + most_pieces(bound_tokens, num_kv_heads, invariant=invariant)
    pieces = max(items, SLAB_ITEMS) if invariant else items
    attention = 4 * pieces * num_heads * (head_dim + 1)
    table = 4 * (rows + 1) * (pages_per_row + 1)
    sent = 4 * (items + 3 * rows * pages_per_row + 3 * token_budget + 7 * rows + 2)
    sampling = rows * (4 * 4 * ceil_div(vocab_size, SAMPLE_BLOCK_TOKENS) + 2 * 4)
    return attention + table + sent + sampling + rows * (vocab_size * logit_bytes + 3 * 4)
