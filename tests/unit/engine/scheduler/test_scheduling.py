"""Scheduler, pages, prefix cache and swap, decision by decision. Random traffic is in
test_engine_traffic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_device import PAGE_TOKENS, FakeDevice, make_core
from gyre.core.records import Request, Sampling
from gyre.engine.kv_cache.page_allocator import Pages
from gyre.engine.kv_cache.prefix_cache import extend_keys, root_key
from gyre.engine.runners.batch_layout import BUCKET_SLACK, BUCKET_WASTE, plan_buckets
from gyre.engine.scheduler.random import draw_key
from gyre.engine.scheduler.state import SchedulerState
from gyre.engine.scheduler.swap import HostSlots, SwapRates, choose_preemption


def run_alone(
    requests: list[Request],
    *,
    num_pages: int,
    max_running: int,
    budget: int,
    prefix: bool = True,
    num_slots: int = 0,
    depth: int = 0,
    window: int | None = None,
):
    events: list[tuple[str, dict]] = []
    state = SchedulerState(
        max_running=max_running,
        num_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        prefix_cache=prefix,
        emit=lambda kind, **fields: events.append((kind, fields)),
        num_slots=num_slots,
        window=window,
        rates=SwapRates(page_bytes=1, swap_bytes_per_s=2.0, prefill_tokens_per_s=1.5),
    )
    runner = FakeDevice(window)
    core = make_core(state, runner, budget=budget, depth=depth)
    order = []
    for request in requests:
        core.add(request)
    while not core.is_idle:
        order += [chunk.request_id for chunk in core.step() if chunk.finish]
    state.check()
    return state, order, events, runner


def plain(name: str, prompt: list[int], max_tokens: int, **fields) -> Request:
    return Request(
        request_id=name,
        tokens=np.asarray(prompt, np.int32),
        sampling=Sampling(max_tokens=max_tokens, n=fields.pop("n", 1)),
        chunk_tokens=0,
        **fields,
    )


def test_a_long_prompt_is_computed_beside_those_that_decode_within_one_budget() -> None:
    """Whoever decodes gets a token in every step, the prompt what is left of the budget."""
    short, long = plain("short", [0] * 4, 20), plain("long", [1] * 41, 5)
    *_, runner = run_alone([short, long], num_pages=64, max_running=2, budget=8, prefix=False)
    assert runner.loads == [(0, 8), *[(1, 7)] * 5, (1, 2), *[(2, 0)] * 4, *[(1, 0)] * 9]


def test_a_row_is_taken_in_the_step_after_it_was_left() -> None:
    requests = [plain("short", [0] * 4, 3), plain("long", [1] * 4, 10), plain("waits", [2] * 4, 2)]
    _, order, _, runner = run_alone(requests, num_pages=64, max_running=2, budget=8, prefix=False)
    assert runner.loads == [(0, 8), (2, 0), (2, 0), (1, 4), (2, 0), *[(1, 0)] * 5]
    assert order == ["short", "waits", "long"]


def test_siblings_share_one_prefill_of_their_prompt() -> None:
    state, *_ = run_alone(
        [plain("a", [1] * 10, 4, n=5)], num_pages=64, max_running=8, budget=64, prefix=False
    )
    assert state.counters.prompt_tokens == 50
    assert state.counters.prefix_hit_tokens == 40
    assert state.counters.steps == 4


def test_equal_beginnings_hit_the_cache_only_within_a_tenant() -> None:
    first, same, other = (
        plain("a", [1] * 9, 2),
        plain("b", [1] * 9, 2),
        plain("c", [1] * 9, 2, tenant_salt="x"),
    )
    state, *_ = run_alone([first, same, other], num_pages=64, max_running=1, budget=64)
    assert state.counters.prefix_hit_tokens == 8  # two full pages, for b only


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint8])
def test_a_prompt_hits_the_cache_whatever_numbers_it_is_of(dtype: type) -> None:
    first, same = plain("a", [1] * 9, 2), plain("b", [1] * 9, 2)
    for requests in (
        [first, replace(same, tokens=same.tokens.astype(dtype))],
        [replace(first, tokens=first.tokens.astype(dtype)), same],
    ):
        state, *_ = run_alone(requests, num_pages=64, max_running=1, budget=64)
        assert state.counters.prefix_hit_tokens == 8


def test_priority_runs_first_and_is_preempted_last() -> None:
    low, high = plain("low", [0] * 6, 20), plain("high", [1] * 6, 20, priority=1)
    _, order, *_ = run_alone([low, high], num_pages=32, max_running=1, budget=8)
    assert order == ["high", "low"]
    _, _, events, _ = run_alone([low, high], num_pages=9, max_running=2, budget=16, prefix=False)
    preempted = [fields["request_id"] for kind, fields in events if kind == "engine.preempted"]
    assert preempted and set(preempted) == {"low"}


@pytest.mark.parametrize("dtype", [int, np.uint8, np.int16, np.int64, np.uint64])
def test_numbers_of_a_request_mean_the_same_whatever_their_type(dtype: type) -> None:
    """Priority 2 comes before 1, chunks are of four tokens behind a prompt of 300, and a seed gives
    the same draws."""
    numbers = {"seed": dtype(5), "chunk_tokens": dtype(4)}
    low, high = (
        replace(plain(name, [place] * 300, 9, priority=dtype(1 + place)), **numbers)
        for place, name in enumerate("ab")
    )
    state, order, *_ = run_alone([low, high], num_pages=99, max_running=1, budget=512, prefix=False)
    assert order == ["b", "a"]
    assert int(state.rows.key_R[0]) == draw_key(5, 0)


def test_the_one_that_lost_least_is_preempted_among_those_of_lowest_priority() -> None:
    for priority, victim in ((0, "young"), (1, "old")):
        old, young = plain("old", [0] * 12, 12), plain("young", [1] * 4, 20, priority=priority)
        state, _, events, _ = run_alone(
            [old, young], num_pages=8, max_running=2, budget=32, prefix=False
        )
        preempted = [fields for kind, fields in events if kind == "engine.preempted"]
        assert {fields["request_id"] for fields in preempted} == {victim}
        assert state.counters.preemptions == len(preempted) > 0


def test_block_keys_depend_on_version_tenant_and_everything_before() -> None:
    tokens = np.arange(8, dtype=np.int32)

    def keys(version: int, salt: str, tokens: np.ndarray) -> list[bytes]:
        made: list[bytes] = []
        extend_keys(made, root_key(version, salt), tokens, 4, 2)
        return made

    base = keys(1, "", tokens)
    assert not set(base) & set(keys(2, "", tokens))
    assert not set(base) & set(keys(1, "x", tokens))
    changed = tokens.copy()
    changed[0] = 99
    assert keys(1, "", changed)[1] != base[1], (
        "the second block's key must depend on the first block"
    )
    assert root_key(1, "1:") != root_key(11, ":")


def test_idle_pages_are_evicted_oldest_first_and_tails_before_heads() -> None:
    pages = Pages(4)
    first, second = pages.take(2), pages.take(2)
    pages.remember([b"a0", b"a1"], first, 0)
    pages.remember([b"b0", b"b1"], second, 0)
    pages.give(first)
    pages.give(second)
    assert pages.num_available == 4 and pages.num_used == 0
    pages.take(1)
    assert pages.find([b"a0", b"a1"]).tolist() == [first[0]]
    pages.take(1)
    assert pages.find([b"a0"]).size == 0 and pages.find([b"b0", b"b1"]).size == 2


def test_a_page_that_was_shared_again_is_evicted_later() -> None:
    pages = Pages(2)
    taken = pages.take(2)
    pages.remember([b"a", b"b"], taken, 0)
    pages.give(taken[:1])
    pages.give(taken[1:])
    pages.share(pages.find([b"a"]))
    pages.give(taken[:1])
    assert pages.take(1).tolist() == [taken[1]]
    assert pages.find([b"a"]).tolist() == [taken[0]] and pages.find([b"b"]).size == 0


def test_the_accounts_find_what_was_lost() -> None:
    def lose_page(state: SchedulerState) -> None:
        state.pages.take(1)

    def lose_slot(state: SchedulerState) -> None:
        state.slots.take(1)

    def lose_row(state: SchedulerState) -> None:
        state.rows.active_R[0] = True

    for lose in (lose_page, lose_slot, lose_row):
        state, *_ = run_alone(
            [plain("a", [1] * 9, 2)], num_pages=9, max_running=2, budget=8, num_slots=4
        )
        lose(state)
        with pytest.raises(AssertionError):
            state.check()


def test_a_page_given_back_twice_is_our_fault() -> None:
    pages = Pages(2)
    taken = pages.take(1)
    pages.give(taken)
    with pytest.raises(AssertionError):
        pages.give(taken)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 64)), min_size=1, max_size=80))
def test_buckets_cover_everything_once_and_waste_little(sizes: list[tuple[int, int]]) -> None:
    count_S = np.asarray([count for count, _ in sizes])
    keys_S = np.asarray([pages * 16 for _, pages in sizes])
    order, bounds = plan_buckets(count_S, keys_S)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    assert [a for a, _ in bounds] == [0, *[b for _, b in bounds[:-1]]] and bounds[-1][1] == len(
        sizes
    )
    for a, b in bounds:
        members = order[a:b]
        padded = len(members) * count_S[members].max() * keys_S[members].max()
        real = (count_S[members] * keys_S[members]).sum()
        assert padded - real <= BUCKET_SLACK + BUCKET_WASTE * real


LONG_FIRST = [plain("old", [0] * 12, 12), plain("young", [1] * 4, 20), plain("third", [2] * 7, 16)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix", [False, True])
def test_a_swapped_sequence_goes_straight_on(depth: int, prefix: bool) -> None:
    """Swapped: every token is computed once, in spite of preemptions. Recomputed: more are."""
    roomy = run_alone(LONG_FIRST, num_pages=64, max_running=3, budget=32, prefix=prefix)
    swapped = run_alone(
        LONG_FIRST, num_pages=8, max_running=3, budget=32, prefix=prefix, num_slots=50, depth=depth
    )
    recomputed = run_alone(
        LONG_FIRST, num_pages=8, max_running=3, budget=32, prefix=prefix, depth=depth
    )
    due = roomy[3].computed
    state, _, events, runner = swapped
    assert runner.computed == due and state.counters.recomputed_tokens == 0
    assert state.counters.swaps_out == state.counters.swaps_in == state.counters.preemptions > 0
    ways = {fields["way"] for kind, fields in events if kind == "engine.preempted"}
    assert ways == {"swap"} and runner.pool.swapped_pages > 0
    assert recomputed[0].counters.recomputed_tokens == recomputed[3].computed - due > 0


def test_a_half_computed_prompt_is_swapped_too() -> None:
    """A prompt in progress is the victim (it has the lower priority) and goes on prefilling where
    it was."""
    requests = [plain("high", [0] * 4, 20, priority=1), plain("low", [1] * 24, 2)]
    _, _, events, runner = run_alone(
        requests, num_pages=8, max_running=2, budget=3, prefix=False, num_slots=50
    )
    (fields,) = [fields for kind, fields in events if kind == "engine.preempted"]
    assert (
        fields["request_id"] == "low"
        and fields["way"] == "swap"
        and 0 < fields["computed_tokens"] < 24
    )
    assert runner.computed == 4 + 19 + 24 + 1


def test_a_full_host_pool_means_computing_again_and_the_event_says_so() -> None:
    state, _, events, _ = run_alone(
        LONG_FIRST, num_pages=8, max_running=3, budget=32, prefix=False, num_slots=1
    )
    whys = [
        fields["why"]
        for kind, fields in events
        if kind == "engine.preempted" and fields["way"] == "recompute"
    ]
    assert whys and all("host pool is full" in why and "1 of 1 slots free" in why for why in whys)
    assert state.counters.recomputed_tokens > 0


def test_swap_or_recompute_is_the_cheaper_of_the_two() -> None:
    rates = SwapRates(page_bytes=1000, swap_bytes_per_s=1e6, prefill_tokens_per_s=1e4)
    long = choose_preemption(computed_tokens=160, num_pages=3, slots=HostSlots(9), rates=rates)
    assert (long.way, long.swap_s, long.recompute_s) == ("swap", 0.006, 0.016)
    assert long.lost_tokens == 0 and long.size_bytes == 3000
    short = choose_preemption(computed_tokens=40, num_pages=3, slots=HostSlots(9), rates=rates)
    assert (short.way, short.lost_tokens) == ("recompute", 40) and "cheaper" in short.why
    nowhere = choose_preemption(computed_tokens=160, num_pages=3, slots=HostSlots(0), rates=rates)
    assert nowhere.way == "recompute" and "no host pool" in nowhere.why


def test_swapping_loses_no_work_so_the_latest_arrival_goes() -> None:
    requests = [plain("old", [0] * 4, 20), plain("young", [1] * 12, 12)]
    for num_slots, victim in ((0, "old"), (50, "young")):
        *_, events, _ = run_alone(
            requests, num_pages=8, max_running=2, budget=32, prefix=False, num_slots=num_slots
        )
        first = next(fields for kind, fields in events if kind == "engine.preempted")
        assert first["request_id"] == victim


@pytest.mark.parametrize("depth", [0, 1])
def test_pages_out_of_every_window_are_free_again(depth: int) -> None:
    """Three sequences of 50 tokens would need 39 pages; with a window of 9 they decode within 4
    each."""
    requests = [plain(name, [place] * 6, 44) for place, name in enumerate("abc")]
    for prefix in (False, True):
        state, *_ = run_alone(
            requests, num_pages=13, max_running=3, budget=32, prefix=prefix, window=9, depth=depth
        )
        assert state.counters.preemptions == 0 and state.counters.generated_tokens == 3 * 44
    state, *_ = run_alone(requests, num_pages=13, max_running=3, budget=32, prefix=False)
    assert state.counters.preemptions > 0
