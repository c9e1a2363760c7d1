"""A follower whose process has other work: it changes phases by its own ledger, with rank 0 or not
at all; over real processes."""

from __future__ import annotations

import uuid

import pytest

from beside_cases import phases_apart
from rank_pool import RankPool

TIMEOUT_S = 3.0


@pytest.fixture
def mortal():
    """Ranks that a test may break."""
    pool = RankPool(2)
    yield pool
    pool.close()


def told(pool: RankPool, how: str, timeout_s: float = 20.0) -> list[tuple[bool, tuple[str, str]]]:
    return pool.attempt(phases_apart, how, pool.port, uuid.uuid4().hex, timeout_s)


def test_ranks_that_change_alike_go_on(pair: RankPool) -> None:
    assert told(pair, "alike") == [(False, ("", "")), (False, ("", ""))]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("elsewhere", "it comes to the move of engine.kv to tier 'host', and rank 0 to the move of "
         "engine.kv to tier 'none'"),
        pytest.param(
            "more",
            "it comes to phase train of step 0, and rank 0 to the move of engine.kv to tier 'none'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "fewer",
            "it comes to the move of engine.kv to tier 'none', and rank 0 to phase train of step 0",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_ledger_that_decides_otherwise_ends_the_engine_by_name(
    mortal: RankPool, how: str, words: str
) -> None:
    """The first rank hears of it by the failure detector, in its move or at its next step."""
    leader, follower = told(mortal, how)
    assert follower == (False, (f"rank 1 of the engine plays no more: {words}", ""))
    assert "rank 1 failed: RankError" in leader[1][1] and words in leader[1][1]


@pytest.mark.slow
def test_a_first_rank_that_does_not_come_is_named_in_time(mortal: RankPool) -> None:
    _, follower = told(mortal, "late", TIMEOUT_S)
    assert "rank 0 did not come to the move of engine.kv to tier 'none' in 3 s" in follower[1][0]


def test_a_first_rank_that_is_gone_is_named(mortal: RankPool) -> None:
    leader, follower = told(mortal, "gone")
    assert leader[0] and "rank 0" in follower[1][0], follower
