"""Packed attention and its layout: against the oracle forward and backward, and never across
sequences."""

# T packed tokens, H heads, K kv heads, D head dim

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference_kernels
from gyre.kernels.attention import PackedLayout, query_blocks, varlen_attention
from gyre.kernels.layout import KEEP_TOKENS, QUERY_BLOCK, SHORTEST_SHARE, padded_slots, plan_buckets

CPU = torch.device("cpu")
some_lengths = st.lists(st.integers(0, 40), min_size=0, max_size=9)


def make_qkv(
    tokens: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, heads, head_dim, generator=generator, dtype=dtype).requires_grad_()
        for heads in (kv_heads * group, kv_heads, kv_heads)
    ]


def check_against_oracle(
    lengths: list[int], kv_heads: int, group: int, head_dim: int, seed: int
) -> None:
    qkv = make_qkv(sum(lengths), kv_heads, group, head_dim, seed=seed)
    got = varlen_attention(*qkv, PackedLayout.of(lengths, CPU))
    want = reference_kernels.varlen_attention(*qkv, lengths)
    torch.testing.assert_close(got, want)
    if got.numel():
        upstream = torch.randn(
            got.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        got_grads, want_grads = (torch.autograd.grad(out, qkv, upstream) for out in (got, want))
        torch.testing.assert_close(got_grads, want_grads)


@settings(max_examples=40, deadline=None)
@given(
    lengths=some_lengths,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    half=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_attention_is_the_oracle(
    lengths: list[int], kv_heads: int, group: int, half: int, seed: int
) -> None:
    check_against_oracle(lengths, kv_heads, group, 2 * half, seed)


@pytest.mark.parametrize(
    "lengths",
    [
        [QUERY_BLOCK, QUERY_BLOCK + 1],  # one block and two, sharing a bucket
        [KEEP_TOKENS, KEEP_TOKENS],  # probabilities kept, several blocks
        [2 * KEEP_TOKENS + 3, 5, KEEP_TOKENS + 1],  # probabilities computed again, uneven blocks
    ],
)
def test_long_sequences_are_the_oracle(lengths: list[int]) -> None:
    check_against_oracle(lengths, kv_heads=2, group=2, head_dim=4, seed=7)


def test_attention_gradcheck() -> None:
    layout = PackedLayout.of([3, 0, 1, 4], CPU)
    qkv = make_qkv(8, 1, 2, 2, seed=3)
    assert torch.autograd.gradcheck(lambda q, k, v: varlen_attention(q, k, v, layout), qkv)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=6),
    seed=st.integers(0, 1000),
    poisoned=st.integers(0),
)
def test_nothing_crosses_sequences_even_poison(
    lengths: list[int], seed: int, poisoned: int
) -> None:
    """NaN in one sequence's keys, values and upstream gradient reaches no other's output or
    gradient."""
    victim = poisoned % len(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    inside_T = torch.zeros(sum(lengths), dtype=torch.bool)
    inside_T[starts[victim] : starts[victim + 1]] = True
    layout = PackedLayout.of(lengths, CPU)
    clean = make_qkv(sum(lengths), 1, 2, 4, seed=seed)
    poison = [
        x.detach().masked_fill(inside_T[:, None, None], float("nan")).requires_grad_()
        for x in clean
    ]
    results = []
    for qkv in (clean, poison):
        out = varlen_attention(*qkv, layout)
        upstream = torch.ones_like(out)
        if qkv is poison:
            upstream[inside_T] = float("nan")
        results.append([out, *torch.autograd.grad(out, qkv, upstream)])
    for want, got in zip(*results, strict=True):
        assert torch.equal(got[~inside_T], want[~inside_T])


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_the_future_is_not_seen(lengths: list[int], seed: int) -> None:
    """Changing the last token of each sequence changes no earlier output."""
    layout = PackedLayout.of(lengths, CPU)
    last_T = (layout.offsets[1:] - 1).long()
    q, k, v = (x.detach() for x in make_qkv(sum(lengths), 2, 1, 4, seed=seed))
    before = varlen_attention(q, k, v, layout)
    k[last_T], v[last_T] = 9.0, -9.0
    after = varlen_attention(q, k, v, layout)
    earlier_T = torch.ones(sum(lengths), dtype=torch.bool)
    earlier_T[last_T] = False
    assert torch.equal(before[earlier_T], after[earlier_T])


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 600), max_size=40))
def test_buckets_hold_every_sequence_once_and_waste_little(lengths: list[int]) -> None:
    buckets = plan_buckets(lengths)
    assert sorted(i for members in buckets for i in members) == [
        i for i, n in enumerate(lengths) if n
    ]
    for members in buckets:
        longest = lengths[members[0]]
        assert all(SHORTEST_SHARE * longest <= lengths[i] <= longest for i in members)


@settings(max_examples=40, deadline=None)
@given(lengths=some_lengths)
def test_slots_hold_each_token_once_and_padding_stays_home(lengths: list[int]) -> None:
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    token_of_slot, slot_of_token = padded_slots(lengths, starts, plan_buckets(lengths))
    assert torch.equal(token_of_slot[slot_of_token], torch.arange(sum(lengths)))
    layout = PackedLayout.of(lengths, CPU)
    assert layout.num_tokens == sum(lengths) == len(layout.positions_T)
    assert layout.positions_T.tolist() == [t for n in lengths for t in range(n)]
    slot = 0
    owner_T = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)], dtype=torch.int64)
    for batch, padded in layout.buckets:
        for _ in range(batch):
            assert len(set(owner_T[token_of_slot[slot : slot + padded]].tolist())) == 1
            slot += padded
    assert slot == len(token_of_slot)


def test_equal_lengths_need_no_gathering() -> None:
    layout = PackedLayout.of([160] * 300, CPU)
    assert layout.token_of_slot_P is None and len(layout.buckets) > 1


@given(length=st.integers(1, 5000))
def test_query_blocks_cover_a_sequence_in_order(length: int) -> None:
    blocks = list(query_blocks(length))
    assert [t for start, stop in blocks for t in (start, stop)] == sorted(
        t for block in blocks for t in block
    )
    assert blocks[0][0] == 0 and blocks[-1][1] == length
    assert all(a[1] == b[0] for a, b in itertools.pairwise(blocks))
    assert all(0 < stop - start <= QUERY_BLOCK for start, stop in blocks)


def test_bfloat16_stays_within_its_rounding_of_float64() -> None:
    lengths = [37, 160, 90, 160]
    narrow = [
        x.detach().bfloat16().requires_grad_() for x in make_qkv(sum(lengths), 2, 2, 64, seed=5)
    ]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    got = varlen_attention(*narrow, PackedLayout.of(lengths, CPU))
    want = reference_kernels.varlen_attention(*wide, lengths)
    got_grads, want_grads = (
        torch.autograd.grad(got.sum(), narrow),
        torch.autograd.grad(want.sum(), wide),
    )
    for a, b in zip([got, *got_grads], [want, *want_grads], strict=True):
        assert (a.double() - b).norm() < 0.02 * b.norm()
