"""The span tree of marks: whatever was noted, one tree whose spans lie within each other."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.chunks import EngineVisit
from gyre.core.records import PrefillTiming, Request, Sampling, Timing
from gyre.observability.tracing.span_record import SpanRecord
from gyre.observability.tracing.trace_context import TraceContext
from gyre.server.bodies.schema import ApiError
from gyre.server.tracing.marks import CompletionMarks, EngineMarks, RequestTrace
from gyre.server.tracing.request_spans import HttpFacts, make_request_spans

OFFSET_NS = 1_700_000_000_000_000_000
REQUEST = Request(
    request_id="r", tokens=np.zeros(10, np.int32), sampling=Sampling(n=2, max_tokens=5)
)


class Bench:
    """A trace by a clock that the test sets."""

    def __init__(self, parent: int | None = None) -> None:
        self.now_s = 1.0
        self.open_ids: dict[str, str] = {}
        context = TraceContext(trace_id=7, parent_id=parent)
        self.trace = RequestTrace(context, self.open_ids, clock=lambda: self.now_s)

    def spans(self) -> list[SpanRecord]:
        ids = itertools.count(1)
        http = HttpFacts(
            method="POST",
            route="/v1/completions",
            scheme="http",
            operation="text_completion",
            model="m",
            ended_s=self.now_s,
        )
        return make_request_spans(
            self.trace, http, offset_ns=OFFSET_NS, new_span_id=lambda: next(ids)
        )


def prefill(start: int, count: int, launched_s: float, ended_s: float) -> PrefillTiming:
    return PrefillTiming(start=start, num_tokens=count, launched_s=launched_s, ended_s=ended_s)


def seconds(span: SpanRecord) -> tuple[float, float]:
    return (span.started_ns - OFFSET_NS) / 1e9, (span.ended_ns - OFFSET_NS) / 1e9


def told(spans: list[SpanRecord]) -> list[tuple[Any, ...]]:
    names = {span.span_id: span.name for span in spans}
    return [(span.name, names.get(span.parent_id or 0), *seconds(span)) for span in spans[1:]]


def note_answer(bench: Bench, *, is_stream: bool = True) -> None:
    kind = b"text/event-stream; charset=utf-8" if is_stream else b"application/json"
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
    written = bench.trace.written
    written.note(start, bench.now_s, bench.now_s)
    bench.now_s += 0.5
    body = {"type": "http.response.body", "body": b"12345"}
    written.note(body, bench.now_s - 0.25, bench.now_s)


def work(bench: Bench, *visits: EngineVisit, **completions: CompletionMarks) -> EngineMarks:
    found = EngineMarks(REQUEST, lambda: bench.now_s)
    found.visits = visits
    found.completions = {int(name[1:]): marks for name, marks in completions.items()}
    bench.trace.works.append(found)
    return found


def test_a_request_in_one_engine() -> None:
    bench = Bench(parent=99)
    bench.now_s = 2.0
    done = work(
        bench,
        EngineVisit(engine="engine-0", sent_s=2.5),
        c0=CompletionMarks(
            timing=Timing(started_s=3.0, first_token_s=5.0),
            prefills=[prefill(4, 4, 3.0, 4.0), prefill(8, 2, 4.0, 5.0)],
            last_chunk_s=7.0,
            num_tokens=5,
            finish="length",
        ),
        c1=CompletionMarks(
            timing=Timing(started_s=3.0, first_token_s=5.0),
            last_chunk_s=6.0,
            num_tokens=2,
            finish="stop",
        ),
    )
    bench.now_s = 7.25
    done.end(None)
    note_answer(bench)
    spans = bench.spans()
    root, request = spans[0], spans[2]
    assert (root.name, root.parent_id, root.kind) == ("POST /v1/completions", 99, "server")
    assert root.is_parent_remote and root.error is None and seconds(root) == (1.0, 7.75)
    assert told(spans) == [
        ("gateway", root.name, 1.0, 2.0),
        ("llm_request", root.name, 2.0, 7.25),
        ("queue", "llm_request", 2.0, 2.5),
        ("engine", "llm_request", 2.5, 7.25),
        ("admission", "engine", 2.5, 3.0),
        ("prefill", "engine", 3.0, 4.0),
        ("prefill", "engine", 4.0, 5.0),
        ("decode", "engine", 5.0, 7.0),
        ("decode", "engine", 5.0, 6.0),
        ("stream_write", root.name, 7.25, 7.75),
    ]
    assert request.attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    assert request.attributes["gen_ai.usage.output_tokens"] == 7
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length", "stop")
    assert request.attributes["gen_ai.latency.time_in_queue"] == 1.0
    assert request.attributes["gen_ai.latency.time_to_first_token"] == 3.0
    assert request.attributes["gen_ai.latency.time_in_model_inference"] == 4.0
    assert spans[-1].attributes == {
        "gyre.write.num_messages": 2,
        "gyre.write.size_bytes": 5,
        "gyre.write.blocked_s": 0.25,
    }


def test_an_engine_that_is_lost_is_an_error_and_the_next_one_goes_on() -> None:
    """A whole answer: its chunks come joined, at the end."""
    bench = Bench()
    done = work(
        bench,
        EngineVisit(engine="engine-0", sent_s=1.0, lost_s=4.0),
        EngineVisit(engine="engine-1", sent_s=5.0),
        c0=CompletionMarks(
            timing=Timing(started_s=1.5, first_token_s=2.0),
            prefills=[prefill(0, 10, 1.5, 2.0), prefill(0, 12, 5.5, 6.0)],
            last_chunk_s=8.0,
            num_tokens=5,
            finish="length",
        ),
    )
    bench.now_s = 8.0
    done.end(None)
    note_answer(bench, is_stream=False)
    spans = bench.spans()
    assert [span.error for span in spans if span.name == "engine"] == ["engine_lost", None]
    assert told(spans)[1:-1] == [
        ("llm_request", spans[0].name, 1.0, 8.0),
        ("queue", "llm_request", 1.0, 1.0),
        ("engine", "llm_request", 1.0, 4.0),
        ("admission", "engine", 1.0, 1.5),
        ("prefill", "engine", 1.5, 2.0),
        ("decode", "engine", 2.0, 4.0),
        ("queue", "llm_request", 4.0, 5.0),
        ("engine", "llm_request", 5.0, 8.0),
        ("admission", "engine", 5.0, 5.5),
        ("prefill", "engine", 5.5, 6.0),
        ("decode", "engine", 6.0, 8.0),
    ]
    assert spans[-1].name == "response_write"
    assert not any(span.attributes.get("gyre.prefill.is_recomputation") for span in spans)


def test_what_a_preemption_costs_is_seen() -> None:
    bench = Bench()
    done = work(
        bench,
        c0=CompletionMarks(
            timing=Timing(started_s=1.0, first_token_s=2.0),
            prefills=[prefill(0, 10, 1.0, 2.0), prefill(0, 12, 3.0, 4.0)],
            last_chunk_s=5.0,
            finish="stop",
        ),
    )
    bench.now_s = 5.0
    done.end(None)
    again = [
        span.attributes["gyre.prefill.is_recomputation"]
        for span in bench.spans()
        if span.name == "prefill"
    ]
    assert again == [False, True]


def test_what_no_engine_had_waited_to_its_end() -> None:
    bench = Bench()
    done = work(bench)
    bench.now_s = 3.0
    done.end(ApiError(503, "no engine is left"))
    spans = bench.spans()
    assert told(spans)[1:] == [
        ("llm_request", spans[0].name, 1.0, 3.0),
        ("queue", "llm_request", 1.0, 3.0),
    ]
    assert spans[0].error == spans[2].error is not None


def test_a_client_that_hangs_up_is_no_error() -> None:
    bench = Bench()
    work(bench).end(asyncio.CancelledError())
    spans = bench.spans()
    assert [span.error for span in spans] == [None] * len(spans)
    request = next(span for span in spans if span.name == "llm_request")
    assert request.attributes["error.type"] == "client_disconnected"
    assert request.attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_a_fault_of_the_server_is_an_error_of_the_root() -> None:
    bench = Bench()
    work(bench).end(RuntimeError("secret"))
    spans = bench.spans()
    assert spans[0].error == "server_fault" and "secret" not in repr(spans)


def test_events_find_the_trace_of_a_request_as_long_as_it_runs() -> None:
    bench = Bench()
    with bench.trace.follow(REQUEST):
        assert bench.open_ids == {"r": f"{7:032x}"}
    assert bench.open_ids == {}


steps = st.floats(0.001, 5.0)


@st.composite
def benches(draw: st.DrawFn) -> Bench:
    """A request whose engines were lost, each after so much of its work."""
    bench, visits = Bench(draw(st.none() | st.just(1 << 40))), []
    marks = {index: CompletionMarks() for index in range(draw(st.integers(0, 3)))}

    def wait() -> float:
        bench.now_s += draw(steps)
        return bench.now_s

    wait()
    done = work(bench)
    for number in range(draw(st.integers(0, 3))):
        if visits and visits[-1].lost_s is None:
            visits[-1] = EngineVisit(
                engine=visits[-1].engine, sent_s=visits[-1].sent_s, lost_s=wait()
            )
        visits.append(EngineVisit(engine=f"engine-{number}", sent_s=wait()))
        for found in marks.values():
            at = 0
            for _ in range(draw(st.integers(0, 3))):
                found.prefills.append(prefill(at, 5, wait(), wait()))
                at += 5
            if found.prefills and found.timing is None and draw(st.booleans()):
                first = found.prefills[0].launched_s
                found.timing = Timing(started_s=first, first_token_s=bench.now_s)
            if found.timing is not None:
                found.last_chunk_s = wait()
    for found in marks.values():
        if found.timing is not None and draw(st.booleans()):
            found.finish, found.last_chunk_s = "stop", wait()
    done.visits, done.completions = visits, marks
    wait()
    done.end(None)
    if draw(st.booleans()):
        note_answer(bench)
    wait()
    return bench


@given(benches())
def test_every_span_lies_within_its_parent(bench: Bench) -> None:
    spans = bench.spans()
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    assert [span for span in spans if span.parent_id not in by_id] == spans[:1]
    for span in spans[1:]:
        parent = by_id[span.parent_id or 0]
        assert parent.started_ns <= span.started_ns <= span.ended_ns <= parent.ended_ns, span
    (work,) = bench.trace.works
    pieces = sum(len(marks.prefills) for marks in work.completions.values())
    assert sum(span.name == "prefill" for span in spans) == pieces
    assert sum(span.name == "engine" for span in spans) >= len(work.visits)
