"""When an engine gets no new requests, and how slowly it returns: by property."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyre.cluster.engine_pool.ejection import (
    LEAST_SHARE,
    EjectionPolicy,
    Standing,
    eject,
    find_share,
    observe,
    return_s,
)

POLICY = EjectionPolicy(still_s=10.0, return_s=30.0)
# seconds to the next look, and how long the engine has stood still then
LOOKS = st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 30.0)), max_size=30)


NEW = Standing()


def play(looks, standing=NEW):
    """Yield the time, and the standing after each look."""
    now_s = 0.0
    for passed_s, still_s in looks:
        now_s += passed_s
        before = standing
        standing = observe(standing, still_s=still_s, now_s=now_s, policy=POLICY)
        yield now_s, still_s, before, standing


@given(LOOKS)
def test_one_that_stands_still_has_no_share_and_any_other_has_one(looks) -> None:
    for now_s, still_s, _, standing in play(looks):
        share = find_share(standing, now_s, POLICY)
        assert (share == 0.0) == (still_s >= POLICY.still_s) == (standing.state == "ejected")
        assert share == 0.0 or LEAST_SHARE <= share <= 1.0


@given(LOOKS)
def test_after_an_ejection_the_share_grows_from_the_least(looks) -> None:
    for now_s, _, before, standing in play(looks):
        if before.state == "ejected" != standing.state:
            assert find_share(standing, now_s, POLICY) == LEAST_SHARE
            shares = [find_share(standing, now_s + passed_s, POLICY) for passed_s in range(300)]
            assert shares == sorted(shares) and shares[-1] == 1.0


@given(LOOKS)
def test_each_ejection_is_one_strike_and_strikes_lengthen_the_return(looks) -> None:
    ejections = 0
    for _, _, before, standing in play(looks):
        if standing.state == "ejected" != before.state:
            assert standing.ejections == before.ejections + 1
        else:
            assert standing.ejections in (before.ejections, 0)
        ejections = max(ejections, standing.ejections)
        assert POLICY.return_s <= return_s(standing, POLICY) <= 8 * POLICY.return_s


def test_an_engine_that_stays_well_is_whole_and_its_strikes_are_forgotten() -> None:
    once = eject(Standing(), 5.0)
    assert eject(once, 9.0) == once  # lost while it was ejected: one strike
    looks = [(0.0, 0.0), (29.0, 0.0), (1.0, 0.0), (29.0, 0.0), (1.0, 0.0)]
    found = [standing for *_, standing in play([(10.0, 0.0), *looks[1:]], once)]
    assert [one.state for one in found] == ["returning", "returning", "active", "active", "active"]
    assert [one.ejections for one in found] == [1, 1, 1, 1, 0]
    twice = eject(eject(once, 6.0), 7.0)
    again = eject(observe(twice, still_s=0.0, now_s=8.0, policy=POLICY), 9.0)
    assert (again.ejections, return_s(again, POLICY)) == (2, 60.0)
