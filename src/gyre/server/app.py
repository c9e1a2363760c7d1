"""App: the routes of the API. In: an engine, a model, HTTP requests. Out: answers and streams.

request ─▶ body limit ─▶ schema ─▶ prompt tokens ─▶ refusal? ─▶ engine ─▶ pieces ─▶ JSON | events
                                                                   ▲
                      the client hangs up ──▶ abort ───────────────┘
"""

from __future__ import annotations

import asyncio
import json
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gyre.core.contracts import RolloutEngine
from gyre.core.errors import GyreError
from gyre.core.events import Emit
from gyre.core.records import Health, Request
from gyre.server.answers import Answer, ChatAnswer, TextAnswer
from gyre.server.generation import ServedModel, TokenUsage, make_request
from gyre.server.respond import ActiveRequest, EventStream, WholeAnswer
from gyre.server.schema import (
    FAULT,
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    find_unsupported,
)

MOST_BODY_BYTES = 8 << 20
READY_S = 5.0  # longest wait for the engines' answer about their health
MOST_LOGPROBS = 20  # alternatives that a request may ask for at each token, as in OpenAI's API

Body = TypeVar("Body", bound=BaseModel)


class Api:
    """The handlers, over one engine and one model."""

    def __init__(self, engine: RolloutEngine, model: ServedModel, *, emit: Emit) -> None:
        self._engine, self._model, self._emit = engine, model, emit
        self._started_s = int(time.time())

    async def models(self, http: HttpRequest) -> Response:
        entry = {
            "id": self._model.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "gyre",
            "max_model_len": self._model.context_tokens,
            "version": self._model.find_version(),
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def live(self, http: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, http: HttpRequest) -> Response:
        try:
            health = await asyncio.wait_for(self._engine.health(), READY_S)
        except TimeoutError:
            health = Health(ok=False, reason=f"the engines had not answered after {READY_S:g} s")
        status = 200 if health.ok else 503
        return JSONResponse({"ready": health.ok, "reason": health.reason}, status_code=status)

    async def load(self, http: HttpRequest) -> Response:
        stats = await self._engine.stats()
        return JSONResponse({"running": stats.running, "waiting": stats.waiting})

    async def tokenize(self, http: HttpRequest) -> Response:
        body = await read_body(http, TokenizeBody)
        tokens = self._model.tokenizer.encode(body.prompt).tolist()
        longest = self._model.context_tokens
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": longest})

    async def detokenize(self, http: HttpRequest) -> Response:
        body = await read_body(http, DetokenizeBody)
        return JSONResponse({"prompt": self._model.tokenizer.decode(body.tokens)})

    async def chat(self, http: HttpRequest) -> Response:
        body = await read_body(http, ChatBody)
        self._check_model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: need logprobs = true with it", param="top_logprobs")
        tokens = self._model.render([message.as_text() for message in body.messages])
        request = make_request(
            body,
            tokens,
            self._model,
            request_id=f"{ChatAnswer.prefix}-{uuid.uuid4().hex}",
            most_tokens=body.most_tokens,
            top_logprobs=check_top(body.top_logprobs or 0, "top_logprobs"),
        )
        answer = ChatAnswer(
            request.request_id,
            self._model.name,
            self._model.tokenizer,
            logprobs=body.logprobs,
        )
        return self._respond(request, answer, body)

    async def complete(self, http: HttpRequest) -> Response:
        body = await read_body(http, CompletionBody)
        self._check_model(body.model)
        tokenizer, prompt = self._model.tokenizer, body.prompt
        if isinstance(prompt, str):
            prefix = np.asarray(tokenizer.prefix_ids, np.int32)
            tokens = np.concatenate([prefix, tokenizer.encode(prompt)]).astype(np.int32)
        else:
            tokens = np.asarray(prompt, np.int32)
        if body.echo and body.logprobs is not None:
            raise ApiError(
                400, "echo with logprobs is not supported yet; leave one out", param="echo"
            )
        request = make_request(
            body,
            tokens,
            self._model,
            request_id=f"{TextAnswer.prefix}-{uuid.uuid4().hex}",
            most_tokens=body.max_tokens,
            top_logprobs=check_top(body.logprobs or 0, "logprobs"),
        )
        echo = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        answer = TextAnswer(
            request.request_id,
            self._model.name,
            tokenizer,
            logprobs=body.logprobs is not None,
            echo=echo if body.echo else "",
        )
        return self._respond(request, answer, body)

    def _check_model(self, name: str) -> None:
        if name != self._model.name:
            raise ApiError(
                404, f"model {name[:80]!r}: this server has {self._model.name!r}", param="model"
            )

    def _respond(
        self, request: Request, answer: Answer, body: ChatBody | CompletionBody
    ) -> Response:
        usage = TokenUsage(prompt_tokens=len(request.tokens))
        work = ActiveRequest(self._engine, request, self._model, usage)
        if body.stream:
            return EventStream(work, answer, includes_usage=body.includes_usage, emit=self._emit)
        return WholeAnswer(work, answer)


async def read_body(http: HttpRequest, kind: type[Body]) -> Body:
    """Return the parsed body. ApiError for one that is too large, no JSON, or does not fit."""
    data = bytearray()
    try:
        async for part in http.stream():
            data += part
            if len(data) > MOST_BODY_BYTES:
                raise ApiError(413, f"the body is larger than {MOST_BODY_BYTES} bytes")
    except ClientDisconnect:
        raise ApiError(400, "the client hung up within the body") from None
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}: need an object")
    if (found := find_unsupported(value)) is not None:
        name, what_to_do = found
        raise ApiError(400, f"{name}: {what_to_do}", param=name)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{place}: {first['msg']}", param=place or None) from None


