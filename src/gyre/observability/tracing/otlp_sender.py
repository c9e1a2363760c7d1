"""OTLP sender: spans to a collector, by OpenTelemetry's own exporter. In: SpanRecords. Out: OTLP
over HTTP with protobuf; a sentence where a batch was not taken.

OpenTelemetry is imported when a sender is made: a start without traces does not wait for it. Its
variables OTEL_EXPORTER_OTLP_HEADERS (a key), _CERTIFICATE and OTEL_RESOURCE_ATTRIBUTES count.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from gyre.core.errors import ConfigError
from gyre.observability.tracing.span_record import AttributeValue, SpanRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

TRACES_PATH = "/v1/traces"  # of the protocol
TIMEOUT_S = 10.0  # for a batch, with what the exporter tries again
LOGGER = "opentelemetry"


def read_endpoint(url: str, asked_by: str) -> str:
    """Return the address that takes spans. ConfigError for an address that cannot be asked, or
    where OpenTelemetry is not installed; both before anything is started."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{asked_by} {url!r}: need http://HOST:PORT or https://HOST:PORT",
            hint="a collector takes OTLP over HTTP at port 4318; its port 4317 is gRPC's",
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"{asked_by}: the address has a password, which would be logged",
            hint="put it into OTEL_EXPORTER_OTLP_HEADERS: Authorization=Basic%20…",
        )
    for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        if not _is_installed(name):
            raise ConfigError(
                f"{asked_by}: the package {name} is not installed",
                hint="pip install 'gyre-rl[trace]'",
            )
    path = parts.path.rstrip("/")
    path = path if path.endswith(TRACES_PATH) else path + TRACES_PATH
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


class OtlpSender:
    """Sends batches to one endpoint, from one thread."""

    def __init__(
        self,
        endpoint: str,
        *,
        service: str,
        attributes: Mapping[str, AttributeValue],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`attributes` are those of OpenTelemetry's resource: of this process."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=timeout_s)
        self._taken = SpanExportResult.SUCCESS
        told = {"service.name": service, "service.version": version("gyre-rl"), **attributes}
        self._as_span = partial(
            make_otel_span,
            resource=Resource.create(told),
            scope=InstrumentationScope("gyre", version("gyre-rl")),
        )
        self._log = LastMessage()
        logger = logging.getLogger(LOGGER)
        logger.addHandler(self._log)
        logger.propagate = False  # its lines are no events; the last one goes into ours

    def send(self, spans: Sequence[SpanRecord]) -> str | None:
        """Send a batch. Return why it was not taken, or None; at the latest after the timeout."""
        self._log.text = ""
        if self._exporter.export([self._as_span(span) for span in spans]) is self._taken:
            return None
        return self._log.text or "the collector did not take it"

    def close(self) -> None:
        """Let a `send` under way end without another try."""
        self._exporter.shutdown()  # the handler stays: a send under way may still write to it


class LastMessage(logging.Handler):
    """Keeps the last message of a logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:500]


def make_otel_span(span: SpanRecord, *, resource: Any, scope: Any) -> ReadableSpan:
    """Return the span as OpenTelemetry's exporter reads it."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.span import TraceState
    from opentelemetry.trace.status import Status, StatusCode

    flags = TraceFlags(TraceFlags.SAMPLED)
    state = TraceState.from_header([span.trace_state]) if span.trace_state else TraceState()
    parent = None
    if span.parent_id is not None:
        parent = SpanContext(span.trace_id, span.parent_id, span.is_parent_remote, flags, state)
    return ReadableSpan(
        name=span.name,
        context=SpanContext(span.trace_id, span.span_id, False, flags, state),
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        events=[Event(mark.name, mark.attributes, mark.at_ns) for mark in span.marks],
        kind=SpanKind.SERVER if span.kind == "server" else SpanKind.INTERNAL,
        status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=span.started_ns,
        end_time=span.ended_ns,
        instrumentation_scope=scope,
    )
