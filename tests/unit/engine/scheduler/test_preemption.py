"""One sequence is preempted and comes back: what it takes along, what it pays, and what is
reported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine_device import PAGE_TOKENS, FakeDevice, answer, make_core
from gyre.core.records import Partial, Request, Sampling, TokenChunk
from gyre.engine.scheduler.postprocess import advance
from gyre.engine.scheduler.preemption import (
    mix_versions,
    num_pages_to_resume,
    preempt,
    void_swapped,
)
from gyre.engine.scheduler.scheduler import schedule
from gyre.engine.scheduler.sequence import State
from gyre.engine.scheduler.state import SchedulerState
from gyre.engine.scheduler.swap import SwapRates

PAGE_BYTES = 10
RATES = SwapRates(page_bytes=PAGE_BYTES, swap_bytes_per_s=100.0, prefill_tokens_per_s=2.0)


def make(name: str, prompt_tokens: int, max_tokens: int = 20) -> Request:
    return Request(
        request_id=name,
        tokens=np.arange(prompt_tokens, dtype=np.int32) % 5,
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
        chunk_tokens=0,
    )


class Bench:
    """A core over a device without arithmetic: sequences stand where `steps` steps have brought
    them."""

    def __init__(
        self, requests: list[Request], steps: int, *, prefix: bool = False, window=None, budget=64
    ) -> None:
        self.events: list[tuple[str, dict]] = []
        self.state = SchedulerState(
            max_running=3,
            num_pages=20,
            page_tokens=PAGE_TOKENS,
            prefix_cache=prefix,
            emit=lambda kind, **fields: self.events.append((kind, fields)),
            num_slots=9,
            rates=RATES,
            window=window,
        )
        self.device = FakeDevice(window)
        self.core = make_core(self.state, self.device, budget=budget)
        for request in requests:
            self.core.add(request)
        self.sequences = list(self.state.queue)
        for _ in range(steps):
            self.core.step()

    def preempt(self, row: int = 0, **ways) -> None:
        preempt(self.state, row, reason="a test", version=0, **ways)
        self.state.check()

    def told(self, kind: str) -> list[dict]:
        return [fields for named, fields in self.events if named == kind]

    def finish(self) -> dict[str, list[int]]:
        chunks: list[TokenChunk] = []
        while not self.core.is_idle:
            chunks += self.core.step()
        self.state.check()
        return {chunk.request_id: chunk.tokens.tolist() for chunk in chunks}


def test_a_swapped_sequence_keeps_its_pages_in_host_memory_and_the_event_tells_the_price() -> None:
    """Six prompt tokens and two steps: seven tokens have KV, in two pages."""
    bench = Bench([make("a", 6)], steps=2)
    bench.preempt()
    assert bench.told("engine.preempted") == [
        {
            "request_id": "a",
            "index": 0,
            "way": "swap",
            "why": "swapping is cheaper",
            "reason": "a test",
            "computed_tokens": 7,
            "size_bytes": 2 * PAGE_BYTES,
            "swap_s": 0.4,
            "recompute_s": 3.5,
        }
    ]
    state, (sequence,) = bench.state, bench.sequences
    assert (
        sequence.state is State.SWAPPED and sequence.lost_tokens == 0 and state.queue == [sequence]
    )
    assert (state.counters.preemptions, state.counters.swaps_out, state.counters.swaps_in) == (
        1,
        1,
        0,
    )
    assert state.slots.num_free == 7 and state.pages.num_used == 0 and state.rows.num_free == 3
    assert bench.finish() == {"a": answer(make("a", 6))}
    (back,) = bench.told("engine.resumed")
    assert back == {
        "request_id": "a",
        "index": 0,
        "computed_tokens": 7,
        "pages": 2,
        "shared_pages": 0,
    }
    assert (
        state.counters.swaps_in == 1
        and state.counters.recomputed_tokens == 0
        and state.slots.num_free == 9
    )
    assert bench.device.computed == 6 + 19


def test_a_void_sequence_is_computed_again_though_swapping_is_cheaper() -> None:
    bench = Bench([make("a", 6)], steps=2)
    bench.preempt(must_recompute=True)
    (told,) = bench.told("engine.preempted")
    assert (told["way"], told["why"], told["computed_tokens"]) == ("recompute", "its KV is void", 7)
    (sequence,) = bench.sequences
    assert (
        sequence.state is State.PREEMPTED and sequence.lost_tokens == 7 and sequence.swapped is None
    )
    assert bench.state.counters.preemptions == 1 and bench.state.counters.swaps_out == 0
    assert bench.finish() == {"a": answer(make("a", 6))}
    assert bench.state.counters.recomputed_tokens == 7 and bench.told("engine.resumed") == []


def test_cached_pages_of_a_swapped_sequence_are_shared_when_it_comes_back() -> None:
    """Of three pages the two full ones stay cached; only the third, half full, comes from host
    memory."""
    bench = Bench([make("a", 9)], steps=2, prefix=True)
    kept = bench.state.rows.pages_of(0).tolist()
    bench.preempt()
    step = schedule(bench.state, token_budget=8, version=0)
    (back,) = bench.told("engine.resumed")
    assert (back["pages"], back["shared_pages"]) == (3, 2)
    assert step is not None and step.swap_in is not None and step.swap_out is not None
    (_, out_slots), (slots, pages) = step.swap_out, step.swap_in
    now = bench.state.rows.pages_of(0).tolist()
    assert now[:2] == kept[:2] and pages.tolist() == [now[2]] and slots.tolist() == [out_slots[2]]
    assert step.restored_rows.tolist() == step.decode_rows.tolist() == [0] and step.chunks == ()
    bench.state.check()


@pytest.mark.parametrize(("prompt", "pages"), [(6, 2), (7, 3)])
def test_a_decoding_sequence_comes_back_with_room_for_its_next_token(
    prompt: int, pages: int
) -> None:
    """After two steps 7 or 8 tokens have KV, and the next token's KV is the 8th or 9th."""
    bench = Bench([make("a", prompt)], steps=2)
    bench.preempt()
    assert num_pages_to_resume(bench.state, bench.sequences[0]) == pages
    assert schedule(bench.state, token_budget=8, version=0) is not None
    assert bench.state.pages.num_used == bench.state.rows.pages_R[0] == pages


