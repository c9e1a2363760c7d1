"""What clients of OpenAI's and vLLM's APIs send besides: accepted where it asks for nothing more,
refused by name where it would change the answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from api_cases import Api, api
from gyre.server.bodies.refused_fields import REFUSED

USER = {"role": "user", "content": "cba"}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER], "max_tokens": 3}
TEXT: dict[str, Any] = {"model": "m", "prompt": "cba", "max_tokens": 3}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
SAMPLING = (
    *("temperature", "top_p", "n", "stream", "presence_penalty", "frequency_penalty", "seed"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "priority", "deadline_s"),
    *("stop", "logit_bias", "logprobs", "stream_options", "user", "response_format"),
    *("prompt_cache_key", "functions", "suffix", "best_of", "guided_json"),
)
OF_CHAT = ("top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "store", "metadata")


def ask(path: str, **body: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with api() as on:
            # httpx would not write a lone surrogate
            return await on.client.post(path, content=json.dumps(body))

    return asyncio.run(asyncio.wait_for(go(), 60))


def chat(**fields: Any) -> httpx.Response:
    return ask("/v1/chat/completions", **CHAT | fields)


def say(**message: Any) -> httpx.Response:
    return chat(messages=[USER, message, USER])


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("path", BODIES)
def test_null_is_as_if_a_field_were_left_out(path: str) -> None:
    names = [*SAMPLING, *(OF_CHAT if "chat" in path else ("echo",))]
    answer = ask(path, **BODIES[path], **dict.fromkeys(names))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"] == ask(path, **BODIES[path]).json()["usage"]


def test_null_within_a_field_and_in_generate_too() -> None:
    params = dict.fromkeys(("temperature", "top_k", "ignore_eos"), None)
    assert ask("/generate", prompt="a", params=params, stream=None).status_code == 200
    assert ask("/generate", prompt="a", params=None).status_code == 200
    options = {"include_usage": None, "include_obfuscation": None}
    assert chat(stream=True, stream_options=options).status_code == 200


def test_null_is_no_value_of_what_is_required_or_unknown() -> None:
    assert error_of(chat(messages=None))["param"] == "messages"
    assert error_of(chat(nothing=None))["param"] == "nothing"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"top_logprobs": 0},
        {"top_k": -1},
        {"modalities": ["text"]},
        {"service_tier": "auto"},
        {"service_tier": "default"},
        {"metadata": {"a": "b"}, "store": True, "safety_identifier": "x"},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        {"use_beam_search": False},
    ],
)
def test_what_asks_for_nothing_more_is_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields).status_code == 200


@pytest.mark.parametrize(("best_of", "n"), [(1, None), (2, 2), (1, 2)])
def test_best_of_as_many_as_are_returned_is_accepted(best_of: int, n: int | None) -> None:
    assert ask("/v1/completions", **TEXT, best_of=best_of, n=n).status_code == 200


REFUSED_VALUES = dict.fromkeys(REFUSED, "x") | {
    "response_format": {"type": "json_object"},
    "best_of": 3,
    "service_tier": "priority",
    "modalities": ["text", "audio"],
    "use_beam_search": True,
    "return_token_strs": True,
    "continue_final_message": True,
}


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_what_would_change_the_answer_is_refused_by_name(name: str) -> None:
    error = error_of(chat(**{name: REFUSED_VALUES[name]}))
    assert error["param"] == name and error["message"] == f"{name}: {REFUSED[name]}"
    is_form = name.startswith(("guided", "struct", "response"))
    assert ("grammars" in error["message"]) == is_form


def test_a_field_that_nobody_knows_is_told_with_the_nearest() -> None:
    message = error_of(chat(temprature=1))["message"]
    assert message == "temprature: unknown field; did you mean 'temperature'?"
    told = error_of(ask("/generate", prompt="a", params={"top_pp": 1}))
    assert told["param"] == "params.top_pp" and "'top_p'" in told["message"]
    told = error_of(chat(messages=[USER | {"contents": "x"}]))
    assert told["param"] == "messages.0.contents" and "'content'" in told["message"]
    assert "docs/api.md" in error_of(chat(zzzzzz=1))["message"]


def test_all_tokens_in_vllms_way_are_all_tokens() -> None:
    async def go() -> Any:
        async with api() as on:
            await on.post("/v1/completions", **TEXT, top_k=-1)
            answer = await on.post("/v1/completions", **TEXT, top_k=-2)
            return on.engine.asked[0], answer

    asked, answer = asyncio.run(go())
    assert asked.sampling.top_k == 0 and answer.status_code == 400


# ---- messages


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_these_roles_are_accepted(role: str) -> None:
    assert say(role=role, content="x").status_code == 200


@pytest.mark.parametrize("role", ["function", "bogus", "", "User", "x" * 500])
def test_other_roles_are_refused_with_those_that_are(role: str) -> None:
    error = error_of(say(role=role, content="x"))
    assert error["param"] == "messages.1.role" and len(error["message"]) < 250
    for known in ("system", "developer", "user", "assistant", "tool"):
        assert known in error["message"]
    assert ("role tool" in error["message"]) == (role == "function")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_that_is_no_text_is_refused_by_its_kind(kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:image/png;base64,SECRET"}}
    error = error_of(say(role="user", content=[{"type": "text", "text": "a"}, part]))
    assert kind in error["message"] and "text" in error["message"]
    assert error["param"].startswith("messages.1.content") and "SECRET" not in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"annotations": [], "refusal": None, "audio": None, "function_call": None},
        {"annotations": None, "reasoning": None, "tool_calls": None},
    ],
)
def test_an_answer_can_be_sent_back_as_a_client_has_it(fields: dict[str, Any]) -> None:
    assert say(role="assistant", content="x", **fields).status_code == 200


def test_annotations_are_not_dropped_silently() -> None:
    assert "annotations" in error_of(say(role="assistant", content="x", annotations=[1]))["param"]


# ---- shapes


@pytest.mark.parametrize("path", BODIES)
def test_options_of_a_stream_need_one(path: str) -> None:
    error = error_of(ask(path, **BODIES[path], stream_options={"include_usage": True}))
    assert error["param"] == "stream_options" and "stream = true" in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_with_the_usage_asked_for_other_events_have_null(path: str) -> None:
    async def rows(on: Api, **fields: Any) -> list[dict[str, Any]]:
        return await on.rows(path, **BODIES[path], **fields)

    async def go() -> Any:
        async with api() as on:
            return await rows(on, stream_options={"include_usage": True}), await rows(on)

    told, plain = asyncio.run(go())
    assert [row["usage"] for row in told[:-1]] == [None] * (len(told) - 1) and len(told) > 2
    assert told[-1]["usage"]["completion_tokens"] == 3 and not told[-1]["choices"]
    assert not any("usage" in row for row in plain)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": [USER | {"content": "a" * 256}]}, "messages"),
        ("/v1/chat/completions", {"max_tokens": 1000}, "max_tokens"),
        ("/v1/completions", {"prompt": "a" * 256}, "prompt"),
        ("/v1/completions", {"prompt": "a" * 9000}, "prompt"),
        ("/v1/completions", {"prompt": [7] * 300}, "prompt"),
        ("/v1/completions", {"max_tokens": 1000}, "max_tokens"),
    ],
)
def test_what_is_beyond_the_context_names_its_field(path, fields, param) -> None:
    error = error_of(ask(path, **BODIES[path] | fields))
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_a_half_of_a_character_and_a_long_number_are_told_in_words_of_the_api() -> None:
    for path, body in (("/tokenize", {"prompt": "a\ud83d"}), ("/v1/completions", TEXT)):
        message = error_of(ask(path, **body | {"prompt": "a\ud83d"}))["message"]
        assert "lone surrogate" in message and "file" not in message

    async def go() -> httpx.Response:
        async with api() as on:
            return await on.client.post("/tokenize", content=b'{"prompt": %s}' % (b"7" * 5000))

    message = error_of(asyncio.run(go()))["message"]
    assert "too many digits" in message and "sys." not in message


def test_the_openai_client_retrieves_the_model() -> None:
    async def go() -> None:
        async with api() as on:
            transport = httpx.ASGITransport(app=on.app)
            async with (
                httpx.AsyncClient(transport=transport) as http,
                openai.AsyncOpenAI(
                    base_url="http://m/v1", api_key="none", max_retries=0, http_client=http
                ) as client,
            ):
                found = await client.models.retrieve("m")
                (listed,) = (await client.models.list()).data
                assert found == listed and found.id == "m"
                for name in ("other", "owner/name"):
                    with pytest.raises(openai.NotFoundError) as caught:
                        await client.models.retrieve(name)
                    assert caught.value.code == "model_not_found"
                    assert name in caught.value.message

    asyncio.run(go())


def test_a_name_with_slashes_is_a_model() -> None:
    async def go() -> Any:
        async with api(name="owner/name") as on:
            found = await on.client.get("/v1/models/owner/name")
            escaped = await on.client.get("/v1/models/owner%2Fname")
            return found, escaped

    for answer in asyncio.run(go()):
        assert answer.status_code == 200 and answer.json()["id"] == "owner/name"
