"""The OpenAPI document: it is valid, it has all routes, and real answers fit it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator, validate
from starlette.routing import Route

from api_cases import Api, api
from fakes.engine import Faults
from gyre.server.openapi import OPERATIONS, make_document

DOCUMENT = make_document()
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "cba"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": ["ab", "c"]}
BODIES = [one.body.__name__ for one in OPERATIONS if one.body is not None]
USAGE = {"stream_options": {"include_usage": True}}


def check(value: Any, name: str) -> None:
    """`value` fits the schema of this name."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    Draft202012Validator(schema).validate(value)


def schema_name(path: str, method: str, status: int, kind: str = "application/json") -> str:
    answers = DOCUMENT["paths"][path][method]["responses"]
    return answers[str(status)]["content"][kind]["schema"]["$ref"].rsplit("/", 1)[-1]


def test_the_document_is_valid_openapi() -> None:
    validate(DOCUMENT, cls=OpenAPIV31SpecValidator)


def test_it_is_served_and_has_every_route() -> None:
    async def go() -> tuple[Any, set[tuple[str, str]]]:
        async with api() as on:
            routes = {
                (route.path.replace(":path", ""), method.lower())
                for route in on.app.routes
                if isinstance(route, Route)
                for method in route.methods or ()
                if method != "HEAD"
            }
            return (await on.client.get("/openapi.json")).json(), routes

    served, routes = asyncio.run(go())
    assert served == DOCUMENT
    assert routes == {(path, one) for path, found in served["paths"].items() for one in found}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", TEXT),
        ("/v1/completions", TEXT | {"n": 2, "logprobs": 2, "echo": True}),
        ("/v1/completions", TEXT | {"echo": True, "max_tokens": 0, "logprobs": 0}),
        ("/generate", {"prompt": "cba", "params": {"max_tokens": 2}}),
    ],
)
def test_answers_and_events_fit_it(path: str, body: dict[str, Any]) -> None:
    async def go(on: Api) -> None:
        answer = await on.post(path, **body)
        assert answer.status_code == 200, answer.text
        check(answer.json(), schema_name(path, "post", 200))
        options = {} if path == "/generate" else USAGE
        rows = await on.rows(path, **body, **options)
        assert len(rows) > 1
        for row in rows:
            check(row, schema_name(path, "post", 200, "text/event-stream"))

    async def within() -> None:
        async with api() as on:
            await go(on)

    asyncio.run(within())


@pytest.mark.parametrize("path", [one.path for one in OPERATIONS if one.method == "get"])
def test_what_can_be_looked_at_fits_it(path: str) -> None:
    async def go() -> None:
        url = path.format(model="m")
        async with api() as on:
            answer = await on.client.get(url)
            assert answer.status_code == 200
            check(answer.json(), schema_name(path, "get", answer.status_code))
            await on.engine.terminate()
            answer = await on.client.get(url)
            assert answer.status_code == (503 if path in ("/health", "/health/ready") else 200)
            check(answer.json(), schema_name(path, "get", answer.status_code))

    asyncio.run(go())


def test_tokens_and_text_fit_it() -> None:
    async def go() -> None:
        async with api() as on:
            for path, body in (
                ("/tokenize", {"prompt": "ab"}),
                ("/tokenize", {"messages": CHAT["messages"]}),
                ("/detokenize", {"tokens": [1]}),
            ):
                check((await on.post(path, **body)).json(), schema_name(path, "post", 200))

    asyncio.run(go())


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/generate", {"prompt": "a", "params": {"best": 1}}, 400, ""),
        ("/v1/completions", TEXT | {"model": "other"}, 404, ""),
        ("/v1/completions", TEXT | {"prompt": "a" * (9 << 20)}, 413, ""),
        ("/v1/chat/completions", CHAT, 429, "the queue is full"),
        ("/generate", {"prompt": "a"}, 429, "the queue is full"),
    ],
)
def test_refusals_fit_it(path: str, body: dict[str, Any], status: int, reason: str) -> None:
    async def go() -> None:
        async with api(faults=Faults(refuse=lambda request: reason)) as on:
            answer = await on.post(path, **body)
        assert answer.status_code == status
        check(answer.json(), schema_name(path, "post", status))

    asyncio.run(go())


@pytest.mark.parametrize("name", [*BODIES, "GenerateParams"])
def test_each_field_that_can_be_asked_is_explained_and_no_other_is_allowed(name: str) -> None:
    schema = DOCUMENT["components"]["schemas"][name]
    assert schema["additionalProperties"] is False
    assert not [key for key, field in schema["properties"].items() if "description" not in field]
