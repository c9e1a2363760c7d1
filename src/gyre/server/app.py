"""App: the routes of the API. In: an engine, a model, HTTP requests. Out: answers and streams.

request ─▶ body limit ─▶ schema ─▶ prompt tokens ─▶ refusal? ─▶ engine ─▶ pieces ─▶ JSON | events
                                                                   ▲
                      the client hangs up ──▶ abort ───────────────┘
"""

from __future__ import annotations

import asyncio
import functools
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gyre.core.contracts import RolloutEngine
from gyre.core.errors import GyreError
from gyre.core.events import Emit
from gyre.core.records import Health
from gyre.server.answers import Answer, ChatAnswer
from gyre.server.bodies.read_body import read_body
from gyre.server.bodies.schema import (
    FAULT,
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    SamplingFields,
    TokenizeBody,
)
from gyre.server.completions import open_completion
from gyre.server.conversation import read_messages, read_tools
from gyre.server.gateway.gate import Gate, OpenGate
from gyre.server.generate import open_generation
from gyre.server.generation import ServedModel, TokenUsage, check_top, find_session, make_request
from gyre.server.metrics.measured import REFUSED_STATUS, SOURCE, MeasuredApp
from gyre.server.metrics.server_metrics import ServerMetrics, inspect_one
from gyre.server.openapi import make_document
from gyre.server.prompt_reader import ClientGone, PromptReader, check_tokenize, tokenize
from gyre.server.respond import (
    ActiveRequest,
    AnswerSource,
    EventStream,
    ReservedSource,
    Service,
    WholeAnswer,
)
from gyre.server.tracing.marks import trace_fields

PROMPT_END_TOKENS = 16  # enough for an opening tag and the white space after it
READY_S = 5.0  # longest wait for the engines' answer about their health

Result = TypeVar("Result")
Fields = TypeVar("Fields", bound=SamplingFields)


class Api:
    """The handlers, over one engine and one model."""

    def __init__(self, service: Service, *, gate: Gate) -> None:
        self._service = service
        self._model = service.model
        self._gate = gate
        self._prompts = PromptReader(service.model, service.metrics, service.emit)
        self._document = make_document()
        self._started_s = int(time.time())

    async def models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe_model()]})

    async def model(self, http: HttpRequest) -> Response:
        self._check_model(http.path_params["model"])
        return JSONResponse(self._describe_model())

    def _describe_model(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "gyre",
            "max_model_len": self._model.context_tokens,
            "version": self._model.find_version(),
        }

    async def live(self, http: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, http: HttpRequest) -> Response:
        try:
            health = await asyncio.wait_for(self._service.engine.health(), READY_S)
        except TimeoutError:
            health = Health(ok=False, reason=f"the engines had not answered after {READY_S:g} s")
        status = 200 if health.ok else 503
        return JSONResponse({"ready": health.ok, "reason": health.reason}, status_code=status)

    async def load(self, http: HttpRequest) -> Response:
        try:
            stats = await asyncio.wait_for(self._service.engine.stats(), READY_S)
        except TimeoutError:
            raise ApiError(503, f"the engines had not answered after {READY_S:g} s") from None
        return JSONResponse({"running": stats.running, "waiting": stats.waiting})

    async def metrics(self, http: HttpRequest) -> Response:
        return Response(await self._service.metrics.expose(), media_type=CONTENT_TYPE_LATEST)

    async def describe(self, http: HttpRequest) -> Response:
        return JSONResponse(self._document)

    async def tokenize(self, http: HttpRequest) -> Response:
        body = await read_body(http, TokenizeBody)
        check_tokenize(body)
        with self._gate.reserve(http.scope, 0, TokenUsage(prompt_tokens=0)):
            answer = await tokenize(body, self._prompts, self._model.answer_format, http)
        return Response(answer, media_type="application/json")

    async def detokenize(self, http: HttpRequest) -> Response:
        body = await read_body(http, DetokenizeBody)
        with self._gate.reserve(http.scope, 0, TokenUsage(prompt_tokens=0)):
            answer = await self._prompts.detokenize(body.tokens, http)
        return Response(answer, media_type="application/json")

    async def chat(self, http: HttpRequest) -> Response:
        body = await read_body(http, ChatBody)
        self._check(body)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs: need logprobs = true with it", param="top_logprobs")
        form = self._model.answer_format
        messages, tools = read_messages(body), read_tools(body, form)
        reading = self._prompts.render(messages, tools, http, deadline_s=body.deadline_s)
        tokens, body = await self._read(reading, body)
        request = make_request(
            body,
            tokens,
            self._model,
            request_id=f"{ChatAnswer.prefix}-{uuid.uuid4().hex}",
            stream=body.stream,
            n=body.n,
            most_tokens=body.most_tokens,
            prompt_field="messages",
            top_logprobs=check_top(body.top_logprobs or 0, "top_logprobs"),
            session_id=find_session(http.headers, body.prompt_cache_key),
        )
        answer = ChatAnswer(
            request.request_id,
            self._model.name,
            self._model.tokenizer,
            logprobs=body.logprobs,
            make_parser=functools.partial(
                form.make_parser,
                prompt_end=self._model.tokenizer.decode(tokens[-PROMPT_END_TOKENS:]),
                with_tools=bool(tools),
                tools=tools,
                most_calls=1 if body.parallel_tool_calls is False else None,
            ),
            kept_ids=form.kept_ids(with_tools=bool(tools)),
        )
        usage = TokenUsage(prompt_tokens=len(tokens))
        work = ActiveRequest(self._service, request, usage, kept_ids=answer.kept_ids)
        return self._respond(
            http, work, answer, stream=body.stream, includes_usage=body.includes_usage
        )

    async def complete(self, http: HttpRequest) -> Response:
        body = await read_body(http, CompletionBody)
        self._check(body)
        session_id = find_session(http.headers, body.prompt_cache_key)
        reading = self._prompts.read(body.prompts, http, deadline_s=body.deadline_s)
        prompts, body = await self._read(reading, body)
        work, answer = open_completion(body, prompts, self._service, session_id=session_id)
        return self._respond(
            http, work, answer, stream=body.stream, includes_usage=body.includes_usage
        )

    async def generate(self, http: HttpRequest) -> Response:
        body = await read_body(http, GenerateBody)
        session_id = find_session(http.headers)
        reading = self._prompts.read([body.prompt], http, deadline_s=body.params.deadline_s)
        (tokens,), params = await self._read(reading, body.params)
        body = body.model_copy(update={"params": params})
        work, answer = open_generation(body, tokens, self._service, session_id=session_id)
        return self._respond(http, work, answer, stream=body.stream)

    async def _read(self, reading: Awaitable[Result], fields: Fields) -> tuple[Result, Fields]:
        """Return what the prompt became, and the fields with what is left of the deadline."""
        begun_s = time.monotonic()
        found = await reading
        return found, fields.after(time.monotonic() - begun_s)

    def _check(self, body: ChatBody | CompletionBody) -> None:
        """ApiError for another model, or options of a stream that is none."""
        self._check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(
                400, "stream_options: need stream = true with it", param="stream_options"
            )

    def _check_model(self, name: str) -> None:
        if name != self._model.name:
            raise ApiError(
                404, f"model {name[:80]!r}: this server has {self._model.name!r}", param="model"
            )

    def _respond(
        self,
        http: HttpRequest,
        work: AnswerSource,
        answer: Answer,
        *,
        stream: bool,
        includes_usage: bool = False,
    ) -> Response:
        most_tokens = work.usage.prompt_tokens + work.most_tokens
        reservation = self._gate.reserve(http.scope, most_tokens, work.usage)
        work = ReservedSource(work, reservation)
        if stream:
            return EventStream(work, answer, includes_usage=includes_usage, emit=self._service.emit)
        return WholeAnswer(work, answer)


