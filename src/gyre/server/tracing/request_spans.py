"""Request spans: the span tree of one HTTP request. In: its marks. Out: SpanRecords. Pure.

POST /v1/chat/completions: a part of the client's span, where it sent one
├─ gateway: key, body, prompt tokens
├─ llm_request: one for each prompt; attributes by OpenTelemetry, else by vLLM
│  ├─ queue: waits for an engine
│  └─ engine: one for each that had it; an error where it was lost
│     ├─ admission: waits for a place in the batch
│     ├─ prefill: one for each chunk of the prompt
│     └─ decode: one for each completion
└─ stream_write or response_write: from the first byte to the last
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from gyre.core.chunks import EngineVisit
from gyre.core.records import PrefillTiming
from gyre.observability.tracing.span_record import AttributeValue, SpanRecord
from gyre.observability.tracing.trace_context import TraceContext
from gyre.server.tracing.marks import (
    HUNG_UP_CODE,
    CompletionMarks,
    EngineMarks,
    RequestTrace,
    WriteMarks,
)

ENGINE_LOST = "engine_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpFacts:
    """What the spans tell of the HTTP request and the model."""

    method: str
    route: str
    scheme: str
    operation: str  # gen_ai.operation.name
    model: str
    ended_s: float


class SpanMaker:
    """Makes the spans of one trace, in the order of their parents."""

    def __init__(
        self, context: TraceContext, offset_ns: int, new_span_id: Callable[[], int]
    ) -> None:
        """`offset_ns`: unix time less the monotonic clock's."""
        self._context = context
        self._offset_ns = offset_ns
        self._new_id = new_span_id
        self.spans: list[SpanRecord] = []

    def add(
        self, name: str, parent_id: int | None, started_s: float, ended_s: float, **fields: Any
    ) -> int:
        """Add a span, and return its id."""
        span = SpanRecord(
            name=name,
            trace_id=self._context.trace_id,
            span_id=self._new_id(),
            parent_id=parent_id,
            started_ns=self._offset_ns + round(started_s * 1e9),
            ended_ns=self._offset_ns + round(ended_s * 1e9),
            trace_state=self._context.state,
            **fields,
        )
        self.spans.append(span)
        return span.span_id


def make_request_spans(
    trace: RequestTrace, http: HttpFacts, *, offset_ns: int, new_span_id: Callable[[], int]
) -> list[SpanRecord]:
    """Return all spans of a request that has ended, the root first."""
    maker, written = SpanMaker(trace.context, offset_ns, new_span_id), trace.written
    root = maker.add(
        f"{http.method} {http.route}",
        trace.context.parent_id,
        trace.arrived_s,
        http.ended_s,
        kind="server",
        is_parent_remote=trace.context.parent_id is not None,
        attributes=http_attributes(trace, http),
        error=find_error(trace),
    )
    begins = [work.submitted_s for work in trace.works]
    written_s = http.ended_s if written.first_s is None else written.first_s
    maker.add("gateway", root, trace.arrived_s, min([*begins, written_s]))
    for work in trace.works:
        add_engine_spans(maker, root, work, http, is_stream=written.is_stream)
    if written.first_s is not None:
        add_write(maker, root, written, written.first_s)
    return maker.spans


def http_attributes(trace: RequestTrace, http: HttpFacts) -> dict[str, AttributeValue]:
    """Return the root's attributes, by OpenTelemetry's conventions for HTTP servers."""
    found: dict[str, AttributeValue] = {
        "http.request.method": http.method,
        "http.route": http.route,
        "url.scheme": http.scheme,
    }
    if trace.written.status is not None:
        found["http.response.status_code"] = trace.written.status
    if trace.answer_id is not None:
        found["gen_ai.response.id"] = trace.answer_id
    error = find_error(trace)
    if error is not None:
        found["error.type"] = error
    return found


def find_error(trace: RequestTrace) -> str | None:
    """Return the code of what the server did not do. A client that hangs up or asks wrongly is no
    error of the server's."""
    status = trace.written.status
    errors = [work.error for work in trace.works if work.error not in (None, HUNG_UP_CODE)]
    if status is not None and 400 <= status < 500:
        return None
    if errors:
        return errors[0]
    return str(status) if status is not None and status >= 500 else None


def add_write(maker: SpanMaker, root: int, written: WriteMarks, first_s: float) -> None:
    """Add how the answer went to the connection."""
    maker.add(
        "stream_write" if written.is_stream else "response_write",
        root,
        first_s,
        written.last_s,
        attributes={
            "gyre.write.num_messages": written.num_messages,
            "gyre.write.size_bytes": written.size_bytes,
            "gyre.write.blocked_s": written.blocked_s,
        },
    )


def add_engine_spans(
    maker: SpanMaker, root: int, work: EngineMarks, http: HttpFacts, *, is_stream: bool
) -> None:
    """Add one request in the engines, with each engine that had it."""
    attributes = request_attributes(work, http, is_stream=is_stream)
    if work.error is not None:
        attributes["error.type"] = work.error
    request = maker.add(
        "llm_request",
        root,
        work.submitted_s,
        work.ended_s,
        attributes=attributes,
        error=None if work.error == HUNG_UP_CODE else work.error,
    )
    waits_s = work.submitted_s
    for visit in find_visits(work):
        maker.add("queue", request, waits_s, visit.sent_s)
        add_visit(maker, request, work, visit)
        waits_s = work.ended_s if visit.lost_s is None else visit.lost_s
    if waits_s < work.ended_s:  # no engine had it at its end
        maker.add("queue", request, waits_s, work.ended_s)


