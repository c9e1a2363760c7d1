"""OpenAPI: the API as an OpenAPI 3.1 document. In: the models of bodies and answers, and the table
of operations below. Out: the document, which GET /openapi.json answers and docs/api.md is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gyre.core import VERSION
from gyre.server.bodies.answer_schema import (
    ChatChunk,
    ChatCompletion,
    ErrorBody,
    GenerateResult,
    Liveness,
    ModelEntry,
    ModelList,
    PromptText,
    QueueLoad,
    Readiness,
    TextChunk,
    TextCompletion,
    TokenList,
)
from gyre.server.bodies.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)

FAILURES: Mapping[int, str] = {
    400: "A value or field that is not accepted.",
    401: "No valid key, where the server asks for one.",
    404: "Another model than the served one.",
    413: "The body is too large.",
    429: "The queue is full, or a limit of the key is reached; Retry-After says when to try again.",
    500: "A fault of the server.",
    503: "No engine is there to answer, or the prompt took too long to read.",
    504: "The request's deadline has passed.",
}
OF_BODIES = (400, 401, 413, 429, 500, 503)
OF_ENGINES = (*OF_BODIES, 504)


_NO_BRACES = str.maketrans("", "", "{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route under one method."""

    path: str
    method: Literal["get", "post"]
    summary: str
    answer: type[BaseModel]
    body: type[BaseModel] | None = None
    event: type[BaseModel] | None = None  # of a stream
    parameters: tuple[str, ...] = ()  # of the path; may hold slashes
    failures: tuple[int, ...] = (500,)
    other: Mapping[int, type[BaseModel]] = field(default_factory=dict)  # statuses without an error


OPERATIONS = (
    Operation(
        path="/v1/chat/completions",
        method="post",
        summary="Continue a conversation.",
        body=ChatBody,
        answer=ChatCompletion,
        event=ChatChunk,
        failures=(*OF_ENGINES, 404),
    ),
    Operation(
        path="/v1/completions",
        method="post",
        summary="Continue one or several texts.",
        body=CompletionBody,
        answer=TextCompletion,
        event=TextChunk,
        failures=(*OF_ENGINES, 404),
    ),
    Operation(
        path="/generate",
        method="post",
        summary="Continue a prompt, and get tokens.",
        body=GenerateBody,
        answer=GenerateResult,
        event=GenerateResult,
        failures=OF_ENGINES,
    ),
    Operation(path="/v1/models", method="get", summary="List the served model.", answer=ModelList),
    Operation(
        path="/v1/models/{model}",
        method="get",
        summary="Describe the served model.",
        answer=ModelEntry,
        parameters=("model",),
        failures=(401, 404, 500),
    ),
    Operation(
        path="/tokenize",
        method="post",
        summary="Turn a text or a conversation into token ids.",
        body=TokenizeBody,
        answer=TokenList,
        failures=OF_BODIES,
    ),
    Operation(
        path="/detokenize",
        method="post",
        summary="Turn token ids into text.",
        body=DetokenizeBody,
        answer=PromptText,
        failures=OF_BODIES,
    ),
    Operation(
        path="/health/live", method="get", summary="Ask if the process answers.", answer=Liveness
    ),
    Operation(
        path="/health/ready",
        method="get",
        summary="Ask if an engine is well.",
        answer=Readiness,
        other={503: Readiness},
    ),
    Operation(
        path="/health",
        method="get",
        summary="Ask if an engine is well, as /health/ready does.",
        answer=Readiness,
        other={503: Readiness},
    ),
    Operation(path="/health/load", method="get", summary="Count completions.", answer=QueueLoad),
)


def make_document() -> dict[str, Any]:
    """Return the OpenAPI document. Pure."""
    paths: dict[str, Any] = {
        "/openapi.json": {"get": _own_operation()},
        "/metrics": {"get": _metrics_operation()},
    }
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _as_json(one)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Gyre",
            "version": VERSION,
            "description": "OpenAI's API, and more, over the engines of one host.",
        },
        "paths": paths,
        "components": {"schemas": _components()},
    }


def _components() -> dict[str, Any]:
    """Return the JSON schema of every model."""
    bodies = [one.body for one in OPERATIONS if one.body is not None]
    answers = [one.answer for one in OPERATIONS]
    events = [one.event for one in OPERATIONS if one.event is not None]
    _, whole = models_json_schema(
        [
            *((model, "validation") for model in dict.fromkeys(bodies)),
            *((model, "serialization") for model in dict.fromkeys([*answers, *events, ErrorBody])),
        ],
        ref_template="#/components/schemas/{model}",
    )
    return dict(sorted(whole["$defs"].items()))


def _as_json(one: Operation) -> dict[str, Any]:
    content = {"application/json": _schema_of(one.answer)}
    description = "The answer."
    if one.event is not None:
        content["text/event-stream"] = _schema_of(one.event)
        description = (
            "The answer; with `stream` its events. The schema is of the data of one event, the "
            "last of which is `[DONE]`, or an error."
        )
    answers: dict[str, Any] = {"200": {"description": description, "content": content}}
    for status, model in one.other.items():
        answers[str(status)] = _answer(FAILURES[status], model)
    for status in sorted(one.failures):
        answers[str(status)] = _answer(FAILURES[status], ErrorBody)
    found: dict[str, Any] = {"operationId": _name(one), "summary": one.summary}
    if one.parameters:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in one.parameters
        ]
    if one.body is not None:
        content = {"application/json": _schema_of(one.body)}
        found["requestBody"] = {"required": True, "content": content}
    return found | {"responses": answers}


def _answer(description: str, model: type[BaseModel]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": _schema_of(model)}}


def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}


def _name(one: Operation) -> str:
    return "_".join([one.method, *one.path.translate(_NO_BRACES).strip("/").split("/")])


def _metrics_operation() -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "operationId": "get_metrics",
        "summary": "Read the metrics, in Prometheus' text format.",
        "responses": {"200": {"description": "The metrics.", "content": content}},
    }


def _own_operation() -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}}
    return {
        "operationId": "get_openapi.json",
        "summary": "Describe the API: this document.",
        "responses": {"200": {"description": "The document.", "content": content}},
    }
