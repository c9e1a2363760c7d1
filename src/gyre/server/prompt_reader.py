"""Prompt reader: what a request brings to token ids, without holding up other requests. In: texts,
conversations, token ids. Out: ids or text, or a refusal in the shape of the API.

A short text is read in the event loop, since a thread would cost more than it. Threads take the
rest. A chat template is a program of the model's folder, so each conversation for one is rendered
beside the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from starlette.requests import Request as HttpRequest

from gyre.core.errors import PromptTooLong
from gyre.core.events import Emit
from gyre.server.bodies.schema import ApiError, TokenizeBody
from gyre.server.conversation import read_messages, read_tools
from gyre.server.generation import ServedModel, check_length, read_prompt
from gyre.server.metrics.server_metrics import ServerMetrics
from gyre.server.parsers.choose import AnswerFormat
from gyre.server.respond import as_json, unless_gone
from gyre.server.work_threads import WorkThreads
from gyre.text.messages import Message, Tool
from gyre.text.prompt_bounds import LIKELY_CHARS

SHORT_CHARS = 4096  # of texts that are read in the event loop: at most 2 ms of others' time
# of a text to tokenize, where the context has no room for more: freeing what the tokenizer makes of
# it takes the interpreter's lock, for some 200 ms
TOKENIZED_CHARS = 1 << 20
SHORT_TOKENS = 4096  # the same of ids that become text
PROMPT_S = 30.0  # longest wait for the tokens of a prompt
PROMPT_THREADS = 2
MOST_WAITING = 64  # requests for each kind of threads
TOLD_AT_ONCE = 1 << 14  # ids that become JSON while other threads wait

Result = TypeVar("Result")
OF_MESSAGES = ("tools", "add_generation_prompt")  # fields of /tokenize


class ClientGone(Exception):
    """The client hung up: the answer has no reader."""


class PromptReader:
    """Prompts of one model. Of each kind of threads, one that is held up holds up no other."""

    def __init__(self, model: ServedModel, metrics: ServerMetrics, emit: Emit) -> None:
        self._model = model
        self._metrics = metrics
        self._emit = emit
        self._templates = WorkThreads("templates", 1, most_waiting=MOST_WAITING)
        self._prompts = WorkThreads("prompts", PROMPT_THREADS, most_waiting=MOST_WAITING)
        self._texts = WorkThreads("texts", 1, most_waiting=MOST_WAITING)

    @property
    def _most_chars(self) -> int:
        """Return how much of a text is tokenized to be counted."""
        return max(TOKENIZED_CHARS, LIKELY_CHARS * self._model.context_tokens)

    async def read(
        self,
        prompts: Sequence[str | list[int]],
        http: HttpRequest,
        *,
        deadline_s: float | None = None,
    ) -> list[np.ndarray]:
        """Return int32 ids of each prompt. ApiError for one that is beyond the context."""
        with refusing_long("prompt"):
            for prompt in prompts:
                check_length(prompt, self._model)
            works = [functools.partial(read_prompt, prompt, self._model) for prompt in prompts]
            if sum(map(len, prompts)) <= SHORT_CHARS:
                return [work() for work in works]

            async def read_all() -> list[np.ndarray]:
                return [await self._prompts.run(work) for work in works]

            return await self._beside(read_all(), http, deadline_s)

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        http: HttpRequest,
        *,
        deadline_s: float | None = None,
    ) -> np.ndarray:
        """Return int32 ids of a conversation up to the model's turn. ApiError for one that is
        beyond the context, InputError for one that the template refuses."""
        work = functools.partial(self._model.render, messages, tools)
        return await self._read_messages(work, messages, http, self._prompts, deadline_s)

    async def _read_messages(
        self,
        work: Callable[[], Result],
        messages: Sequence[Message],
        http: HttpRequest,
        threads: WorkThreads,
        deadline_s: float | None = None,
    ) -> Result:
        """Return what `work` makes of them, in the loop where they are short and no template
        runs; `threads` take long ones."""
        is_short = sum(len(one.content) for one in messages) <= SHORT_CHARS
        with refusing_long("messages"):
            if is_short and not self._model.runs_template:
                return work()
            threads = self._templates if is_short else threads
            return await self._beside(threads.run(work), http, deadline_s)

    async def tokenize_messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        http: HttpRequest,
        *,
        generation_prompt: bool,
        adds_prefix: bool,
    ) -> bytes:
        """Return the answer of POST /tokenize. ApiError for a conversation far beyond the context,
        InputError as `render` does."""
        most_tokens = self._most_chars // LIKELY_CHARS

        def work() -> bytes:
            try:
                tokens = self._model.render(
                    messages, tools, generation_prompt=generation_prompt, most_tokens=most_tokens
                )
            except PromptTooLong:
                message = f"a conversation of more than {most_tokens} tokens: send parts"
                code = "context_length_exceeded"
                raise ApiError(400, message, param="messages", code=code) from None
            return self._list_tokens(tokens, adds_prefix)

        return await self._read_messages(work, messages, http, self._texts)

    async def tokenize(self, text: str, http: HttpRequest, *, adds_prefix: bool) -> bytes:
        """Return the answer of POST /tokenize. ApiError for a text far beyond the context."""
        if len(text) > self._most_chars:
            most = f"need at most {self._most_chars}"
            message = f"a text of {len(text)} characters: {most}; send parts"
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")

        def work() -> bytes:
            return self._list_tokens(self._model.tokenizer.encode(text), adds_prefix)

        if len(text) <= SHORT_CHARS:
            return work()
        return await self._beside(self._texts.run(work), http)

    def _list_tokens(self, tokens: np.ndarray, adds_prefix: bool) -> bytes:
        if adds_prefix:
            prefix = np.asarray(self._model.tokenizer.prefix_ids, np.int32)
            tokens = np.concatenate([prefix, tokens])
        return token_list(tokens, self._model.context_tokens)

    async def detokenize(self, tokens: list[int], http: HttpRequest) -> bytes:
        """Return the answer of POST /detokenize."""

        def work() -> bytes:
            return as_json({"prompt": self._model.tokenizer.decode(tokens)})

        if len(tokens) <= SHORT_TOKENS:
            return work()
        return await self._beside(self._texts.run(work), http)

    async def _beside(
        self, work: Awaitable[Result], http: HttpRequest, deadline_s: float | None = None
    ) -> Result:
        """Return what the threads make. ApiError after the deadline, ClientGone for a client that
        hangs up before."""
        most_s = min(PROMPT_S, PROMPT_S if deadline_s is None else deadline_s)
        try:
            async with asyncio.timeout(most_s):
                found = await unless_gone(work, http.receive, self._metrics)
        except TimeoutError:
            self._emit("serve.prompt_late", path=http.url.path, seconds=most_s)
            if most_s == deadline_s:
                raise ApiError(
                    504, f"deadline_s = {deadline_s:g} passed before the prompt was read"
                ) from None
            message = f"the prompt was not read within {most_s:g} s; send a shorter one, or later"
            raise ApiError(503, message, code="prompt_timeout") from None
        if found is None:
            self._metrics.disconnects.inc()
            raise ClientGone
        return found


@contextlib.contextmanager
def refusing_long(param: str) -> Iterator[None]:
    """Make the API's error of a prompt that cannot fit."""
    try:
        yield
    except PromptTooLong as error:
        message = f"{error.message}; {error.hint}"
        raise ApiError(400, message, param=param, code="context_length_exceeded") from None


