"""Schema: the bodies of the API's requests, and of its refusals. In: JSON; a status and a message.
Out: typed models; responses in the shape of OpenAI's API.

The field names are OpenAI's. `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`,
`priority` and `deadline_s` are extensions. server/bodies/refused_fields.py lists what is refused by
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, StringConstraints, Tag
from starlette.responses import JSONResponse

from gyre.core.records import Sampling
from gyre.server.bodies.message_schema import MessageBody, ToolBody
from gyre.server.bodies.strict_body import StrictBody

MOST_MESSAGES = 4096
MOST_PROMPTS = 256  # of one request
MOST_TOOLS = 1024
MOST_SESSION_CHARS = 256
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Messages = Annotated[list[MessageBody], Field(min_length=1, max_length=MOST_MESSAGES)]
Tools = Annotated[list[ToolBody], Field(min_length=1, max_length=MOST_TOOLS)]


class StreamOptions(StrictBody):
    """Settings of a stream."""

    include_usage: bool = False
    """One more event with the usage, at the end; in the others it is null."""
    include_obfuscation: bool = False
    """Accepted; nothing depends on it."""


class TextFormat(StrictBody):
    """Text without a form: what every answer is."""

    type: Literal["text"]


class SamplingFields(StrictBody):
    """How tokens are chosen, and when a request is over."""

    temperature: Number = 1.0
    """0 chooses the best token."""
    top_p: Number = 1.0
    """Keep the smallest set with this mass."""
    stop: str | list[str] | None = None
    """The text ends before any of these."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Equal seeds draw equally."""
    presence_penalty: Number = 0.0
    """Off the logit of each token chosen before."""
    frequency_penalty: Number = 0.0
    """Off it for each time the token was chosen."""
    logit_bias: dict[str, Number] | None = None
    """Token id to what its logit gains."""
    top_k: int = 0
    """Keep so many best tokens; 0 and -1 keep all."""
    min_p: Number = 0.0
    """Keep tokens with this share of the best probability."""
    repetition_penalty: Number = 1.0
    """Divides the logits of tokens seen before."""
    min_tokens: int = 0
    """No end before so many tokens."""
    ignore_eos: bool = False
    """Go on after the end token."""
    priority: int = 0
    """Larger runs earlier."""
    deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds until the request is given up."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings, however they were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def after(self, seconds: float) -> Self:
        """Return the fields with what is left of the deadline after so many seconds, at least 0."""
        if self.deadline_s is None:
            return self
        return self.model_copy(update={"deadline_s": max(0.0, self.deadline_s - seconds)})


class _Generation(SamplingFields):
    """What both ways of OpenAI's API have in common."""

    model: str
    """The served model's name."""
    stream: bool = False
    """Answer with server-sent events."""
    stream_options: StreamOptions | None = None
    """What a stream tells besides."""
    n: int = 1
    """Completions of each prompt."""
    user: str | None = None
    """Accepted; nothing depends on it."""
    prompt_cache_key: Annotated[str, StringConstraints(max_length=MOST_SESSION_CHARS)] | None = None
    """Requests with one key prefer one engine; before the header x-session-id."""

    response_format: TextFormat | None = None
    """Text alone: grammars are refused."""

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(_Generation):
    """POST /v1/chat/completions."""

    messages: Messages
    """The conversation so far."""
    tools: Tools | None = None
    """Functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """auto, or none: the model is shown no tools."""
    parallel_tool_calls: bool | None = None
    """With false, at most one call is told."""
    max_tokens: int | None = None
    """Tokens chosen at most; null fills the context."""
    max_completion_tokens: int | None = None
    """OpenAI's newer name of max_tokens."""
    logprobs: bool = False
    """Tell each token's log-prob."""
    top_logprobs: int | None = None
    """Tell so many alternatives at each token, at most 20; more than 0 need logprobs."""
    modalities: list[Literal["text"]] | None = None
    """Text alone."""
    service_tier: Literal["auto", "default"] | None = None
    """Accepted; nothing depends on it."""
    metadata: dict[str, str] | None = None
    """Accepted; nothing depends on it."""
    store: bool | None = None
    """Accepted; nothing is stored."""
    safety_identifier: str | None = None
    """Accepted; nothing depends on it."""

    @property
    def most_tokens(self) -> int | None:
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer


def _prompt_kind(value: Any) -> str | None:
    """Return how a prompt is given: by its type, and that of its first item. Pure."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else 0
    return {str: "texts", list: "token lists"}.get(type(first), "tokens")


Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TokenId], Tag("tokens")],
    Discriminator(
        lambda value: found if (found := _prompt_kind(value)) in ("text", "tokens") else None,
        custom_error_type="prompt",
        custom_error_message="need a text or a list of token ids",
    ),
]
Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[TokenId], Tag("tokens")]
    | Annotated[list[str], Field(max_length=MOST_PROMPTS), Tag("texts")]
    | Annotated[list[list[TokenId]], Field(max_length=MOST_PROMPTS), Tag("token lists")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt",
        custom_error_message="need a text, a list of token ids, or a list of either",
    ),
]


class CompletionBody(_Generation):
    """POST /v1/completions."""

    prompt: Prompts
    """One or several, each as text or as token ids."""
    max_tokens: int | None = 16
    """Tokens chosen at most; 0 goes with echo."""
    echo: bool = False
    """Put the prompt before its completions, with its log-probs where they are asked for."""
    best_of: int | None = None
    """n, or 1: every completion is returned."""
    logprobs: int | None = None
    """Tell each token's log-prob, and so many alternatives, at most 20."""

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, however they were given."""
        is_list = _prompt_kind(self.prompt) in ("texts", "token lists")
        return list(self.prompt) if is_list else [self.prompt]  # type: ignore[list-item]


class GenerateParams(SamplingFields):
    """`params` of POST /generate."""

    max_tokens: int | None = Sampling().max_tokens
    """Tokens chosen at most; null fills the context."""


class GenerateBody(StrictBody):
    """POST /generate."""

    prompt: Prompt
    """As text or as token ids."""
    params: GenerateParams = Field(default_factory=GenerateParams)
    """How tokens are chosen."""
    stream: bool = False
    """Answer with server-sent events."""


class TokenizeBody(StrictBody):
    """POST /tokenize."""

    model: str | None = None
    """Accepted; nothing depends on it."""
    prompt: str | None = None
    """A text; either this or messages."""
    messages: Messages | None = None
    """A conversation."""
    tools: Tools | None = None
    """Functions that are shown with the messages."""
    add_generation_prompt: bool = True
    """End the messages with the beginning of the model's turn."""
    add_special_tokens: bool | None = None
    """Begin with BOS, if there is one; null: a prompt does, messages have their template's."""


class DetokenizeBody(StrictBody):
    """POST /detokenize."""

    model: str | None = None
    """Accepted; nothing depends on it."""
    tokens: list[TokenId]
    """Their ids."""


RETRY_S = 1  # what Retry-After says where nobody knows better
FAULT = "a fault of the server; its log has the details"

_CODES = {
    400: "invalid_value",
    401: "invalid_api_key",
    403: "admin_required",
    404: "model_not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    429: "queue_full",
    431: "headers_too_large",
    500: "server_fault",
    503: "engine_unavailable",
    504: "deadline_exceeded",
}


class ApiError(Exception):
    """A refusal on its way to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or _CODES[status]
        self.headers = {"retry-after": str(RETRY_S)} if status in (429, 503) else {}
        self.headers |= headers or {}

    def as_dict(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.as_dict(), status_code=self.status, headers=self.headers)
