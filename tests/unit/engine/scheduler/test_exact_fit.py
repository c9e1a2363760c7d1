"""The scheduler where what is needed is exactly what is there, and where one page or token is
missing."""

from __future__ import annotations

import numpy as np
import pytest

from engine_device import PAGE_TOKENS, FakeDevice, make_core
from gyre.core.records import Request, Sampling
from gyre.engine.scheduler.scheduler import must_preempt, schedule
from gyre.engine.scheduler.state import SchedulerState
from gyre.engine.scheduler.swap import SwapRates


def make(name: str, prompt_tokens: int, max_tokens: int, n: int = 1) -> Request:
    tokens = np.arange(prompt_tokens, dtype=np.int32)
    return Request(
        request_id=name,
        tokens=tokens,
        sampling=Sampling(max_tokens=max_tokens, n=n),
        chunk_tokens=0,
    )


class Bench:
    """A core over a device without arithmetic, and what it reported."""

    def __init__(
        self,
        requests: list[Request],
        *,
        num_pages: int,
        budget: int = 64,
        max_running: int = 4,
        prefix_cache: bool = False,
        num_slots: int = 0,
    ) -> None:
        self.events: list[tuple[str, dict]] = []
        self.state = SchedulerState(
            max_running=max_running,
            num_pages=num_pages,
            page_tokens=PAGE_TOKENS,
            prefix_cache=prefix_cache,
            emit=lambda kind, **fields: self.events.append((kind, fields)),
            num_slots=num_slots,
            window=None,
            rates=SwapRates(page_bytes=1, swap_bytes_per_s=2.0, prefill_tokens_per_s=1.0),
        )
        self.runner = FakeDevice(None)
        self.core = make_core(self.state, self.runner, budget=budget)
        for request in requests:
            self.core.add(request)

    def preempted(self) -> list[tuple[str, int]]:
        return [
            (at["request_id"], at["index"])
            for kind, at in self.events
            if kind == "engine.preempted"
        ]


def run(requests: list[Request], **sizes):
    """Run to the end; also whether any step was asked for while only a preemption could provide
    it."""
    bench, short = Bench(requests, **sizes), False
    while not bench.core.is_idle:
        short |= must_preempt(bench.state)
        bench.core.step()
    bench.state.check()
    return bench.state, bench.runner.loads, short


@pytest.mark.parametrize(("num_pages", "fits"), [(4, True), (3, False)])
def test_decoding_rows_take_the_last_pages(num_pages: int, fits: bool) -> None:
    """Two rows of one full page each need two pages for their next tokens."""
    requests = [make("a", PAGE_TOKENS, PAGE_TOKENS + 1), make("b", PAGE_TOKENS, PAGE_TOKENS + 1)]
    state, _, short = run(requests, num_pages=num_pages)
    assert (state.counters.preemptions == 0) == fits and short == (not fits)


@pytest.mark.parametrize(("num_pages", "first"), [(3, 2), (2, 1)])
def test_a_waiting_prompt_starts_when_its_pages_and_one_for_each_that_runs_are_there(
    num_pages: int, first: int
) -> None:
    _, loads, _ = run([make("a", PAGE_TOKENS, 1), make("b", PAGE_TOKENS, 1)], num_pages=num_pages)
    assert loads == [(0, 2 * PAGE_TOKENS)] if first == 2 else [(0, PAGE_TOKENS)] * 2


@pytest.mark.parametrize(("num_pages", "together"), [(4, True), (3, False)])
def test_a_sibling_is_forked_when_its_page_and_one_for_each_that_runs_are_there(
    num_pages: int, together: bool
) -> None:
    # the second page is partly filled, so that a sibling needs a copy of it
    prompt = PAGE_TOKENS + 2
    _, loads, _ = run([make("a", prompt, 1, n=2)], num_pages=num_pages)
    assert loads[0] == (0, prompt) and (len(loads) == 1) == together


@pytest.mark.parametrize(
    ("second", "loads"), [(4, [(0, 12)]), (5, [(0, 12), (0, 1)]), (8, [(0, 12), (0, 4)])]
)
def test_prompts_fill_the_budget_and_no_more(second: int, loads: list[tuple[int, int]]) -> None:
    _, seen, _ = run([make("a", 8, 1), make("b", second, 1)], num_pages=64, budget=12)
    assert seen == loads


def test_no_prompt_starts_on_a_budget_that_is_used_up() -> None:
    state, seen, _ = run([make("a", 12, 1), make("b", 3, 1)], num_pages=64, budget=12)
    assert seen == [(0, 12), (0, 3)]
    assert schedule(state, token_budget=12, version=0) is None


