"""Fresh weights: any run of a tensor, in any order, is a slice of the same draw."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.models.decoder import Decoder
from gyre.models.init import BLOCK, FreshWeights, deviation, init_dummies
from trainer_cases import SPEC

WIDE = replace(SPEC, vocab_size=70_001, hidden_size=128)  # an embedding of two blocks and a bit
NAME = "embed.weight"


@pytest.fixture(scope="module")
def whole_N() -> torch.Tensor:
    out_N = torch.empty(WIDE.vocab_size * WIDE.hidden_size)
    FreshWeights(WIDE, 7).read(NAME, 0, len(out_N), out_N)
    return out_N


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_runs_are_slices_of_one_draw(whole_N, data):
    near = st.sampled_from([0, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, len(whole_N) - 1])
    start = data.draw(near | st.integers(0, len(whole_N) - 1))
    stop = data.draw(st.integers(start + 1, min(len(whole_N), start + 70_000)))
    out_N = torch.empty(stop - start)
    FreshWeights(WIDE, 7).read(NAME, start, stop, out_N)
    assert torch.equal(out_N, whole_N[start:stop])


def test_blocks_are_draws_of_their_own(whole_N):
    count = min(BLOCK, len(whole_N) - BLOCK)
    assert not torch.equal(whole_N[:count], whole_N[BLOCK : BLOCK + count])
    correlation = float(
        torch.corrcoef(torch.stack([whole_N[:count], whole_N[BLOCK : BLOCK + count]]))[0, 1]
    )
    assert abs(correlation) < 0.005
    for block_N in whole_N.split(BLOCK):
        assert float(block_N.std()) == pytest.approx(
            deviation(WIDE, NAME, WIDE.hidden_size), rel=0.01
        )


def test_threads_that_draw_have_no_teams_of_their_own():
    kept = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        torch.ones(BLOCK).mul_(2.0)  # this thread's own team
        before = len(os.listdir("/proc/self/task"))
        drawn = FreshWeights(WIDE, 7).blocks(NAME, range(3))
        next(drawn)
        assert 0 < len(os.listdir("/proc/self/task")) - before <= 4
        assert len(list(drawn)) == 2
    finally:
        torch.set_num_threads(kept)


def test_dummies_are_like_fresh_weights():
    decoder = Decoder(
        replace(SPEC, hidden_size=128, mlp_size=256),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
    )
    init_dummies(decoder)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(
                parameter, torch.full_like(parameter, float(name.endswith("norm.weight")))
            )
        else:
            expected = deviation(decoder.spec, name, parameter.shape[1])
            assert float(parameter.detach().float().std()) == pytest.approx(expected, rel=0.1), name
