"""Restarts: never more than allowed within any window, with waits that grow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyre.cluster.engine_pool.restarts import LONGEST_WAIT_S, RestartPolicy, restart_wait_s

POLICIES = st.builds(
    RestartPolicy,
    max_restarts=st.integers(0, 6),
    window_s=st.sampled_from([5.0, 60.0, float("inf")]),
    first_wait_s=st.sampled_from([0.0, 0.5, 4.0]),
)


@given(POLICIES, st.lists(st.floats(0.0, 30.0), max_size=40))
def test_no_window_has_more_than_are_allowed(policy: RestartPolicy, lived_s: list[float]) -> None:
    """An engine that is lost again and again, each time after it lived a while."""
    now_s, began_s = 0.0, []
    for life_s in lived_s:
        now_s += life_s
        wait_s = restart_wait_s(began_s, now_s, policy)
        if wait_s is None:
            assert sum(now_s - one < policy.window_s for one in began_s) >= policy.max_restarts
            continue
        assert 0.0 <= wait_s <= LONGEST_WAIT_S
        now_s += wait_s
        began_s.append(now_s)
    for first, begin_s in enumerate(began_s):
        within = [one for one in began_s[first:] if one - begin_s < policy.window_s]
        assert len(within) <= policy.max_restarts


def test_waits_double_and_are_forgotten_after_the_window() -> None:
    policy = RestartPolicy(max_restarts=5, window_s=600.0, first_wait_s=1.0)
    assert restart_wait_s([], 0.0, policy) == 0.0
    assert [restart_wait_s([0.0] * n, 1.0, policy) for n in (1, 2, 3, 4)] == [1.0, 2.0, 4.0, 8.0]
    assert restart_wait_s([0.0] * 5, 1.0, policy) is None
    assert restart_wait_s([0.0] * 5, 600.0, policy) == 0.0
    assert (
        restart_wait_s([0.0] * 99, 1.0, RestartPolicy(max_restarts=100, first_wait_s=1.0)) == 60.0
    )
