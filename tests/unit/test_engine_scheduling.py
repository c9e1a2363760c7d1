"""Scheduler, pages and prefix cache under random traffic: nothing leaks, nothing is used twice, every request gets the
answer that it would get alone."""

from __future__ import annotations

import numpy as np
import pytest
from engine_device import PAGE_TOKENS, STOP, FakeDevice, answer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gyre.core.records import Partial, Request, Sampling
from gyre.engine.cycle import Cycle
from gyre.engine.layout import BUCKET_SLACK, BUCKET_WASTE, plan_buckets
from gyre.engine.pages import Pages
from gyre.engine.prefix import extend_keys, root_key
from gyre.engine.roster import Roster

STEPS = st.integers(0, 8)  # after most rules, so that traffic moves
RARELY = st.integers(0, 3).map(lambda drawn: drawn == 3)
# Few beginnings, so that most prompts share one; then a tail of their own.
PROMPTS = st.builds(
    lambda base, length, tail: [base] * length + tail,
    st.integers(0, 1),
    st.integers(1, 13),
    st.lists(st.integers(0, 3), max_size=2),
)


class Traffic(RuleBasedStateMachine):
    """Random requests, steps, aborts, interrupts and new versions on a small engine."""

    @initialize(
        num_pages=st.integers(7, 16),
        max_running=st.integers(1, 6),
        spare=st.integers(0, 12),
        prefix=st.booleans(),
        depth=st.integers(0, 2),
    )
    def build(self, num_pages: int, max_running: int, spare: int, prefix: bool, depth: int) -> None:
        self.events: list[str] = []
        self.budget = max_running + spare
        self.roster = Roster(
            max_running=max_running,
            num_pages=num_pages,
            page_tokens=PAGE_TOKENS,
            prefix_cache=prefix,
            emit=lambda kind, **fields: self.events.append(kind),
        )
        self.runner = FakeDevice()
        self.cycle = Cycle(
            self.roster,
            self.runner,  # type: ignore[arg-type]
            token_budget=self.budget,
            version=0,
            eos_ids=(STOP,),
            tokenizer=None,
            clock=lambda: 0.0,
            depth=depth,
        )
        self.requests: dict[str, Request] = {}
        self.open: dict[str, dict[int, list[int]]] = {}
        self.answered = 0

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 4),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "a"]),
        chunk_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        begun=st.lists(st.integers(0, 12), max_size=4),
        then=STEPS,
    )
    def submit(self, prompt, max_tokens, n, priority, salt, chunk_tokens, ignore_eos, begun, then) -> None:
        request = Request(
            request_id=f"r{len(self.requests)}",
            tokens=np.asarray(prompt, np.int32),
            sampling=Sampling(max_tokens=max_tokens, n=n, ignore_eos=ignore_eos),
            priority=priority,
            tenant_salt=salt,
            chunk_tokens=chunk_tokens,
        )
        if len(prompt) + max_tokens - 1 > self.roster.pages.num_pages * PAGE_TOKENS:
            return  # admission refuses it
        whole = answer(request)
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
        self.book(self.cycle.add(request, None))
        self.advance(then)

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            self.book(self.cycle.step())

    @precondition(lambda self: self.open)
    @rule(data=st.data(), sure=RARELY)
    def abort(self, data, sure: bool) -> None:
        if not sure:
            return
        assert self.cycle.abort("nobody", "test") == []
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        self.book(self.cycle.abort(request_id, "test"))
        assert request_id not in self.open

    @precondition(lambda self: self.open)
    @rule(recompute=st.booleans(), keep_cached=st.booleans(), then=STEPS)
    def new_version(self, recompute: bool, keep_cached: bool, then: int) -> None:
        self.cycle.change_version(self.cycle.version + 1, recompute=recompute, keep_cached=keep_cached)
        self.book(self.cycle.flush())
        self.advance(then)

    @precondition(lambda self: self.open)
    @rule(sure=RARELY)
    def forget_kv(self, sure: bool) -> None:
        if not sure:
            return
        self.cycle.forget_kv("test")
        self.runner.pool.clear()
        self.book(self.cycle.flush())

    @precondition(lambda self: self.open)
    @rule(sure=RARELY)
    def interrupt(self, sure: bool) -> None:
        if not sure:
            return
        self.book(self.cycle.flush())
        expected = {
            (request_id, index): tokens for request_id, parts in self.open.items() for index, tokens in parts.items()
        }
        partials, chunks = self.cycle.interrupt()
        self.book(chunks)
        for request_id, parts in partials.items():
            for partial in parts:
                before = expected.pop((request_id, partial.index))
                assert partial.tokens.tolist()[: len(before)] == before
        assert not expected and not self.open

    @invariant()
    def accounts_balance(self) -> None:
        if not hasattr(self, "roster"):
            return
        self.roster.check()
        assert self.runner.largest_step <= self.budget
        waiting_and_running = self.roster.num_waiting + self.roster.rows.num_active
        assert waiting_and_running == sum(map(len, self.open.values()))

    def book(self, chunks) -> None:
        """Every chunk goes on where the last one ended; a finished completion is the one that was to be expected."""
        for chunk in chunks:
            parts = self.open[chunk.request_id]
            parts[chunk.index] += chunk.tokens.tolist()
            whole = answer(self.requests[chunk.request_id])
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
        if not hasattr(self, "roster"):
            return
        for _ in range(5000):
            if not self.open:
                break
            self.book(self.cycle.step())
        assert not self.open, "a request starved"
        assert self.answered == sum(request.sampling.n for request in self.requests.values())
        self.roster.pages.drop_cached()
        assert self.roster.pages.num_available == self.roster.pages.num_pages


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def run_alone(requests: list[Request], *, num_pages: int, max_running: int, budget: int, prefix: bool = True):
    events: list[tuple[str, dict]] = []
    roster = Roster(
        max_running=max_running,
        num_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        prefix_cache=prefix,
        emit=lambda kind, **fields: events.append((kind, fields)),
    )
    runner = FakeDevice()
    cycle = Cycle(
        roster,
        runner,  # type: ignore[arg-type]
        token_budget=budget,
        version=0,
        eos_ids=(),
        tokenizer=None,
        clock=lambda: 0.0,
    )
    order = []
    for request in requests:
        cycle.add(request, None)
    while not cycle.is_idle:
        order += [chunk.request_id for chunk in cycle.step() if chunk.finish]
    roster.check()
    return roster, order, events