class NoAnswer(Response):
    """Nothing, to a client that hung up."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


Handlers = dict[Any, Callable[[HttpRequest, Exception], Awaitable[Response]]]


def make_app(
    engine: RolloutEngine,
    model: ServedModel,
    *,
    emit: Emit,
    gate: Gate | None = None,
    metrics: ServerMetrics | None = None,
    logs_access: bool = False,
    more_routes: Sequence[Route] = (),
) -> Starlette:
    """Return the ASGI application. Without a gate no key is needed; without `metrics` they are
    those of one engine in this process."""
    gate = gate or OpenGate()
    metrics = metrics or ServerMetrics(
        model.name, context_tokens=model.context_tokens, inspect=inspect_one(engine)
    )
    service = Service(engine, model, metrics, emit)
    routes = [*make_routes(Api(service, gate=gate)), *more_routes]
    # outermost: a request without a key is counted too
    measured = Middleware(
        MeasuredApp, routes=routes, metrics=metrics, emit=emit if logs_access else None
    )
    return Starlette(
        routes=routes,
        exception_handlers=make_handlers(service),
        middleware=[measured, Middleware(gate.guard, count=metrics.count_error)],
    )


def make_routes(api: Api) -> list[Route]:
    """Return the routes of the API, as server/openapi.py describes them."""
    get, post = ["GET"], ["POST"]
    return [
        Route("/v1/models", api.models, methods=get),
        Route("/v1/models/{model:path}", api.model, methods=get),
        Route("/v1/chat/completions", api.chat, methods=post),
        Route("/v1/completions", api.complete, methods=post),
        Route("/generate", api.generate, methods=post),
        Route("/tokenize", api.tokenize, methods=post),
        Route("/detokenize", api.detokenize, methods=post),
        Route("/openapi.json", api.describe, methods=get),
        Route("/health/live", api.live, methods=get),
        Route("/health/ready", api.ready, methods=get),
        Route("/health/load", api.load, methods=get),
        Route("/health", api.ready, methods=get),
        Route("/metrics", api.metrics, methods=get),
    ]


def make_handlers(service: Service) -> Handlers:
    """Return what answers the errors that a route raises, each counted by its code."""

    def answer(error: ApiError) -> Response:
        service.metrics.count_error(error.code)
        return error.response()

    async def refuse(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return answer(error)

    async def refuse_input(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, GyreError)
        return answer(ApiError(400, f"{error.message}. {error.hint}".strip(". ") + "."))

    async def refuse_route(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = error.status_code if error.status_code in (404, 405) else 400
        code = "route_not_found" if status == 404 else ""
        message = f"{http.method} {http.url.path}: {error.detail}"
        return answer(ApiError(status, message, code=code))

    async def fail(http: HttpRequest, error: Exception) -> Response:
        trace = "".join(traceback.format_exception(error))
        work = http.scope.get(SOURCE)
        service.emit(
            "serve.request_failed",
            path=http.url.path,
            error=trace,
            request_id=None if work is None else work.name,
            **trace_fields(http.scope),
        )
        return answer(ApiError(500, FAULT))

    async def say_nothing(http: HttpRequest, error: Exception) -> Response:
        return NoAnswer()

    async def count_gone(http: HttpRequest, error: Exception) -> Response:
        if REFUSED_STATUS not in http.scope:  # the client has an answer, and may be there
            service.metrics.disconnects.inc()
        return NoAnswer()

    return {
        ApiError: refuse,
        ClientDisconnect: count_gone,  # within its body
        ClientGone: say_nothing,  # counted where it was noticed
        GyreError: refuse_input,
        HTTPException: refuse_route,
        Exception: fail,
    }
