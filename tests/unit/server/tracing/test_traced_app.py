"""The layer around an application: which requests it traces, and that no failure reaches them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from gyre.observability.tracing.span_queue import SpanCount
from gyre.observability.tracing.span_record import SpanRecord
from gyre.server.tracing.marks import trace_answer, trace_fields
from gyre.server.tracing.traced_app import OPERATIONS, RequestTraces, TracedApp
from scraped import read_samples

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Spans:
    def __init__(self) -> None:
        self.traces: list[Sequence[SpanRecord]] = []

    def offer(self, spans: Sequence[SpanRecord]) -> None:
        self.traces.append(spans)


async def tell(http: HttpRequest) -> JSONResponse:
    recorded = trace_answer(http.scope, "a") is not None
    return JSONResponse({**trace_fields(http.scope), "recorded": recorded})


async def fail(http: HttpRequest) -> PlainTextResponse:
    raise RuntimeError("secret")


def make(ratio: float = 1.0) -> tuple[TracedApp, Spans]:
    routes = [Route(path, tell, methods=["POST", "GET"]) for path in [*OPERATIONS, "/health"]]
    routes[2] = Route("/generate", fail, methods=["POST"])
    spans = Spans()
    return TracedApp(
        Starlette(routes=routes), traces=RequestTraces("m", ratio=ratio), spans=spans
    ), spans


async def ask(app: TracedApp, path: str, method: str = "POST", **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        return await client.request(method, path, headers=headers)


def test_a_request_for_a_completion_is_a_trace_of_its_own() -> None:
    app, spans = make()
    answers = [asyncio.run(ask(app, "/v1/completions")).json() for _ in range(2)]
    ids = [answer["trace_id"] for answer in answers]
    assert [f"{trace[0].trace_id:032x}" for trace in spans.traces] == ids
    assert len(set(ids)) == 2 and all(answer["recorded"] for answer in answers)
    root = spans.traces[0][0]
    assert root.name == "POST /v1/completions" and root.parent_id is None
    assert not root.is_parent_remote and root.attributes["http.response.status_code"] == 200


@pytest.mark.parametrize(("flags", "recorded"), [("01", True), ("00", False)])
def test_that_of_the_client_goes_on_and_is_recorded_where_it_records(flags, recorded) -> None:
    app, spans = make()
    header = f"00-{TRACE}-{PARENT}-{flags}"
    answer = asyncio.run(ask(app, "/v1/chat/completions", traceparent=header)).json()
    assert answer == {"trace_id": TRACE, "recorded": recorded}
    assert [trace[0].parent_id for trace in spans.traces] == [int(PARENT, 16)] * recorded


def test_what_is_not_recorded_has_an_id_and_no_spans() -> None:
    app, spans = make(ratio=0.0)
    answer = asyncio.run(ask(app, "/v1/completions")).json()
    assert len(answer["trace_id"]) == 32 and not answer["recorded"] and spans.traces == []
    header = f"00-{TRACE}-{PARENT}-01"  # the client records, whatever the ratio is
    assert asyncio.run(ask(app, "/v1/completions", traceparent=header)).json()["recorded"]
    assert len(spans.traces) == 1


@pytest.mark.parametrize(("path", "method"), [("/health", "POST"), ("/v1/completions", "GET")])
def test_other_requests_are_none(path: str, method: str) -> None:
    app, spans = make()
    assert asyncio.run(ask(app, path, method)).json() == {"recorded": False}
    assert spans.traces == []


def test_a_fault_of_the_application_is_in_its_trace() -> None:
    app, spans = make()
    assert asyncio.run(ask(app, "/generate")).status_code == 500
    ((root, *_),) = spans.traces
    assert root.error == "500" and "secret" not in repr(spans.traces)


def test_events_about_a_request_get_its_trace() -> None:
    traces, rows = RequestTraces("m"), []

    def emit(kind: str, /, **fields: Any) -> None:
        rows.append((kind, fields))

    stamped = traces.stamped(emit)
    traces.open_ids["r"] = TRACE
    stamped("engine.preempted", request_id="r")
    stamped("engine.preempted", request_id="other")
    stamped("engine.started", version=0)
    stamped("serve.access", request_id=None)
    assert rows == [
        ("engine.preempted", {"request_id": "r", "trace_id": TRACE}),
        ("engine.preempted", {"request_id": "other"}),
        ("engine.started", {"version": 0}),
        ("serve.access", {"request_id": None}),
    ]


def test_the_counts_are_metrics() -> None:
    traces, registry = RequestTraces("m"), CollectorRegistry()
    traces.register(registry)
    traces.count(SpanCount(number=5, dropped=None))
    traces.count(SpanCount(number=3, dropped="queue_full"))
    samples = read_samples(generate_latest(registry).decode())
    assert samples["gyre_trace_spans_sent_total",] == 5
    assert samples["gyre_trace_spans_dropped_total", "reason=queue_full"] == 3
    assert samples["gyre_trace_spans_dropped_total", "reason=not_taken"] == 0
