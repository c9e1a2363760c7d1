"""What a key's limits admit, whatever the order of requests, ends and waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.server.gateway.limits import (
    MINUTE_NS,
    KeyLimits,
    KeyMeter,
    LimitRefusal,
    Reservation,
)

LIMIT = 97  # a prime: a nanosecond refills no whole number of units
WAITS = st.integers(0, 2 * MINUTE_NS) | st.sampled_from([0, 1, MINUTE_NS // 2, MINUTE_NS])
OPS = st.lists(
    st.tuples(st.just("wait"), WAITS)
    | st.tuples(st.just("admit"), st.integers(1, LIMIT) | st.sampled_from([LIMIT, LIMIT // 2]))
    | st.tuples(st.just("end"), st.integers(0, 7), st.floats(0, 1) | st.sampled_from([0.0, 1.0])),
    max_size=60,
)
# bursts, and refunds of bursts before them: what the finer ones above seldom meet
COARSE = st.lists(
    st.sampled_from(
        [("wait", MINUTE_NS), ("wait", MINUTE_NS // 2), ("admit", LIMIT), ("end", 0, 0.0)]
    ),
    min_size=30,
    max_size=60,
)


@dataclass
class Admitted:
    at_ns: int
    reservation: Reservation
    used: int | None = None  # None while it runs

    @property
    def charge(self) -> int:
        return self.reservation.tokens if self.used is None else self.used


def play(meter: KeyMeter, ops: list[Any], now_ns: int = 0) -> tuple[list[Admitted], int]:
    """All admitted requests, and the time at the end."""
    admitted: list[Admitted] = []
    for op, *values in ops:
        running = [one for one in admitted if one.used is None]
        if op == "wait":
            now_ns += values[0]
        elif op == "admit":
            found = meter.admit(values[0], now_ns)
            if isinstance(found, Reservation):
                admitted.append(Admitted(now_ns, found))
        elif running:
            one = running[values[0] % len(running)]
            one.used = round(values[1] * one.reservation.tokens)
            meter.end(one.reservation, one.used, now_ns)
        running = [one for one in admitted if one.used is None]
        assert meter.running == len(running)
    return admitted, now_ns


def assert_windows(events: list[tuple[int, int]], limit: int) -> None:
    """Between any two admissions at most the burst and the rate's share were charged."""
    for place, (begin, _) in enumerate(events):
        total = 0
        for at, charge in events[place:]:
            total += charge
            assert total * MINUTE_NS <= limit * (MINUTE_NS + at - begin), (begin, at, total)


@given(OPS)
def test_no_span_of_time_uses_more_tokens_than_the_limit(ops) -> None:
    admitted, _ = play(KeyMeter(KeyLimits(tokens_per_minute=LIMIT), 0), ops)
    assert_windows([(one.at_ns, one.charge) for one in admitted], LIMIT)


@settings(max_examples=400)
@given(COARSE)
def test_refunds_and_bursts_together_use_no_more(ops) -> None:
    admitted, _ = play(KeyMeter(KeyLimits(tokens_per_minute=LIMIT), 0), ops)
    assert_windows([(one.at_ns, one.charge) for one in admitted], LIMIT)


@given(OPS)
def test_no_span_of_time_admits_more_requests_than_the_limit(ops) -> None:
    admitted, _ = play(KeyMeter(KeyLimits(requests_per_minute=3), 0), ops)
    assert_windows([(one.at_ns, 1) for one in admitted], 3)


def test_a_refund_does_not_come_on_top_of_a_full_bucket() -> None:
    meter = KeyMeter(KeyLimits(tokens_per_minute=LIMIT), 0)
    first = meter.admit(LIMIT, 0)
    second = meter.admit(LIMIT, MINUTE_NS)  # refilled meanwhile
    assert isinstance(first, Reservation) and isinstance(second, Reservation)
    meter.end(first, 0, MINUTE_NS)
    assert isinstance(meter.admit(1, MINUTE_NS), LimitRefusal)


