"""The failure table of docs/serving.md, over an engine that ends as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
import pytest

from gyre.core.chunks import TokenStream
from gyre.core.errors import InputError, RankError
from gyre.core.records import EngineStats, Health, Request, TokenChunk
from gyre.server import app as server
from gyre.server.app import make_app
from gyre.server.generation import ServedModel
from gyre.server.metrics.server_metrics import ServerMetrics
from gyre.server.parsers.choose import CALL_FORMATS, AnswerFormat
from gyre.server.respond import unless_gone
from gyre.text.tokenizer import train_tokenizer
from scraped import read_samples

TOKENIZER = train_tokenizer(["what is one and one"], vocab_size=300, min_share=0.0)
End = Callable[[TokenStream, str], None]


class OneToken:
    """Answers each request with as many tokens as were asked for, then ends it as it was told."""

    def __init__(self, end: End, tokens: int) -> None:
        self._end, self._tokens = end, tokens
        self.first_version = 0  # that of the first token; each further token has the next one
        self.aborted: list[str] = []
        self.is_hung = False

    def submit(self, request: Request) -> AsyncIterator[TokenChunk]:
        stream = TokenStream(request, 8, self.abort)
        for number in range(self._tokens):
            stream.push(
                TokenChunk(
                    request_id=request.request_id,
                    index=0,
                    tokens=TOKENIZER.encode("o"),
                    logprobs=np.zeros(1, np.float32),
                    raw_logprobs=np.zeros(1, np.float32),
                    versions=np.full(1, self.first_version + number, np.int32),
                )
            )
        self._end(stream, request.request_id)
        return stream

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def health(self) -> Health:
        if self.is_hung:
            await asyncio.Event().wait()
        return Health(ok=True)

    async def stats(self) -> EngineStats:
        await asyncio.Event().wait()
        raise AssertionError("it never answers")

    async def interrupt(self, *, deadline_s: float) -> Any:
        raise NotImplementedError

    async def drain(self, *, deadline_s: float) -> None:
        raise NotImplementedError


def finish(kind: Any, reason: str = "") -> End:
    return lambda stream, name: stream.push(TokenChunk.end(name, 0, kind, reason))


def fail(error: Exception) -> End:
    return lambda stream, name: stream.end(error)


def render(messages: Any, tools: Any) -> np.ndarray:
    if messages[0].role != "user":
        raise InputError("the first message is the system's", hint="begin with a question")
    return TOKENIZER.encode(messages[0].content)


def ask(
    engine: OneToken,
    path: str,
    body: Any = None,
    *,
    form: AnswerFormat | None = None,
    **headers: str,
) -> tuple[httpx.Response, list[Any]]:
    events: list[Any] = []
    model = ServedModel(
        name="m",
        tokenizer=TOKENIZER,
        context_tokens=64,
        render=render,
        find_refusal=lambda request: None,
        answer_format=form or AnswerFormat(),
    )
    app = make_app(engine, model, emit=lambda kind, **fields: events.append((kind, fields)))

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://m", headers=headers
        ) as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    return asyncio.run(asyncio.wait_for(go(), 30)), events


def chat(
    engine: OneToken, *, form: AnswerFormat | None = None, **fields: Any
) -> tuple[httpx.Response, list[Any]]:
    messages = [{"role": "user", "content": "what is one"}]
    body = {"model": "m", "messages": messages} | fields
    return ask(engine, "/v1/chat/completions", body, form=form)


ENDS = {
    "full queue": (finish("refused", "the queue is full"), 429, "queue_full"),
    "deadline": (finish("deadline", "1 s have passed"), 504, "deadline_exceeded"),
    "aborted": (finish("abort", "the engine was terminated"), 503, "engine_unavailable"),
    "no engine": (fail(RankError("every engine is lost")), 503, "engine_unavailable"),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("stream", [False, True])
def test_before_its_first_token_a_request_ends_with_a_status(name, stream) -> None:
    end, status, code = ENDS[name]
    answer, events = chat(OneToken(end, 0), stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert not events


@pytest.mark.parametrize("name", ENDS)
def test_in_mid_stream_it_ends_with_an_error_event(name) -> None:
    end, _, code = ENDS[name]
    engine = OneToken(end, 2)
    answer, events = chat(engine, stream=True)
    assert len(engine.aborted) == 1  # where other completions would go on
    rows = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert answer.status_code == 200 and rows[-1]["error"]["code"] == code
    assert "".join(row["choices"][0]["delta"]["content"] for row in rows[:-1]) == "oo"
    assert not events


def chunk_of(name: str, text: str, *, index: int = 0, finish: Any = None) -> TokenChunk:
    tokens = TOKENIZER.encode(text)
    zeros = np.zeros(len(tokens), np.float32)
    return TokenChunk(
        request_id=name,
        index=index,
        tokens=tokens,
        logprobs=zeros,
        raw_logprobs=zeros,
        versions=np.zeros(len(tokens), np.int32),
        finish=finish,
        reason="" if finish is None else "1 s have passed",
    )


def end_with(text: str, kind: Any) -> End:
    """End with tokens that were in flight when the engine ended the request."""
    return lambda stream, name: stream.push(chunk_of(name, text, finish=kind))


def say(text: str, kind: Any, *, n: int = 1) -> End:
    """Say the same in each completion, then end all."""

    def end(stream: TokenStream, name: str) -> None:
        for index in range(n):
            stream.push(chunk_of(name, text, index=index))
        for index in range(n):
            stream.push(TokenChunk.end(name, index, kind, "1 s have passed"))

    return end


@pytest.mark.parametrize("tokens", [0, 1])
def test_what_came_with_the_end_is_sent_before_the_error_event(tokens) -> None:
    engine = OneToken(end_with("ne an", "deadline"), tokens)
    answer, _ = chat(engine, stream=True, stop="one and")
    rows = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert answer.status_code == 200 and rows[-1]["error"]["code"] == "deadline_exceeded"
    deltas = [row["choices"][0]["delta"].get("content", "") for row in rows[:-1]]
    assert "".join(deltas) == "o" * tokens + "ne an"
    assert all(row["choices"][0]["finish_reason"] is None for row in rows[:-1])


def test_a_beginning_of_a_stop_string_is_sent_when_nothing_follows() -> None:
    answer, _ = chat(OneToken(finish("deadline"), 2), stream=True, stop="oops")
    rows = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert rows[-1]["error"]["code"] == "deadline_exceeded"
    assert "".join(row["choices"][0]["delta"].get("content", "") for row in rows[:-1]) == "oo"


HERMES = AnswerFormat(calls=CALL_FORMATS["hermes"], tools_refusal="")
THINKS = AnswerFormat(thinks=True)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
BEGUN_CALL = 'ok <tool_call>{"name": "get_weather"'


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, BEGUN_CALL, {"content": BEGUN_CALL}),
        (THINKS, "<think>one</thi", {"reasoning_content": "one</thi"}),
        (THINKS, "<thi", {"content": "<thi"}),
    ],
)
@pytest.mark.parametrize("finished", ["deadline", "abort"])
def test_what_a_parser_holds_is_sent_before_the_error_event(form, text, expected, finished) -> None:
    tools = {"tools": [TOOL]} if form is HERMES else {}
    answer, _ = chat(OneToken(say(text, finished), 0), stream=True, form=form, **tools)
    rows = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert "error" in rows[-1]
    deltas = [row["choices"][0]["delta"] for row in rows[:-1]]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == expected.get(name, "")
    assert all(row["choices"][0]["finish_reason"] is None for row in rows[:-1])


@pytest.mark.parametrize("finished", ["deadline", "abort"])
def test_each_completion_that_had_begun_is_sent_before_the_error_event(finished) -> None:
    engine = OneToken(say(BEGUN_CALL, finished, n=3), 0)
    answer, _ = chat(engine, stream=True, form=HERMES, tools=[TOOL], n=3)
    rows = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert "error" in rows[-1] and len(engine.aborted) == 1
    told = dict.fromkeys(range(3), "")
    for row in rows[:-1]:
        (choice,) = row["choices"]
        told[choice["index"]] += choice["delta"].get("content", "")
    assert told == dict.fromkeys(range(3), BEGUN_CALL)


def test_an_error_does_not_wait_for_completions_that_go_on() -> None:
    def end(stream: TokenStream, name: str) -> None:
        stream.push(TokenChunk.end(name, 0, "abort", "1 s have passed"))
        stream.push(chunk_of(name, "what", index=1))

    engine = OneToken(end, 1)
    answer, _ = chat(engine, stream=True, n=2)
    rows = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert "error" in rows[-1] and len(engine.aborted) == 1
    assert "what" not in answer.text


@pytest.mark.parametrize("finished", ["deadline", "abort"])
def test_an_answer_in_one_body_is_whole_or_an_error(finished) -> None:
    answer, _ = chat(OneToken(end_with("ne", finished), 1))
    assert answer.status_code == {"deadline": 504, "abort": 503}[finished]
    assert "choices" not in answer.json()


@pytest.mark.parametrize(("stream", "tokens"), [(False, 1), (True, 0), (True, 1)])
def test_a_fault_of_ours_is_an_event_and_tells_the_client_nothing_of_it(stream, tokens) -> None:
    answer, events = chat(OneToken(fail(ValueError("a secret")), tokens), stream=stream)
    text = answer.text if not (stream and tokens) else answer.text.splitlines()[-2][6:]
    assert answer.status_code == (200 if stream and tokens else 500)
    assert json.loads(text)["error"]["code"] == "server_fault" and "secret" not in answer.text
    ((kind, fields),) = events
    assert kind == "serve.request_failed" and fields["path"] == "/v1/chat/completions"
    assert "ValueError: a secret" in fields["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_the_version_of_the_weights_is_told_by_token(path, stream) -> None:
    """As after changes of the weights in mid answer, with policy continue."""
    engine = OneToken(finish("length"), 3)
    engine.first_version = 7
    body: dict[str, Any] = {"model": "m", "stream": stream}
    if path == "/generate":
        body = {"prompt": "what", "stream": stream}
    elif path == "/v1/completions":
        body |= {"prompt": "what", "logprobs": 0, "echo": False}
    else:
        body |= {"messages": [{"role": "user", "content": "what"}], "logprobs": True}
    answer, _ = ask(engine, path, body)
    rows = [line[6:] for line in answer.text.splitlines() if line][:-1] if stream else [answer.text]
    found, fingerprints = [], []
    for row in map(json.loads, rows):
        told = row if path == "/generate" else row["choices"][0]["logprobs"] or {"versions": []}
        found += told["versions"]
        fingerprints.append(row.get("system_fingerprint", row.get("weights_version")))
    assert found == [7, 8, 9] and fingerprints[-1] in ("version-7,8,9", 9)


def test_an_answer_that_is_whole_aborts_nothing() -> None:
    engine = OneToken(finish("length"), 3)
    answer, _ = chat(engine)
    assert answer.json()["choices"][0]["message"]["content"] == "ooo" and not engine.aborted


def test_what_a_template_refuses_is_the_clients_to_mend() -> None:
    engine = OneToken(finish("length"), 1)
    answer, _ = chat(engine, messages=[{"role": "system", "content": "be brief"}])
    assert answer.status_code == 400
    assert "begin with a question" in answer.json()["error"]["message"]


def test_engines_that_do_not_answer_are_not_ready(monkeypatch) -> None:
    engine = OneToken(finish("length"), 1)
    assert ask(engine, "/health/ready")[0].status_code == 200
    engine.is_hung = True
    monkeypatch.setattr(server, "READY_S", 0.05)
    answer, _ = ask(engine, "/health")
    assert answer.status_code == 503 and "had not answered" in answer.json()["reason"]
    assert ask(engine, "/health/live")[0].status_code == 200
    answer, _ = ask(engine, "/health/load")
    assert answer.status_code == 503 and "had not answered" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [("/v1/nothing", 404, "route_not_found"), ("/v1/completions", 405, "method_not_allowed")],
)
def test_other_routes_are_refused_in_the_same_shape(path, status, code) -> None:
    answer, _ = ask(OneToken(finish("length"), 1), path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "same-origin", "origin": "http://m"}, 200),
        ({"sec-fetch-site": "cross-site", "origin": "http://other"}, 403),
        ({"origin": "http://m"}, 200),
        ({"origin": "http://other"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_a_page_of_another_site_asks_nothing_of_a_server_without_keys(headers, status) -> None:
    engine = OneToken(finish("length"), 1)
    answer, _ = ask(engine, "/generate", {"prompt": "what"}, **headers)
    assert answer.status_code == status
    assert ask(engine, "/v1/models", **headers)[0].status_code == 200, "it could be a link"


def test_an_abort_that_fails_after_the_client_is_gone_is_no_fault() -> None:
    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise RankError("every engine is lost")

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def inspect() -> list[Any]:
        return []

    async def go() -> None:
        metrics = ServerMetrics("m", context_tokens=64, inspect=inspect)
        assert await unless_gone(work(), receive, metrics) is None
        found = read_samples((await metrics.expose()).decode())
        assert found["gyre_request_errors_total", "code=abort_failed"] == 1
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()

    asyncio.run(asyncio.wait_for(go(), 30))
