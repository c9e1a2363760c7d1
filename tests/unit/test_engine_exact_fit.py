"""The scheduler where what is needed is exactly what is there, and where one page or token is missing."""

from __future__ import annotations

import numpy as np
import pytest
from engine_device import PAGE_TOKENS, FakeDevice

from gyre.core.records import Request, Sampling
from gyre.engine.cycle import Cycle
from gyre.engine.roster import Roster
from gyre.engine.scheduler import must_preempt, schedule
from gyre.engine.swap import Rates


def make(name: str, prompt_tokens: int, max_tokens: int, n: int = 1) -> Request:
    tokens = np.arange(prompt_tokens, dtype=np.int32)
    return Request(request_id=name, tokens=tokens, sampling=Sampling(max_tokens=max_tokens, n=n), chunk_tokens=0)


def run(requests: list[Request], *, num_pages: int, budget: int = 64, max_running: int = 4):
    """Run to the end; also whether any step was asked for while only a preemption could provide it."""
    roster = Roster(
        max_running=max_running,
        num_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        prefix_cache=False,
        emit=lambda kind, **fields: None,
        num_slots=0,
        window=None,
        rates=Rates(page_bytes=1, swap_bytes_per_s=1.0, prefill_tokens_per_s=1.0),
    )
    runner = FakeDevice(None)
    cycle = Cycle(
        roster,
        runner,  # type: ignore[arg-type]
        token_budget=budget,
        version=0,
        eos_ids=(),
        tokenizer=None,
        clock=lambda: 0.0,
        depth=0,
        host=runner.pool,
    )
    for request in requests:
        cycle.add(request, None)
    short = False
    while not cycle.is_idle:
        short |= must_preempt(roster)
        cycle.step()
    roster.check()
    return roster, runner.loads, short


@pytest.mark.parametrize(("num_pages", "fits"), [(4, True), (3, False)])
def test_decoding_rows_take_the_last_pages(num_pages: int, fits: bool) -> None:
    """Two rows of one full page each need two pages for their next tokens."""
    requests = [make("a", PAGE_TOKENS, PAGE_TOKENS + 1), make("b", PAGE_TOKENS, PAGE_TOKENS + 1)]
    roster, _, short = run(requests, num_pages=num_pages)
    assert (roster.counters.preemptions == 0) == fits and short == (not fits)


@pytest.mark.parametrize(("num_pages", "first"), [(3, 2), (2, 1)])
def test_a_waiting_prompt_starts_when_its_pages_and_one_for_each_that_runs_are_there(
    num_pages: int, first: int
) -> None:
    _, loads, _ = run([make("a", PAGE_TOKENS, 1), make("b", PAGE_TOKENS, 1)], num_pages=num_pages)
    assert loads == [(0, 2 * PAGE_TOKENS)] if first == 2 else [(0, PAGE_TOKENS)] * 2


@pytest.mark.parametrize(("num_pages", "together"), [(4, True), (3, False)])
def test_a_sibling_is_forked_when_its_page_and_one_for_each_that_runs_are_there(num_pages: int, together: bool) -> None:
    prompt = PAGE_TOKENS + 2  # the second page is partly filled, so that a sibling needs a copy of it
    _, loads, _ = run([make("a", prompt, 1, n=2)], num_pages=num_pages)
    assert loads[0] == (0, prompt) and (len(loads) == 1) == together


@pytest.mark.parametrize(("second", "loads"), [(4, [(0, 12)]), (5, [(0, 12), (0, 1)]), (8, [(0, 12), (0, 4)])])
def test_prompts_fill_the_budget_and_no_more(second: int, loads: list[tuple[int, int]]) -> None:
    _, seen, _ = run([make("a", 8, 1), make("b", second, 1)], num_pages=64, budget=12)
    assert seen == loads


def test_no_prompt_starts_on_a_budget_that_is_used_up() -> None:
    roster, seen, _ = run([make("a", 12, 1), make("b", 3, 1)], num_pages=64, budget=12)
    assert seen == [(0, 12), (0, 3)]
    assert schedule(roster, token_budget=12, version=0) is None


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
