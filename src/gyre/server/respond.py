"""Respond: one request in the engine, and how its answer leaves. In: a Request, an Answer, a
client's connection. Out: one body, or a stream of events. A client that hangs up aborts the
request, which frees its KV pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gyre.core.contracts import RolloutEngine
from gyre.core.errors import GyreError, RankError
from gyre.core.events import Emit
from gyre.core.records import Request, TokenChunk
from gyre.server.answers import Answer
from gyre.server.bodies.schema import FAULT, ApiError
from gyre.server.generation import ServedModel, TextDelta, TokenUsage, pieces
from gyre.server.metrics.measured import SOURCE
from gyre.server.metrics.server_metrics import ServerMetrics
from gyre.server.tracing.marks import EngineMarks, RequestTrace, trace_answer, trace_fields

# tokens and alternatives of an answer that is formed in the event loop: about 5 ms of others' time
MOST_INLINE = 1024
COUNT_S = 5.0  # longest wait for the last tokens of an aborted request


@dataclass(frozen=True, slots=True)
class Service:
    """What answers: the engines as one, their model, and what counts requests."""

    engine: RolloutEngine
    model: ServedModel
    metrics: ServerMetrics
    emit: Emit


class AnswerSource(Protocol):
    """What an answer is made of: one request in the engine, or several."""

    name: str  # of the answer, as clients see it
    usage: TokenUsage
    metrics: ServerMetrics

    @property
    def num_choices(self) -> int: ...

    @property
    def most_tokens(self) -> int:
        """Return how many tokens its completions may have together."""
        ...

    def open(
        self, trace: RequestTrace | None
    ) -> AbstractAsyncContextManager[AsyncIterator[TextDelta]]:
        """Submit it. `trace` notes when its parts happen; None: they are not recorded."""
        ...


class ActiveRequest:
    """One request in the engine, from its first piece to its end or abort."""

    def __init__(
        self,
        service: Service,
        request: Request,
        usage: TokenUsage,
        *,
        prompt_only: bool = False,
        kept_ids: frozenset[int] = frozenset(),  # special tokens that the answer's text shows
    ) -> None:
        self._service = service
        self.request = request
        self.usage = usage
        self.name = request.request_id
        self.metrics = service.metrics
        self._prompt_only = prompt_only
        self._kept_ids = kept_ids

    @property
    def num_choices(self) -> int:
        return self.request.sampling.n

    @property
    def most_tokens(self) -> int:
        return self.request.sampling.n * self.request.sampling.max_tokens

    @contextlib.asynccontextmanager
    async def open(self, trace: RequestTrace | None) -> AsyncIterator[AsyncIterator[TextDelta]]:
        """Submit it. An error or a cancellation aborts it, which frees its KV pages."""
        engine, tokenizer = self._service.engine, self._service.model.tokenizer
        with self.metrics.follow(self.request) as followed, marking(trace, self.request) as marks:
            if marks is None:
                stream = engine.submit(self.request)
            else:
                stream = marks.watch(engine.submit(replace(self.request, traced=True)))
            try:
                yield pieces(
                    followed.watch(stream),
                    self.request,
                    tokenizer,
                    self.usage,
                    prompt_only=self._prompt_only,
                    kept_ids=self._kept_ids,
                )
            except BaseException as error:
                await engine.abort(self.request.request_id)
                if isinstance(error, asyncio.CancelledError | ApiError):
                    await self._count_rest(stream)
                raise

    async def _count_rest(self, stream: AsyncIterator[TokenChunk]) -> None:
        """Count what the engine chose before the abort reached it: the client's key pays for it."""
        try:
            async with asyncio.timeout(COUNT_S):
                async for chunk in stream:
                    self.usage.completion_tokens += len(chunk.tokens)
        except TimeoutError:
            self._service.emit("serve.usage_incomplete", request_id=self.request.request_id)
        except RankError:
            return  # no engine is left to tell more; the client is told so, or gone


def marking(
    trace: RequestTrace | None, request: Request
) -> AbstractContextManager[EngineMarks | None]:
    """Return what notes the request's times in the engines, where they are recorded."""
    return nullcontext() if trace is None else trace.follow(request)


