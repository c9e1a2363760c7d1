"""POST /generate: a prompt and parameters to text, tokens and log-probs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api_cases import TOKENIZER, api


def generate(**body: Any) -> dict[str, Any]:
    async def go() -> dict[str, Any]:
        async with api() as on:
            return (await on.post("/generate", **body)).json()

    return asyncio.run(go())


@pytest.mark.parametrize("prompt", ["cba", TOKENIZER.encode("cba").tolist()])
def test_an_answer_has_text_tokens_and_the_weights_version(prompt: Any) -> None:
    found = generate(prompt=prompt, params={"seed": 1})
    assert found.pop("id").startswith("gen-")
    assert found == {
        "text": "abc0",
        "tokens": [*TOKENIZER.encode("abc0").tolist(), TOKENIZER.end_id],
        "logprobs": [-0.5] * 5,
        "versions": [3] * 5,
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "weights_version": 3,
    }


def test_the_events_of_a_stream_join_to_the_whole_answer() -> None:
    async def go() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        body = {"prompt": "cba", "params": {"max_tokens": 3, "stop": "c"}}
        async with api() as on:
            return (await on.post("/generate", **body)).json(), await on.rows("/generate", **body)

    whole, rows = asyncio.run(go())
    assert whole["text"] == "ab" and whole["finish_reason"] == "stop"
    for name in ("text", "tokens", "logprobs", "versions"):
        joined = rows[0][name]
        for row in rows[1:]:
            joined += row[name]
        assert joined == whole[name]
    assert rows[-1]["usage"] == whole["usage"]
    assert [row["finish_reason"] for row in rows] == [None] * (len(rows) - 1) + ["stop"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "params": {"tempreature": 1}}, "params.tempreature"),
        ({"prompt": "a", "params": {"n": 2}}, "params.n"),
        ({"prompt": "a", "model": "m"}, "model"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"params": {}}, "prompt"),
        ({"prompt": "a", "params": {"max_tokens": 500}}, "params.max_tokens"),
    ],
)
def test_what_is_not_accepted_is_refused_by_name(body: dict[str, Any], param: str | None) -> None:
    error = generate(**body)["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param


def test_every_sampling_field_reaches_the_engine() -> None:
    params = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "max_tokens": 2,
        "stop": ["x"],
        "ignore_eos": True,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "logit_bias": {"7": 1.5},
        "min_tokens": 1,
    }

    async def go() -> Any:
        async with api() as on:
            body = {"params": {**params, "seed": 9, "priority": 2, "deadline_s": 60}}
            await on.post("/generate", prompt="a", **body)
            return on.engine.asked[0]

    asked = asyncio.run(go())
    given = params | {"stop": ("x",), "logit_bias": ((7, 1.5),)}
    assert {name: getattr(asked.sampling, name) for name in given} == given
    assert (asked.seed, asked.priority, asked.deadline_s) == (9, 2, pytest.approx(60, abs=30))


def test_no_character_of_an_answer_ends_a_line_of_the_stream() -> None:
    """Clients of Python often split lines as str does, at more places than the format's."""
    text = "a\x85b\u2028c\u2029d\ve\x1cf\rg\n漢"

    async def go() -> list[dict[str, Any]]:
        async with api(lambda *_: TOKENIZER.encode(text).tolist()) as on:
            return await on.rows("/generate", prompt="a")

    assert "".join(row["text"] for row in asyncio.run(go())) == text
