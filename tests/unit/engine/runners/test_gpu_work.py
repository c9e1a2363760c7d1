"""Work lists of the GPU's attention kernels: nothing is left out, nothing is done twice, and no
step needs more room than was made for it."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gyre.engine.runners.gpu_buffers import DeviceRows
from gyre.engine.runners.gpu_work import (
    INVARIANT_PIECE,
    LARGEST_PIECE,
    MIN_WORK,
    SMALLEST_PIECE,
    buffer_bytes,
    cut_tiles,
    most_pieces,
    plan_graph_batches,
    plan_piece,
)
from gyre.kernels.gpu.work_list import ITEM_BITS, cut_pieces

LENGTHS = st.lists(st.integers(1, 5000), max_size=24)
KV_HEADS = st.sampled_from([1, 2, 4, 8, 16])
PAGES = st.sampled_from([16, 32, 64, 128, 256, 1024])
LOW_BITS = (1 << ITEM_BITS) - 1


def places(lengths: list[int], piece: int) -> list[tuple[int, int, int]]:
    """What the kernel reads from an item: (place in the scratch, sequence, first key), in the order
    of the list."""
    first_B, item_I = cut_pieces(np.asarray(lengths, dtype=np.int64), piece)
    pairs = [(int(item) >> ITEM_BITS, int(item) & LOW_BITS) for item in item_I.astype(np.int32)]
    return [(int(first_B[sequence]) + index, sequence, index * piece) for sequence, index in pairs]


@given(lengths=LENGTHS, piece=st.sampled_from([16, 128, 512, 1024, 4096]))
def test_each_key_of_each_sequence_is_in_one_piece_and_each_piece_has_its_own_place(
    lengths: list[int], piece: int
) -> None:
    listed = places(lengths, piece)
    keys = [
        (sequence, key)
        for _, sequence, at in listed
        for key in range(at, min(at + piece, lengths[sequence]))
    ]
    assert sorted(keys) == [
        (sequence, key) for sequence, length in enumerate(lengths) for key in range(length)
    ]
    assert sorted(place for place, _, _ in listed) == list(range(len(listed)))
    sizes = [min(piece, lengths[sequence] - at) for _, sequence, at in listed]
    assert sizes == sorted(sizes, reverse=True) and all(size > 0 for size in sizes)


@given(
    chunks=st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 2000)), max_size=12),
    tile=st.sampled_from([16, 64, 128]),
)
def test_each_query_is_in_one_tile_and_tiles_that_look_back_furthest_come_first(
    chunks: list[tuple[int, int]], tile: int
) -> None:
    start_C, count_C = np.asarray(chunks, dtype=np.int64).reshape(-1, 2).T
    listed = [
        (int(item) >> ITEM_BITS, int(item) & LOW_BITS) for item in cut_tiles(start_C, count_C, tile)
    ]
    queries = [
        (c, q) for c, at in listed for q in range(at * tile, min((at + 1) * tile, chunks[c][1]))
    ]
    assert sorted(queries) == [(c, q) for c, (_, count) in enumerate(chunks) for q in range(count)]
    positions = [chunks[c][0] + at * tile for c, at in listed]
    assert positions == sorted(positions, reverse=True)


@given(
    num_tokens=st.integers(1, 3_000_000),
    pool_tokens=st.integers(16, 3_000_000),
    kv_heads=KV_HEADS,
    page=PAGES,
)
def test_a_piece_is_a_power_of_two_of_whole_pages_and_as_large_as_the_work_allows(
    num_tokens: int, pool_tokens: int, kv_heads: int, page: int
) -> None:
    piece = plan_piece(num_tokens, kv_heads, page, pool_tokens=pool_tokens)
    assert piece & (piece - 1) == 0 and piece % page == 0 and piece >= SMALLEST_PIECE
    if num_tokens <= pool_tokens:
        assert piece <= max(LARGEST_PIECE, page)
    if piece > max(SMALLEST_PIECE, page):
        assert num_tokens * kv_heads // piece >= MIN_WORK, "larger than the work allows"


@settings(max_examples=300)
@given(
    lengths=st.lists(st.integers(1, 40_000), min_size=1, max_size=64),
    shared=st.floats(0.01, 1.0),
    kv_heads=KV_HEADS,
    page=PAGES,
)
def test_no_step_has_more_pieces_than_there_is_room_for(
    lengths: list[int], shared: float, kv_heads: int, page: int
) -> None:
    """Sequences share pages, so together they may be many times as long as the pool. What the
    invariant mode cuts has one size; its bound is that of all rows at full length."""
    total = sum(lengths)
    pool_tokens = max(page, int(total * shared))
    piece = plan_piece(total, kv_heads, page, pool_tokens=pool_tokens)
    room = len(lengths) + most_pieces(pool_tokens, kv_heads, invariant=False)
    assert len(places(lengths, piece)) <= room
    room = len(lengths) + most_pieces(len(lengths) * max(lengths), kv_heads, invariant=True)
    assert len(places(lengths, INVARIANT_PIECE)) <= room


@given(max_running=st.integers(1, 4224))
def test_graph_batches_ascend_to_max_running_and_pad_little(max_running: int) -> None:
    batches = plan_graph_batches(max_running)
    assert list(batches) == sorted(set(batches)) and batches[-1] == max_running and batches[0] == 1
    for before, after in pairwise(batches):
        assert after - before <= max(8, before // 4), (before, after)


@example(rows=3, context=64, vocabulary=2048, invariant=False)
@example(rows=3, context=65, vocabulary=2049, invariant=True)
@example(rows=1, context=128, vocabulary=4096, invariant=True)
@given(
    rows=st.integers(1, 64),
    context=st.integers(64, 4096),
    vocabulary=st.integers(8, 9000),
    invariant=st.booleans(),
)
def test_the_bytes_of_the_runners_buffers_are_those_of_its_tensors(
    rows, context, vocabulary, invariant
) -> None:
    """The tensors that gpu_state makes, and those of the kernels' scratch by the shapes that they
    state."""
    budget, pool, heads, kv_heads, size = 300, 8192, 4, 2, 16
    device_rows = DeviceRows(
        max_running=rows, pages_per_row=-(-context // 64), device=torch.device("cpu")
    )
    items = rows + most_pieces(rows * context if invariant else pool, kv_heads, invariant=invariant)
    pieces = max(items, 16_384) if invariant else items
    shapes = [  # of 4-byte numbers
        (pieces, heads, size), (pieces, heads),  # what the pieces of attention leave
        # what blocks of the vocabulary leave
        *[(rows, -(-vocabulary // 2048))] * 4, (rows,), (rows,),
        # sent with every step
        (rows, 2), *[(rows,)] * 4, (2,), (items + 3 * rows * device_rows.pages_per_row,),
        *[(budget,)] * 3, (rows,),  # sent with prompt chunks
        (3, rows),  # tokens and log-probs
    ]  # fmt: skip
    expected = sum(4 * math.prod(shape) for shape in shapes) + 2 * rows * vocabulary
    expected += device_rows.table_RP.nbytes + device_rows.last_R.nbytes
    assert expected == buffer_bytes(
        max_running=rows,
        token_budget=budget,
        pool_tokens=pool,
        page_tokens=64,
        context_tokens=context,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        vocab_size=vocabulary,
        logit_bytes=2,
        invariant=invariant,
    )


@pytest.mark.parametrize(
    ("num_tokens", "kv_heads", "page", "piece"),
    [
        (1, 1, 16, 128),  # the smallest
        (1, 1, 256, 256),  # one page at least
        (102_399, 1, 16, 128),
        (102_400, 1, 16, 256),  # 400 pieces of 256 keys
        (204_800, 1, 16, 512),
        (409_599, 1, 16, 512),
        (409_600, 1, 16, 1024),
        (51_199, 8, 16, 512),
        (51_200, 8, 16, 1024),  # 50 pieces for each of eight heads
        (113_000, 8, 16, 1024),  # the largest
        (112 * 1024 - 1, 8, 16, 1024),
        # 112 pieces of 1,024 keys are more than the 111 that there is room for
        (112 * 1024, 8, 16, 2048),
        (112 * 2048 - 1, 8, 16, 2048),
        (112 * 2048, 8, 16, 4096),
    ],
)
def test_pieces_at_the_bounds(num_tokens: int, kv_heads: int, page: int, piece: int) -> None:
    """The pool has ten pieces of 1,024 keys: with eight heads there is room for 10, 2 × 400 / 8,
    and one more."""
    assert plan_piece(num_tokens, kv_heads, page, pool_tokens=10_240) == piece


def test_room_for_pieces() -> None:
    assert most_pieces(10_240, 8, invariant=False) == 10 + 100 + 1
    assert most_pieces(10_239, 8, invariant=False) == 9 + 100 + 1
    assert most_pieces(0, 3, invariant=False) == 266 + 1
    assert (most_pieces(5120, 8, invariant=True), most_pieces(5119, 8, invariant=True)) == (10, 9)


def test_tiles_of_two_chunks() -> None:
    """Of 33 queries from 5 on and 17 from 20 on, in tiles of 16: those at 37 and 36 come first."""
    listed = cut_tiles(np.asarray([5, 20]), np.asarray([33, 17]), 16)
    assert [(int(item) >> 16, int(item) & 0xFFFF) for item in listed] == [
        (0, 2),
        (1, 1),
        (0, 1),
        (1, 0),
        (0, 0),
    ]


def test_batches_that_are_captured() -> None:
    eights, sixteens = (
        [8, 16, 24, 32, 40, 48, 56],
        [64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240],
    )
    small = [1, 2, 4, *eights, *sixteens, 256, 288, 320, 352, 384, 416, 448, 480]
    assert plan_graph_batches(511) == (*small, 511) and plan_graph_batches(512) == (*small, 512)
    assert plan_graph_batches(5000) == (*small, *(128 * count for count in range(4, 33)), 5000)
    assert plan_graph_batches(8) == (1, 2, 4, 8) and plan_graph_batches(1) == (1,)
