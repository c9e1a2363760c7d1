"""POST /v1/completions: several prompts in one request, and prompts that are echoed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from api_cases import TOKENIZER, Api, api
from fakes.engine import Faults
from gyre.server.bodies.schema import MOST_PROMPTS
from gyre.server.generation import as_alternatives

PATH = "/v1/completions"
WORDS = ["ab", "cde", "ü"]


async def complete(on: Api, **body: Any) -> dict[str, Any]:
    return (await on.post(PATH, model="m", **body)).json()


def run(**body: Any) -> dict[str, Any]:
    async def go() -> dict[str, Any]:
        async with api() as on:
            return await complete(on, **body)

    return asyncio.run(go())


def as_ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).tolist()


@pytest.mark.parametrize("prompts", [WORDS, [as_ids(word) for word in WORDS]])
def test_choices_are_those_of_each_prompt_in_order(prompts: Any) -> None:
    async def go() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with api() as on:
            many = await complete(on, prompt=prompts, n=2, seed=5)
            return many, [await complete(on, prompt=one, n=2, seed=5) for one in prompts]

    many, each = asyncio.run(go())
    assert [choice["index"] for choice in many["choices"]] == list(range(6))
    texts = [choice["text"] for answer in each for choice in answer["choices"]]
    assert [choice["text"] for choice in many["choices"]] == texts
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert many["usage"][name] == sum(answer["usage"][name] for answer in each)
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in each]
    assert many["usage"]["prompt_tokens_details"] == {"cached_tokens": sum(cached)}


def test_a_stream_of_several_prompts_interleaves_and_joins_to_the_whole_answer() -> None:
    async def go() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        body = {"model": "m", "prompt": WORDS, "n": 2, "echo": True, "logprobs": 1}
        async with api() as on:
            options = {"stream_options": {"include_usage": True}}
            return (await on.post(PATH, **body)).json(), await on.rows(PATH, **body, **options)

    whole, rows = asyncio.run(go())
    assert rows[-1]["choices"] == [] and rows[-1]["usage"] == whole["usage"]
    choices = [row["choices"][0] for row in rows[:-1]]
    order = [choice["index"] for choice in choices]
    assert order != sorted(order)
    for choice in whole["choices"]:
        parts = [part for part in choices if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "stop"
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values


@pytest.mark.parametrize(
    "prompt",
    [["a"] * (MOST_PROMPTS + 1), ["a", [1]], [[1], "a"], [1, "a"], {"a": 1}, None, [True], [-1]],
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    error = run(prompt=prompt)["error"]
    assert error["code"] == "invalid_value" and error["param"].startswith("prompt")


def test_as_many_prompts_as_are_allowed_are_answered() -> None:
    found = run(prompt=["a"] * MOST_PROMPTS, max_tokens=1)
    assert [choice["text"] for choice in found["choices"]] == ["a"] * MOST_PROMPTS


def test_more_completions_than_any_queue_holds_are_refused_for_good() -> None:
    error = run(prompt=["a"] * MOST_PROMPTS, n=3)["error"]
    assert error["code"] == "invalid_value" and error["param"] == "prompt"
    assert "256 prompts with n = 3" in error["message"]


def test_more_log_probs_of_prompts_than_an_answer_may_hold_are_refused() -> None:
    asked: dict[str, Any] = {"prompt": ["a" * 200] * MOST_PROMPTS, "max_tokens": 1, "echo": True}
    error = run(**asked, logprobs=20)["error"]
    assert error["param"] == "logprobs" and "51200 prompt tokens" in error["message"]
    assert len(run(**asked)["choices"]) == MOST_PROMPTS


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompt_that_the_engine_refuses_ends_the_others(stream: bool) -> None:
    async def go() -> None:
        # the refusal is of the engine's queue: what can never run was refused before
        async with api() as on:
            submit = on.engine.submit

            def refuse_third(request: Any) -> Any:
                is_third = len(on.engine.asked) == 2
                on.engine.faults = Faults(refuse=lambda _: is_third * "the queue is full")
                return submit(request)

            on.engine.submit = refuse_third  # type: ignore[method-assign]
            answer = await on.post(PATH, model="m", prompt=WORDS, stream=stream)
            # tokens of the first prompt may have been sent before
            last = answer.text.splitlines()[-2][6:] if stream else answer.text
            assert answer.status_code == (200 if stream else 429)
            assert json.loads(last)["error"]["code"] == "queue_full"
            assert set(on.engine.aborted) == {one.request_id for one in on.engine.asked}
            assert len(on.engine.asked) == 3 and not on.engine.live

    asyncio.run(go())


def test_a_client_that_hangs_up_aborts_all() -> None:
    async def go() -> None:
        async with api(lambda *_: as_ids("a") * 200) as on:
            gone = asyncio.Event()
            sent: list[dict[str, Any]] = []
            body = b'{"model": "m", "prompt": ["a", "b", "c"], "max_tokens": 200, "stream": true}'
            inbox = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive() -> dict[str, Any]:
                if inbox:
                    return inbox.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: dict[str, Any]) -> None:
                sent.append(message)
                if len(sent) == 10:
                    gone.set()

            scope = {"type": "http", "method": "POST", "path": PATH, "headers": []}
            scope |= {"query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1"}
            await asyncio.wait_for(on.app(scope, receive, send), 30)
            assert len(on.engine.asked) == 3 and not on.engine.live
            assert set(on.engine.aborted) == {one.request_id for one in on.engine.asked}
            assert b"[DONE]" not in b"".join(one.get("body", b"") for one in sent)

    asyncio.run(go())


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("best", [0, 2])
def test_an_echo_with_logprobs_tells_those_of_the_prompt(max_tokens: int, best: int) -> None:
    found = run(prompt="aü漢b", echo=True, logprobs=best, max_tokens=max_tokens)
    (choice,) = found["choices"]
    prompt, told = as_ids("aü漢b"), choice["logprobs"]
    assert len(prompt) == 7 and found["usage"]["completion_tokens"] == max_tokens
    assert choice["text"].startswith("aü漢b") and choice["finish_reason"] == "length"
    assert max_tokens or choice["text"] == "aü漢b"
    assert {len(values) for values in told.values()} == {7 + max_tokens}
    assert told["token_logprobs"] == [None] + [-0.5] * (6 + max_tokens)
    assert told["top_logprobs"][0] is None
    # the chosen token's entry stands beside the best; here the best are others
    assert all(len(entry) == best + 1 for entry in told["top_logprobs"][1:])
    assert told["versions"][:7] == [None] * 7 and set(told["versions"][7:]) <= {3}
    assert told["text_offset"][:7] == [0, 1, 1, 2, 2, 2, 3]  # ü has two tokens, 漢 three
    if max_tokens:
        assert told["text_offset"][7] == 4 and told["tokens"][7] == "b"


@pytest.mark.parametrize(
    "changed", [{"echo": False}, {"echo": True, "min_tokens": 1}, {"echo": True, "max_tokens": -1}]
)
def test_no_tokens_need_an_echo(changed: dict[str, Any]) -> None:
    found = run(**{"prompt": "ab", "max_tokens": 0, **changed})
    assert found["error"]["type"] == "invalid_request_error"


def test_tokens_of_the_same_text_share_the_best_value() -> None:
    best = [("a", -1.0), ("�", -2.0), ("�", -3.0)]
    assert as_alternatives(best, ("�", -9.0)) == {"a": -1.0, "�": -2.0}
    assert as_alternatives(best, ("b", -9.0)) == {"a": -1.0, "�": -2.0, "b": -9.0}
    assert as_alternatives([], ("b", -9.0)) == {"b": -9.0}
