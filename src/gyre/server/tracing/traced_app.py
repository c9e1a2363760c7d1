"""Traced app: the ASGI layer that makes a trace of every request for a completion. In: an
application, the header traceparent. Out: the same answers; spans, and trace ids for events.

Without --otlp-endpoint the layer is not there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gyre.core.events import Emit
from gyre.observability.tracing.span_queue import DROP_REASONS, SpanCount
from gyre.observability.tracing.span_record import SpanRecord
from gyre.observability.tracing.trace_context import begin_trace, new_id, read_traceparent
from gyre.server.tracing.marks import TRACE, RequestTrace
from gyre.server.tracing.request_spans import HttpFacts, make_request_spans

# what each traced route does, in OpenTelemetry's words
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
}


class TakesSpans(Protocol):
    """Where the spans of a request go."""

    def offer(self, spans: Sequence[SpanRecord]) -> None: ...


class RequestTraces:
    """The traces of one server: which are open, and what became of their spans."""

    def __init__(self, model: str, *, ratio: float = 1.0) -> None:
        """Record a share of `ratio` of those that begin here."""
        self.model = model
        self.ratio = ratio
        self.open_ids: dict[str, str] = {}  # of requests in the engines: their traces
        self._families = (
            Counter("gyre_trace_spans_sent", "Sent spans.", ["model_name"], registry=None),
            Counter(
                "gyre_trace_spans_dropped",
                "Spans that were lost, by why.",
                ["model_name", "reason"],
                registry=None,
            ),
        )
        sent, dropped = self._families
        self._sent = sent.labels(model_name=model)
        self._dropped = {
            reason: dropped.labels(model_name=model, reason=reason) for reason in DROP_REASONS
        }

    def register(self, registry: CollectorRegistry) -> None:
        """Tell the counts with a server's metrics."""
        for family in self._families:
            registry.register(family)

    def count(self, told: SpanCount) -> None:
        counter = self._sent if told.dropped is None else self._dropped[told.dropped]
        counter.inc(told.number)

    def stamped(self, emit: Emit) -> Emit:
        """Return `emit` with `trace_id` in every event about a request whose trace is open."""

        def stamp(kind: str, /, **fields: Any) -> None:
            trace_id = self.open_ids.get(fields.get("request_id") or "")
            if trace_id is not None:
                fields.setdefault("trace_id", trace_id)
            emit(kind, **fields)

        return stamp


class TracedApp:
    """Trace requests for completions. Where the client sent a trace, they are a part of it, and
    recorded if it records."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        traces: RequestTraces,
        spans: TakesSpans,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._traces = traces
        self._spans = spans
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in OPERATIONS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        found = read_traceparent(headers.getlist("traceparent"), headers.getlist("tracestate"))
        trace = RequestTrace(
            found or begin_trace(self._traces.ratio), self._traces.open_ids, clock=self._clock
        )
        scope[TRACE] = trace
        if not trace.context.is_sampled:
            await self._app(scope, receive, send)
            return

        async def noted(message: Message) -> None:
            began_s = self._clock()
            await send(message)
            trace.written.note(message, began_s, self._clock())

        try:
            await self._app(scope, receive, noted)
        finally:
            self._spans.offer(self._make_spans(scope, trace))

    def _make_spans(self, scope: Scope, trace: RequestTrace) -> list[SpanRecord]:
        http = HttpFacts(
            method=scope["method"],
            route=scope["path"],
            scheme=scope["scheme"],
            operation=OPERATIONS[scope["path"]],
            model=self._traces.model,
            ended_s=self._clock(),
        )
        return make_request_spans(
            trace,
            http,
            offset_ns=time.time_ns() - round(self._clock() * 1e9),
            new_span_id=lambda: new_id(64),
        )
