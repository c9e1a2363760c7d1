"""Answers: pieces of completions to the JSON of the API. In: pieces, in order. Out: the body of an
answer, or the events of a stream. The same class forms both, so that they say the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from gyre.server.echo import Echo, TokenOffsets
from gyre.server.generation import TextDelta, TokenUsage, chat_logprobs, completion_logprobs
from gyre.server.parsers.answer import AnswerDelta, AnswerParser, CallDelta
from gyre.text.tokenizer import Tokenizer


class ChatAnswer:
    """A chat completion. Each completion has a parser of its own, from `make_parser`; `kept_ids`
    are the special tokens that the parsers need to see."""

    kind, prefix = "chat.completion", "chatcmpl"

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        logprobs: bool,
        make_parser: Callable[[], AnswerParser] = AnswerParser,
        kept_ids: frozenset[int] = frozenset(),
    ):
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._make_parser = make_parser
        self.kept_ids = kept_ids
        self._parsers: dict[int, AnswerParser] = {}  # by the index of the completion

    def first(self, n: int) -> list[dict[str, Any]]:
        """Return the events before any token: who speaks."""
        return [
            self._event([_choice(index, {"delta": {"role": "assistant", "content": ""}}, None)])
            for index in range(n)
        ]

    def event(self, piece: TextDelta, usage: TokenUsage) -> dict[str, Any]:
        """Return the event of a piece."""
        found = self._parse(piece)
        delta: dict[str, Any] = {"content": found.content} if found.content else {}
        if found.reasoning:
            delta["reasoning_content"] = found.reasoning
        if found.calls:
            delta["tool_calls"] = [
                {"index": call.index, **self._call(piece.index, call)} for call in found.calls
            ]
        if not delta and piece.finish is None:
            delta = {"content": ""}
        body: dict[str, Any] = {"delta": delta}
        if self._logprobs:
            body["logprobs"] = {
                "content": chat_logprobs(piece, self._tokenizer),
                "versions": piece.versions.tolist(),
            }
        fingerprint = usage.fingerprint
        return self._event([_choice(piece.index, body, self._finish(piece))]) | {
            "system_fingerprint": fingerprint
        }

    def last(self, usage: TokenUsage) -> dict[str, Any]:
        """Return the event with the usage, after all pieces."""
        return self._event([]) | {"usage": usage.as_dict()}

    def whole(self, pieces: list[TextDelta], usage: TokenUsage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = []
        for index, parts in _by_index(pieces).items():
            message = self._message(index, [self._parse(part) for part in parts])
            body: dict[str, Any] = {"message": message}
            if self._logprobs:
                entries = [
                    entry for part in parts for entry in chat_logprobs(part, self._tokenizer)
                ]
                versions = [number for part in parts for number in part.versions.tolist()]
                body["logprobs"] = {"content": entries, "versions": versions}
            choices.append(_choice(index, body, self._finish(parts[-1])))
        return {
            **self._head,
            "object": self.kind,
            "choices": choices,
            "usage": usage.as_dict(),
            "system_fingerprint": usage.fingerprint,
        }

    def _parse(self, piece: TextDelta) -> AnswerDelta:
        if piece.index not in self._parsers:
            self._parsers[piece.index] = self._make_parser()
        return self._parsers[piece.index].push(piece.text, is_last=piece.is_last)

    def _finish(self, piece: TextDelta) -> str | None:
        """Return why the completion ended, after its last piece was parsed."""
        calls = piece.finish == "stop" and self._parsers[piece.index].has_call
        return "tool_calls" if calls else piece.finish

    def _message(self, index: int, deltas: list[AnswerDelta]) -> dict[str, Any]:
        """Return the message that the deltas of a completion make."""
        content = "".join(delta.content for delta in deltas)
        reasoning = "".join(delta.reasoning for delta in deltas)
        calls = _join_calls(call for delta in deltas for call in delta.calls)
        has_other = bool(reasoning or calls)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if has_other and not content:
            message["content"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [self._call(index, call) for call in calls]
        return message

    def _call(self, index: int, call: CallDelta) -> dict[str, Any]:
        """Return a call, or what is added to it; the first delta has its id and name."""
        if not call.name:
            return {"function": {"arguments": call.arguments}}
        request = str(self._head["id"]).removeprefix(f"{self.prefix}-")
        return {
            "id": f"call_{request}_{index}_{call.index}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": f"{self.kind}.chunk", "choices": choices}


class TextAnswer:
    """A text completion. With `echoes`, one of each prompt, a completion's text begins with its
    prompt's. The n completions of prompt i have the indices from i × n on."""

    kind, prefix = "text_completion", "cmpl"
    kept_ids: frozenset[int] = frozenset()

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
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._echoes = echoes
        self._n = n
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
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "versions")
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


def _join_calls(deltas: Iterable[CallDelta]) -> list[CallDelta]:
    """Return whole calls of their deltas, in order."""
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        names.setdefault(delta.index, delta.name)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return [
        CallDelta(index=index, name=name, arguments="".join(arguments[index]))
        for index, name in names.items()
    ]


def _by_index(pieces: list[TextDelta]) -> dict[int, list[TextDelta]]:
    found: dict[int, list[TextDelta]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.index):
        found.setdefault(piece.index, []).append(piece)
    return found
