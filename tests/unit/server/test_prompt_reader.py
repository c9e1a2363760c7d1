"""Prompts beside the event loop: while one is read, others are answered; it ends by a deadline or
with its client, and what cannot fit is refused at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from starlette.types import Receive

import api_cases
from api_cases import CONTEXT, TOKENIZER, Api, api
from gyre.core.errors import InputError
from gyre.server import prompt_reader
from gyre.server.work_threads import WorkThreads
from gyre.text.tokenizer import Tokenizer
from scraped import read_samples

LONG = "ab" * prompt_reader.SHORT_CHARS
Play = Callable[[Api], Any]


class Held:
    """A piece of work that a test lets go on."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.begun.set()
        assert self.released.wait(30)

    async def has_begun(self) -> None:
        """Return once a thread is in it; the event loop goes on meanwhile."""
        async with asyncio.timeout(30):
            while not self.begun.is_set():
                await asyncio.sleep(0.001)


@pytest.fixture
def held(monkeypatch) -> Any:
    """Texts that are long wait within the tokenizer."""
    found, encode = Held(), Tokenizer.encode

    def slow(self: Tokenizer, text: str) -> np.ndarray:
        if len(text) > prompt_reader.SHORT_CHARS:
            found.wait()
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    yield found
    found.released.set()


def play(work: Play, **options: Any) -> Any:
    async def go() -> Any:
        async with api(**options) as on:
            return await work(on)

    return asyncio.run(asyncio.wait_for(go(), 60))


@contextlib.asynccontextmanager
async def beginning(on: Api, held: Held, path: str, **body: Any) -> AsyncIterator[Any]:
    """A request that is being read."""
    task = asyncio.ensure_future(on.post(path, **body))
    await held.has_begun()
    try:
        yield task
    finally:
        held.released.set()
        await asyncio.gather(task, return_exceptions=True)


def test_others_are_answered_while_a_text_is_tokenized(held) -> None:
    async def work(on: Api) -> None:
        async with beginning(on, held, "/tokenize", prompt=LONG) as waiting:
            assert (await on.client.get("/health/live")).status_code == 200
            rows = await on.rows("/v1/completions", model="m", prompt="abc", max_tokens=3)
            assert "".join(row["choices"][0]["text"] for row in rows) == "cba"
            assert (await on.post("/tokenize", prompt="ab")).json()["count"] == 2
            assert not waiting.done()
            held.released.set()
            assert (await waiting).json() == {
                "tokens": TOKENIZER.encode("ab").tolist() * (len(LONG) // 2),
                "count": len(LONG),
                "max_model_len": CONTEXT,
            }

    play(work)


def test_a_text_to_tokenize_holds_up_no_prompt(held, monkeypatch) -> None:
    """Each kind of work has threads of its own."""

    async def work(on: Api) -> None:
        async with beginning(on, held, "/tokenize", prompt=LONG) as waiting:
            body = {"model": "m", "prompt": ["ab" * 60] * 40, "max_tokens": 1}
            assert (await on.post("/v1/completions", **body)).status_code == 200
            assert not waiting.done()

    play(work)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_what_cannot_fit_is_refused_before_it_is_tokenized(path, monkeypatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *args: pytest.fail("it was tokenized"))
    long = "x" * 2_000_000
    body: dict[str, Any] = {"prompt": long}
    if path != "/generate":
        body = {"model": "m", "prompt": long}
    answer = play(lambda on: on.post(path, **body))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt" and str(CONTEXT) in error["message"]
    ids = play(lambda on: on.post(path, **{**body, "prompt": [1] * (CONTEXT + 1)}))
    assert ids.json()["error"]["code"] == "context_length_exceeded"
    assert f"{CONTEXT + 1} tokens" in ids.json()["error"]["message"]


def test_a_prompt_that_is_not_read_in_time_is_refused_and_counted(held, monkeypatch) -> None:
    monkeypatch.setattr(prompt_reader, "PROMPT_S", 0.05)

    async def work(on: Api) -> None:
        answer = await on.post("/tokenize", prompt=LONG)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "prompt_timeout")
        assert "retry-after" in answer.headers
        assert on.events == [("serve.prompt_late", {"path": "/tokenize", "seconds": 0.05})]
        held.released.set()

    play(work)


