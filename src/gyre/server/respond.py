"""Respond: one request in the engine, and how its answer leaves. In: a Request, an Answer, a
client's connection. Out: one body, or a stream of events. A client that hangs up aborts the
request, which frees its KV pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import traceback
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gyre.core.contracts import RolloutEngine
from gyre.core.events import Emit
from gyre.core.records import Request
from gyre.server.answers import Answer
from gyre.server.generation import ServedModel, TextDelta, TokenUsage, pieces
from gyre.server.schema import FAULT, ApiError


class ActiveRequest:
    """One request in the engine, from its first piece to its end or abort."""

    def __init__(
        self,
        engine: RolloutEngine,
        request: Request,
        model: ServedModel,
        usage: TokenUsage,
        *,
        kept_ids: frozenset[int] = frozenset(),  # special tokens that the answer's text shows
    ) -> None:
        self._engine, self.request, self._model, self.usage = engine, request, model, usage
        self._kept_ids = kept_ids

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[AsyncIterator[TextDelta]]:
        """Submit it. An error or a cancellation aborts it, which frees its KV pages."""
        stream = self._engine.submit(self.request)
        try:
            yield pieces(
                stream,
                self.request,
                self._model.tokenizer,
                self.usage,
                kept_ids=self._kept_ids,
            )
        except BaseException:
            await self._engine.abort(self.request.request_id)
            raise


class WholeAnswer(Response):
    """An answer in one body. The request is aborted when the client hangs up before."""

    def __init__(self, work: ActiveRequest, answer: Answer) -> None:
        self._work, self._answer = work, answer
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def collect() -> list[TextDelta]:
            async with self._work.open() as found:
                return [piece async for piece in found]

        try:
            gathered = await unless_gone(collect(), receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if gathered is not None:
            body = self._answer.whole(gathered, self._work.usage)
            await JSONResponse(body)(scope, receive, send)


class EventStream(Response):
    """An answer as server-sent events. The headers wait for the first piece, so that what the
    engine refuses has its status."""

    def __init__(
        self, work: ActiveRequest, answer: Answer, *, includes_usage: bool, emit: Emit
    ) -> None:
        self._work, self._answer, self._emit = work, answer, emit
        self._includes_usage = includes_usage
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def go() -> bool:
            nonlocal started
            async with self._work.open() as found:
                async for piece in found:
                    if not started:
                        started = True
                        await send(START)
                        for event in self._answer.first(self._work.request.sampling.n):
                            await send(as_event(event))
                    await send(as_event(self._answer.event(piece, self._work.usage)))
            if self._includes_usage:
                await send(as_event(self._answer.last(self._work.usage)))
            await send(END)
            return True

        try:
            await unless_gone(go(), receive)
        except ApiError as error:
            refusal = error
        except Exception as error:
            if not started:
                raise
            trace = "".join(traceback.format_exception(error))
            self._emit("serve.request_failed", path=scope["path"], error=trace)
            refusal = ApiError(500, FAULT)
        else:
            return
        if started:  # the status is sent already: the stream ends with the error as its last event
            await send(as_event(refusal.as_dict()) | {"more_body": False})
        else:
            await refusal.response()(scope, receive, send)


START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # proxies pass each event on at once
    ],
}
END = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}


def as_event(value: dict[str, Any]) -> dict[str, Any]:
    """Return the ASGI message of one server-sent event."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return {"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True}


Result = TypeVar("Result")


async def unless_gone(work: Awaitable[Result], receive: Receive) -> Result | None:
    """Return what `work` gives, or None when the client hung up, after `work` was cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
