"""Abort, deadline and interrupt, wherever a request is: it is answered once, and no page, slot or
row stays behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine_device import PAGE_TOKENS, FakeDevice, answer, make_core
from gyre.core.records import Request, Sampling, TokenChunk
from gyre.engine.scheduler.sequence import State
from gyre.engine.scheduler.state import SchedulerState
from gyre.engine.scheduler.swap import SwapRates
from shown_settings import show


class Inside:
    """A core on the fake device, with everything that came out of it."""

    def __init__(
        self,
        *,
        depth: int = 0,
        num_pages: int = 9,
        max_running: int = 3,
        budget: int = 8,
        num_slots: int = 0,
    ):
        self.device, self.now = FakeDevice(), 0.0
        self.state = SchedulerState(
            max_running=max_running,
            num_pages=num_pages,
            page_tokens=PAGE_TOKENS,
            prefix_cache=True,
            emit=lambda kind, **fields: None,
            num_slots=num_slots,
            rates=SwapRates(page_bytes=1, swap_bytes_per_s=2.0, prefill_tokens_per_s=1e-9),
        )
        self.core = make_core(self.state, self.device, budget=budget, depth=depth)
        self.deadlines: dict[str, float] = {}
        self.requests: dict[str, Request] = {}
        self.got: dict[tuple[str, int], list[int]] = {}
        self.finishes: dict[tuple[str, int], str] = {}

    def submit(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        deadline_at: float | None = None,
        **fields,
    ) -> None:
        sampling = Sampling(max_tokens=max_tokens, n=fields.pop("n", 1), ignore_eos=True)
        self.requests[name] = Request(
            request_id=name,
            tokens=np.asarray(prompt, np.int32),
            sampling=sampling,
            chunk_tokens=0,
            **fields,
        )
        if deadline_at is not None:
            self.deadlines[name] = deadline_at
        self.take(self.core.add(self.requests[name]))

    def expire(self) -> None:
        """End who is past his deadline."""
        late = [name for name, deadline_at in self.deadlines.items() if self.now >= deadline_at]
        for name in late:
            del self.deadlines[name]
        self.take(self.core.expire(late))

    def take(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            key = (chunk.request_id, chunk.index)
            assert key not in self.finishes, "answered twice"
            self.got.setdefault(key, []).extend(chunk.tokens.tolist())
            whole = answer(self.requests[chunk.request_id])
            assert self.got[key] == whole[: len(self.got[key])]
            if chunk.finish:
                self.finishes[key] = chunk.finish
        self.state.check()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.take(self.core.step())

    def states(self, name: str) -> set[State]:
        return {sequence.state for sequence in self.state.requests.get(name, ())}

    def until(self, name: str, state: State) -> None:
        for _ in range(200):
            if state in self.states(name):
                return
            self.step()
        raise AssertionError(f"{name} never came to be {state}")

    def finish(self) -> None:
        """Everyone is answered in the end, and everything is free."""
        for _ in range(1000):
            if self.core.is_idle:
                break
            self.step()
        due = {
            (name, index)
            for name, request in self.requests.items()
            for index in range(request.sampling.n)
        }
        assert set(self.finishes) == due
        self.state.pages.drop_cached()
        assert self.state.pages.num_available == self.state.pages.num_pages
        assert self.state.slots.num_free == self.state.slots.num_slots
        assert self.state.rows.num_free == self.state.rows.max_running


def bring(inside: Inside, state: str) -> str:
    """Bring a request into a state, among others. Returns its name."""
    inside.submit("first", [0] * 6, 24)
    if state == "queued":
        inside.submit("a", [1] * 6, 8)
        inside.submit("b", [1] * 6, 8)
        inside.submit("c", [2] * 6, 8)
        inside.step()
        assert inside.states("c") == {State.WAITING}
        return "c"
    if state in ("prefilling", "followers"):
        inside.submit("x", [1] * 20, 4, n=3 if state == "followers" else 1)
        inside.until("x", State.PREFILLING)
        assert (State.WAITING in inside.states("x")) == (state == "followers")
        return "x"
    if state == "decoding":
        inside.submit("x", [1] * 5, 9)
        inside.until("x", State.DECODING)
        inside.step(3)
        return "x"
    if state == "forked":
        inside.submit("x", [1] * 5, 9, n=4)
        inside.until("x", State.DECODING)
        return "x"
    inside.submit("x", [1] * 6, 24)  # two of them outgrow the pages
    inside.until("x", State.SWAPPED if state == "swapped" else State.PREEMPTED)
    return "x"


STATES = ["queued", "prefilling", "followers", "decoding", "forked", "preempted", "swapped"]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state(state: str, depth: int) -> None:
    inside = Inside(depth=depth, num_slots=40 if state == "swapped" else 0)
    name = bring(inside, state)
    inside.take(inside.core.abort([name], "test"))
    assert name not in inside.state.requests
    ended = {finish for (request_id, _), finish in inside.finishes.items() if request_id == name}
    assert ended == {"abort"}
    inside.take(inside.core.abort([name], "again"))
    inside.finish()
    assert {
        finish for (request_id, _), finish in inside.finishes.items() if request_id != name
    } == {"length"}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("state", STATES)
def test_deadline_and_interrupt_in_every_state(state: str, depth: int) -> None:
    inside = Inside(depth=depth, num_slots=40 if state == "swapped" else 0)
    name = bring(inside, state)
    inside.deadlines[name] = inside.now = 5.0
    inside.expire()
    assert {
        finish for (request_id, _), finish in inside.finishes.items() if request_id == name
    } == {"deadline"}
    partials, chunks = inside.core.interrupt()
    inside.take(chunks)
    for request_id, parts in partials.items():
        whole = answer(inside.requests[request_id])
        assert all(part.tokens.tolist() == whole[: len(part.tokens)] for part in parts)
    inside.finish()


def test_what_is_found_finished_while_its_next_step_is_in_flight_is_dropped() -> None:
    """With depth 1 a stop is seen one launch late: the surplus token is nobody's, and a new tenant
    may have the row."""
    for depth in (1, 2):
        inside = Inside(depth=depth, max_running=1)
        sampling = Sampling(max_tokens=20, ignore_eos=True)
        free = Request(
            request_id="x",
            tokens=np.asarray([0, 1, 2], np.int32),
            sampling=sampling,
            chunk_tokens=0,
        )
        stop = answer(free)[3]
        end = answer(free).index(stop)
        inside.requests["x"] = replace(free, sampling=replace(sampling, stop_ids=(stop,)))
        inside.take(inside.core.add(inside.requests["x"]))
        inside.submit("next", [2, 1], 5)
        while ("x", 0) not in inside.finishes:
            inside.step()
        assert inside.finishes["x", 0] == "stop" and len(inside.got["x", 0]) == end + 1
        inside.finish()
        assert inside.state.counters.generated_tokens == end + 1 + 5
        assert inside.device.computed > 3 + end + 2 + 4, "there was a surplus"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "num_slots"),
    show(((0, 0), (1, 12), (2, 40)), ((0, 0), (1, 0), (1, 12), (2, 40))),
)
def test_soak_under_random_aborts(depth: int, num_slots: int) -> None:
    """Tens of thousands of steps with aborts, deadlines, interrupts and new weights; nothing leaks
    on the way."""
    generator = np.random.default_rng(depth * 100 + num_slots)
    inside = Inside(depth=depth, num_pages=24, max_running=6, budget=14, num_slots=num_slots)
    for turn in range(20_000):
        inside.step()
        if turn % 2000 == 1999:
            inside.take(inside.core.interrupt()[1])
            inside.state.pages.drop_cached()
            assert inside.state.pages.num_available == inside.state.pages.num_pages
        if len(inside.state.requests) < 12 and generator.random() < 0.3:
            prompt = [int(generator.integers(2))] * int(
                generator.integers(3, 30)
            ) + generator.integers(0, 4, 2).tolist()
            late = (
                inside.now + float(generator.integers(1, 60)) if generator.random() < 0.2 else None
            )
            n, priority = int(generator.integers(1, 4)), int(generator.integers(-1, 2))
            inside.submit(
                f"r{turn}", prompt, int(generator.integers(1, 40)), late, n=n, priority=priority
            )
        if inside.state.requests and generator.random() < 0.05:
            name = sorted(inside.state.requests)[
                int(generator.integers(len(inside.state.requests)))
            ]
            inside.take(inside.core.abort([name], "soak"))
        if generator.random() < 0.005:
            recompute = bool(generator.random() < 0.5)
            inside.core.change_version(
                inside.core.version + 1, recompute=recompute, keep_cached=recompute
            )
            inside.take(inside.core.flush())
        inside.now += 1.0
        inside.expire()
    inside.finish()
    counters = inside.state.counters
    assert counters.preemptions > 50 and (counters.swaps_out > 20) == (num_slots > 0)
    assert set(inside.finishes.values()) == {"length", "abort", "deadline", "interrupted"}
