"""Leases judged by an observer over a store without leases: none ends early, whatever clocks do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyre.distributed.rendezvous.tcp_store import OBSERVE_S, StillLeases

STEP_S = 2 * OBSERVE_S
TTL_S = 10 * STEP_S


def test_a_lease_without_a_sign_of_life_ends_after_its_time() -> None:
    leases, looks = StillLeases(most_step_s=STEP_S), 0
    while not leases.observe({1: TTL_S}, {1: 0}, looks * OBSERVE_S):
        looks += 1
    assert looks == TTL_S / OBSERVE_S


@given(st.lists(st.floats(-1e6, 1e6), max_size=9))
def test_few_looks_end_no_lease_however_far_the_clock_jumps(jumps) -> None:
    """A process that was stopped for an hour, or whose clock jumped, has looked no more often."""
    leases, now_s = StillLeases(most_step_s=STEP_S), 0.0
    assert leases.observe({1: TTL_S}, {1: 3}, now_s) == []
    for jump in jumps:  # fewer than TTL_S / STEP_S
        now_s += jump
        assert leases.observe({1: TTL_S}, {1: 3}, now_s) == []


@given(st.lists(st.tuples(st.floats(-5, 50), st.booleans()), max_size=60))
def test_a_lease_ends_only_when_it_was_seen_still_for_its_time(looks) -> None:
    leases, now_s, counter, still_s = StillLeases(most_step_s=STEP_S), 0.0, 0, 0.0
    leases.observe({1: TTL_S, 2: TTL_S}, {1: 0, 2: 0}, now_s)
    for other, (gap_s, is_alive) in enumerate(looks, 1):
        now_s += gap_s
        counter += is_alive
        still_s = 0.0 if is_alive else still_s + min(max(gap_s, 0.0), STEP_S)
        over = leases.observe({1: TTL_S, 2: TTL_S}, {1: counter, 2: other}, now_s)
        assert (1 in over) == (still_s >= TTL_S) and 2 not in over