def plain(name: str, prompt: list[int], max_tokens: int, **fields) -> Request:
    return Request(
        request_id=name,
        tokens=np.asarray(prompt, np.int32),
        sampling=Sampling(max_tokens=max_tokens, n=fields.pop("n", 1)),
        chunk_tokens=0,
        **fields,
    )


def test_siblings_share_one_prefill_of_their_prompt() -> None:
    roster, _, _ = run_alone([plain("a", [1] * 10, 4, n=5)], num_pages=64, max_running=8, budget=64, prefix=False)
    assert roster.counters.prompt_tokens == 50
    assert roster.counters.prefix_hit_tokens == 40
    assert roster.counters.steps == 4


def test_equal_beginnings_hit_the_cache_only_within_a_tenant() -> None:
    first, same, other = (
        plain("a", [1] * 9, 2),
        plain("b", [1] * 9, 2),
        plain("c", [1] * 9, 2, tenant_salt="x"),
    )
    roster, _, _ = run_alone([first, same, other], num_pages=64, max_running=1, budget=64)
    assert roster.counters.prefix_hit_tokens == 8  # two full pages, for b only


def test_priority_runs_first_and_is_preempted_last() -> None:
    low, high = plain("low", [0] * 6, 20), plain("high", [1] * 6, 20, priority=1)
    _, order, _ = run_alone([low, high], num_pages=32, max_running=1, budget=8)
    assert order == ["high", "low"]
    _, _, events = run_alone([low, high], num_pages=9, max_running=2, budget=16, prefix=False)
    preempted = [fields["request_id"] for kind, fields in events if kind == "engine.preempted"]
    assert preempted and set(preempted) == {"low"}


def test_the_one_that_lost_least_is_preempted() -> None:
    old, young = plain("old", [0] * 12, 12), plain("young", [1] * 4, 20)
    roster, _, events = run_alone([old, young], num_pages=8, max_running=2, budget=32, prefix=False)
    preempted = [fields for kind, fields in events if kind == "engine.preempted"]
    assert {fields["request_id"] for fields in preempted} == {"young"}
    assert roster.counters.preemptions == len(preempted) > 0


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
    assert keys(1, "", changed)[1] != base[1], "the second block's key must depend on the first block"
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
    assert [a for a, _ in bounds] == [0, *[b for _, b in bounds[:-1]]] and bounds[-1][1] == len(sizes)
    for a, b in bounds:
        members = order[a:b]
        padded = len(members) * count_S[members].max() * keys_S[members].max()
        real = (count_S[members] * keys_S[members]).sum()
        assert padded - real <= BUCKET_SLACK + BUCKET_WASTE * real