def test_one_token_of_budget_is_used() -> None:
    _, seen, _ = run([make("a", 11, 1), make("b", 3, 1)], num_pages=64, budget=12)
    assert seen == [(0, 12), (0, 2)]
    _, seen, _ = run([make("a", 1, 4), make("b", 4, 1)], num_pages=64, budget=2)
    assert seen == [(0, 2), (1, 1), (1, 1), (1, 1)]


def test_the_last_free_row_is_given() -> None:
    requests = [make(name, 4, 2) for name in "abc"]
    _, seen, _ = run(requests, num_pages=64, max_running=2)
    assert seen[0] == (0, 8) and seen[1] == (2, 0) and seen[2] == (0, 4)


def test_a_sibling_takes_the_last_free_row() -> None:
    _, seen, _ = run([make("a", 6, 1, n=2)], num_pages=64, max_running=2)
    assert seen == [(0, 6)]


def test_decoding_rows_may_fill_the_budget() -> None:
    _, seen, _ = run([make("a", 1, 3), make("b", 1, 3)], num_pages=64, budget=2)
    assert seen == [(0, 2), (2, 0), (2, 0)]


def test_no_piece_of_a_prompt_is_empty() -> None:
    """Three siblings decode on a budget of three tokens, while a prompt is half computed."""
    bench = Bench([make("a", 2, 3, n=3), make("b", 3, 1)], num_pages=64, budget=3)
    for _ in range(2):
        bench.core.step()
    step = schedule(bench.state, token_budget=3, version=0)
    assert step is not None and len(step.decode_rows) == 3 and step.chunks == ()
    _, seen, _ = run([make("a", 2, 3, n=3), make("b", 3, 1)], num_pages=64, budget=3)
    assert seen == [(0, 3), (3, 0), (3, 0), (0, 2)]


def test_one_budget_is_for_those_that_decode_and_prompts_old_and_new() -> None:
    """Two decode, four tokens of a begun prompt are left, and the next prompt gets the last two of
    eight."""
    requests = [make("a", 1, 3), make("b", 1, 3), make("begun", 10, 1), make("next", 5, 1)]
    _, seen, _ = run(requests, num_pages=64, budget=8)
    assert seen == [(0, 8), (2, 6), (2, 3)]


def test_each_prompt_that_starts_takes_its_own_tokens_of_the_budget() -> None:
    _, seen, _ = run([make("a", 3, 1), make("b", 5, 1), make("c", 20, 1)], num_pages=64, budget=12)
    assert seen == [(0, 12), (0, 12), (0, 4)]


def test_no_sibling_starts_without_a_free_row() -> None:
    _, seen, _ = run([make("a", 6, 1, n=2)], num_pages=64, max_running=1)
    assert seen == [(0, 6), (0, 6)]


def test_of_two_siblings_the_later_one_is_preempted() -> None:
    """They share the prompt's page, hold one page each, and both need the third."""
    bench = Bench([make("a", PAGE_TOKENS, PAGE_TOKENS + 2, n=2)], num_pages=3)
    while not bench.preempted():
        bench.core.step()
    assert bench.preempted() == [("a", 1)]


def test_one_sequence_that_outgrows_all_pages_is_our_fault() -> None:
    bench = Bench([make("a", PAGE_TOKENS, 2)], num_pages=1)
    bench.core.step()
    with pytest.raises(AssertionError, match="outgrew"):
        bench.core.step()


@pytest.mark.parametrize(("num_pages", "beside"), [(5, True), (4, False)])
def test_a_prompt_needs_no_page_for_what_it_shares(num_pages: int, beside: bool) -> None:
    """Of nine tokens two full pages are those of the first sequence, which runs: one is needed, and
    one of headroom."""
    requests = [make("a", 2 * PAGE_TOKENS + 1, 3), make("b", 2 * PAGE_TOKENS + 1, 1)]
    _, seen, _ = run(requests, num_pages=num_pages, budget=2 * PAGE_TOKENS + 1, prefix_cache=True)
    assert seen == [(0, 9), *([(1, 1), (1, 0)] if beside else [(1, 0), (1, 0), (0, 1)])]


def test_a_sequence_that_comes_back_takes_one_token_of_the_budget() -> None:
    """The second sequence is swapped out for its third page, and comes back beside a prompt that
    gets what is left."""
    requests = [make("a", 4, 10), make("b", 4, 8), make("waits", 4, 1)]
    state, seen, _ = run(requests, num_pages=5, budget=4, max_running=2, num_slots=8)
    assert state.counters.swaps_in == state.counters.preemptions == 1
    assert seen == [(0, 4), (1, 3), (1, 1), *[(2, 0)] * 4, *[(1, 0)] * 3, (1, 3), (1, 1), (1, 0)]
