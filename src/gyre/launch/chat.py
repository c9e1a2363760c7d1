"""Chat: a conversation with a model. In: a model folder, turns as they are typed. Out: words as
they are chosen.

The event loop runs only while an answer is made: between two of them the terminal belongs to who
types, Ctrl-C and all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gyre.core.errors import EngineRefused
from gyre.core.events import Emit
from gyre.core.records import Request, Sampling
from gyre.core.seeds import derive_seed
from gyre.engine.engine import NativeEngine
from gyre.launch.factories import (
    Policy,
    load_policy,
    make_engine,
    make_machine,
)
from gyre.models.hub.folders import refuse_reward_model
from gyre.runconfig.run_config import RunConfig
from gyre.text.detokenizer import Detokenizer
from gyre.text.messages import Message
from gyre.text.render import render_prompt

Write = Callable[[str], None]


def chat(
    model: Path,
    config: RunConfig,
    turns: Iterator[str],
    write: Write,
    note: Write,
    *,
    interactive: bool,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> Any:
    """Answer each turn; "/new" starts a new conversation. `max_tokens` 0 lets an answer fill the
    context. Remarks go to `note`. With `interactive` a conversation continues after a refused turn
    (EngineRefused otherwise) or an answer that Ctrl-C ended. Ctrl-C between answers ends the chat.
    """
    refuse_reward_model(model)
    machine = make_machine(config)
    policy = load_policy(model, machine, end_token=config.tokenizer.end_token)
    emit: Emit = lambda kind, **fields: None  # noqa: E731  a chat keeps no log
    answers: list[str] = []
    with asyncio.Runner() as runner:
        engine = make_engine(config.engine, policy, machine, emit)
        runner.run(engine.start(dummy=False))
        talk = Conversation(
            engine, policy, config, write, max_tokens=max_tokens, temperature=temperature, seed=seed
        )
        try:
            for turn in turns:
                if talk.is_command(turn):
                    continue
                try:
                    answers.append(runner.run(talk.answer(turn)))
                except EngineRefused as error:
                    if not interactive:
                        raise
                    note(f"{error.message}\n hint: {error.hint}")
                except KeyboardInterrupt:
                    if not interactive:
                        raise
                    note("stopped; Ctrl-C again, or Ctrl-D, ends the chat")
                for line in talk.take_notes():
                    note(line)
        finally:
            runner.run(engine.terminate())
    machine.compute.shutdown()
    return {"answers": answers}


class Conversation:
    """The messages so far, and the engine that answers them. A data.template that is not a
    chat template holds one question, so each turn is separate there."""

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
        self._engine = engine
        self._policy = policy
        self._data = config.data
        self._write = write
        self._stop = config.rollout.stop
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._seed = seed
        self._messages: list[Message] = []
        self._notes: list[str] = []
        self._number = 0

    def is_command(self, turn: str) -> bool:
        if turn.strip() != "/new":
            return False
        self._messages = []
        return True

    def take_notes(self) -> list[str]:
        """Return the remarks of the last turns and forget them."""
        notes, self._notes = self._notes, []
        return notes

    async def answer(self, turn: str) -> str:
        """Write the answer while it is chosen, and return it. Of an answer that is cancelled the
        conversation keeps what was said."""
        asked = [*self._messages, Message(role="user", content=turn)]
        tokens = self._render(asked)
        sampling = Sampling(
            max_tokens=self._room(len(tokens)), temperature=self._temperature, stop=self._stop
        )
        self._number += 1
        seed = derive_seed(self._seed, self._number)
        request = Request(request_id=str(self._number), tokens=tokens, sampling=sampling, seed=seed)
        words, pieces = Detokenizer(self._policy.tokenizer, skip_special=True), []
        stream = self._engine.submit(request)
        try:
            async for chunk in stream:
                if chunk.finish not in (None, "stop", "length"):
                    why = chunk.reason or f"the engine ended it with '{chunk.finish}'"
                    raise EngineRefused(
                        f"the model cannot answer: {why}", hint="ask something shorter, or /new"
                    )
                pieces.append(words.push(chunk.tokens))
                self._write(pieces[-1])
                if chunk.finish == "length" and sampling.max_tokens != self._max_tokens:
                    self._notes.append("cut off: the context is full; /new begins again")
            pieces.append(words.flush())
            self._write(pieces[-1] + "\n")
        finally:
            await stream.aclose()
            said = "".join(pieces)
            if said and self._data.template == "chat":
                self._messages = [*asked, Message(role="assistant", content=said)]
        return said

    def _render(self, asked: list[Message]) -> Any:
        data = self._data
        prompt = asked if data.template == "chat" else asked[-1].content
        if data.template != "chat" and self._number == 1:
            self._notes.append("data.template holds one question: every turn stands alone")
        tokens, _ = render_prompt(
            self._policy.tokenizer,
            prompt,
            template=data.template,
            system=data.system,
            options=data.template_options,
        )
        return tokens

    def _room(self, prompt_tokens: int) -> int:
        """Tokens that an answer may have: as asked for, and no more than context and KV cache hold.
        At least one, so that the engine says why when there is none."""
        room = min(self._policy.spec.context_tokens, self._engine.cache_tokens + 1) - prompt_tokens
        return max(1, min(room, self._max_tokens or room))
