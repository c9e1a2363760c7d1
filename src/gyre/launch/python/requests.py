"""Python requests: what a call of `gyre.Engine` asks for. In: prompts or messages, keywords. Out:
bodies of the API, and requests of the engine; InputError for what is not accepted.

Names, ranges and defaults are those of the API's bodies (`server/bodies/schema.py`), which check
them. The typed dicts say which of the names there are here, for editors and type checkers.
"""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict, TypeVar

import numpy as np
from pydantic import ValidationError

from gyre.core.errors import DeadlineError, EngineRefused, GyreError, InputError
from gyre.core.records import Request
from gyre.launch.python.results import CompletionOutput, as_completions
from gyre.server.bodies.schema import ApiError, ChatBody, CompletionBody
from gyre.server.conversation import read_messages
from gyre.server.generation import ServedModel, TextDelta, make_request, read_prompt

TextPrompt: TypeAlias = str | Sequence[int] | np.ndarray
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Body = TypeVar("Body", ChatBody, CompletionBody)


class SamplingArgs(TypedDict, total=False):
    """What `generate`, `chat` and `stream` have in common."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    n: int
    stop: str | Sequence[str] | None
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | None
    min_tokens: int
    ignore_eos: bool
    priority: int
    deadline_s: float | None


class GenerateArgs(SamplingArgs, total=False):
    """What `generate` takes beside the prompts."""

    logprobs: int | None  # alternatives returned at each token; None: no log-probs


class ChatArgs(SamplingArgs, total=False):
    """What `chat` takes beside the messages."""

    max_completion_tokens: int | None
    logprobs: bool
    top_logprobs: int | None


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as the API's body of it."""

    body: ChatBody | CompletionBody

    @property
    def alternatives(self) -> int:
        """Return how many are returned at each token."""
        body = self.body
        return (body.top_logprobs if isinstance(body, ChatBody) else body.logprobs) or 0

    @property
    def tells_logprobs(self) -> bool:
        body = self.body
        return body.logprobs if isinstance(body, ChatBody) else body.logprobs is not None

    def request(self, model: ServedModel) -> Request:
        """Return the engine's request. ApiError where the engine would refuse it."""
        body = self.body
        if isinstance(body, ChatBody):
            tokens = model.render(read_messages(body), ())
        else:
            (prompt,) = body.prompts  # each of a list is asked for by itself
            tokens = read_prompt(prompt, model)
        return make_request(
            body,
            tokens,
            model,
            request_id=f"local-{uuid.uuid4().hex}",
            stream=body.stream,
            n=body.n,
            most_tokens=body.most_tokens if isinstance(body, ChatBody) else body.max_tokens,
            top_logprobs=self.alternatives,
        )

    def completions(self, parts: Sequence[TextDelta]) -> tuple[CompletionOutput, ...]:
        """Return the answers that the pieces make."""
        return as_completions(
            parts, logprobs=self.tells_logprobs, alternatives=self.alternatives > 0
        )


def is_one_prompt(prompts: Any) -> bool:
    """Return whether it is a text or a row of token ids, rather than a list of such."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    return _is_list(prompts) and len(prompts) > 0 and isinstance(prompts[0], int | np.integer)


def is_conversation(messages: Any) -> bool:
    """Return whether it is one conversation, rather than a list of such."""
    return _is_list(messages) and len(messages) > 0 and isinstance(messages[0], Mapping)


def texts_asked(prompts: Any, asked: Mapping[str, Any]) -> Asked | list[Asked]:
    """Return what a prompt, or each of a list, asks for."""
    if is_one_prompt(prompts):
        return text_asked(prompts, asked)
    return [text_asked(prompt, asked) for prompt in _listed(prompts, "prompts", "a text")]


def chats_asked(messages: Any, asked: Mapping[str, Any]) -> Asked | list[Asked]:
    """Return what a conversation, or each of a list, asks for."""
    if is_conversation(messages):
        return chat_asked(messages, asked)
    return [chat_asked(one, asked) for one in _listed(messages, "messages", "a conversation")]


def stream_asked(prompt: Any, asked: Mapping[str, Any]) -> Asked:
    """Return what a stream asks for. InputError for several completions."""
    if asked.get("n", 1) != 1:
        raise InputError(
            f"n = {asked['n']!r}: a stream has one completion",
            hint="take generate or chat for several, or open several streams",
        )
    if is_conversation(prompt):
        return chat_asked(prompt, asked, stream=True)
    return text_asked(prompt, asked, stream=True)


def text_asked(prompt: TextPrompt, asked: Mapping[str, Any], *, stream: bool = False) -> Asked:
    """Return what asks to continue a prompt. InputError for what the API refuses."""
    refuse_unknown(asked, GenerateArgs)
    given = {name: _plain(value) for name, value in asked.items()}
    return Asked(_check(CompletionBody, {**given, "prompt": _plain(prompt), "stream": stream}))


def chat_asked(messages: Messages, asked: Mapping[str, Any], *, stream: bool = False) -> Asked:
    """Return what asks for the next turn. InputError for what the API refuses."""
    refuse_unknown(asked, ChatArgs)
    given = {name: _plain(value) for name, value in asked.items()}
    if given.get("top_logprobs") and not given.get("logprobs"):
        raise InputError("top_logprobs: need logprobs = True with it")
    return Asked(_check(ChatBody, {**given, "messages": _plain(messages), "stream": stream}))


def refuse_unknown(asked: Mapping[str, Any], kind: type) -> None:
    """InputError for a name that is not in `kind`, with the nearest that is."""
    accepted = sorted(kind.__annotations__)  # a typed dict's hold what it inherits
    for name in asked:
        if name in accepted:
            continue
        near = difflib.get_close_matches(name, accepted, n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"unknown argument {name!r}{meant} (accepted: {', '.join(accepted)})",
            hint="docs/python.md says what each means",
        )


def as_gyre_error(error: ApiError) -> GyreError:
    """Return the refusal of the API as an error of Gyre."""
    if error.status == 504:
        return DeadlineError(error.message, hint="give a larger deadline_s")
    if error.status < 500 and error.status != 429:
        return InputError(error.message)
    return EngineRefused(error.message)


def _check(kind: type[Body], values: Mapping[str, Any]) -> Body:
    try:
        return kind.model_validate({**values, "model": "local"})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{place} = {repr(first['input'])[:80]}: {first['msg']}") from None


def _is_list(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _listed(value: Any, name: str, one: str) -> Any:
    """Return a list as it is. InputError for anything else."""
    if not _is_list(value):
        raise InputError(f"{name} = {repr(value)[:80]}: need {one}, or a list of them")
    return value


def _plain(value: Any) -> Any:
    """Return the value as JSON would bring it: the bodies accept nothing else."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(inside) for key, inside in value.items()}
    if _is_list(value):
        return [_plain(inside) for inside in value]
    return value
