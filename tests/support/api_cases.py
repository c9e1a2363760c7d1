"""The API over an engine that recites, in one process. In: a script, faults. Out: a client, what
the engine got and told."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from starlette.applications import Starlette

from fakes.config import FakeEngineConfig
from fakes.engine import Faults, ScriptedEngine
from fakes.script import Script, byte_tokenizer
from gyre.core.chunks import TokenStream
from gyre.core.records import Request
from gyre.engine.frontend.admission import RequestLimits, find_refusal
from gyre.server.app import make_app
from gyre.server.generation import ServedModel

TOKENIZER = byte_tokenizer()
CONTEXT = 256
LIMITS = RequestLimits(
    vocab_size=TOKENIZER.vocab_size,
    context_tokens=CONTEXT,
    cache_tokens=4 * CONTEXT,
    can_decode=True,
    most_completions=512,
    eos_ids=TOKENIZER.eos_ids,
)


class HeardEngine(ScriptedEngine):
    """It keeps what it was asked."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.asked: list[Request] = []
        self.aborted: list[str] = []

    def submit(self, request: Request) -> TokenStream:
        self.asked.append(request)
        return super().submit(request)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        await super().abort(request_id)


@dataclass
class Api:
    app: Starlette
    engine: HeardEngine
    client: httpx.AsyncClient
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def rows(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream that ends well."""
        answer = await self.post(path, **body, stream=True)
        assert answer.status_code == 200, answer.text
        *rows, last = [line[6:] for line in answer.text.splitlines() if line]
        assert last == "[DONE]"
        return [json.loads(row) for row in rows]


def reverse(request: Request, index: int, version: int) -> Sequence[int]:
    """The prompt from its end on, then the completion's number."""
    return [
        *request.tokens[::-1].tolist(),
        *TOKENIZER.encode(str(index)).tolist(),
        TOKENIZER.end_id,
    ]


def render(
    messages: Any, tools: Any, *, generation_prompt: bool = True, most_tokens: int | None = None
) -> np.ndarray:
    return TOKENIZER.encode("".join(message.content or "" for message in messages))


@contextlib.asynccontextmanager
async def api(
    script: Script = reverse,
    *,
    faults: Faults | None = None,
    name: str = "m",
    model: ServedModel | None = None,
) -> AsyncIterator[Api]:
    """`model`: served in place of the one whose prompts are the messages' bytes."""
    events: list[tuple[str, dict[str, Any]]] = []

    def emit(kind: str, /, **fields: Any) -> None:
        events.append((kind, fields))

    engine = HeardEngine(
        script,
        emit=emit,
        config=FakeEngineConfig(context_tokens=CONTEXT),
        faults=faults,
        version=3,
        eos_ids=TOKENIZER.eos_ids,
        decode=TOKENIZER.decode,
    )
    await engine.start(dummy=False)

    model = model or ServedModel(
        name=name,
        tokenizer=TOKENIZER,
        context_tokens=CONTEXT,
        render=render,
        find_refusal=lambda request: find_refusal(request, LIMITS),
    )
    app = make_app(engine, model, emit=emit)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://m") as client:
        yield Api(app=app, engine=engine, client=client, events=events)
