"""The engine's inside under random traffic: nothing leaks, nothing is used twice, every request
gets the answer that it would get alone, whatever is aborted, preempted, swapped, in flight or under
new weights meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_device import PAGE_TOKENS, STOP, FakeDevice, answer
from gyre.core.records import Partial, Request, Sampling
from gyre.engine.scheduler.core import EngineCore
from gyre.engine.scheduler.preemption import preempt
from gyre.engine.scheduler.state import SchedulerState
from gyre.engine.scheduler.swap import SwapRates

STEPS = st.sampled_from([4, 8, 2, 0, 12])  # after most rules, so that traffic moves
RARELY = st.integers(0, 3).map(lambda drawn: drawn == 3)
# Few beginnings, so that most prompts share one; then a tail of their own.
PROMPTS = st.builds(
    lambda base, length, tail: [base] * length + tail,
    st.integers(0, 1),
    st.integers(3, 13),
    st.lists(st.integers(0, 3), max_size=2),
)


class Traffic(RuleBasedStateMachine):
    """Random requests, steps, aborts, interrupts and new versions on a small engine."""

    @initialize(
        num_pages=st.integers(8, 12),
        max_running=st.sampled_from([4, 6, 3, 2, 1]),
        spare=st.integers(0, 12),
        prefix=st.booleans(),
        depth=st.integers(0, 2),
        num_slots=st.sampled_from([40, 8, 40, 3, 0]),
        tokens_per_page=st.sampled_from([0.0, 1.5, 3.0]),
        window=st.sampled_from([None, 5, None, 9, 1]),
    )
    def build(
        self, num_pages, max_running, spare, prefix, depth, num_slots, tokens_per_page, window
    ) -> None:
        """`tokens_per_page`: so many are computed again while a page goes out and back."""
        self.events: list[str] = []
        self.budget = max_running + spare
        self.state = SchedulerState(
            max_running=max_running,
            num_pages=num_pages,
            page_tokens=PAGE_TOKENS,
            prefix_cache=prefix,
            emit=lambda kind, **fields: self.events.append(kind),
            num_slots=num_slots,
            window=window,
            rates=SwapRates(
                page_bytes=1, swap_bytes_per_s=2.0, prefill_tokens_per_s=tokens_per_page or 1e-9
            ),
        )
        self.runner, self.window = FakeDevice(window), window
        self.core = EngineCore(
            self.state,
            self.runner,  # type: ignore[arg-type]
            token_budget=self.budget,
            version=0,
            eos_ids=(STOP,),
            tokenizer=None,
            depth=depth,
            host=self.runner.pool if num_slots else None,
        )
        self.requests: dict[str, Request] = {}
        self.open: dict[str, dict[int, list[int]]] = {}
        self.answered = 0

    @rule(
        prompt=PROMPTS,
        max_tokens=st.sampled_from([16, 20, 12, 24, 8, 1]),
        n=st.integers(1, 4),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "a"]),
        chunk_tokens=st.integers(0, 3),
        ignore_eos=st.sampled_from([True, True, False]),
        begun=st.lists(st.integers(0, 12), max_size=2),
        then=STEPS,
    )
    def submit(
        self, prompt, max_tokens, n, priority, salt, chunk_tokens, ignore_eos, begun, then
    ) -> None:
        request = Request(
            request_id=f"r{len(self.requests)}",
            tokens=np.asarray(prompt, np.int32),
            sampling=Sampling(max_tokens=max_tokens, n=n, ignore_eos=ignore_eos),
            priority=priority,
            tenant_salt=salt,
            chunk_tokens=chunk_tokens,
        )
        if len(prompt) + max_tokens - 1 > self.state.pages.num_pages * PAGE_TOKENS:
            return  # admission refuses it
        whole = answer(request, self.window)
        partials = tuple(
            Partial(
                index=index,
                tokens=np.asarray(whole[:count], np.int32),
                logprobs=np.zeros(len(whole[:count]), np.float32),
                raw_logprobs=np.zeros(len(whole[:count]), np.float32),
                versions=np.zeros(len(whole[:count]), np.int32),
            )
            for index, count in enumerate(begun[:n])
        )
        fields = {name: getattr(request, name) for name in request.__slots__ if name != "partials"}
        request = Request(**fields, partials=partials)
        self.requests[request.request_id] = request
        starts = {partial.index: partial.tokens.tolist() for partial in partials}
        self.open[request.request_id] = {index: list(starts.get(index, [])) for index in range(n)}
        self.book(self.core.add(request))
        self.advance(then)

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            self.book(self.core.step())

    @precondition(lambda self: self.open)
    @rule(data=st.data(), sure=RARELY)
    def abort(self, data, sure: bool) -> None:
        if not sure:
            return
        assert self.core.abort(["nobody"], "test") == []
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        self.book(self.core.abort([request_id], "test"))
        assert request_id not in self.open

    @precondition(lambda self: self.open)
    @rule(recompute=st.booleans(), keep_cached=st.booleans(), then=STEPS)
    def new_version(self, recompute: bool, keep_cached: bool, then: int) -> None:
        self.change_version(recompute, keep_cached)
        self.advance(then)

    @precondition(lambda self: hasattr(self, "state") and self.state.rows.num_active)
    @rule(data=st.data(), then=STEPS)
    def preempt_anyone(self, data, then: int) -> None:
        """Whoever the scheduler would never choose here, too."""
        self.core.quiesce()
        rows = self.state.active_rows().tolist()
        if rows:
            preempt(
                self.state,
                data.draw(st.sampled_from(rows)),
                reason="test",
                version=self.core.version,
            )
        self.advance(1 + then)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), what=st.sampled_from(["recompute", "continue", "abort"]))
    def interfere_with_swapped(self, data, what: str) -> None:
        """Rare by chance, so drawn on purpose."""
        if what == "abort":
            self.book(self.core.abort([data.draw(st.sampled_from(self.swapped))], "test"))
        else:
            self.change_version(what == "recompute", False)
            assert what == "continue" or not self.swapped
        self.advance(12)

    @property
    def swapped(self) -> list[str]:
        waiting = self.state.queue if hasattr(self, "state") else []
        return sorted(
            {sequence.request.request_id for sequence in waiting if sequence.swapped is not None}
        )

    def change_version(self, recompute: bool, keep_cached: bool) -> None:
        self.core.change_version(
            self.core.version + 1, recompute=recompute, keep_cached=keep_cached
        )
        if recompute:
            self.runner.oldest_version = self.core.version
        self.book(self.core.flush())

    @precondition(lambda self: self.open)
    @rule(sure=RARELY)
    def forget_kv(self, sure: bool) -> None:
        if not sure:
            return
        self.core.forget_kv("test")
        self.runner.pool.clear()
        self.book(self.core.flush())

    @precondition(lambda self: self.open and self.state.slots.num_slots)
    @rule(sure=RARELY)
    def lose_the_host_pool(self, sure: bool) -> None:
        if not sure:
            return
        num_slots = self.state.slots.num_slots
        self.core.change_host(None, 0)
        self.runner.pool.host.clear()
        self.book(self.core.step())
        self.core.change_host(self.runner.pool, num_slots)
        self.book(self.core.flush())

    @precondition(lambda self: self.open)
    @rule(sure=RARELY)
    def interrupt(self, sure: bool) -> None:
        if not sure:
            return
        self.book(self.core.flush())
        expected = {
            (request_id, index): tokens
            for request_id, parts in self.open.items()
            for index, tokens in parts.items()
        }
        partials, chunks = self.core.interrupt()
        self.book(chunks)
        for request_id, parts in partials.items():
            for partial in parts:
                before = expected.pop((request_id, partial.index))
                assert partial.tokens.tolist()[: len(before)] == before
        assert not expected and not self.open

    @invariant()
    def accounts_balance(self) -> None:
        if not hasattr(self, "state"):
            return
        self.state.check()
        assert self.runner.largest_step <= self.budget
        unanswered = sum(map(len, self.state.requests.values()))
        assert unanswered == sum(map(len, self.open.values()))

    def book(self, chunks) -> None:
        """Every chunk goes on where the last one ended; a finished completion is the one that was
        to be expected."""
        for chunk in chunks:
            parts = self.open[chunk.request_id]
            parts[chunk.index] += chunk.tokens.tolist()
            whole = answer(self.requests[chunk.request_id], self.window)
            got = parts[chunk.index]
            assert got == whole[: len(got)]
            if chunk.finish in ("stop", "length"):
                assert got == whole
                assert (chunk.finish == "stop") == (
                    got[-1] == STOP and not self.requests[chunk.request_id].sampling.ignore_eos
                )
            if chunk.finish is not None:
                del parts[chunk.index]
                self.answered += 1
            if not parts:
                del self.open[chunk.request_id]

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        for _ in range(5000):
            if not self.open:
                break
            self.book(self.core.step())
        assert not self.open, "a request starved"
        assert self.answered == sum(request.sampling.n for request in self.requests.values())
        self.state.pages.drop_cached()
        assert self.state.pages.num_available == self.state.pages.num_pages
        assert self.state.slots.num_free == self.state.slots.num_slots
        counters = self.state.counters
        assert (
            counters.swaps_in
            <= counters.swaps_out
            <= counters.preemptions
            == self.events.count("engine.preempted")
        )


SETTINGS = settings(stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))


class TestTraffic(Traffic.TestCase):
    settings = settings(SETTINGS, max_examples=40)


@pytest.mark.slow
class TestMuchTraffic(Traffic.TestCase):
    settings = settings(SETTINGS, max_examples=150)