def test_pages_out_of_the_window_are_not_swapped() -> None:
    """Of 14 tokens with KV the window of 6 sees those from the 10th on: of four pages the first two
    are given back."""
    bench = Bench([make("a", 12)], steps=3, window=6)
    assert bench.state.rows.first_R[0] == 2 and bench.state.rows.pages_R[0] == 4
    bench.preempt()
    (told,) = bench.told("engine.preempted")
    assert (told["computed_tokens"], told["size_bytes"]) == (14, 2 * PAGE_BYTES)
    swapped = bench.sequences[0].swapped
    assert (
        swapped is not None and swapped.first == 2 and len(swapped.slots) == len(swapped.pages) == 2
    )
    assert num_pages_to_resume(bench.state, bench.sequences[0]) == 2
    assert schedule(bench.state, token_budget=8, version=0) is not None
    assert bench.state.rows.first_R[0] == 2 and bench.state.rows.pages_R[0] == 4
    assert bench.state.pages.num_used == 2
    bench = Bench([make("a", 12)], steps=3, window=6)
    bench.preempt()
    assert bench.finish() == {"a": answer(make("a", 12), 6)}


def test_a_half_computed_prompt_comes_back_where_it_was() -> None:
    """Five of 12 tokens have KV, in two of the three pages that it holds; it needs all three
    again."""
    bench = Bench([make("a", 12)], steps=1, budget=5)
    bench.preempt()
    (told,) = bench.told("engine.preempted")
    assert (told["computed_tokens"], told["size_bytes"]) == (5, 2 * PAGE_BYTES)
    assert num_pages_to_resume(bench.state, bench.sequences[0]) == 3
    step = schedule(bench.state, token_budget=5, version=0)
    assert step is not None and [(chunk.start, chunk.count) for chunk in step.chunks] == [(5, 5)]
    assert bench.state.prefilling == [0] and not bench.state.rows.decoding_R[0]
    assert bench.sequences[0].state is State.PREFILLING and bench.state.rows.pages_R[0] == 3
    bench.state.check()


def test_a_given_beginning_counts_among_the_pages_that_a_half_computed_sequence_needs() -> None:
    """Six prompt tokens and a beginning of six: 12 tokens, three pages, whatever part of them has
    KV."""
    zeros = np.zeros(6, np.float32)
    ids = zeros.astype(np.int32)
    begun = Partial(index=0, tokens=ids, logprobs=zeros, raw_logprobs=zeros, versions=ids)
    bench = Bench([replace(make("a", 6), partials=(begun,))], steps=1, budget=5)
    bench.preempt()
    assert num_pages_to_resume(bench.state, bench.sequences[0]) == 3


def test_nothing_of_a_preempted_row_may_be_in_flight() -> None:
    bench = Bench([make("a", 6)], steps=1)
    step = schedule(bench.state, token_budget=8, version=0)
    assert step is not None
    advance(bench.state, step)
    with pytest.raises(AssertionError):
        bench.preempt()


def test_what_lies_in_host_memory_can_go_void() -> None:
    """Of three that wait two lie in host memory, with 7 and 8 tokens: both are computed again, and
    both are told."""
    bench = Bench([make("a", 6), make("b", 7), make("c", 5), make("d", 5)], steps=2)
    bench.preempt(0)
    bench.preempt(1)
    void_swapped(bench.state, "a test")
    expected = [("a", 7), ("b", 8)]
    assert bench.told("engine.swap_voided") == [
        {"request_id": name, "index": 0, "computed_tokens": tokens, "reason": "a test"}
        for name, tokens in expected
    ]
    assert [sequence.state for sequence in bench.state.queue] == [State.PREEMPTED] * 2 + [
        State.WAITING
    ]
    assert [sequence.lost_tokens for sequence in bench.sequences] == [7, 8, 0, 0]
    assert bench.state.slots.num_free == 9
    void_swapped(bench.state, "once more: nothing is there")
    assert len(bench.told("engine.swap_voided")) == 2
    bench.finish()
    assert bench.state.counters.recomputed_tokens == 15


def test_new_weights_mix_the_versions_of_what_runs_and_of_what_is_swapped() -> None:
    """-1 stands for mixed: nothing of it is cached from then on."""
    bench = Bench([make("a", 6), make("b", 7), make("c", 5), make("d", 5)], steps=2, prefix=True)
    bench.preempt(0)
    mix_versions(bench.state)
    assert bench.state.rows.kv_version_R.tolist() == [-1] * 3
    swapped = [sequence.swapped for sequence in bench.state.queue]
    assert [one.kv_version if one else None for one in swapped] == [-1, None]
    assert swapped[0] is not None and swapped[0].computed == 7
    bench.state.check()


def test_a_swapped_sequence_keeps_the_version_of_its_kv() -> None:
    bench = Bench([make("a", 6)], steps=2)
    bench.state.rows.kv_version_R[0] = 3
    bench.preempt()
    schedule(bench.state, token_budget=8, version=0)
    assert bench.state.rows.kv_version_R[0] == 3
