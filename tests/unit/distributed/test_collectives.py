"""Collectives of a group, over real processes: results, bytes that are counted, and the bare path of
a graph capture."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collective_cases import every_collective, expected_of_all, numbers_of, rows_of, sent_rows
from gyre.distributed.process_group import RankGroup, alone
from rank_pool import RankPool

LARGE = 1 << 20  # numbers; more than what a socket holds of a send that nobody receives
COUNTS = st.lists(
    st.lists(st.integers(0, 5), min_size=2, max_size=2), min_size=2, max_size=2
)  # rows that rank i sends to rank j


@settings(max_examples=25)
@given(counts=COUNTS, width=st.integers(1, 3))
def check_rows(pair: RankPool, counts: list[list[int]], width: int) -> None:
    for rank, found in enumerate(pair.run(sent_rows, counts, width)):
        expected = [
            row for other in (0, 1) for row in rows_of(other, rank, counts[other][rank], width)
        ]
        assert found["rows"] == torch.tensor(expected, dtype=torch.float64).tolist()
        assert found["sent"] == {"all_to_all": counts[rank][1 - rank] * width * 8}


def test_uneven_rows_reach_every_rank(pair: RankPool) -> None:
    check_rows(pair)


def crossed(group: RankGroup, *, late_s: float = 0.0) -> dict[str, Any]:
    """Both ranks send before they receive."""
    group.traffic.take()
    other, out_N = 1 - group.rank, torch.zeros(LARGE)
    own_N = torch.arange(float(LARGE)) + group.rank
    time.sleep(late_s * group.rank)
    wait = group.begin_point_to_point({other: own_N}, {other: out_N})
    wait()
    nothing = group.begin_point_to_point({}, {})
    nothing()
    return {
        "received": torch.equal(out_N, torch.arange(float(LARGE)) + other),
        "sent": dict(group.traffic.take().bytes_by_kind),
    }


def test_two_ranks_send_to_each_other(pair: RankPool) -> None:
    expected = {"received": True, "sent": {"send": LARGE * 4}}
    assert pair.run(crossed) == [expected] * 2


def test_a_late_rank_is_waited_for(pair: RankPool) -> None:
    """Longer than a slice of the wait, which would close Gloo's connection."""
    assert [found["received"] for found in pair.run(crossed, late_s=0.5)] == [True] * 2
    assert [found["received"] for found in pair.run(crossed)] == [True] * 2


def bare(group: RankGroup) -> dict[str, Any]:
    group.traffic.take()
    own_N = numbers_of(group)
    plain, counted = every_collective(group, own_N), group.traffic.take()
    with group.capturing() as captured:
        inside = every_collective(group, own_N)
    between = group.traffic.take()
    group.traffic.replayed(captured)
    group.traffic.replayed(captured)
    after = every_collective(group, own_N)
    return {
        "plain": plain,
        "inside": inside,
        "after": after,
        "counted": dict(counted.bytes_by_kind),
        "waited": counted.wait_s > 0,
        "between": (dict(between.bytes_by_kind), between.wait_s),
        "twice": dict(group.traffic.take().bytes_by_kind),
    }


def test_the_bare_path_gives_the_same_and_counts_by_replay(pair: RankPool) -> None:
    for rank, found in enumerate(pair.run(bare)):
        expected = expected_of_all(rank)
        assert found["inside"] == found["plain"] == found["after"] == expected
        assert found["waited"] and found["between"] == ({}, 0.0)
        kinds = {"all_reduce": 2 * 16, "all_gather": 16, "reduce_scatter": 8, "send": 16}
        assert found["counted"] == {**kinds, "all_to_all": (3 if rank == 0 else 2) * 4}
        once = found["counted"]
        after = {kind: 3 * sent for kind, sent in once.items()}  # two replays, and once after them
        assert found["twice"] == after


def test_one_process_keeps_what_it_sends() -> None:
    group, x_TE = alone(), torch.arange(6.0).view(3, 2)
    assert group.exchange_counts([3]) == [3]
    assert torch.equal(group.all_to_all(x_TE, [3], [3]), x_TE)
    group.begin_point_to_point({}, {})()
    assert not group.traffic.take().bytes_by_kind


def waits_for_the_dead(group: RankGroup) -> str:
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with group.guard("step 1"):
        group.begin_point_to_point({}, {1: torch.empty(4)})()
    return "received"


@pytest.mark.slow
def test_a_rank_that_dies_ends_a_receive() -> None:
    pool = RankPool(2)
    try:
        found = pool.attempt(waits_for_the_dead)
    finally:
        pool.close()
    failed, (kind, text) = found[0]
    assert failed and kind == "RankError" and "rank 1 said nothing" in text
