"""A whole sweep against a server that plays a script."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gyre.benchmark.client_rate import measure_client
from gyre.benchmark.connection import parse_url
from gyre.benchmark.loads import Lengths, RandomLoad, TextLoad
from gyre.benchmark.records import DrawnRequest, Level, LevelProgress
from gyre.benchmark.sweep import SweepResult, SweepSettings, run_sweep
from gyre.core.errors import ConfigError, InputError
from scripted_api import END, Api, event, part, scripted, stream, usage, whole

MODELS = whole({"data": [{"id": "m"}]})


def settings(url: str, **changed: Any) -> SweepSettings:
    values = {
        "target": parse_url(url),
        "load": RandomLoad(lengths=Lengths(input_tokens=20, output_tokens=7), seed=1),
        "levels": [Level(concurrency=2, requests=10)],
        "endpoint": "completions",
        "stream": True,
        "model": "",
        "api_key": "",
        "temperature": 0.0,
        "ignore_eos": True,
        "timeout_s": 30.0,
        "most_connections": 64,
        "seed": 1,
        "measures_client": False,
    }
    return SweepSettings(**(values | changed))


def sweep(script: Any, **changed: Any) -> tuple[SweepResult, Api, list[LevelProgress]]:
    steps: list[LevelProgress] = []

    async def go() -> tuple[SweepResult, Api]:
        async with scripted(script) as api:
            return await run_sweep(settings(api.url, **changed), steps.append), api

    return *asyncio.run(go()), steps


def answer(number: int, body: dict[str, Any]) -> list[Any]:
    return stream("a", "b") if body else [MODELS]


def test_each_level_has_its_warm_up_and_its_numbers() -> None:
    levels = [
        Level(concurrency=2, requests=10, warm_up=3),
        Level(rate_per_s=500.0, requests=6, warm_up=1),
    ]
    result, api, steps = sweep(answer, levels=levels)
    assert result.model == "m" and not result.is_interrupted
    assert [level.ok for level in result.levels] == [10, 6]
    assert [level.completion_tokens for level in result.levels] == [70, 42]
    assert [level.chunks for level in result.levels] == [20, 12]
    assert len(api.bodies) == 1 + 3 + 10 + 1 + 6
    prompts = {tuple(body["prompt"]) for body in api.bodies if body}
    assert len(prompts) == 20, "no prompt is asked twice"
    assert [(step.ok, step.number) for step in steps if step.is_over] == [(10, 1), (6, 2)]


def test_failures_are_counted_by_reason_beside_what_was_answered() -> None:
    refusal = whole({"error": {"message": "too many", "code": "queue_full"}}, 429)
    answers = [stream("a"), [refusal], [refusal], [*stream("a")[:3], event({"error": {}}), END]]
    result, *_ = sweep(
        lambda number, body: answers[number % 4],
        model="m",
        levels=[Level(concurrency=1, requests=8, warm_up=4)],
    )
    (level,) = result.levels
    assert (level.ok, level.failed, level.failed_warm_up) == (2, 6, 3)
    assert level.failures == {"429 queue_full": 4, "error event": 2}
    assert level.failure_details["429 queue_full"] == "too many"
    assert level.e2e.count == 2 and level.completion_tokens == 14


def test_words_of_a_chat_are_fitted_to_the_server() -> None:
    """The server has 5 tokens of template and 2 for a word, so 21 tokens are 8 words."""

    def counted(number: int, body: dict[str, Any]) -> list[Any]:
        words = len(body["messages"][0]["content"].split())
        choice = {"message": {"content": "a"}, "finish_reason": "length"}
        return [whole({"choices": [choice], "usage": usage(5 + 2 * words, 1)})]

    result, *_ = sweep(
        counted,
        endpoint="chat",
        stream=False,
        model="m",
        load=RandomLoad(lengths=Lengths(input_tokens=21, output_tokens=1), seed=1),
    )
    assert result.levels[0].prompt_tokens == 10 * 21
    assert result.levels[0].ttft.count == 0 and result.levels[0].e2e.count == 10


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_questions_of_a_file_are_sent_as_they_are(endpoint: str) -> None:
    questions = [DrawnRequest(text=f"question {n}?", max_tokens=n + 1) for n in range(4)]
    load = TextLoad(drawn=questions, seed=0, per_level=4)
    levels = [Level(concurrency=2, requests=4)]
    result, api, _ = sweep(answer, endpoint=endpoint, model="m", load=load, levels=levels)
    asked = [
        (body["messages"][0]["content"] if endpoint == "chat" else body["prompt"])
        for body in api.bodies
    ]
    assert sorted(asked) == [question.text for question in questions]
    assert sorted(body["max_tokens"] for body in api.bodies) == [1, 2, 3, 4]
    assert result.levels[0].ok == 4


def test_a_chat_server_that_does_not_answer_ends_the_sweep() -> None:
    with pytest.raises(InputError, match=r"a first question failed: 500: broken"):
        sweep(
            lambda number, body: [whole({"error": {"message": "broken"}}, 500)],
            endpoint="chat",
            model="m",
        )


def test_a_body_with_bytes_of_no_api_fails_and_does_not_end_the_sweep() -> None:
    result, *_ = sweep(
        lambda number, body: [*stream()[:1], part(b"data: {\n\n"), b"0\r\n\r\n"],
        model="m",
        levels=[Level(concurrency=1, requests=2)],
    )
    assert result.levels[0].failures == {"malformed": 2}


@pytest.mark.parametrize(
    "level", [Level(requests=5), Level(concurrency=2), Level(rate_per_s=-1.0, requests=3)]
)
def test_a_level_that_never_begins_or_ends_is_refused(level: Level) -> None:
    with pytest.raises(ConfigError, match="need a concurrency"):
        settings("http://127.0.0.1:1", levels=[level])


def test_the_clients_own_rate_is_measured() -> None:
    assert asyncio.run(measure_client()) > 0.0