def find_visits(work: EngineMarks) -> Sequence[EngineVisit]:
    """Return the engines that had the request. An engine outside a pool had it from its submit."""
    if not work.visits and any(one.prefills or one.timing for one in work.completions.values()):
        return (EngineVisit(engine="", sent_s=work.submitted_s),)
    return work.visits


def add_visit(maker: SpanMaker, request: int, work: EngineMarks, visit: EngineVisit) -> None:
    """Add what one engine did of a request."""
    ended_s = work.ended_s if visit.lost_s is None else visit.lost_s
    attributes: dict[str, AttributeValue] = {"gyre.engine.name": visit.engine}
    error = None
    if visit.lost_s is not None:
        attributes["error.type"] = error = ENGINE_LOST
    engine = maker.add("engine", request, visit.sent_s, ended_s, attributes=attributes, error=error)
    parts = {index: during(marks, visit) for index, marks in sorted(work.completions.items())}
    launches = [piece.launched_s for marks in parts.values() for piece in marks.prefills]
    maker.add("admission", engine, visit.sent_s, min(launches, default=ended_s))
    for index, marks in parts.items():
        add_prefills(maker, engine, index, marks.prefills)
    for index, marks in parts.items():
        began_s = find_decode_start(marks)
        if began_s is not None:
            maker.add(
                "decode",
                engine,
                began_s,
                marks.last_chunk_s if visit.lost_s is None else ended_s,
                attributes={
                    "gyre.completion.index": index,
                    "gyre.completion.num_tokens": marks.num_tokens,
                },
            )


def during(marks: CompletionMarks, visit: EngineVisit) -> CompletionMarks:
    """Return the marks within an engine's time."""
    lost_s = math.inf if visit.lost_s is None else visit.lost_s
    timing = marks.timing
    if timing is not None and not visit.sent_s <= timing.first_token_s < lost_s:
        timing = None
    prefills = [piece for piece in marks.prefills if visit.sent_s <= piece.launched_s < lost_s]
    return replace(marks, timing=timing, prefills=prefills)


def add_prefills(
    maker: SpanMaker, engine: int, index: int, prefills: Sequence[PrefillTiming]
) -> None:
    """Add the pieces of a completion's known tokens."""
    known = 0
    for piece in prefills:
        maker.add(
            "prefill",
            engine,
            piece.launched_s,
            piece.ended_s,
            attributes={
                "gyre.completion.index": index,
                "gyre.prefill.start": piece.start,
                "gyre.prefill.num_tokens": piece.num_tokens,
                # it was preempted, and its KV was given up
                "gyre.prefill.is_recomputation": piece.start < known,
            },
        )
        known = max(known, piece.start + piece.num_tokens)


def find_decode_start(marks: CompletionMarks) -> float | None:
    """Return when an engine had a completion's first token; None where it had none, as far as is
    known. One that another engine began decodes once its known tokens are computed."""
    if marks.timing is not None:
        return marks.timing.first_token_s
    if not marks.prefills:
        return None
    for piece, after in pairwise(marks.prefills):
        if after.start < piece.start + piece.num_tokens:
            return piece.ended_s
    return marks.prefills[-1].ended_s if marks.finish in ("stop", "length") else None


def request_attributes(
    work: EngineMarks, http: HttpFacts, *, is_stream: bool
) -> dict[str, AttributeValue]:
    """Return the attributes of a request: OpenTelemetry's where it has a name, else vLLM's. Tokens
    used have both, since vLLM's dashboards read the older names."""
    request, sampling = work.request, work.request.sampling
    completions = [marks for _, marks in sorted(work.completions.items())]
    prompt, chosen = len(request.tokens), sum(marks.num_tokens for marks in completions)
    ends = [marks.finish for marks in completions if marks.finish is not None]
    if work.error == HUNG_UP_CODE:
        ends = ends or ["abort"]
    found: dict[str, AttributeValue] = {
        "gen_ai.operation.name": http.operation,
        "gen_ai.provider.name": "gyre",
        "gen_ai.request.model": http.model,
        "gen_ai.response.model": http.model,
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.n": sampling.n,
        "gen_ai.request.stream": is_stream,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.output_tokens": chosen,
        "gen_ai.usage.completion_tokens": chosen,
        "gen_ai.response.finish_reasons": tuple(ends),
        "gen_ai.latency.e2e": work.ended_s - work.submitted_s,
    }
    firsts = [marks.prefills[0].start for marks in completions if marks.prefills]
    if firsts:
        found["gen_ai.usage.cache_read.input_tokens"] = firsts[0]
    timings = [marks.timing for marks in completions if marks.timing is not None]
    if timings:
        started_s = min(timing.started_s for timing in timings)
        first_token_s = min(timing.first_token_s for timing in timings)
        last_s = max(marks.last_chunk_s for marks in completions)
        found |= {
            "gen_ai.latency.time_in_queue": started_s - work.submitted_s,
            "gen_ai.latency.time_to_first_token": first_token_s - work.submitted_s,
            "gen_ai.latency.time_in_model_prefill": first_token_s - started_s,
            "gen_ai.latency.time_in_model_decode": last_s - first_token_s,
            "gen_ai.latency.time_in_model_inference": last_s - started_s,
        }
    return found
