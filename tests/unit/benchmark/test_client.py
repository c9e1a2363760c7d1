"""A client against a server that plays a script: counts, times and failures of one request."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from gyre.benchmark.client import first_model
from gyre.benchmark.connection import ConnectionPool, Target, parse_url
from gyre.benchmark.records import RequestResult
from gyre.core.errors import ConfigError, InputError
from scripted_api import (
    CHUNKED,
    END,
    HANG_UP,
    RESET,
    Step,
    client_of,
    event,
    head,
    part,
    said,
    scripted,
    stream,
    usage,
    whole,
)


def ask(*steps: Step, **settings: Any) -> RequestResult:
    async def go() -> RequestResult:
        async with scripted(lambda number, body: steps) as api:
            with client_of(api, **settings) as client:
                return await client.ask(b"{}", time.perf_counter())

    return asyncio.run(go())


def test_tokens_are_those_of_usage_and_chunks_those_with_text() -> None:
    outcome = ask(*stream("a", "b c d", "", "e", tokens=17))
    assert outcome.failure == ""
    assert len(outcome.text_times_s) == 3  # neither who speaks, an empty part, nor the end
    assert outcome.usage is not None
    assert outcome.usage.completion_tokens == 17
    assert (outcome.usage.prompt_tokens, outcome.usage.cached_tokens) == (11, 3)


def test_times_are_in_order_and_not_before_the_server_sent() -> None:
    outcome = ask(
        0.05, CHUNKED, 0.05, said("a"), 0.04, said("b"), 0.03, said("c", "stop"), 0.02, END
    )
    first, second, third = outcome.text_times_s
    assert outcome.failure == ""
    assert outcome.due_s <= outcome.sent_s <= first - 0.09
    assert second - first >= 0.03 and third - second >= 0.02
    assert outcome.ended_s - third >= 0.01
    assert outcome.usage is None


def test_an_answer_that_is_not_streamed_has_no_chunks() -> None:
    choice = {"message": {"content": "four words are here"}, "finish_reason": "stop"}
    outcome = ask(whole({"choices": [choice], "usage": usage(5, 4)}), stream=False)
    assert outcome.failure == "" and outcome.text_times_s == ()
    assert outcome.usage is not None and outcome.usage.completion_tokens == 4


def test_a_stream_may_end_with_its_connection_and_split_anywhere() -> None:
    data = b'data: {"choices":[{"text":"a"}]}\r\n\r\n: ping\n\ndata: [DONE]\n\n'
    cuts = [data[at : at + 1] for at in range(len(data))]
    outcome = ask(head(200, "connection: close"), *cuts, HANG_UP)
    assert outcome.failure == "" and len(outcome.text_times_s) == 1


REFUSAL = {"error": {"message": "too many", "code": "queue_full"}}


@pytest.mark.parametrize(
    ("steps", "failure", "detail"),
    [
        ([whole(REFUSAL, 429)], "429 queue_full", "too many"),
        ([whole({"error": {"message": "no", "code": "a b\nc"}}, 500)], "500", "no"),
        ([head(503, "content-length: 4"), b"busy"], "503", "busy"),
        ([RESET], "reset", ""),
        ([CHUNKED, said("a"), RESET], "reset", ""),
        ([CHUNKED, said("a"), HANG_UP], "reset", "the server hung up"),
        ([CHUNKED, said("a"), event(REFUSAL), END], "error event queue_full", "too many"),
        ([CHUNKED, said("a"), END], "incomplete", "finish reason"),
        ([CHUNKED, event(b'{"choices": 7}'), END], "malformed", "array"),
        ([CHUNKED, part(b"data: \xff\n\n"), END], "malformed", ""),
        ([b"SSH-2.0-OpenSSH_9\r\n\r\n"], "reset", "no HTTP answer"),
    ],
)
def test_a_failure_has_its_reason(steps: list[Step], failure: str, detail: str) -> None:
    outcome = ask(*steps)
    assert outcome.failure == failure
    assert detail in outcome.detail


def test_a_request_has_a_deadline_from_its_due_time() -> None:
    outcome = ask(CHUNKED, said("a"), asyncio.sleep(60), timeout_s=0.2)
    assert outcome.failure == "timeout"
    assert len(outcome.text_times_s) == 1 and outcome.ended_s - outcome.due_s >= 0.2


def test_a_server_that_is_not_there_is_a_failure() -> None:
    async def go() -> RequestResult:
        async with scripted(lambda number, body: []) as api:
            pass
        with client_of(api) as client:
            return await client.ask(b"{}", time.perf_counter())

    outcome = asyncio.run(go())
    assert outcome.failure == "connect" and outcome.sent_s == 0.0


def test_a_connection_is_kept_unless_an_answer_broke() -> None:
    answers = [stream("a"), [CHUNKED, said("a"), RESET], stream("b"), [whole({}, 404)], stream("c")]

    async def go() -> tuple[list[str], int]:
        async with scripted(lambda number, body: answers[number]) as api:
            with client_of(api) as client:
                found = [(await client.ask(b"{}", time.perf_counter())).failure for _ in answers]
            return found, api.connections

    failures, connections = asyncio.run(go())
    assert failures == ["", "reset", "", "404", ""]
    assert connections == 2


def test_the_key_is_sent_and_shown_nowhere() -> None:
    async def go() -> None:
        async with scripted(lambda number, body: stream("a")) as api:
            with client_of(api, api_key="sk-secret") as client:
                await client.ask(b"{}", time.perf_counter())
                assert "sk-secret" not in repr(client._settings)
            assert "Authorization: Bearer sk-secret\r\n" in api.heads[0]

    asyncio.run(go())


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (whole({"data": [{"id": "m"}, {"id": "n"}]}), "m"),
        (whole({"data": []}), "lists no model"),
        (whole(["m"]), "lists no model"),
        (whole({"error": {"message": "who are you"}}, 401), "401: who are you"),
    ],
)
def test_the_first_model_is_asked_for(answer: bytes, found: str) -> None:
    async def go() -> str:
        async with scripted(lambda number, body: [answer]) as api:
            pool = ConnectionPool(parse_url(api.url), most=1)
            try:
                return await first_model(pool, api_key="")
            except InputError as error:
                assert ("--api-key-file" in error.hint) == ("401" in found)
                return error.message
            finally:
                pool.close()

    assert found in asyncio.run(go())


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:8000", Target(host="127.0.0.1", port=8000, path="/v1", is_tls=False)),
        ("https://a.b/v2/", Target(host="a.b", port=443, path="/v2", is_tls=True)),
        ("http://[::1]:1", Target(host="::1", port=1, path="/v1", is_tls=False)),
    ],
)
def test_a_url_is_read(url: str, target: Target) -> None:
    assert parse_url(url) == target


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:x", "http://a?b"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_url(url)
