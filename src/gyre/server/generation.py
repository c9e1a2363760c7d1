"""Generation: a request of the API to one of the engine, and its chunks to answers. In: a parsed
body, prompt tokens. Out: a Request; pieces of text with their log-probs and the count of tokens. A
piece never changes once sent: it has whole characters, and nothing of a stop string.

C tokens of a completion, c of one chunk, K alternatives of each.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from gyre.core.errors import RankError
from gyre.core.records import PromptLogprobs, Request, Sampling, TokenChunk
from gyre.server.bodies.schema import MOST_SESSION_CHARS, ApiError, SamplingFields
from gyre.server.parsers.choose import AnswerFormat
from gyre.server.parsers.spans import held_chars
from gyre.text.detokenizer import Detokenizer
from gyre.text.messages import Message, Tool
from gyre.text.prompt_bounds import check_chars, encode_within, too_long
from gyre.text.tokenizer import Tokenizer

ALL_TOKENS = -1  # top_k of a client that was written for vLLM
ENDED_TOGETHER = ("deadline", "abort")  # ends of every completion of a request at once
MOST_LOGPROBS = 20  # alternatives that a request may ask for at each token, as in OpenAI's API


class Renderer(Protocol):
    """Makes the prompt of a conversation."""

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        generation_prompt: bool = True,
        most_tokens: int | None = None,
    ) -> np.ndarray:
        """Return int32 ids up to the model's turn, whose beginning is left out without
        `generation_prompt`. InputError or ConfigError for what the template does not show,
        PromptTooLong for what certainly has more than `most_tokens`; None is the context."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What is served, and how a conversation becomes its prompt."""

    name: str
    tokenizer: Tokenizer
    context_tokens: int
    render: Renderer
    find_refusal: Callable[[Request], str | None]  # why no engine runs the request
    answer_format: AnswerFormat = field(default_factory=AnswerFormat)
    runs_template: bool = False  # rendering runs a program of the model's folder
    find_version: Callable[[], int] = lambda: 0  # of the weights that answer now


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text of one completion."""

    index: int
    text: str
    tokens: np.ndarray  # int32 [c]
    logprobs: np.ndarray  # float32 [c], of the plain softmax
    versions: np.ndarray  # int32 [c], of the weights that chose each token
    top_ids: np.ndarray | None  # int32 [c, K]
    top_logprobs: np.ndarray | None  # float32 [c, K]
    finish: str | None  # "stop" or "length"; None also where it ends without an answer
    is_last: bool  # of its completion, which has ended
    prompt_logprobs: PromptLogprobs | None = None  # in the first piece, where asked for


@dataclass(slots=True)
class TokenUsage:
    """Tokens that were read and chosen."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompts
    versions: set[int] = field(default_factory=set)  # of the weights that chose them

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def fingerprint(self) -> str:
        """Name the weights' versions: "version-3", or "version-3,4" after a change in between."""
        return "version-" + ",".join(str(version) for version in sorted(self.versions))


def read_prompt(prompt: str | list[int], model: ServedModel) -> np.ndarray:
    """Return int32 ids of a prompt that is no conversation; a text begins as the model's do.
    PromptTooLong for one that certainly has more than the context."""
    check_length(prompt, model)
    if not isinstance(prompt, str):
        return np.asarray(prompt, np.int32)
    prefix = np.asarray(model.tokenizer.prefix_ids, np.int32)
    tokens = encode_within(model.tokenizer, prompt, model.context_tokens)
    return np.concatenate([prefix, tokens]).astype(np.int32)


def check_length(prompt: str | list[int], model: ServedModel) -> None:
    """PromptTooLong where the length alone says that a prompt is beyond the context."""
    most = model.context_tokens
    if isinstance(prompt, str):
        check_chars(model.tokenizer, prompt, most)
    elif len(prompt) > most:
        raise too_long(f"{len(prompt)} tokens", most)


def make_request(
    body: SamplingFields,
    tokens: np.ndarray,
    model: ServedModel,
    *,
    request_id: str,
    stream: bool,
    most_tokens: int | None,
    prompt_field: str = "prompt",
    limit_field: str = "max_tokens",
    n: int = 1,
    top_logprobs: int = 0,
    prompt_logprobs: int | None = None,
    session_id: str = "",
) -> Request:
    """Return the engine's request. ApiError where the engine would refuse it. Beyond the
    context, `prompt_field` is to blame, or `limit_field` where the prompt alone would fit."""
    room = max(1, model.context_tokens - len(tokens))
    sampling = Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=0 if body.top_k == ALL_TOKENS else body.top_k,
        min_p=body.min_p,
        max_tokens=room if most_tokens is None else most_tokens,
        stop=body.stops,
        ignore_eos=body.ignore_eos,
        n=n,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=read_bias(body.logit_bias or {}),
        min_tokens=body.min_tokens,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    request = Request(
        request_id=request_id,
        tokens=tokens,
        sampling=sampling,
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        priority=body.priority,
        deadline_s=body.deadline_s,
        chunk_tokens=1 if stream else 0,
        session_id=session_id,
    )
    if (reason := model.find_refusal(request)) is not None:
        if len(tokens) + (most_tokens or 1) <= model.context_tokens:
            raise ApiError(400, reason)
        param = limit_field if len(tokens) < model.context_tokens else prompt_field
        raise ApiError(400, reason, param=param, code="context_length_exceeded")
    return request