def check_top(number: int, name: str) -> int:
    """Return how many alternatives to tell. ApiError outside 0 to MOST_LOGPROBS."""
    if not 0 <= number <= MOST_LOGPROBS:
        raise ApiError(400, f"{name} = {number}: need 0 to {MOST_LOGPROBS}", param=name)
    return number


def make_app(
    engine: RolloutEngine, model: ServedModel, *, emit: Emit, more_routes: Sequence[Route] = ()
) -> Starlette:
    """Return the ASGI application."""
    api = Api(engine, model, emit=emit)

    async def refuse(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def refuse_input(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, GyreError)
        return ApiError(400, f"{error.message}. {error.hint}".strip(". ") + ".").response()

    async def refuse_route(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = error.status_code if error.status_code in (404, 405) else 400
        code = "route_not_found" if status == 404 else ""
        message = f"{http.method} {http.url.path}: {error.detail}"
        return ApiError(status, message, code=code).response()

    async def fail(http: HttpRequest, error: Exception) -> Response:
        trace = "".join(traceback.format_exception(error))
        emit("serve.request_failed", path=http.url.path, error=trace)
        return ApiError(500, FAULT).response()

    get, post = ["GET"], ["POST"]
    routes = [
        Route("/v1/models", api.models, methods=get),
        Route("/v1/chat/completions", api.chat, methods=post),
        Route("/v1/completions", api.complete, methods=post),
        Route("/tokenize", api.tokenize, methods=post),
        Route("/detokenize", api.detokenize, methods=post),
        Route("/health/live", api.live, methods=get),
        Route("/health/ready", api.ready, methods=get),
        Route("/health/load", api.load, methods=get),
        Route("/health", api.ready, methods=get),
        *more_routes,
    ]
    handlers: dict[Any, Callable[[HttpRequest, Exception], Awaitable[Response]]] = {
        ApiError: refuse,
        GyreError: refuse_input,
        HTTPException: refuse_route,
        Exception: fail,
    }
    return Starlette(routes=routes, exception_handlers=handlers)