@given(OPS)
def test_at_one_moment_what_is_left_and_what_is_charged_are_the_limit(ops) -> None:
    meter = KeyMeter(KeyLimits(tokens_per_minute=LIMIT), 0)
    admitted, now_ns = play(meter, [op for op in ops if op[0] != "wait"])
    assert meter.remaining(now_ns) == (None, LIMIT - sum(one.charge for one in admitted))


@given(OPS, st.randoms(use_true_random=False))
def test_a_minute_after_the_last_end_everything_is_back(ops, random) -> None:
    limits = KeyLimits(requests_per_minute=7, tokens_per_minute=LIMIT, concurrent_requests=3)
    meter = KeyMeter(limits, 0)
    admitted, now_ns = play(meter, ops)
    running = [one for one in admitted if one.used is None]
    random.shuffle(running)
    for one in running:
        now_ns += random.randrange(MINUTE_NS)
        meter.end(one.reservation, random.randint(0, one.reservation.tokens), now_ns)
    assert meter.running == 0
    assert meter.remaining(now_ns + MINUTE_NS) == (7, LIMIT)


@given(OPS, st.integers(1, LIMIT))
def test_a_refusal_says_to_the_nanosecond_when_the_request_fits(ops, tokens) -> None:
    limits = KeyLimits(requests_per_minute=5, tokens_per_minute=LIMIT)
    meter = KeyMeter(limits, 0)
    admitted, now_ns = play(meter, ops)
    while isinstance(found := meter.admit(tokens, now_ns), LimitRefusal):
        assert found.retry_ns is not None and found.retry_ns > 0
        before = meter.admit(tokens, now_ns + found.retry_ns - 1)
        assert isinstance(before, LimitRefusal) and before.retry_ns == 1
        now_ns += found.retry_ns
        after = meter.admit(tokens, now_ns)
        if isinstance(after, Reservation):
            admitted.append(Admitted(now_ns, after))
            assert_windows([(one.at_ns, one.charge) for one in admitted], LIMIT)
            break
        assert after.limit != found.limit  # the other limit binds longer


@given(OPS)
def test_no_more_run_at_once_than_may(ops) -> None:
    meter = KeyMeter(KeyLimits(concurrent_requests=2), 0)
    running: list[Reservation] = []
    for op, *values in ops:
        if op == "admit":
            found = meter.admit(values[0], 0)
            assert isinstance(found, Reservation) == (len(running) < 2)
            if isinstance(found, Reservation):
                running.append(found)
            else:
                assert (found.limit, found.retry_ns) == ("concurrent_requests", 10**9)
        elif op == "end" and running:
            meter.end(running.pop(values[0] % len(running)), 0, 0)


def test_what_never_fits_is_said_to_never_fit() -> None:
    meter = KeyMeter(KeyLimits(tokens_per_minute=LIMIT, requests_per_minute=1), 0)
    assert meter.admit(LIMIT + 1, 0) == LimitRefusal(limit="tokens_per_minute", retry_ns=None)
    assert meter.remaining(0) == (1, LIMIT)  # a refusal costs nothing


def test_a_request_that_cost_more_than_it_reserved_is_charged_for_it() -> None:
    meter = KeyMeter(KeyLimits(tokens_per_minute=LIMIT), 0)
    found = meter.admit(60, 0)
    assert isinstance(found, Reservation)
    meter.end(found, 80, 0)
    assert meter.remaining(0) == (None, LIMIT - 80)


def test_a_request_ends_once() -> None:
    meter = KeyMeter(KeyLimits(tokens_per_minute=LIMIT), 0)
    found = meter.admit(10, 0)
    assert isinstance(found, Reservation)
    meter.end(found, 0, 0)
    with pytest.raises(KeyError):
        meter.end(found, 0, 0)
    assert meter.remaining(0) == (None, LIMIT)


def test_without_limits_everything_is_admitted() -> None:
    meter = KeyMeter(KeyLimits(), 0)
    assert all(isinstance(meter.admit(10**9, 0), Reservation) for _ in range(100))
    assert meter.remaining(0) == (None, None)