def find_session(headers: Mapping[str, str], cache_key: str | None = None) -> str:
    """Return the session that a request belongs to, as a hash: it is data of a client, and may name
    a person. Empty where there is none. ApiError for a header that is too long."""
    name = cache_key or headers.get("x-session-id", "")
    if len(name) > MOST_SESSION_CHARS:
        most = f"need at most {MOST_SESSION_CHARS}"
        raise ApiError(400, f"x-session-id has {len(name)} characters: {most}")
    if not name:
        return ""
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def check_top(number: int, name: str) -> int:
    """Return how many alternatives to tell. ApiError outside 0 to MOST_LOGPROBS."""
    if not 0 <= number <= MOST_LOGPROBS:
        raise ApiError(400, f"{name} = {number}: need 0 to {MOST_LOGPROBS}", param=name)
    return number


def read_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Return (token id, added to its logit) of each entry. ApiError for a key that is no id."""
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise ApiError(
                400, f"logit_bias key {key[:40]!r}: need a token id as text", param="logit_bias"
            )
    return tuple((int(key), float(value)) for key, value in bias.items())


async def pieces(
    stream: AsyncIterator[TokenChunk],
    request: Request,
    tokenizer: Tokenizer,
    usage: TokenUsage,
    *,
    prompt_only: bool = False,
    kept_ids: Collection[int] = (),
) -> AsyncIterator[TextDelta]:
    """Yield the text of the completions as it can be sent, and count into `usage`. It has those
    special tokens that are in `kept_ids`. ApiError where the engine ends one without an answer,
    after a last piece of each that had begun, with what was chosen until then. With
    `prompt_only` the chosen tokens are left out."""
    texts: dict[int, AnswerText] = {}
    error: ApiError | None = None  # the first one
    async for chunk in _unless_lost(stream):
        if error is not None and chunk.finish is None:
            break  # others go on, and are aborted
        usage.versions.update(chunk.versions.tolist())
        usage.cached_tokens += chunk.cached_tokens
        if prompt_only:
            chunk = _without_tokens(chunk)
        usage.completion_tokens += len(chunk.tokens)  # also of one that ends without an answer
        is_answer = chunk.finish in (None, "stop", "length")
        text = texts.get(chunk.index)
        has_begun = text is not None
        if text is None:
            text = texts[chunk.index] = AnswerText(
                tokenizer, request.sampling.stop, kept_ids=kept_ids
            )
        new_text = text.push(chunk.tokens, chunk.finish)
        if is_answer or has_begun or new_text or len(chunk.tokens):
            yield TextDelta(
                index=chunk.index,
                text=new_text,
                tokens=chunk.tokens,
                logprobs=chunk.raw_logprobs,
                versions=chunk.versions,
                top_ids=chunk.top_ids,
                top_logprobs=chunk.top_logprobs,
                finish=chunk.finish if is_answer else None,
                is_last=chunk.finish is not None,
                prompt_logprobs=chunk.prompt_logprobs,
            )
        if not is_answer:
            error = error or _end_error(chunk)
            if chunk.finish not in ENDED_TOGETHER:
                break
    if error is not None:
        raise error


def _without_tokens(chunk: TokenChunk) -> TokenChunk:
    """Return the chunk as if no token had been allowed."""
    return replace(
        chunk,
        tokens=chunk.tokens[:0],
        logprobs=chunk.logprobs[:0],
        raw_logprobs=chunk.raw_logprobs[:0],
        versions=chunk.versions[:0],
        support=None,
        top_ids=None,
        top_logprobs=None,
        finish="length" if chunk.finish == "stop" else chunk.finish,
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


def completion_logprobs(
    piece: TextDelta, tokenizer: Tokenizer, offsets: Sequence[int]
) -> dict[str, Any]:
    """Return `logprobs` of a text completion; `offsets` are where its tokens' texts begin."""
    words = [_text_of(int(token), tokenizer) for token in piece.tokens]
    values = [float(value) for value in piece.logprobs]
    return {
        "tokens": words,
        "token_logprobs": values,
        "top_logprobs": [
            as_alternatives(
                [(_text_of(token, tokenizer), value) for token, value in _best(piece, place)],
                (words[place], values[place]),
            )
            for place in range(len(words))
        ],
        "text_offset": list(offsets),
        "versions": piece.versions.tolist(),
    }


def as_alternatives(best: Sequence[tuple[str, float]], own: tuple[str, float]) -> dict[str, float]:
    """Return `top_logprobs` of one token: the best texts and its own. Tokens that say the same text
    share an entry, which has the best of their values. Pure."""
    found: dict[str, float] = {}
    for text, value in (*best, own):
        found.setdefault(text, value)
    return found


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

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], *, kept_ids: Collection[int] = ()
    ) -> None:
        self._words = Detokenizer(tokenizer, skip_special=True, kept_ids=kept_ids)
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
