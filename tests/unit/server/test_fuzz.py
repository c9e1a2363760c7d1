"""Generated requests, by the OpenAPI document: whatever comes, the answer is one that the document
tells of, and no fault of the server.

Three kinds: bodies within ranges that an engine accepts, any bodies that the document allows, and
bodies that it does not allow. `--hypothesis-seed=N` repeats a run.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode

from api_cases import TOKENIZER, Api, api
from gyre.server.openapi import OPERATIONS, make_document

DOCUMENT = make_document()
POSTS = [one.path for one in OPERATIONS if one.method == "post"]
CASES = 700  # of each kind and route
MOST_CASES = 3 * len(POSTS) * CASES  # 10,500
LEAST_CASES = 10_000  # that all kinds and routes together must make
TOKEN = {"type": "integer", "minimum": 0, "maximum": TOKENIZER.vocab_size - 1}
WORD = {"type": "string", "minLength": 1, "maxLength": 8}
IDS = {"type": "array", "items": TOKEN, "minItems": 1, "maxItems": 20}
NARROW: dict[str, Any] = {
    "temperature": {"type": "number", "minimum": 0.5, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0.1, "maximum": 1},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1, "maximum": 50},
    "best_of": {"const": 1},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "minimum": 0.1, "maximum": 10},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"enum": ["0", "7", "65"]},
        "additionalProperties": {"type": "number", "minimum": -90, "maximum": 90},
    },
    "stop": {"anyOf": [WORD, {"type": "array", "items": WORD, "maxItems": 4}, {"type": "null"}]},
    "n": {"type": "integer", "minimum": 1, "maximum": 4},
    "max_tokens": {"type": "integer", "minimum": 3, "maximum": 9},
    "max_completion_tokens": {"type": "integer", "minimum": 3, "maximum": 9},
    "min_tokens": {"type": "integer", "minimum": 0, "maximum": 3},
    "priority": {"type": "integer", "minimum": -5, "maximum": 5},
    "deadline_s": {"type": "number", "minimum": 60, "maximum": 1000},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    "logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    "prompt": {
        "anyOf": [WORD, IDS]
        + [{"type": "array", "items": one, "minItems": 1, "maxItems": 5} for one in (WORD, IDS)]
    },
}


def as_document(*, narrow: bool) -> dict[str, Any]:
    """The document, with the served model's name; narrow with ranges that an engine accepts."""
    document = copy.deepcopy(DOCUMENT)
    schemas = document["components"]["schemas"]
    for field in ("messages", "tools"):  # they take half a minute to draw, and are ChatBody's
        del schemas["TokenizeBody"]["properties"][field]
    for name in ("ChatBody", "CompletionBody", "GenerateBody", "GenerateParams"):
        fields = schemas[name]["properties"]
        if "model" in schemas[name].get("required", ()):
            fields["model"] = {"const": "m"}
        for field in NARROW.keys() & fields.keys() if narrow else ():
            fields[field] = NARROW[field]
    if narrow:
        schemas["ChatBody"]["properties"]["logprobs"] = {"const": True}  # top_logprobs need it
        schemas["ChatBody"]["required"].append("logprobs")
        schemas["GenerateBody"]["properties"]["prompt"] = {"anyOf": [WORD, IDS]}
        role = {"enum": ["system", "user", "assistant"]}
        schemas["MessageBody"]["properties"] = {"role": role, "content": WORD}
        schemas["MessageBody"]["required"] = ["role", "content"]
        for field in ("tools", "tool_choice"):  # this model's template takes none
            del schemas["ChatBody"]["properties"][field]
        schemas["TokenizeBody"]["properties"]["prompt"] = WORD
        schemas["TokenizeBody"]["required"] = ["prompt"]
        del schemas["TokenizeBody"]["properties"]["add_generation_prompt"]
    return document


KINDS = {
    "accepted": (as_document(narrow=True), GenerationMode.POSITIVE),
    "allowed": (as_document(narrow=False), GenerationMode.POSITIVE),
    "not allowed": (as_document(narrow=False), GenerationMode.NEGATIVE),
}


def as_whole(value: Any) -> Any:
    """The value with 3 for each 3.0: to JSON Schema that is a whole number too, not to the API."""
    if isinstance(value, dict):
        return {key: as_whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [as_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


async def send(on: Api, path: str, body: Any) -> httpx.Response:
    """POST it; bytes as they are."""
    is_missing = isinstance(body, type(schemathesis.core.NOT_SET))
    data = b"" if is_missing else body
    if not isinstance(data, bytes):
        data = json.dumps(as_whole(body)).encode()
    return await asyncio.wait_for(on.client.post(path, content=data), 60)


@functools.cache
def validator_of(path: str, status: str, kind: str) -> Draft202012Validator:
    """Of the answers that the document tells of."""
    answer = DOCUMENT["paths"][path]["post"]["responses"][status]
    schema = answer["content"][kind]["schema"]
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def check(answer: httpx.Response, path: str) -> None:
    """It is one that the document tells of."""
    status = str(answer.status_code)
    assert status in DOCUMENT["paths"][path]["post"]["responses"], answer.text
    kind = answer.headers["content-type"].split(";")[0]
    validator = validator_of(path, status, kind)
    if kind == "application/json":
        validator.validate(answer.json())
        return
    *rows, last = [line[6:] for line in answer.text.splitlines() if line]
    assert last == "[DONE]", last
    for row in rows:
        validator.validate(json.loads(row))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", POSTS)
def test_no_request_makes_the_server_fail(path: str, kind: str) -> None:
    document, mode = KINDS[kind]
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]
    statuses: Counter[int] = Counter()
    with asyncio.Runner() as runner:
        opened = api()
        on = runner.run(opened.__aenter__())

        @settings(
            max_examples=CASES,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def fuzz(case: schemathesis.Case) -> None:
            if kind == "accepted" and isinstance(case.body, dict) and not case.body.get("stream"):
                case.body.pop("stream_options", None)  # they go with a stream alone
            answer = runner.run(send(on, path, case.body))
            statuses[answer.status_code] += 1
            assert not on.events, on.events
            check(answer, path)
            # a deadline may have passed, however short it was
            allowed = {200, 400, 404, 413, 504 if b"deadline_s" in answer.request.content else 400}
            assert answer.status_code in allowed, answer.text
            assert not on.engine.live, "a request was left in the engine"
            if kind == "not allowed":
                assert answer.status_code in (400, 404), answer.text

        fuzz()
        runner.run(opened.__aexit__(None, None, None))
    assert sum(statuses.values()) >= CASES * LEAST_CASES / MOST_CASES
    if kind == "accepted":
        assert statuses[200] > 0.8 * sum(statuses.values()), statuses
