"""Schema: the bodies of the API's requests, and of its refusals. In: JSON; a status and a message.
Out: typed models; responses in the shape of OpenAI's API.

The field names are OpenAI's. `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`,
`priority` and `deadline_s` are extensions. docs/serving.md lists the refusals.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.responses import JSONResponse

MOST_MESSAGES = 4096
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class StrictBody(BaseModel):
    """A body without unknown fields; values keep their JSON types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(StrictBody):
    type: Literal["text"]
    text: str


class Message(StrictBody):
    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: str | list[TextPart]

    def as_text(self) -> dict[str, str]:
        """Return the message with its parts joined, as chat templates take it."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


class StreamOptions(StrictBody):
    include_usage: bool = False


class _Generation(StrictBody):
    """What both ways to ask have in common."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Number = 1.0
    top_p: Number = 1.0
    n: int = 1
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    logit_bias: dict[str, Number] | None = None
    user: str | None = None  # accepted for clients that send it; nothing depends on it
    top_k: int = 0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    priority: int = 0
    deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings, however they were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(_Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # OpenAI's newer name of the same
    logprobs: bool = False
    top_logprobs: int | None = None

    @property
    def most_tokens(self) -> int | None:
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer


class CompletionBody(_Generation):
    """POST /v1/completions."""

    prompt: str | list[TokenId]
    max_tokens: int | None = 16
    echo: bool = False
    logprobs: int | None = None


class TokenizeBody(StrictBody):
    """POST /tokenize."""

    model: str | None = None
    prompt: str


class DetokenizeBody(StrictBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


# Fields of OpenAI's API that are refused by name, with what to do instead.
UNSUPPORTED: dict[str, str] = {
    "response_format": "grammars are not supported yet; ask for the format in the prompt",
    "tools": "tools are not supported yet; describe them in the prompt",
    "tool_choice": "tools are not supported yet; describe them in the prompt",
    "functions": "tools are not supported yet; describe them in the prompt",
    "suffix": "text cannot be inserted before a suffix; put it into the prompt",
    "best_of": "every completion is returned; choose among n of them",
}


def find_unsupported(body: dict[str, Any]) -> tuple[str, str] | None:
    """Return the first field that the API of OpenAI has and this one does not, and what to do."""
    return next(((name, UNSUPPORTED[name]) for name in body if name in UNSUPPORTED), None)


RETRY_S = 1  # what Retry-After says
FAULT = "a fault of the server; its log has the details"

_CODES = {
    400: "invalid_value",
    404: "model_not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    429: "queue_full",
    500: "server_fault",
    503: "engine_unavailable",
    504: "deadline_exceeded",
}


class ApiError(Exception):
    """A refusal on its way to the client."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str = ""
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or _CODES[status]

    def as_dict(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        headers = {"retry-after": str(RETRY_S)} if self.status in (429, 503) else None
        return JSONResponse(self.as_dict(), status_code=self.status, headers=headers)
