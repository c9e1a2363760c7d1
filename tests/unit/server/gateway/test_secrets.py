"""Keys and prompts, however they are sent, are in no log, event, metric or refusal: over a real
socket, with every logger at DEBUG and asyncio in debug mode."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from api_cases import LIMITS, TOKENIZER, HeardEngine, render, reverse
from fakes.config import FakeEngineConfig
from fakes.engine import Faults
from gyre.core.records import Request
from gyre.engine.frontend.admission import find_refusal
from gyre.launch.serving.telemetry import libraries_logged
from gyre.server.admin import admin_routes
from gyre.server.app import make_app
from gyre.server.gateway.bounded_http import BoundedHttp, ConnectionLimits
from gyre.server.gateway.gate import KeyGate
from gyre.server.gateway.key_store import KeyStore
from gyre.server.gateway.keys import create_key, revoke_key
from gyre.server.gateway.limits import KeyLimits
from gyre.server.generation import ServedModel
from gyre.server.metrics.server_metrics import ServerMetrics, inspect_one

PROMPT = "Xylophone4711 of my aunt"
BEGUN = datetime(2030, 1, 1, tzinfo=UTC)
Told = list[tuple[str, dict[str, Any]]]


def make_keys(path: Path) -> dict[str, str]:
    """The secret of a key of each kind."""

    def make(valid_days: int | None = None, **limits: int) -> tuple[str, str]:
        key, secret = create_key(
            path,
            name="",
            role="admin",
            limits=KeyLimits(**limits),
            valid_days=valid_days,
            now=lambda: BEGUN,
        )
        return key.key_id, secret

    revoked_id, revoked = make()
    found = {
        "valid": make()[1],
        "used up": make(requests_per_minute=1)[1],
        "expired": make(valid_days=1)[1],
        "revoked": revoked,
        "wrong": "gyre-" + "Zk7" * 14 + "q",
    }
    revoke_key(path, revoked_id)
    return found


class RefusedWeights:
    async def change(self, folder: Path, policy: str) -> int:
        raise ValueError("a fault")


def fault_of(request: Request) -> str:
    """One request in five breaks the engine's own code; others run, or are refused."""
    if request.sampling.top_k == 5:
        raise ZeroDivisionError("a fault")
    return "the queue is full" if request.sampling.top_k == 6 else ""


