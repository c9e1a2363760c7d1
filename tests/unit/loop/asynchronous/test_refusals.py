"""What cannot run while the policy trains is refused by name."""

from __future__ import annotations

import pytest

from gyre.loop.config import RolloutConfig, why_not_asynchronous

FITS = {
    "separate_weights": True,
    "needs_rollouts": True,
    "batch_invariant": False,
    "restarts_engine": False,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"separate_weights": False}, "cluster.kind = 'pod'"),
        ({"needs_rollouts": False}, "trains on given data"),
        ({"batch_invariant": True}, "engine.batch_invariant"),
        ({"restarts_engine": True}, "memory.leave.engine"),
    ],
)
def test_each_reason_has_its_words_and_none_concerns_the_synchronous_order(change, says):
    ahead = RolloutConfig(max_staleness=3)
    reason = why_not_asynchronous(ahead, **(FITS | change))
    assert reason is not None and reason.startswith("rollout.max_staleness = 3") and says in reason
    assert why_not_asynchronous(RolloutConfig(), **(FITS | change)) is None
    assert why_not_asynchronous(ahead, **FITS) is None


@pytest.mark.parametrize(
    ("bound", "max_tokens", "cap", "lead"),
    [
        (0, 128, 0, 0),
        (0, 128, 32, 0),
        (1, 128, 0, 1),
        (4, 128, 0, 4),
        (4, 128, 32, 1),
        (5, 128, 64, 4),
    ],
)
def test_the_lead_follows_from_the_bound_and_the_carries(bound, max_tokens, cap, lead):
    rollout = RolloutConfig(
        max_staleness=bound, max_tokens=max_tokens, max_tokens_per_iteration=cap
    )
    assert rollout.lead == lead
