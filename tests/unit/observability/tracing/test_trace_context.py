"""traceparent: what is read of any header is what OpenTelemetry's own propagator reads."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gyre.observability.tracing.trace_context import (
    begin_trace,
    is_chosen,
    new_id,
    read_traceparent,
)

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{PARENT}-01"

hexes = st.text("0123456789abcdef", min_size=0, max_size=40)
likely = st.builds(
    "{}-{}-{}-{}{}".format,
    st.sampled_from(["00", "01", "cc", "ff", "0", "0A"]) | hexes,
    st.sampled_from([TRACE, "0" * 32, TRACE.upper(), TRACE[1:]]) | hexes,
    st.sampled_from([PARENT, "0" * 16, PARENT.upper()]) | hexes,
    st.sampled_from(["00", "01", "03", "ff", "1", "zz"]) | hexes,
    st.sampled_from(["", "-", "-more", "more", " ", "\t"]),
)


@given(likely | st.text(max_size=60))
@example(GOOD)
@example(f"01-{TRACE}-{PARENT}-01-what-a-later-version-adds")
def test_a_header_is_read_as_opentelemetry_reads_it(header: str) -> None:
    if "\n" in header or "\r" in header:
        return  # HTTP has no such header
    found = read_traceparent([header])
    carrier = {"traceparent": header}
    told = trace.get_current_span(TraceContextTextMapPropagator().extract(carrier))
    expected = told.get_span_context()
    if found is None:
        assert not expected.is_valid
    else:
        assert (found.trace_id, found.parent_id) == (expected.trace_id, expected.span_id)
        assert found.is_sampled == bool(expected.trace_flags.sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        GOOD[:-1],
        GOOD + "0",
        GOOD + "-more",  # version 00 has four fields
        GOOD.upper(),
        "ff" + GOOD[2:],
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}",
        GOOD.replace("-", "_"),
    ],
)
def test_a_malformed_header_begins_a_trace(header: str) -> None:
    assert read_traceparent([header]) is None


def test_the_flag_says_whether_the_caller_records() -> None:
    for flags, sampled in (("00", False), ("01", True), ("02", False), ("03", True)):
        found = read_traceparent([f"00-{TRACE}-{PARENT}-{flags}"])
        assert found is not None and found.is_sampled is sampled
        assert found.trace_hex == TRACE and found.parent_id == int(PARENT, 16)


def test_two_headers_are_none_and_states_go_on() -> None:
    assert read_traceparent([GOOD, GOOD]) is None and read_traceparent([]) is None
    found = read_traceparent([GOOD], ["a=1", "b=2"])
    assert found is not None and found.state == "a=1,b=2"
    assert read_traceparent([GOOD], ["a=" + "x" * 511]).state == ""  # type: ignore[union-attr]


@given(trace_id=st.integers(1, (1 << 128) - 1), ratio=st.floats(0.0, 1.0))
@example(trace_id=(1 << 64) - 1, ratio=1.0)
def test_a_share_is_recorded_by_opentelemetrys_own_rule(trace_id: int, ratio: float) -> None:
    told = TraceIdRatioBased(ratio).should_sample(None, trace_id, "a")
    assert is_chosen(trace_id, ratio) == told.decision.is_sampled()


def test_a_ratio_is_that_of_the_traces() -> None:
    assert not any(begin_trace(0.0).is_sampled for _ in range(100))
    chosen = sum(begin_trace(0.5).is_sampled for _ in range(1000))
    assert 300 < chosen < 700  # but for one in 10³⁰ runs


def test_new_traces_are_recorded_and_differ() -> None:
    traces = [begin_trace() for _ in range(100)]
    assert len({one.trace_id for one in traces}) == 100
    assert all(one.is_sampled and one.parent_id is None for one in traces)
    assert all(0 < new_id(64) < 2**64 for _ in range(100))
    assert all(len(one.trace_hex) == 32 for one in traces)
