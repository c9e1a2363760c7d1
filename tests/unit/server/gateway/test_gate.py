"""Keys and limits at the routes, over an engine that a test holds and lets go on."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gyre.core.chunks import TokenStream
from gyre.core.errors import RankError
from gyre.core.records import EngineStats, Health, Request, TokenChunk
from gyre.server.app import make_app
from gyre.server.bodies.schema import ApiError
from gyre.server.gateway.gate import SCOPE_KEY, KeyGate
from gyre.server.gateway.key_store import LOOK_S, KeyStore
from gyre.server.gateway.keys import create_key, revoke_key
from gyre.server.gateway.limits import MINUTE_NS, KeyLimits
from gyre.server.generation import ServedModel
from gyre.server.metrics.server_metrics import ServerMetrics, inspect_one
from gyre.text.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(["what is one and one"], vocab_size=300, min_share=0.0)
PROMPT = TOKENIZER.encode("what is one")
BODY = {"model": "m", "prompt": PROMPT.tolist()}


class HeldEngine:
    """Holds every request until it is told how to end it. An abort gives the tokens so far."""

    def __init__(self) -> None:
        self.streams: dict[str, TokenStream] = {}
        self.chosen = 0  # tokens that an abort finds chosen and not told

    def submit(self, request: Request) -> AsyncIterator[TokenChunk]:
        stream = self.streams[request.request_id] = TokenStream(request, 8, self.abort)
        return stream

    def tell(self, name: str, tokens: int, finish: Any = None, index: int = 0) -> None:
        self.streams[name].push(chunk(name, tokens, finish, index))

    async def abort(self, request_id: str) -> None:
        stream = self.streams[request_id]
        for index in stream.unfinished:
            self.tell(request_id, self.chosen, "abort", index)

    async def health(self) -> Health:
        return Health(ok=True)

    async def stats(self) -> EngineStats:
        raise ValueError("a fault")

    async def interrupt(self, *, deadline_s: float) -> Any:
        raise NotImplementedError

    async def drain(self, *, deadline_s: float) -> None:
        raise NotImplementedError


def chunk(name: str, tokens: int, finish: Any, index: int) -> TokenChunk:
    return TokenChunk(
        request_id=name,
        index=index,
        tokens=np.resize(TOKENIZER.encode("o"), tokens),
        logprobs=np.zeros(tokens, np.float32),
        raw_logprobs=np.zeros(tokens, np.float32),
        versions=np.zeros(tokens, np.int32),
        finish=finish,
    )


class Guarded:
    """The application behind a gate with one key, whose clock the test moves."""

    def __init__(self, folder: Path, **limits: int) -> None:
        self.path, self.now_ns = folder / "keys.json", 0
        self.key, self.secret = create_key(
            self.path, name="", role="user", limits=KeyLimits(**limits)
        )
        self.engine, self.events = HeldEngine(), []
        store = KeyStore(self.path, emit=self.emit, clock_s=lambda: self.now_ns / 1e9)
        self.gate = KeyGate(store, clock_ns=lambda: self.now_ns)
        model = ServedModel(
            name="m",
            tokenizer=TOKENIZER,
            context_tokens=512,
            render=lambda messages, tools: PROMPT,
            find_refusal=lambda request: None,
        )
        self.metrics = ServerMetrics("m", context_tokens=512, inspect=inspect_one(self.engine))
        app = make_app(self.engine, model, emit=self.emit, gate=self.gate, metrics=self.metrics)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        self.app = app
        self.client = httpx.AsyncClient(transport=transport, base_url="http://m")

    def emit(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secret}"}

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.client.get(path, headers=headers)

    def ask(self, **fields: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(
            self.client.post("/v1/completions", json=BODY | fields, headers=self.headers)
        )

    async def left(self) -> tuple[str | None, str | None]:
        """Requests and tokens that are left, as the headers say."""
        headers = (await self.get("/v1/models", **self.headers)).headers
        return tuple(
            headers.get(f"x-ratelimit-remaining-{name}") for name in ("requests", "tokens")
        )

    async def until_held(self, number: int) -> list[str]:
        """The ids of the requests, once the engine has as many."""
        async with asyncio.timeout(30):
            while len(self.engine.streams) < number:
                await asyncio.sleep(0)
        return list(self.engine.streams)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))  # type: ignore[arg-type]


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_every_route_but_the_health_routes_needs_a_key(tmp_path) -> None:
    guarded = Guarded(tmp_path)

    async def go() -> None:
        refused = 0
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await guarded.get(path)).status_code == 200
        routes = [route.path for route in guarded.app.routes]  # type: ignore[attr-defined]
        assert len(routes) >= 9
        for path in [*routes, "/v1/nothing", "/", "/healthy", "//health"]:
            if path.startswith("/health/") or path == "/health":
                continue
            for method in ("GET", "POST"):
                answer = await guarded.client.request(method, path)
                assert error_of(answer) == (401, "invalid_api_key"), path
                assert answer.headers["www-authenticate"] == "Bearer"
                refused += 1
        labels = {"model_name": "m", "code": "invalid_api_key"}
        registry = guarded.metrics.registry
        assert registry.get_sample_value("gyre_request_errors_total", labels) == refused > 0

    run(go)


def test_a_key_comes_as_bearer_or_as_x_api_key(tmp_path) -> None:
    guarded = Guarded(tmp_path)

    async def go() -> None:
        secret = guarded.secret
        for headers in (
            {"Authorization": f"Bearer {secret}"},
            {"authorization": f"bearer   {secret} "},
            {"x-api-key": secret},
            {"authorization": "Basic YTpi", "x-api-key": secret},
        ):
            assert (await guarded.get("/v1/models", **headers)).status_code == 200, headers
        for headers in (
            {},
            {"authorization": secret},
            {"authorization": f"Bearer {secret[:-1]}"},
            {"authorization": f"Bearer {guarded.key.sha256}"},
            {"authorization": f"Bearer {guarded.key.key_id}"},
            {"authorization": "Bearer"},
            {"x-api-key": ""},
        ):
            assert (await guarded.get("/v1/models", **headers)).status_code == 401, headers

    run(go)


def test_a_revoked_key_is_refused_in_the_words_for_an_unknown_one(tmp_path) -> None:
    guarded = Guarded(tmp_path)

    async def go() -> None:
        assert (await guarded.get("/v1/models", **guarded.headers)).status_code == 200
        revoke_key(guarded.path, guarded.key.key_id)
        guarded.now_ns += round(LOOK_S * 1e9)
        revoked = await guarded.get("/v1/models", **guarded.headers)
        unknown = await guarded.get("/v1/models", authorization="Bearer gyre-nobody")
        assert revoked.status_code == unknown.status_code == 401
        assert revoked.content == unknown.content
        assert guarded.secret not in revoked.text

    run(go)


def test_requests_over_a_limit_are_refused_until_the_time_that_is_said(tmp_path) -> None:
    guarded = Guarded(tmp_path, requests_per_minute=2)

    async def go() -> None:
        for number in (1, 2):
            asked = guarded.ask(max_tokens=1)
            name = (await guarded.until_held(number))[-1]
            guarded.engine.tell(name, 1, "length")
            answer = await asked
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(2 - number)
            assert "x-ratelimit-limit-tokens" not in answer.headers
        for stream in (False, True):
            refused = await guarded.ask(stream=stream)
            assert error_of(refused) == (429, "rate_limit_exceeded")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert refused.headers["retry-after"] == "30"
        guarded.now_ns += 30 * 10**9 - 1
        assert (await guarded.ask()).headers["retry-after"] == "1"
        guarded.now_ns += 1
        asked = guarded.ask(max_tokens=1)
        guarded.engine.tell((await guarded.until_held(3))[-1], 1, "length")
        assert (await asked).status_code == 200

    run(go)


def test_turning_text_to_tokens_counts_as_a_request_and_costs_no_tokens(tmp_path) -> None:
    async def work() -> None:
        guarded = Guarded(tmp_path, requests_per_minute=3, tokens_per_minute=100)

        async def post(path: str, **body: Any) -> httpx.Response:
            return await guarded.client.post(path, json=body, headers=guarded.headers)

        told = await post("/tokenize", prompt="what is one")
        assert told.json()["tokens"] == PROMPT.tolist()
        back = await post("/detokenize", tokens=PROMPT.tolist())
        assert back.json() == {"prompt": "what is one"}
        assert (await post("/tokenize", prompt=7)).status_code == 400
        assert await guarded.left() == ("1", "100")
        assert (await post("/tokenize", prompt="a")).status_code == 200
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            answer = await post(path, **body)
            assert error_of(answer) == (429, "rate_limit_exceeded")
            assert answer.headers["retry-after"] == "20"
        guarded.now_ns += MINUTE_NS // 3
        assert (await post("/tokenize", prompt="a")).status_code == 200

    run(work)


def test_what_can_never_fit_is_the_clients_to_change(tmp_path) -> None:
    guarded = Guarded(tmp_path, tokens_per_minute=100)

    async def go() -> None:
        for fields in ({"max_tokens": 100}, {"max_tokens": 50, "n": 2}, {"max_tokens": None}):
            refused = await guarded.ask(**fields)
            assert error_of(refused) == (400, "request_too_large")
            assert "retry-after" not in refused.headers
        assert await guarded.left() == (None, "100")

    run(go)


def test_fifty_at_once_are_admitted_exactly_as_far_as_their_tokens_fit(tmp_path) -> None:
    cost = len(PROMPT) + 2 * 7
    guarded = Guarded(tmp_path, tokens_per_minute=13 * cost + cost - 1)

    async def go() -> None:
        asked = [guarded.ask(max_tokens=7, n=2, stream=number % 2 == 0) for number in range(50)]
        names = await guarded.until_held(13)
        refused = []
        async with asyncio.timeout(30):
            while len(refused) < 37:
                refused = [one.result() for one in asked if one.done()]
                await asyncio.sleep(0)
        assert all(error_of(one) == (429, "rate_limit_exceeded") for one in refused)
        assert len(guarded.engine.streams) == 13
        assert await guarded.left() == (None, str(cost - 1))
        for name in names:
            for index in (0, 1):
                guarded.engine.tell(name, 3, "stop", index)
        answers = await asyncio.gather(*asked)
        assert sum(one.status_code == 200 for one in answers) == 13
        assert await guarded.left() == (None, str(cost - 1 + 13 * (cost - len(PROMPT) - 6)))

    run(go)


ENDS: dict[str, tuple[Any, int | None]] = {
    # how the engine ends it; the answer's tokens that are paid, None: nothing, nor the prompt
    "finished": (lambda engine, name: engine.tell(name, 4, "stop"), 4),
    "refused": (lambda engine, name: engine.streams[name].refuse("the queue is full"), None),
    "engine lost": (lambda engine, name: engine.streams[name].end(RankError("lost")), None),
    "deadline": (lambda engine, name: engine.tell(name, 3, "deadline"), 3),
    "aborted": (lambda engine, name: engine.tell(name, 2, "abort"), 2),
    "fault": (lambda engine, name: engine.streams[name].end(ValueError("a fault")), 0),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_however_a_request_ends_it_pays_for_what_it_used(tmp_path, end, stream) -> None:
    guarded = Guarded(tmp_path, tokens_per_minute=1000, concurrent_requests=1)
    act, paid = ENDS[end]

    async def go() -> None:
        for number in (1, 2, 3):
            asked = guarded.ask(max_tokens=50, stream=stream)
            name = (await guarded.until_held(number))[-1]
            assert error_of(await guarded.ask(max_tokens=1)) == (429, "rate_limit_exceeded")
            act(guarded.engine, name)
            answer = await asked
            # a stream has sent what came with its end, before the error event
            begins = stream and end in ("deadline", "aborted")
            assert (answer.status_code == 200) == (end == "finished" or begins)
            if answer.status_code != 500:  # a fault's answer is made outside of the gate
                assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
            each = 0 if paid is None else len(PROMPT) + paid
            assert await guarded.left() == (None, str(1000 - number * each))

    run(go)


async def hang_up(guarded: Guarded, *, told: int, stream: bool) -> None:
    """Ask, and hang up when `told` tokens have come."""
    gone, started = asyncio.Event(), asyncio.Event()
    body = json.dumps(BODY | {"max_tokens": 50, "stream": stream}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        started.set()

    headers = [(name.encode(), value.encode()) for name, value in guarded.headers.items()]
    path = "/v1/completions"
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http"}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
    known = len(guarded.engine.streams)
    asked = asyncio.create_task(guarded.app(scope, receive, send))
    name = (await guarded.until_held(known + 1))[-1]
    if told:
        guarded.engine.tell(name, told)
        if stream:
            await started.wait()
        await asyncio.sleep(0)
    gone.set()
    await asked


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("told", "chosen"), [(0, 0), (0, 5), (3, 5)])
def test_a_client_that_hangs_up_pays_for_what_the_engine_chose(
    tmp_path, told, chosen, stream
) -> None:
    guarded = Guarded(tmp_path, tokens_per_minute=1000, concurrent_requests=1)
    guarded.engine.chosen = chosen

    async def go() -> None:
        for number in (1, 2, 3):
            await hang_up(guarded, told=told, stream=stream)
            used = number * (len(PROMPT) + told + chosen)
            assert await guarded.left() == (None, str(1000 - used))
        assert not guarded.events

    run(go)


def test_an_engine_that_does_not_tell_holds_no_request(tmp_path, monkeypatch) -> None:
    """The abort is not answered: what is known is paid, and an event says that it may be too
    little."""
    guarded = Guarded(tmp_path, tokens_per_minute=1000, concurrent_requests=1)
    monkeypatch.setattr("gyre.server.respond.COUNT_S", 0.01)

    async def silent(request_id: str) -> None:
        return None

    guarded.engine.abort = silent  # type: ignore[method-assign]

    async def go() -> None:
        await hang_up(guarded, told=2, stream=True)
        assert await guarded.left() == (None, str(1000 - len(PROMPT) - 2))
        ((kind, _),) = guarded.events
        assert kind == "serve.usage_incomplete"

    run(go)


def test_after_any_mixture_of_ends_nothing_is_reserved(tmp_path) -> None:
    guarded = Guarded(
        tmp_path, tokens_per_minute=10**6, requests_per_minute=10**6, concurrent_requests=1
    )
    chance = random.Random(3)

    async def go() -> None:
        for count in range(1, 41):
            asked = guarded.ask(max_tokens=9, stream=chance.random() < 0.5)
            name = (await guarded.until_held(count))[-1]
            if chance.random() < 0.5:
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
            else:
                ENDS[chance.choice(list(ENDS))][0](guarded.engine, name)
                await asked
        guarded.now_ns += MINUTE_NS
        assert await guarded.left() == ("1000000", "1000000")

    run(go)


def test_changed_limits_begin_anew_and_those_that_run_end_well(tmp_path) -> None:
    guarded = Guarded(tmp_path, tokens_per_minute=100)

    async def go() -> None:
        asked = guarded.ask(max_tokens=50)
        (name,) = await guarded.until_held(1)
        text = guarded.path.read_text()
        guarded.path.write_text(text.replace('"tokens_per_minute": 100', '"tokens_per_minute": 70'))
        guarded.now_ns += round(LOOK_S * 1e9)
        assert await guarded.left() == (None, "70")
        guarded.engine.tell(name, 1, "stop")
        assert (await asked).status_code == 200
        assert await guarded.left() == (None, "70")

    run(go)


def test_a_key_is_in_no_answer_and_in_no_event(tmp_path) -> None:
    guarded = Guarded(tmp_path, requests_per_minute=1)

    async def go() -> None:
        answers = [await guarded.get("/health/load", **guarded.headers)]  # a fault: a traceback
        asked = guarded.ask()
        guarded.engine.streams[(await guarded.until_held(1))[0]].end(ValueError("a fault"))
        answers += [await asked, await guarded.ask(), await guarded.ask(prompt=guarded.secret)]
        assert [one.status_code for one in answers] == [500, 500, 429, 429]
        assert len(guarded.events) == 2
        said = repr(guarded.events) + "".join(one.text + repr(one.headers) for one in answers)
        assert guarded.secret.removeprefix("gyre-") not in said

    run(go)


def test_admin_routes_ask_for_the_role(tmp_path) -> None:
    guarded = Guarded(tmp_path)
    guarded.gate.require_admin({SCOPE_KEY: replace(guarded.key, role="admin")})
    with pytest.raises(ApiError) as caught:
        guarded.gate.require_admin({SCOPE_KEY: guarded.key})
    assert (caught.value.status, caught.value.code) == (403, "admin_required")
