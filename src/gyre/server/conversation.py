"""Conversation: the messages and tools of a chat body as records. In: a parsed body. Out: Message
and Tool records, or an ApiError that names the field and what is accepted.
"""

from __future__ import annotations

import json
from typing import Any

from gyre.server.bodies.message_schema import MessageBody, ToolBody
from gyre.server.bodies.schema import ApiError, ChatBody, TokenizeBody
from gyre.server.parsers.choose import AnswerFormat
from gyre.text.messages import NO_PARAMETERS, Message, Tool, ToolCall

MOST_DEPTH = 64  # of nested values: templates and JSON recurse into them


def read_messages(body: ChatBody | TokenizeBody) -> tuple[Message, ...]:
    """Return the messages. ApiError for one whose fields do not go together."""
    return tuple(
        _read_message(one, f"messages.{number}") for number, one in enumerate(body.messages or ())
    )


def read_tools(body: ChatBody | TokenizeBody, form: AnswerFormat) -> tuple[Tool, ...]:
    """Return the tools that the model is shown: none with tool_choice "none". ApiError where the
    model, or this server, has no use for what the body says of tools."""
    is_shown = not isinstance(body, ChatBody) or _check_choice(body)
    is_about_tools = any(one.tool_calls or one.role == "tool" for one in body.messages or ())
    if (body.tools or is_about_tools) and form.tools_refusal:
        name = "tools" if body.tools else "messages"
        raise ApiError(400, f"{name}: {form.tools_refusal}", param=name)
    tools = [_read_tool(tool, f"tools.{number}") for number, tool in enumerate(body.tools or ())]
    return tuple(tools) if is_shown else ()


def _check_choice(body: ChatBody) -> bool:
    """Return whether tools are shown. ApiError for a choice that cannot be had."""
    choice = body.tool_choice
    if choice in (None, "none"):
        return choice is None
    if not body.tools:
        raise ApiError(400, "tool_choice: need tools with it", param="tool_choice")
    if choice == "auto":
        return True
    shown = "'required'" if choice == "required" else "a named function"
    if not isinstance(choice, dict) and choice != "required":
        raise ApiError(
            400, f"tool_choice = {choice[:40]!r}: need 'auto' or 'none'", param="tool_choice"
        )
    raise ApiError(
        400,
        f"tool_choice: {shown} needs a grammar, which is not supported yet; give 'auto', and ask "
        "for the call in the prompt",
        param="tool_choice",
    )


def _read_message(body: MessageBody, where: str) -> Message:
    if body.tool_calls and body.role != "assistant":
        raise _refusal(f"{where}.tool_calls", "only a message of role assistant has them")
    if body.role == "tool" and not body.tool_call_id:
        raise _refusal(f"{where}.tool_call_id", "need the id of the call that is answered")
    if body.content is None and not body.tool_calls:
        raise _refusal(f"{where}.content", "need a text, or parts of type text")
    calls = [
        ToolCall(
            id=call.id,
            name=call.function.name,
            arguments=_read_arguments(
                call.function.arguments, f"{where}.tool_calls.{number}.function.arguments"
            ),
        )
        for number, call in enumerate(body.tool_calls or ())
    ]
    return Message(
        # as OpenAI's API reads it; few templates know the name, and others would leave the turn out
        role="system" if body.role == "developer" else body.role,
        content=body.text,
        tool_calls=tuple(calls),
        tool_call_id=body.tool_call_id or "",
        name=body.name or "",
        reasoning_content=body.reasoning_content or body.reasoning or "",
    )


def _read_tool(body: ToolBody, where: str) -> Tool:
    function = body.function
    if function.strict:
        raise _refusal(
            f"{where}.function.strict",
            "needs a grammar, which is not supported yet; leave it out, and check the arguments",
        )
    parameters = dict(NO_PARAMETERS) if function.parameters is None else function.parameters
    _check_depth(parameters, f"{where}.function.parameters")
    return Tool(name=function.name, description=function.description or "", parameters=parameters)


def _read_arguments(text: str, where: str) -> dict[str, Any]:
    """Return the arguments of a call that a client sends back."""
    try:
        found = json.loads(text or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _refusal(where, f"no JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise _refusal(where, "need a JSON object as text")
    _check_depth(found, where)
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _check_depth(value: Any, where: str) -> None:
    """ApiError for a value that is nested too deep; level by level, without recursion."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise _refusal(where, f"nested deeper than {MOST_DEPTH}")
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [one for values in inner for one in values if isinstance(one, dict | list)]


def _refusal(where: str, message: str) -> ApiError:
    return ApiError(400, f"{where}: {message}", param=where)
