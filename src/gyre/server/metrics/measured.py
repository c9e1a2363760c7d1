"""Measured: the ASGI layer that counts every HTTP response, and logs it where that was asked for.
In: an application. Out: the same answers; metrics, and events of kind serve.access."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gyre.core.events import Emit
from gyre.server.metrics.server_metrics import ServerMetrics
from gyre.server.tracing.marks import trace_fields

HUNG_UP_STATUS = 499  # status of a request whose client was gone before an answer began
LONGEST_PATH = 200  # characters of a path in the log
# key of the scope under which the connection puts the status of a refusal that it wrote itself
REFUSED_STATUS = "gyre.refused_status"
SOURCE = "gyre.work"  # key of the scope under which a response puts its AnswerSource


class MeasuredApp:
    """Count responses by route and status. `emit`: where accesses are logged; None logs none."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Sequence[BaseRoute],
        metrics: ServerMetrics,
        emit: Emit | None,
    ) -> None:
        self._app = app
        self._routes = routes
        self._metrics = metrics
        self._emit = emit
        self._paths = {route.path for route in routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began_s = HUNG_UP_STATUS, time.monotonic()

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception:
            status = 500 if status == HUNG_UP_STATUS else status  # the layer above answers so
            raise
        finally:
            if status == HUNG_UP_STATUS:
                status = scope.get(REFUSED_STATUS, status)
            path = scope["path"]  # most are a route's own, which needs no search
            route = path if path in self._paths else find_route(scope, self._routes)
            self._metrics.count_response(route, status)
            if self._emit is not None:
                self._log(self._emit, scope, status, time.monotonic() - began_s)

    def _log(self, emit: Emit, scope: Scope, status: int, seconds: float) -> None:
        work = scope.get(SOURCE)
        emit(
            "serve.access",
            method=scope["method"],
            path=scope["path"][:LONGEST_PATH],
            status=status,
            seconds=round(seconds, 6),
            request_id=None if work is None else work.name,
            tokens=None if work is None else work.usage.completion_tokens,
            **trace_fields(scope),
        )


def find_route(scope: Scope, routes: Sequence[BaseRoute]) -> str:
    """Return the path of the route that takes a request, or "other": clients choose paths, and
    each would be a series."""
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            return getattr(route, "path", "other")
    return "other"
