"""The shipped fakes as tests ask for them: an engine on a table of answers, requests, rollouts; and
a limit on every wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np

from fakes.engine import ScriptedEngine
from fakes.script import byte_tokenizer, table_script
from gyre.core.records import Prompt, Request, Rollout, Sampling, TokenChunk

TOKENIZER = byte_tokenizer()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(coroutine, 20)

    return asyncio.run(limited())


class Events:
    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, **fields: Any) -> None:
        self.seen.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.seen]


def request(request_id: str = "r", text: str = "1+2=", **sampling: Any) -> Request:
    fields = {
        key: sampling.pop(key)
        for key in ("chunk_tokens", "deadline_s", "priority", "grammar")
        if key in sampling
    }
    tokens = TOKENIZER.encode(text)
    return Request(request_id=request_id, tokens=tokens, sampling=Sampling(**sampling), **fields)


def engine_of(
    table: dict[str, list[str]] | None = None, *, emit: Events | None = None, **more: Any
) -> ScriptedEngine:
    script = table_script(table or {"1+2=": ["3", "four"]}, TOKENIZER)
    return ScriptedEngine(script, emit=emit or Events(), eos_ids=TOKENIZER.eos_ids, **more)


async def read(stream: Any) -> dict[int, list[TokenChunk]]:
    chunks: dict[int, list[TokenChunk]] = {}
    async for chunk in stream:
        chunks.setdefault(chunk.index, []).append(chunk)
    return chunks


def joined(chunks: list[TokenChunk], name: str = "tokens") -> list[Any]:
    return np.concatenate([getattr(chunk, name) for chunk in chunks]).tolist()


def rollout(name: str, text: str) -> Rollout:
    none, empty = np.empty(0, np.float32), np.empty(0, np.int32)
    prompt = Prompt(prompt_id="p", tokens=empty, text="1+2=", task={"answer": "3"}, source="fake")
    return Rollout(
        rollout_id=name,
        group_id="g",
        prompt=prompt,
        tokens=empty,
        sampled=np.empty(0, bool),
        logprobs=none,
        raw_logprobs=none,
        versions=empty,
        sampling=Sampling(),
        finish="stop",
        text=text,
    )
