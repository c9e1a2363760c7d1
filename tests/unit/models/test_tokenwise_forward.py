"""The decoder token by token, over ranks: the decoder's own numbers within rounding, the same bits
however ranks hold the residual stream and whatever else is in the batch; and the sums in rank order
behind it."""

from __future__ import annotations

import pytest
import torch

from gyre.models.layers.tensor_parallel import ReplicatedRows, SequenceParallel
from invariant_cases import SPECS, passes, summed
from rank_pool import RankPool


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [4, 12])
def test_parts_are_added_in_rank_order(ranks: RankPool, rows: int, dtype: str) -> None:
    """In float32 and rounded once, wherever a row lies; other orders have other bits."""
    found = ranks.run(summed, rows, dtype)
    parts = found[0]["parts"].float()
    expected_TE = (((parts[0] + parts[1]) + parts[2]) + parts[3]).to(getattr(torch, dtype))
    for of_rank in found:
        assert torch.equal(of_rank["replicated"], expected_TE)
        assert torch.equal(of_rank["sequence"], expected_TE)
    if dtype == "float32":
        backward_TE = ((parts[3] + parts[2]) + parts[1]) + parts[0]
        assert not torch.equal(backward_TE, expected_TE)


def test_a_sum_of_two_commutes(pair: RankPool) -> None:
    for dtype in ("float32", "bfloat16"):
        for of_rank in pair.run(summed, 6, dtype):
            expected_TE = of_rank["parts"].float().sum(0).to(getattr(torch, dtype))
            assert torch.equal(of_rank["replicated"], expected_TE)
            assert torch.equal(of_rank["sequence"], expected_TE)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", SPECS)
def test_hidden_states_are_the_decoders_and_do_not_depend_on_company(
    request: pytest.FixtureRequest, which: str, size: int
) -> None:
    pool = request.getfixturevalue({2: "pair", 4: "ranks"}[size])
    found = [
        pool.run(passes, which, lengths, kind)
        for lengths in ([5, 1, 6], [6], [1, 6, 2, 6, 1])
        for kind in (ReplicatedRows, SequenceParallel)
    ]
    hidden, logits, plain = found[0][0]
    for number, results in enumerate(found):
        for hidden_LE, logits_LV, plain_LE in results:
            assert torch.equal(hidden_LE, hidden) and torch.equal(logits_LV, logits), number
            assert torch.allclose(hidden_LE, plain_LE, atol=1e-4)
    assert plain.abs().max() > 0.5 and logits.shape == (6, SPECS[which].vocab_size)
