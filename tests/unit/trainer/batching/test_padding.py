"""Micro-batches whose tokens divide over tensor ranks: padding is behind the sequences, and is no
sequence's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.records import TrainSequence
from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.trainer.batching.microbatch import MicroBatch, blank_chunk, build_chunk
from trainer_cases import make_batch

CPU = torch.device("cpu")
SEQUENCES = make_batch(8, seed=0).sequences


def chunk_of(sequences: Sequence[TrainSequence], **settings: Any) -> MicroBatch:
    members = range(len(sequences))
    return build_chunk(sequences, members, pairwise=False, vocab_size=50, device=CPU, **settings)


@settings(max_examples=30)
@given(chosen=st.lists(st.sampled_from(SEQUENCES), min_size=1), ranks=st.sampled_from([2, 3, 4, 8]))
def test_padding_follows_the_sequences_and_changes_nothing_of_them(chosen, ranks) -> None:
    plain, padded = chunk_of(chosen), chunk_of(chosen, tensor_ranks=ranks)
    count, layout = plain.layout.num_tokens, padded.layout
    assert count == sum(len(sequence.tokens) for sequence in chosen)
    assert len(padded.tokens_T) == layout.num_tokens == count + layout.num_padding
    assert layout.num_tokens % ranks == 0 and 0 <= layout.num_padding < ranks
    assert layout.sequence_lengths == plain.layout.lengths == plain.layout.sequence_lengths
    assert torch.equal(padded.tokens_T[:count], plain.tokens_T)
    assert torch.equal(layout.positions_T[:count], plain.layout.positions_T)
    for name in ("rows_N", "targets_N", "last_row_S", "target_counts_S", "temperature_N"):
        assert torch.equal(getattr(padded, name), getattr(plain, name)), name


@pytest.mark.parametrize("window", [None, 3])
def test_padding_sees_no_sequence_and_no_sequence_sees_it(window: int | None) -> None:
    lengths, generator = [5, 1, 3], torch.Generator().manual_seed(0)
    padded = PackedLayout.of(lengths, CPU, multiple_of=4)
    assert padded.lengths == (5, 1, 3, 3) and padded.num_padding == 3
    q_THD, k_TKD, v_TKD = (
        torch.randn(12, heads, 32, generator=generator).requires_grad_() for heads in (2, 1, 1)
    )
    found_THD = varlen_attention(q_THD, k_TKD, v_TKD, padded, window)
    found_THD[:9].square().sum().backward()
    plain = (x[:9].detach().requires_grad_() for x in (q_THD, k_TKD, v_TKD))
    inputs = tuple(plain)
    expected_THD = varlen_attention(*inputs, PackedLayout.of(lengths, CPU), window)
    expected_THD.square().sum().backward()
    torch.testing.assert_close(found_THD[:9], expected_THD)
    for x, own in zip((q_THD, k_TKD, v_TKD), inputs, strict=True):
        assert x.grad is not None and own.grad is not None
        assert not x.grad[9:].any()
        torch.testing.assert_close(x.grad[:9], own.grad)


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 2), (2, 2), (4, 4)])
def test_a_blank_micro_batch_divides(ranks: int, tokens: int) -> None:
    chunk = blank_chunk(CPU, tensor_ranks=ranks)
    assert len(chunk.tokens_T) == tokens and len(chunk.targets_N) == 1 and not chunk.members
