"""Answer schema: the shapes of what the API answers. In: nothing. Out: models, from which the
OpenAPI document is made; tests check real answers against them.

Answers are formed as plain JSON (`answers.py`, `generate.py`, `app.py`), since an event is made for
each token.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class ErrorDetail(Shape):
    message: str
    """What was got, what is accepted, what to do."""
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    """The field that is to blame."""
    code: str
    """A name of the failure that does not change."""


class ErrorBody(Shape):
    """A refusal or a failure."""

    error: ErrorDetail


class PromptTokensDetails(Shape):
    """What was not computed of the prompts."""

    cached_tokens: int
    """Found in the prefix cache."""


class CompletionUsage(Shape):
    """Tokens read and chosen."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(Shape):
    """A token and its log-prob under the plain softmax."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(TokenLogprob):
    """A token of an answer."""

    top_logprobs: list[TokenLogprob]
    """The best tokens at its place."""


class ChatLogprobs(Shape):
    """Log-probs of a chat answer."""

    content: list[ChosenToken]
    versions: list[int]
    """Of the weights that chose each token."""


class FunctionOfCall(Shape):
    """What a call asks for."""

    name: str
    arguments: str


class MadeCall(Shape):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: FunctionOfCall


class AssistantMessage(Shape):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[MadeCall] | None = None


class ChatChoice(Shape):
    """One completion of a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish


class ChatCompletion(Shape):
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    system_fingerprint: str
    """The versions of the weights that chose the tokens."""


class FunctionDelta(Shape):
    """What is new of a call's function."""

    name: str | None = None
    arguments: str


class MadeCallDelta(Shape):
    """What is new of a call; id, type and name come first, and once."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Shape):
    """What is new of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MadeCallDelta] | None = None


class ChatChunkChoice(Shape):
    """What is new of one completion."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


class ChatChunk(Shape):
    """An event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[ChatChunkChoice]
    """Empty in the event with the usage."""
    usage: CompletionUsage | None = None
    system_fingerprint: str | None = None
    """The versions of the weights that chose the tokens."""


class TextLogprobs(Shape):
    """Log-probs of a text completion, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    """The best tokens' texts and the token's own, with their log-probs."""
    text_offset: list[int]
    """Where the token's text begins, in characters."""
    versions: list[int | None]
    """Of the weights that chose each token; null for those of the prompt."""


class TextChoice(Shape):
    """One completion of a text."""

    index: int
    """Completion j of prompt i has i × n + j."""
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish


class TextCompletion(Shape):
    """The answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage
    system_fingerprint: str
    """The versions of the weights that chose the tokens."""


class TextChunkChoice(Shape):
    """What is new of one completion."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class TextChunk(Shape):
    """An event of a streamed text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[TextChunkChoice]
    """Empty in the event with the usage."""
    usage: CompletionUsage | None = None
    system_fingerprint: str | None = None
    """The versions of the weights that chose the tokens."""


class GenerateResult(Shape):
    """The answer of POST /generate; an event of a stream has what is new, and the usage so far."""

    id: str
    text: str
    tokens: list[int]
    logprobs: list[float]
    """Of the plain softmax, one for each token."""
    versions: list[int]
    """Of the weights that chose each token."""
    finish_reason: Finish | None
    """null in events before the last."""
    usage: CompletionUsage
    weights_version: int | None
    """The newest version that chose one of the tokens."""


class ModelEntry(Shape):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    """Unix time in seconds, of the server's start."""
    owned_by: str
    max_model_len: int
    """Tokens of prompt and completion together at most."""
    version: int
    """Of the weights that answer now."""


class ModelList(Shape):
    """The answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelEntry]


class TokenList(Shape):
    """The answer of POST /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int
    """Tokens of prompt and completion together at most."""


class PromptText(Shape):
    """The answer of POST /detokenize."""

    prompt: str


class Liveness(Shape):
    """The process answers."""

    status: Literal["ok"]


class Readiness(Shape):
    """Whether an engine is well."""

    ready: bool
    reason: str
    """Of engines that are not well."""


class QueueLoad(Shape):
    """Completions that run and wait."""

    running: int
    waiting: int