def token_list(tokens: np.ndarray, longest: int) -> bytes:
    """Return the body that lists int32 ids [T]. Pure."""
    pieces = [
        msgspec.json.encode(tokens[start : start + TOLD_AT_ONCE].tolist())[1:-1]
        for start in range(0, len(tokens), TOLD_AT_ONCE)
    ]
    return b'{"tokens":[%b],"count":%d,"max_model_len":%d}' % (
        b",".join(pieces),
        len(tokens),
        longest,
    )


def check_tokenize(body: TokenizeBody) -> None:
    """ApiError where it is not either a text or a conversation, or has fields of the other."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: need either a prompt or messages", param="prompt")
    for name in OF_MESSAGES if body.messages is None else ():
        if getattr(body, name) != TokenizeBody.model_fields[name].default:
            raise ApiError(400, f"{name}: need messages with it; leave it out", param=name)


async def tokenize(
    body: TokenizeBody, prompts: PromptReader, form: AnswerFormat, http: HttpRequest
) -> bytes:
    """Return the answer of POST /tokenize to a body that `check_tokenize` lets pass."""
    special = body.add_special_tokens
    if body.prompt is not None:
        return await prompts.tokenize(body.prompt, http, adds_prefix=special is not False)
    return await prompts.tokenize_messages(
        read_messages(body),
        read_tools(body, form),
        http,
        generation_prompt=body.add_generation_prompt,
        adds_prefix=special is True,
    )