class ReservedSource:
    """Work that holds a part of its key's limits while it runs."""

    def __init__(self, work: AnswerSource, reservation: AbstractContextManager[None]) -> None:
        """`reservation` reads the work's usage at its end."""
        self._work = work
        self._reservation = reservation
        self.name = work.name
        self.usage = work.usage
        self.metrics = work.metrics
        self.num_choices = work.num_choices
        self.most_tokens = work.most_tokens

    @contextlib.asynccontextmanager
    async def open(self, trace: RequestTrace | None) -> AsyncIterator[AsyncIterator[TextDelta]]:
        """Submit it. ApiError where the key's limits do not admit it."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._reservation)
            except ApiError as error:
                self.metrics.count_error(error.code)
                raise
            async with self._work.open(trace) as found:
                yield found


class WholeAnswer(Response):
    """An answer in one body. The request is aborted when the client hangs up before."""

    def __init__(self, work: AnswerSource, answer: Answer) -> None:
        self._work = work
        self._answer = answer
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SOURCE] = self._work

        async def collect() -> list[TextDelta]:
            async with self._work.open(trace_answer(scope, self._work.name)) as found:
                return [piece async for piece in found]

        try:
            gathered = await unless_gone(collect(), receive, self._work.metrics)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if gathered is None:
            return
        if count_told(gathered) > MOST_INLINE:  # they would hold up every other answer
            response = await asyncio.to_thread(self._form, gathered)
        else:
            response = self._form(gathered)
        await response(scope, receive, send)

    def _form(self, gathered: list[TextDelta]) -> Response:
        body = as_json(self._answer.whole(gathered, self._work.usage))
        return Response(body, media_type="application/json")


def count_told(gathered: Sequence[TextDelta]) -> int:
    """Return the tokens and alternatives that an answer may tell of. Pure."""
    told = 0
    for piece in gathered:
        told += len(piece.tokens) if piece.top_ids is None else piece.top_ids.size
        if piece.prompt_logprobs is not None:
            told += len(piece.prompt_logprobs.logprobs) + piece.prompt_logprobs.top_ids.size
    return told


class EventStream(Response):
    """An answer as server-sent events. The headers wait for the first piece, so that what the
    engine refuses has its status."""

    def __init__(
        self, work: AnswerSource, answer: Answer, *, includes_usage: bool, emit: Emit
    ) -> None:
        self._work = work
        self._answer = answer
        self._emit = emit
        self._includes_usage = includes_usage
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SOURCE] = self._work
        started = False
        no_usage = {"usage": None} if self._includes_usage else {}

        async def go() -> bool:
            nonlocal started
            async with self._work.open(trace_answer(scope, self._work.name)) as found:
                async for piece in found:
                    if not started:
                        started = True
                        await send(START)
                        for event in self._answer.first(self._work.num_choices):
                            await send(as_event(event | no_usage))
                    event = self._answer.event(piece, self._work.usage)
                    await send(as_event(event | no_usage))
            if self._includes_usage:
                await send(as_event(self._answer.last(self._work.usage)))
            await send(END)
            return True

        try:
            await unless_gone(go(), receive, self._work.metrics)
        except ApiError as error:
            refusal = error
        except Exception as error:
            if not started:
                raise
            trace = "".join(traceback.format_exception(error))
            self._emit(
                "serve.request_failed",
                path=scope["path"],
                error=trace,
                request_id=self._work.name,
                **trace_fields(scope),
            )
            self._work.metrics.count_error("server_fault")
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
# clients that split lines wherever Unicode ends one would cut an event there
LINE_ENDS = [(char.encode(), b"\\u%04x" % ord(char)) for char in "\x85\u2028\u2029"]


def as_event(value: dict[str, Any]) -> dict[str, Any]:
    """Return the ASGI message of one server-sent event."""
    body = b"data: %b\n\n" % as_json(value)
    return {"type": "http.response.body", "body": body, "more_body": True}


def as_json(value: Any) -> bytes:
    """Return JSON in UTF-8 on one line, whatever a reader takes for the end of one."""
    data = msgspec.json.encode(value)
    for char, escaped in LINE_ENDS:
        if char in data:
            data = data.replace(char, escaped)
    return data


Result = TypeVar("Result")


async def unless_gone(
    work: Awaitable[Result], receive: Receive, metrics: ServerMetrics
) -> Result | None:
    """Return what `work` gives, or None when the client hung up, after `work` was cancelled. It
    runs in the caller's own task: another one would cost as much as all of the parsing. An abort
    that fails is counted as `abort_failed`."""
    owner, is_gone = asyncio.current_task(), False
    assert owner is not None
    already = owner.cancelling()

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        owner.cancel()  # it waits within `work`, so the cancellation arrives there

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and owner.uncancel() <= already:
            return None
        raise
    except GyreError:
        if not is_gone:
            raise
        owner.uncancel()
        metrics.count_error("abort_failed")  # as with an engine that is lost; nobody can be told
        return None
    finally:
        watcher.cancel()
