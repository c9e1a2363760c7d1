"""Answers: pieces of completions to the JSON of the API. In: pieces, in order. Out: the body of an
answer, or the events of a stream. The same class forms both, so that they say the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from gyre.server.echo import Echo, TokenOffsets
from gyre.server.generation import TextDelta, TokenUsage, chat_logprobs, completion_logprobs
from gyre.text.tokenizer import Tokenizer


class ChatAnswer:
    """A chat completion."""

    kind, prefix = "chat.completion", "chatcmpl"

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, *, logprobs: bool):
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._tokenizer, self._logprobs = tokenizer, logprobs

    def first(self, n: int) -> list[dict[str, Any]]:
        """Return the events before any token: who speaks."""
        return [
            self._event([_choice(index, {"delta": {"role": "assistant", "content": ""}}, None)])
            for index in range(n)
        ]

    def event(self, piece: TextDelta, usage: TokenUsage) -> dict[str, Any]:
        """Return the event of a piece."""
        delta = {"content": piece.text} if piece.text or piece.finish is None else {}
        body: dict[str, Any] = {"delta": delta}
        if self._logprobs:
            body["logprobs"] = {"content": chat_logprobs(piece, self._tokenizer)}
        fingerprint = usage.fingerprint
        return self._event([_choice(piece.index, body, piece.finish)]) | {
            "system_fingerprint": fingerprint
        }

    def last(self, usage: TokenUsage) -> dict[str, Any]:
        """Return the event with the usage, after all pieces."""
        return self._event([]) | {"usage": usage.as_dict()}

    def whole(self, pieces: list[TextDelta], usage: TokenUsage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = []
        for index, parts in _by_index(pieces).items():
            content = "".join(part.text for part in parts)
            body: dict[str, Any] = {"message": {"role": "assistant", "content": content}}
            if self._logprobs:
                entries = [
                    entry for part in parts for entry in chat_logprobs(part, self._tokenizer)
                ]
                body["logprobs"] = {"content": entries}
            choices.append(_choice(index, body, parts[-1].finish))
        return {
            **self._head,
            "object": self.kind,
            "choices": choices,
            "usage": usage.as_dict(),
            "system_fingerprint": usage.fingerprint,
        }

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": f"{self.kind}.chunk", "choices": choices}


class TextAnswer:
    """A text completion. With `echoes`, one of each prompt, a completion's text begins with its
    prompt's. The n completions of prompt i have the indices from i × n on."""

    kind, prefix = "text_completion", "cmpl"

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        logprobs: bool,
        echoes: Sequence[Echo] = (),
        n: int = 1,
    ) -> None:
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self._echoes, self._n = echoes, n
        self._places: dict[int, TokenOffsets] = {}  # of completions that have begun

    def first(self, n: int) -> list[dict[str, Any]]:
        """Return the events before any token: none."""
        return []

    def event(self, piece: TextDelta, usage: TokenUsage) -> dict[str, Any]:
        """Return the event of a piece."""
        return self._event([self._choice([piece])]) | {"system_fingerprint": usage.fingerprint}

    def last(self, usage: TokenUsage) -> dict[str, Any]:
        """Return the event with the usage, after all pieces."""
        return self._event([]) | {"usage": usage.as_dict()}

    def whole(self, pieces: list[TextDelta], usage: TokenUsage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = [self._choice(parts) for parts in _by_index(pieces).values()]
        return self._event(choices) | {
            "usage": usage.as_dict(),
            "system_fingerprint": usage.fingerprint,
        }

    def _choice(self, parts: list[TextDelta]) -> dict[str, Any]:
        index = parts[0].index
        is_first, echo = index not in self._places, self._echo(index)
        if is_first:
            start = len(echo.text) if echo else 0
            self._places[index] = TokenOffsets(self._tokenizer, start, skip_special=True)
        text = "".join(part.text for part in parts)
        body: dict[str, Any] = {"text": echo.text + text if echo and is_first else text}
        if self._logprobs:
            columns = [
                completion_logprobs(part, self._tokenizer, self._places[index].push(part.tokens))
                for part in parts
            ]
            if echo and is_first:
                columns.insert(0, echo.logprobs(parts[0].prompt_logprobs, self._tokenizer))
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            body["logprobs"] = {name: [x for one in columns for x in one[name]] for name in names}
        return _choice(index, body, parts[-1].finish)

    def _echo(self, index: int) -> Echo | None:
        return self._echoes[index // self._n] if self._echoes else None

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.kind, "choices": choices}


class Answer(Protocol):
    """What forms the JSON of one kind of answer."""

    def first(self, n: int) -> list[dict[str, Any]]: ...
    def event(self, piece: TextDelta, usage: TokenUsage) -> dict[str, Any]: ...
    def last(self, usage: TokenUsage) -> dict[str, Any]: ...
    def whole(self, pieces: list[TextDelta], usage: TokenUsage) -> dict[str, Any]: ...


def _choice(index: int, body: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": index, "logprobs": None, **body, "finish_reason": finish}


def _by_index(pieces: list[TextDelta]) -> dict[int, list[TextDelta]]:
    found: dict[int, list[TextDelta]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.index):
        found.setdefault(piece.index, []).append(piece)
    return found
