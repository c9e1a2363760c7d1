"""Waits for the device: soon when it is soon, with pauses when it is long, and never without
end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.errors import DeadlineError
from gyre.engine.runners.device_events import NAP_S, SPIN_S, ResultEvent, wait_for
from gyre.engine.scheduler.step import PrefillChunk, Step

QUESTION_S = 2e-6  # what a question and a pause of nothing take


class World:
    """A clock that questions and pauses move on, and an event that happens at a time of it."""

    def __init__(self, happens_s: float) -> None:
        self.now_s, self.happens_s, self.naps_s = 0.0, happens_s, []

    def query(self) -> bool:
        self.now_s += QUESTION_S
        return self.now_s >= self.happens_s

    def nap(self, seconds: float) -> None:
        self.naps_s.append(seconds)
        self.now_s += seconds

    def wait(self, deadline_s: float, describe: Callable[[], str] = lambda: "it") -> None:
        wait_for(self, describe, deadline_s, clock=lambda: self.now_s, nap=self.nap)


@given(happens_s=st.floats(0.0, 0.05))
def test_it_returns_when_the_event_happens_and_little_later(happens_s: float) -> None:
    world = World(happens_s)
    world.wait(1.0)
    late_s = world.now_s - max(happens_s, QUESTION_S)
    assert 0 <= late_s <= (QUESTION_S if happens_s < SPIN_S else NAP_S + 2 * QUESTION_S)
    if happens_s < SPIN_S:
        assert not any(world.naps_s), "no pause while it is young"


@given(deadline_s=st.floats(1e-4, 0.1))
def test_it_ends_at_the_deadline_and_names_what_was_awaited(deadline_s: float) -> None:
    world = World(float("inf"))
    with pytest.raises(
        DeadlineError, match=r"did not finish step 7 within engine\.step_deadline_s"
    ) as caught:
        world.wait(deadline_s, lambda: "step 7")
    assert deadline_s < world.now_s <= deadline_s + NAP_S + 2 * QUESTION_S
    assert "nvidia-smi" in caught.value.hint


def test_what_went_wrong_on_the_device_is_raised_as_it_is() -> None:
    class Broken:
        def query(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        wait_for(Broken(), lambda: "it", 1.0)


def test_a_step_is_named_by_its_work() -> None:
    none = np.empty(0, np.int64)
    step = Step(
        decode_rows=np.arange(3),
        chunks=(PrefillChunk(row=4, start=0, count=30), PrefillChunk(row=5, start=8, count=12)),
        sample_rows=none,
        sample_chunks=none,
        sample_positions=none,
        sample_generations=none,
        restored_rows=none,
        version=0,
        swap_out=None,
        swap_in=None,
        copies=(),
    )
    arrival = ResultEvent(step, 1e-9)
    arrival.wait()  # nothing is marked, nothing waited for
    arrival.event = World(float("inf"))  # type: ignore[assignment]
    with pytest.raises(
        DeadlineError, match="a step of 3 decoding completions and 42 prompt tokens"
    ):
        arrival.wait()
