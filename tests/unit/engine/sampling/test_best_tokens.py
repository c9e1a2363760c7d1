"""Raw log-probs and the best tokens of a row, against sorting and float64."""

# N rows, V vocabulary, K best tokens, T tokens, E hidden size

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gyre.engine.sampling.logprobs import find_best, order_key, raw_logprob, score_targets

LEAST = 2.0**-149  # the smallest float32 above zero
VALUES = [
    -torch.inf,
    -3e38,
    -3.0,
    -1.0 - 2**-23,
    -1.0,
    -LEAST,
    0.0,
    LEAST,
    0.5,
    1.0,
    1.0 + 2**-23,
    1.5,
    2.0,
    3e38,
]


def logits(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 4


def test_keys_have_the_order_of_their_values_and_both_zeros_are_one() -> None:
    keys = order_key(torch.tensor([*VALUES, torch.inf]))
    assert keys.dtype == torch.int32 and (keys.diff() > 0).all()
    assert len(order_key(torch.tensor([0.0, -0.0])).unique()) == 1


def test_a_raw_logprob_is_that_of_the_plain_softmax() -> None:
    logits_NV, tokens_N = logits(3, 7), torch.tensor([6, 0, 3])
    expected = torch.log_softmax(logits_NV.double(), dim=1)[torch.arange(3), tokens_N]
    torch.testing.assert_close(
        raw_logprob(logits_NV, tokens_N).double(), expected, atol=1e-6, rtol=0
    )


def expected_best(logits_NV: Tensor, count: int) -> tuple[np.ndarray, Tensor]:
    """Larger values first, equal ones by id."""
    ids_NK = np.asarray(
        [
            sorted(range(len(row)), key=lambda at: (-row[at], at))[:count]
            for row in logits_NV.tolist()
        ]
    )
    logprobs_NV = torch.log_softmax(logits_NV.double(), dim=1)
    return ids_NK, logprobs_NV.gather(1, torch.from_numpy(ids_NK))


@pytest.mark.parametrize("rows_at_once", [1, 2, 5, 99])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_best_tokens_stand_in_order_with_their_logprobs(rows_at_once: int, count: int) -> None:
    logits_NV = logits(5, 9)
    # with equal ones
    logits_NV[1] = torch.tensor([2.0, 3.0, 2.0, -1.0, 3.0, 0.0, -0.0, 2.0, -torch.inf])
    logits_NV[2] = -logits_NV[1].abs()
    logits_NV[3] = 1.0
    found = find_best(logits_NV, count, rows_at_once=rows_at_once)
    ids_NK, logprobs_NK = expected_best(logits_NV, count)
    np.testing.assert_array_equal(found.ids_NK.numpy(), ids_NK)
    torch.testing.assert_close(found.logprobs_NK.double(), logprobs_NK, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("rows_at_once", [1, 3, 8])
@pytest.mark.parametrize("best", [0, 1, 3])
def test_targets_are_scored_from_the_hidden_state_before_them(best: int, rows_at_once: int) -> None:
    """A row: the target's log-prob, the ids of the best tokens, their log-probs. Logits are made
    for few rows only."""
    hidden_TE, weight_EV = logits(6, 4), logits(4, 8)
    places_N, targets_N = torch.tensor([5, 0, 2, 2]), torch.tensor([7, 1, 0, 3])
    sizes: list[int] = []

    def project(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return hidden @ weight_EV

    scored = score_targets(
        hidden_TE, places_N, targets_N, project, best=best, rows_at_once=rows_at_once
    )
    assert scored.dtype == torch.float64 and scored.shape == (4, 1 + 2 * best)
    logits_NV = hidden_TE[places_N] @ weight_EV
    own_N = torch.log_softmax(logits_NV.double(), dim=1)[torch.arange(4), targets_N]
    torch.testing.assert_close(scored[:, 0], own_N, atol=1e-4, rtol=1e-5)
    ids_NK, logprobs_NK = (
        expected_best(logits_NV, best) if best else (np.zeros((4, 0)), torch.zeros(4, 0))
    )
    np.testing.assert_array_equal(scored[:, 1 : 1 + best].numpy(), ids_NK)
    torch.testing.assert_close(scored[:, 1 + best :], logprobs_NK.double(), atol=1e-4, rtol=1e-5)
    assert max(sizes) <= rows_at_once and sum(sizes) == 4
