"""Messages: the turns of a conversation and the tools that a model may call. In: fields, as a
client or a program gives them. Out: frozen records, and the nested values that chat templates take,
in the shape that transformers documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model made. `arguments` are parsed: templates write them themselves."""

    id: str
    name: str
    arguments: Mapping[str, Any]

    def as_template(self) -> dict[str, Any]:
        """Return the call as templates take it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: dict(NO_PARAMETERS))

    def as_template(self) -> dict[str, Any]:
        """Return the tool's JSON schema as templates take it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.parameters}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. A field that is empty was not given."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant
    tool_call_id: str = ""  # of a tool's answer: the call that it answers
    name: str = ""
    reasoning_content: str = ""  # of an assistant: what it thought before

    def as_template(self) -> dict[str, Any]:
        """Return the turn as templates take it. `content` is always there, since many of them
        join it to other text without asking."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if value := getattr(self, name):
                turn[name] = value
        if self.tool_calls:
            turn["tool_calls"] = [call.as_template() for call in self.tool_calls]
        return turn


AnyMessage = Message | Mapping[str, Any]  # a record, or a turn as a template takes it


def as_turns(messages: Iterable[AnyMessage]) -> list[dict[str, Any]]:
    """Return the turns as templates take them."""
    return [one.as_template() if isinstance(one, Message) else dict(one) for one in messages]


def as_schemas(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Return the tools as templates take them; None without any."""
    return [tool.as_template() for tool in tools] or None


def count_chars(value: Any) -> int:
    """Return the characters of all texts in a nested value, its keys included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(count_chars(key) + count_chars(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return sum(map(count_chars, value))
    return len(str(value))
