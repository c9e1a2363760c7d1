"""Answers: pieces of completions to the JSON of the API. In: pieces, in order. Out: the body of an
answer, or the events of a stream. The same class forms both, so that they say the same.
"""

from __future__ import annotations

import time
from typing import Any

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
    """A text completion. `echo` is the prompt's text, put before each completion."""

    kind, prefix = "text_completion", "cmpl"

    def __init__(
        self, request_id: str, model: str, tokenizer: Tokenizer, *, logprobs: bool, echo: str
    ):
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._tokenizer, self._logprobs, self._echo = tokenizer, logprobs, echo
        self._places: dict[int, int] = {}  # characters of each completion so far

    def first(self, n: int) -> list[dict[str, Any]]:
        """Return the events before any token: the prompt, where it was asked for."""
        if not self._echo:
            return []
        return [self._event([_choice(index, {"text": self._echo}, None)]) for index in range(n)]

    def event(self, piece: TextDelta, usage: TokenUsage) -> dict[str, Any]:
        """Return the event of a piece."""
        choice = self._choice([piece], piece.text)
        return self._event([choice]) | {"system_fingerprint": usage.fingerprint}

    def last(self, usage: TokenUsage) -> dict[str, Any]:
        """Return the event with the usage, after all pieces."""
        return self._event([]) | {"usage": usage.as_dict()}

    def whole(self, pieces: list[TextDelta], usage: TokenUsage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = [
            self._choice(parts, self._echo + "".join(part.text for part in parts))
            for parts in _by_index(pieces).values()
        ]
        return self._event(choices) | {
            "usage": usage.as_dict(),
            "system_fingerprint": usage.fingerprint,
        }

    def _choice(self, parts: list[TextDelta], text: str) -> dict[str, Any]:
        index = parts[0].index
        body: dict[str, Any] = {"text": text}
        if self._logprobs:
            told: dict[str, Any] = {
                "tokens": [],
                "token_logprobs": [],
                "top_logprobs": [],
                "text_offset": [],
            }
            for part in parts:
                start = self._places.get(index, len(self._echo))
                found = completion_logprobs(part, self._tokenizer, start)
                self._places[index] = start + sum(map(len, found["tokens"]))
                for name, values in found.items():
                    told[name] += values
            body["logprobs"] = told
        return _choice(index, body, parts[-1].finish)

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.kind, "choices": choices}


Answer = ChatAnswer | TextAnswer


def _choice(index: int, body: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": index, "logprobs": None, **body, "finish_reason": finish}


def _by_index(pieces: list[TextDelta]) -> dict[int, list[TextDelta]]:
    found: dict[int, list[TextDelta]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.index):
        found.setdefault(piece.index, []).append(piece)
    return found
