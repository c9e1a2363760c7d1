"""Message schema: the conversation in a chat body. In: JSON. Out: typed models of its messages and
tools. server/conversation.py checks which fields go together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError

from gyre.server.bodies.strict_body import StrictBody

Role = Literal["system", "developer", "user", "assistant", "tool"]
MOST_SHOWN = 40  # characters of a client's value in a refusal


def _check_role(value: Any) -> Any:
    if not isinstance(value, str) or value in get_args(Role):
        return value
    accepted = ", ".join(get_args(Role))
    instead = "; answer a call with role tool" if value == "function" else ""
    shown = repr(value[:MOST_SHOWN])
    text = "role {shown} is not accepted: need one of {accepted}{instead}"
    raise PydanticCustomError(
        "role", text, {"shown": shown, "accepted": accepted, "instead": instead}
    )


def _check_part(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in OTHER_PARTS:
        text = "a part of type {kind} is not accepted: the model reads text alone; leave it out"
        raise PydanticCustomError("part", text, {"kind": kind})
    return value


OTHER_PARTS = ("image_url", "input_audio", "audio_url", "video_url", "file", "refusal")


class TextPart(StrictBody):
    """A part of a message."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[Annotated[TextPart, BeforeValidator(_check_part)]], Tag("parts")],
    Discriminator(
        lambda value: {str: "text", list: "parts"}.get(type(value)),
        custom_error_type="content",
        custom_error_message="need a text, or a list of parts of type text",
    ),
]


class CalledFunction(StrictBody):
    """What a call asks for."""

    name: Annotated[str, StringConstraints(min_length=1)]
    arguments: str  # a JSON object


class ToolCallBody(StrictBody):
    """A call that an assistant's message made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class MessageBody(StrictBody):
    """One message."""

    role: Annotated[Role, BeforeValidator(_check_role)]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of reasoning_content."""
    # what clients send back with an answer, and this server never fills
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        """Return the content with its parts joined."""
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class FunctionBody(StrictBody):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(StrictBody):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionBody
