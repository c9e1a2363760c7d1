"""A rank that raises, dies or hangs ends the step on all ranks, soon, with an error that names
it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from gyre.distributed.failure_detector import FailureDetector
from gyre.distributed.kv_store import LocalKVStore
from rank_pool import RankPool
from zero_cases import broken_step, steps_again, warmed

TIMEOUT_S = 120.0  # of a collective
CAUSE = "rank 1 failed: ValueError: a fault of its own"
SOON_S = 20.0  # far below it, and far above the second or two that it takes on an idle machine


@contextlib.contextmanager
def entered_detectors(size: int) -> Iterator[tuple[list[FailureDetector], threading.Event]]:
    """Detectors of ranks that are in one operation, and what their abort sets."""
    store, aborted = LocalKVStore(), threading.Event()
    detectors = [
        FailureDetector(store, rank=rank, size=size, grace_s=SOON_S, abort=aborted.set)
        for rank in range(size)
    ]
    try:
        for detector in detectors:
            detector.enter()
        yield detectors, aborted
    finally:
        for detector in detectors:
            detector.close()


@pytest.fixture
def ranks():
    pool = RankPool(3, timeout_s=TIMEOUT_S)
    yield pool
    pool.close()


def test_an_aborted_rank_names_the_rank_at_fault_and_not_the_first_to_report():
    with entered_detectors(3) as (detectors, aborted):
        detectors[2].report("collective: another rank failed", own=False)
        detectors[2].leave()
        detectors[1].report("ValueError: a fault of its own", own=True)
        detectors[1].leave()
        assert aborted.wait(SOON_S), "rank 0 was left in its collective"
        assert detectors[0].broken == detectors[0].blame() == CAUSE
        detectors[0].break_off(detectors[0].blame())
        detectors[1].enter()
        assert detectors[1].broken == CAUSE, "the others refuse the next step for that reason"


def test_an_aborted_rank_names_the_rank_at_fault_when_that_reports_late():
    with entered_detectors(3) as (detectors, aborted):
        detectors[2].report("collective: another rank failed", own=False)
        detectors[2].leave()
        assert aborted.wait(SOON_S), "the others were left in their collective"
        detectors[1].report("ValueError: a fault of its own", own=True)
        detectors[1].leave()
        detectors[0].break_off(detectors[0].blame())
        for detector in detectors:
            detector.enter()
            assert detector.broken == CAUSE, "all refuse the next step for that reason"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_a_rank_that_raises_is_named_on_all(ranks, layout):
    assert ranks.run(warmed) == [6.0, 6.0, 6.0]
    told = ranks.run(broken_step, "all", victim=-1, layout=layout)
    assert all("InputError" in text and "temperature 0" in text for _, text in told)
    assert ranks.run(steps_again) == [1, 1, 1], "what all ranks refuse alike breaks nothing"
    told = ranks.run(broken_step, "raise", victim=1, layout=layout)
    assert told[1][1] == "ValueError: a fault of its own"
    for rank in (0, 2):
        seconds, text = told[rank]
        assert seconds < SOON_S
        assert text.startswith(
            f"RankError: step 1 ended on rank {rank}: rank 1 failed: ValueError: a fault of its own"
        )
    again = ranks.attempt(steps_again)
    assert all(failed and "RankError" in error[0] for failed, error in again), (
        "a broken group does not go on"
    )


def test_a_rank_that_dies_is_named(ranks):
    told = ranks.attempt(broken_step, "die", victim=2, layout="zero1")
    assert told[2] == (True, ("Dead", "the process is gone"))
    for rank in (0, 1):
        seconds, text = told[rank][1]
        assert (
            seconds < SOON_S
            and f"RankError: step 1 ended on rank {rank}: rank 2 said nothing" in text
        )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3", "zero1_tensor2"])
def test_a_rank_that_hangs_is_named(layout):
    pool = RankPool(2, timeout_s=6.0)
    try:
        pool.send(broken_step, "hang", victim=1, layout=layout)
        seconds, text = pool.answer(0)[1]
        assert 6.0 <= seconds < 6.0 + SOON_S and "rank 1 said nothing" in text
    finally:
        pool.close()
