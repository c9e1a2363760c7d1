"""Libraries' warnings become events, and what is counted elsewhere is left out. With a collector that
fails, answers are the same, and lost spans are counted."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gyre.core.events import check_event
from gyre.launch.serving.telemetry import (
    COUNTED_ELSEWHERE,
    MOST_CHARS,
    libraries_logged,
    tracing,
)
from gyre.observability.tracing.otlp_sender import read_endpoint
from gyre.server.metrics.server_metrics import ServerMetrics
from gyre.server.tracing.traced_app import RequestTraces
from otlp_collector import collecting
from scraped import read_samples

ASKED = 20


async def answer(http: HttpRequest) -> PlainTextResponse:
    return PlainTextResponse("well")


APP = Starlette(routes=[Route("/generate", answer, methods=["POST"])])


async def inspect() -> list[Any]:
    return []


def test_a_collector_that_takes_nothing_costs_no_answer(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []

    def emit(kind: str, /, **fields: Any) -> None:
        check_event(kind, fields)
        events.append({"kind": kind, **fields})

    async def go(url: str) -> bytes:
        endpoint, traces = read_endpoint(url, "--otlp-endpoint"), RequestTraces("m")
        metrics = ServerMetrics("m", context_tokens=64, inspect=inspect)
        async with tracing(APP, endpoint, traces, metrics, emit) as traced:
            transport = httpx.ASGITransport(app=traced)
            async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
                for _ in range(ASKED):
                    assert (await client.post("/generate")).text == "well"
        return await metrics.expose()

    with collecting(tmp_path, "400") as collector:
        samples = read_samples(asyncio.run(go(collector.url)).decode())
        assert collector.spans() == []
    lost = 3 * ASKED  # the request, gateway and response_write of each
    assert samples["gyre_trace_spans_dropped_total", "reason=not_taken"] == lost
    assert samples["gyre_trace_spans_sent_total",] == 0
    assert {event["kind"] for event in events} == {"drop.spans"}
    assert sum(event["count"] for event in events) == lost
    assert all("400" in event["error"] for event in events), json.dumps(events)


def test_without_an_address_the_application_is_the_same_one() -> None:
    async def go() -> None:
        metrics = ServerMetrics("m", context_tokens=64, inspect=inspect)
        async with tracing(APP, "", None, metrics, lambda kind, **fields: None) as traced:
            assert traced is APP
        assert b"gyre_trace" not in await metrics.expose()

    asyncio.run(go())


def test_warnings_are_events_while_the_server_runs() -> None:
    told: list[dict[str, Any]] = []

    def emit(kind: str, /, **fields: Any) -> None:
        check_event(kind, list(fields))
        told.append(fields)

    logger = logging.getLogger("a.library")
    with libraries_logged(emit):
        logger.info("nothing to say")
        logger.warning("%s of %s", "two", "three" * 200)
        for text in COUNTED_ELSEWHERE:
            logger.warning(text)
        try:
            raise ValueError("what a client sent")
        except ValueError:
            logger.exception("it broke\n")
    logger.warning("too late")
    first, second = told
    assert first["message"] == ("two of " + "three" * 200)[:MOST_CHARS] and first["error"] == ""
    assert second == {
        "logger": "a.library",
        "level": "ERROR",
        "message": "it broke",
        "error": "ValueError",
    }
