"""Tracing of a server: from an address to the layer that makes traces. In: --otlp-endpoint, the
application. Out: the application, traced; at its end all spans are sent, or counted as lost.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp

from gyre.core.events import Emit
from gyre.observability.tracing.otlp_sender import OtlpSender
from gyre.observability.tracing.span_queue import SpanQueue
from gyre.server.metrics.server_metrics import ServerMetrics
from gyre.server.tracing.traced_app import RequestTraces, TracedApp

DRAIN_S = 5.0  # for the spans that are left, after the last answer


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