def test_a_requests_own_deadline_counts_while_it_is_read(monkeypatch) -> None:
    held = Held()
    monkeypatch.setattr(prompt_reader, "read_prompt", lambda prompt, model: held.wait())
    body = {"model": "m", "prompt": ["ab" * 60] * 40, "deadline_s": 0.05, "max_tokens": 1}

    async def work(on: Api) -> None:
        answer = await on.post("/v1/completions", **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert [kind for kind, _ in on.events] == ["serve.prompt_late"] and not on.engine.asked
        held.released.set()

    play(work)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
@pytest.mark.parametrize("deadline_s", [30.0, None])
def test_the_engine_has_what_the_reading_left_of_the_deadline(
    path, deadline_s, monkeypatch
) -> None:
    def slow(*args: Any) -> np.ndarray:
        time.sleep(0.2)
        return TOKENIZER.encode("ab")

    monkeypatch.setattr(prompt_reader, "read_prompt", slow)
    monkeypatch.setattr(api_cases, "render", slow)
    body: dict[str, Any] = {"model": "m", "prompt": "ab", "deadline_s": deadline_s}
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    if path == "/generate":
        body = {"prompt": "ab", "params": {"deadline_s": deadline_s}}

    async def work(on: Api) -> None:
        assert (await on.post(path, **body)).status_code == 200
        (asked,) = on.engine.asked
        if deadline_s is None:
            assert asked.deadline_s is None
        else:
            assert 0.0 < asked.deadline_s <= deadline_s - 0.2

    play(work)


async def post_raw(on: Api, receive: Receive) -> list[Any]:
    """What is sent to a client of /tokenize whose connection is `receive`."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/tokenize",
        "raw_path": b"/tokenize",
        "query_string": b"",
        "headers": [],
        "server": ("m", 80),
        "scheme": "http",
    }
    await on.app(scope, receive, send)
    return sent


async def check_gone(on: Api) -> None:
    """One client hung up, and nothing was refused."""
    found = read_samples((await on.client.get("/metrics")).text)
    assert found["gyre_disconnects_total",] == 1
    assert found["gyre_http_responses_total", "route=/tokenize", "status=499"] == 1
    assert not [key for key in found if key[0] == "gyre_request_errors_total"]


def test_a_client_that_hangs_up_meanwhile_leaves_nothing(held) -> None:
    async def work(on: Api) -> None:
        gone = asyncio.Event()
        body = [
            {"type": "http.request", "body": json.dumps({"prompt": LONG}).encode()},
        ]

        async def receive() -> dict[str, Any]:
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(post_raw(on, receive))
        await held.has_begun()
        gone.set()
        assert not await asyncio.wait_for(task, 10)
        await check_gone(on)
        held.released.set()

    play(work)


@pytest.mark.parametrize("body", [b"", b'{"prompt"'])
def test_a_client_that_hangs_up_within_its_body_was_refused_nothing(body) -> None:
    messages = [
        {"type": "http.request", "body": body, "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def work(on: Api) -> None:
        async def receive() -> dict[str, Any]:
            return messages.pop(0)

        assert not await post_raw(on, receive)
        await check_gone(on)

    play(work)


def test_a_refusal_within_a_thread_is_the_clients() -> None:
    async def work(on: Api) -> None:
        body = json.dumps({"prompt": LONG + "\ud83d"})
        answer = await on.client.post("/tokenize", content=body)
        assert answer.status_code == 400 and "lone surrogate" in answer.json()["error"]["message"]
        ids = [255] * (prompt_reader.SHORT_TOKENS + 1)
        assert len((await on.post("/detokenize", tokens=ids)).json()["prompt"]) > 0

    play(work)


def test_work_is_done_in_its_order_and_bounded() -> None:
    done: list[int] = []
    held = Held()

    async def go() -> None:
        threads = WorkThreads("test", 1, most_waiting=3)
        first = asyncio.ensure_future(threads.run(held.wait))
        await held.has_begun()
        later = [asyncio.ensure_future(threads.run(lambda n=n: done.append(n))) for n in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Exception, match="queue is full"):
            await threads.run(lambda: done.append(9))
        later[1].cancel()
        await asyncio.sleep(0)
        held.released.set()
        await asyncio.gather(first, *later, return_exceptions=True)
        with pytest.raises(InputError, match="no"):
            await threads.run(fail)

    def fail() -> None:
        raise InputError("no")

    asyncio.run(asyncio.wait_for(go(), 30))
    assert done == [0, 2], "what was cancelled before it began is not done"


def test_the_threads_end_with_their_owner() -> None:
    async def go() -> list[threading.Thread]:
        before = set(threading.enumerate())
        threads = WorkThreads("test", 2, most_waiting=3)
        await asyncio.gather(*(threads.run(lambda: None) for _ in range(2)))
        return [one for one in threading.enumerate() if one not in before]

    started = asyncio.run(go())
    assert len(started) == 2
    for one in started:
        one.join(10)
        assert not one.is_alive()