@contextlib.asynccontextmanager
async def listening(keys: Path, events: Told) -> AsyncIterator[str]:
    """The URL of a server with keys, and an access log."""

    def emit(kind: str, /, **fields: Any) -> None:
        events.append((kind, fields))

    config = FakeEngineConfig(context_tokens=256)
    engine = HeardEngine(
        reverse, emit=emit, config=config, faults=Faults(refuse=fault_of), decode=TOKENIZER.decode
    )
    await engine.start(dummy=False)
    model = ServedModel(
        name="m",
        tokenizer=TOKENIZER,
        context_tokens=256,
        render=render,
        find_refusal=lambda request: find_refusal(request, LIMITS),
    )
    metrics = ServerMetrics("m", context_tokens=256, inspect=inspect_one(engine))
    later = BEGUN + timedelta(days=2)
    gate = KeyGate(KeyStore(keys, emit=emit, now=lambda: later))
    app = make_app(
        engine,
        model,
        emit=emit,
        gate=gate,
        metrics=metrics,
        logs_access=True,
        more_routes=admin_routes(
            lambda http: gate.require_admin(http.scope), RefusedWeights(), "m"
        ),
    )

    def protocol(*args: Any, **fields: Any) -> BoundedHttp:
        limits = ConnectionLimits(linger_s=0.0)
        return BoundedHttp(*args, **fields, limits=limits, count=metrics.count_error)

    settings = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="debug",
        access_log=False,
    )
    server = uvicorn.Server(settings)
    with socket.socket() as listener, libraries_logged(emit):
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        serving = asyncio.create_task(server.serve([listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving
    await engine.terminate()


BODIES: list[Any] = [
    {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 30},
    {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "top_k": 5},
    {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "top_k": 6},
    {"model": "m", "messages": [{"role": "user", "content": [{"type": "image", "x": PROMPT}]}]},
    {"model": "m", "messages": [{"role": "user", "content": PROMPT, "tool_calls": [PROMPT]}]},
    {"model": "m", "messages": PROMPT},
    {"model": "m", "prompt": PROMPT, "max_tokens": 30},
    {"model": "m", "prompt": PROMPT, "top_k": 5, "stream": True},
    {"model": "m", "prompt": [PROMPT, 3]},
    {"model": "m", "prompt": {"text": PROMPT}},
    {"model": "m", "prompt": PROMPT, "stop": [PROMPT, None]},
    {"model": "m", "prompt": PROMPT * 40},
    {"model": "m", "prompt": PROMPT, "user": 7},
    {"prompt": PROMPT, "params": {"top_k": 5}},
    {"prompt": PROMPT, "params": PROMPT},
    {"prompt": PROMPT},
    {"tokens": [PROMPT]},
    {"path": "/nowhere"},
    [PROMPT],
    PROMPT,
    json.dumps({"model": "m", "prompt": PROMPT})[:-3].encode(),
    PROMPT.encode() + b"\xff",
    None,
]
ROUTES = [
    *("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize"),
    *("/admin/weights", "/v1/models", "/metrics", "/health/ready", "/openapi.json", "/nowhere"),
]


def ways_of(secret: str) -> list[dict[str, Any]]:
    """How a client may send its key."""
    return [
        {"headers": {"authorization": f"Bearer {secret}"}},
        {"headers": {"x-api-key": secret}},
        {"headers": {"authorization": f"Basic {secret}"}},
        {"headers": {"cookie": f"key={secret}"}, "params": {"api_key": secret}},
        {"headers": {"authorization": f"Bearer {secret}", "host": f"{secret} /"}},
    ]


async def play(url: str, secrets: dict[str, str]) -> list[httpx.Response]:
    """Every body at every route, with the keys and the ways to send one in turn."""
    turns = itertools.cycle(way for secret in secrets.values() for way in ways_of(secret))
    answers = []
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        for path, body in itertools.product(ROUTES, BODIES):
            for way in (ways_of(secrets["valid"])[0], next(turns)):
                sent = {"content": body} if isinstance(body, bytes) else {"json": body}
                method = "GET" if body is None else "POST"
                sent = {} if body is None else sent
                answers.append(await client.request(method, path, **way, **sent))
        head = {"authorization": f"Bearer {secrets['valid']}"}
        answers.append(await client.get("/metrics", headers=head))
    return answers


@pytest.mark.slow
def test_no_key_and_no_prompt_is_told(tmp_path, caplog) -> None:
    caplog.set_level(1)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # of the client: they name its URL
    for name in ("httpcore", "hypothesis"):
        logging.getLogger(name).setLevel(logging.WARNING)
    keys, events = tmp_path / "keys.json", []
    secrets = make_keys(keys)

    async def go() -> list[httpx.Response]:
        async with listening(keys, events) as url:
            return await play(url, secrets)

    with asyncio.Runner(debug=True) as runner:
        answers = runner.run(asyncio.wait_for(go(), 120))
    statuses = {answer.status_code for answer in answers}
    assert statuses >= {200, 400, 401, 404, 405, 429, 500}
    kinds = {kind for kind, _ in events}
    assert kinds >= {"serve.access", "serve.request_failed", "serve.library_warning"}
    assert "uvicorn.error" in {record.name for record in caplog.records}
    told = {
        "log": caplog.text,
        "events": json.dumps(events, default=str),
        "metrics": answers[-1].text,
        "refusals": "".join(answer.text for answer in answers if answer.status_code >= 400),
        "heads": str([answer.headers for answer in answers]),
    }
    texts = (PROMPT[:9], PROMPT[:9][::-1])  # the engine answers with the prompt, from its end on
    assert answers[-1].status_code == 200 and texts[1] in "".join(one.text for one in answers)
    for place, text in told.items():
        for secret in (*secrets.values(), *texts):
            assert secret.removeprefix("gyre-")[:12] not in text, place
