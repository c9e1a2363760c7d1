"""Generation: a request of the API to one of the engine, and its chunks to answers. In: a parsed
body, prompt tokens. Out: a Request; pieces of text with their log-probs and the count of tokens. A
piece never changes once sent: it has whole characters, and nothing of a stop string.

C tokens of a completion, c of one chunk, K alternatives of each.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gyre.core.errors import RankError
from gyre.core.records import Request, Sampling, TokenChunk
from gyre.server.schema import ApiError, ChatBody, CompletionBody
from gyre.text.detokenizer import Detokenizer
from gyre.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What is served, and how a conversation becomes its prompt."""

    name: str
    tokenizer: Tokenizer
    context_tokens: int
    # int32 ids of a conversation up to the model's turn; InputError or ConfigError
    render: Callable[[Sequence[Mapping[str, str]]], np.ndarray]
    find_refusal: Callable[[Request], str | None]  # why no engine runs the request
    find_version: Callable[[], int] = lambda: 0  # of the weights that answer now


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text of one completion."""

    index: int
    text: str
    tokens: np.ndarray  # int32 [c]
    logprobs: np.ndarray  # float32 [c], of the plain softmax
    top_ids: np.ndarray | None  # int32 [c, K]
    top_logprobs: np.ndarray | None  # float32 [c, K]
    finish: str | None  # "stop" or "length"


@dataclass(slots=True)
class TokenUsage:
    """Tokens that were read and chosen."""

    prompt_tokens: int
    completion_tokens: int = 0
    versions: set[int] = field(default_factory=set)  # of the weights that chose them

    def as_dict(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    @property
    def fingerprint(self) -> str:
        """Name the weights' versions: "version-3", or "version-3,4" after a change in between."""
        return "version-" + ",".join(str(version) for version in sorted(self.versions))


def make_request(
    body: ChatBody | CompletionBody,
    tokens: np.ndarray,
    model: ServedModel,
    *,
    request_id: str,
    most_tokens: int | None,
    top_logprobs: int,
) -> Request:
    """Return the engine's request. ApiError where the engine would refuse it."""
    room = max(1, model.context_tokens - len(tokens))
    sampling = Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        max_tokens=room if most_tokens is None else most_tokens,
        stop=body.stops,
        ignore_eos=body.ignore_eos,
        n=body.n,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=read_bias(body.logit_bias or {}),
        min_tokens=body.min_tokens,
        top_logprobs=top_logprobs,
    )
    request = Request(
        request_id=request_id,
        tokens=tokens,
        sampling=sampling,
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        priority=body.priority,
        deadline_s=body.deadline_s,
        chunk_tokens=1 if body.stream else 0,
    )
    if (reason := model.find_refusal(request)) is not None:
        is_long = len(tokens) + (most_tokens or 1) > model.context_tokens
        raise ApiError(400, reason, code="context_length_exceeded" if is_long else "")
    return request


def read_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Return (token id, added to its logit) of each entry. ApiError for a key that is no id."""
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise ApiError(
                400, f"logit_bias key {key[:40]!r}: need a token id as text", param="logit_bias"
            )
    return tuple((int(key), float(value)) for key, value in bias.items())


async def pieces(
    stream: AsyncIterator[TokenChunk], request: Request, tokenizer: Tokenizer, usage: TokenUsage
) -> AsyncIterator[TextDelta]:
    """Yield the text of the completions as it can be sent, and count into `usage`. ApiError where
    the engine ends one without an answer."""
    texts: dict[int, AnswerText] = {}
    async for chunk in _unless_lost(stream):
        if chunk.finish not in (None, "stop", "length"):
            raise _end_error(chunk)
        text = texts.get(chunk.index)
        if text is None:
            text = texts[chunk.index] = AnswerText(tokenizer, request.sampling.stop)
        usage.completion_tokens += len(chunk.tokens)
        usage.versions.update(chunk.versions.tolist())
        yield TextDelta(
            index=chunk.index,
            text=text.push(chunk.tokens, chunk.finish),
            tokens=chunk.tokens,
            logprobs=chunk.raw_logprobs,
            top_ids=chunk.top_ids,
            top_logprobs=chunk.top_logprobs,
            finish=chunk.finish,
        )


async def _unless_lost(stream: AsyncIterator[TokenChunk]) -> AsyncIterator[TokenChunk]:
    """Yield the chunks. ApiError where no engine is left to make them."""
    try:
        async for chunk in stream:
            yield chunk
    except RankError as error:
        raise ApiError(503, error.message) from error


def _end_error(chunk: TokenChunk) -> ApiError:
    # what can never run was refused before: what an engine still refuses waits for capacity
    status = {"refused": 429, "deadline": 504}.get(chunk.finish or "", 503)
    return ApiError(status, chunk.reason or f"the engine ended the request with '{chunk.finish}'")


def chat_logprobs(piece: TextDelta, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the entries of `logprobs.content` of a chat answer, one for each token."""
    entries = []
    for place, (token, logprob) in enumerate(zip(piece.tokens, piece.logprobs, strict=True)):
        entry = _token_entry(int(token), float(logprob), tokenizer)
        entry["top_logprobs"] = [
            _token_entry(other, value, tokenizer) for other, value in _best(piece, place)
        ]
        entries.append(entry)
    return entries


def completion_logprobs(piece: TextDelta, tokenizer: Tokenizer, start: int) -> dict[str, Any]:
    """Return `logprobs` of a text completion; `start` is the place of the piece's text."""
    words = [_text_of(int(token), tokenizer) for token in piece.tokens]
    offsets = list(itertools.accumulate(map(len, words), initial=start))[: len(words)]
    return {
        "tokens": words,
        "token_logprobs": [float(value) for value in piece.logprobs],
        "top_logprobs": [
            {_text_of(token, tokenizer): value for token, value in _best(piece, place)}
            for place in range(len(words))
        ],
        "text_offset": offsets,
    }


def _best(piece: TextDelta, place: int) -> list[tuple[int, float]]:
    if piece.top_ids is None or piece.top_logprobs is None:
        return []
    return list(zip(piece.top_ids[place].tolist(), piece.top_logprobs[place].tolist(), strict=True))


def _text_of(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token])


def _token_entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    text = _text_of(token, tokenizer)
    data = tokenizer.piece_bytes(token) if tokenizer.is_byte_level else text.encode()
    return {"token": text, "logprob": logprob, "bytes": list(data)}


class AnswerText:
    """Text of one completion, incrementally."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._words = Detokenizer(tokenizer, skip_special=True)
        self._stops = tuple(stops)
        self._held = ""  # may be the beginning of a stop string

    def push(self, tokens: np.ndarray, finish: str | None) -> str:
        """Add tokens int32 [c]; return the text that can be sent now. With `finish`, all of it."""
        text = self._held + self._words.push(tokens)
        if finish is not None:
            text += self._words.flush()
            return cut_at_stop(text, self._stops) if finish == "stop" else text
        kept = held_chars(text, self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string in it. Pure."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def held_chars(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins a stop string. Pure."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
