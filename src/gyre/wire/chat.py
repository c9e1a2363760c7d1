"""Chat: a conversation with a model. In: a model folder, turns as they are typed. Out: words as they are chosen.

Caller: cli.chat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gyre.core.errors import EngineRefused
from gyre.core.records import Request, Sampling
from gyre.core.seeds import derive_seed
from gyre.engine.native import NativeEngine
from gyre.runconfig import RunConfig
from gyre.text.detokenise import Detokeniser
from gyre.text.render import render_prompt
from gyre.wire.make import Emit, Policy, load_policy, make_engine, make_machine, refuse_reward_model

Write = Callable[[str], None]


def chat(
    model: Path,
    config: RunConfig,
    turns: Iterator[str],
    write: Write,
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> Any:
    """Answer each turn; "/new" begins again. `max_tokens` 0 lets an answer fill the context. EngineRefused when a
    conversation has outgrown it."""
    refuse_reward_model(model)
    machine = make_machine(config)
    policy = load_policy(model, machine)
    emit: Emit = lambda kind, **fields: None  # noqa: E731  a chat keeps no log

    async def go() -> list[str]:
        engine = make_engine(config.engine, policy, machine, emit)
        await engine.start(dummy=False)
        talk = Conversation(engine, policy, config, write, max_tokens=max_tokens, temperature=temperature, seed=seed)
        try:
            return [await talk.answer(turn) for turn in turns if not talk.is_command(turn)]
        finally:
            await engine.terminate()

    answers = asyncio.run(go())
    machine.compute.shutdown()
    return {"answers": answers}


class Conversation:
    """Messages so far, and an engine that goes on with them."""

    def __init__(
        self,
        engine: NativeEngine,
        policy: Policy,
        config: RunConfig,
        write: Write,
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
    ) -> None:
        self._engine, self._policy, self._data, self._write = engine, policy, config.data, write
        self._max_tokens, self._temperature, self._seed = max_tokens, temperature, seed
        self._messages: list[dict[str, str]] = []
        self._number = 0

    def is_command(self, turn: str) -> bool:
        if turn.strip() != "/new":
            return False
        self._messages = []
        return True

    async def answer(self, turn: str) -> str:
        """Write the answer while it is chosen, and return it."""
        asked = [*self._messages, {"role": "user", "content": turn}]
        tokenizer = self._policy.tokenizer
        tokens, _ = render_prompt(tokenizer, asked, template=self._data.template, system=self._data.system)
        room = self._policy.spec.context_tokens - len(tokens)
        sampling = Sampling(max_tokens=self._max_tokens or max(1, room), temperature=self._temperature)
        self._number += 1
        seed = derive_seed(self._seed, self._number)
        request = Request(request_id=str(self._number), tokens=tokens, sampling=sampling, seed=seed)
        words, pieces = Detokeniser(tokenizer, skip_special=True), []
        async for chunk in self._engine.submit(request):
            if chunk.finish not in (None, "stop", "length"):
                why = chunk.reason or f"the engine ended it with '{chunk.finish}'"
                raise EngineRefused(f"the model cannot answer: {why}", hint="ask something shorter, or /new")
            pieces.append(words.push(chunk.tokens))
            self._write(pieces[-1])
        pieces.append(words.flush())
        self._write(pieces[-1] + "\n")
        said = "".join(pieces)
        self._messages = [*asked, {"role": "assistant", "content": said}]
        return said
