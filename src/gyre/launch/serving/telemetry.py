"""Telemetry of a server: its events, what libraries log, and traces. In: events by their kind,
records of Python's logging, --otlp-endpoint. Out: one JSON object a line on stderr; the traced
application, all of whose spans are sent at its end or counted as lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from starlette.types import ASGIApp

from gyre.core.events import Emit
from gyre.observability.tracing.otlp_sender import OtlpSender
from gyre.observability.tracing.span_queue import SpanQueue
from gyre.server.metrics.server_metrics import ServerMetrics
from gyre.server.tracing.traced_app import RequestTraces, TracedApp

DRAIN_S = 5.0  # for the spans that are left, after the last answer
MOST_CHARS = 500
# said for each write to a client that is gone, or each request that is no HTTP: both are counted in
# the metrics, and a client could fill the log
COUNTED_ELSEWHERE = ("socket.send() raised exception.", "Invalid HTTP request received.")


def worker_events(emit: Emit) -> Callable[..., None]:
    """Return what takes the events of workers, by their names."""

    def write(worker: str, kind: str, /, **fields: Any) -> None:
        emit(kind, worker=worker, **fields)

    return write


def write_server_event(kind: str, /, **fields: Any) -> None:
    """Write an event to the log: one JSON object a line, on stderr."""
    row = {"t": round(time.time(), 4), "kind": kind, **fields}
    # one write: another thread may write too
    sys.stderr.write(json.dumps(row, default=str) + "\n")
    sys.stderr.flush()


class EventHandler(logging.Handler):
    """Emit `serve.library_warning` for each record. Of an exception it has the type alone:
    its traceback is in the event of the request that it broke."""

    def __init__(self, emit: Emit) -> None:
        super().__init__(level=logging.WARNING)
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage().strip()
        except (TypeError, ValueError):  # its arguments do not fit: the library's fault
            message = str(record.msg)
        if message in COUNTED_ELSEWHERE:
            return
        error = record.exc_info[0] if record.exc_info else None
        self._emit(
            "serve.library_warning",
            logger=record.name,
            level=record.levelname,
            message=message[:MOST_CHARS],
            error="" if error is None else error.__name__,
        )


@contextmanager
def libraries_logged(emit: Emit) -> Iterator[None]:
    """Take the place of Python's handler of last resort meanwhile."""
    handler, root = EventHandler(emit), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


@asynccontextmanager
async def tracing(
    app: ASGIApp, endpoint: str, traces: RequestTraces | None, metrics: ServerMetrics, emit: Emit
) -> AsyncIterator[ASGIApp]:
    """Give the application that traces requests as long as the block lasts. Without `traces` it is
    the same one."""
    if traces is None:
        yield app
        return
    sender = OtlpSender(
        endpoint,
        service="gyre",
        attributes={
            "service.instance.id": str(uuid.uuid4()),
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
        },
    )
    spans = SpanQueue(sender, emit=emit, count=traces.count)
    traces.register(metrics.registry)
    try:
        yield TracedApp(app, traces=traces, spans=spans)
    finally:
        await asyncio.to_thread(spans.close, DRAIN_S)
