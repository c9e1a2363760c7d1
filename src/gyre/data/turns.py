"""Turns: the boundary between prompt and response of a row (pure). In: a row and the names of its
fields. Out: the prompt without the response, its turns as Message records, or an InputError that
explains the ambiguity.

    prompt field                     prompt
    a text                           the text; refused when the same field is read as answer or
                                     response.
    ends with the user's turn        all of it.
    ends with the assistant's turn   what is before that turn; refused when another field holds a
                                     response too.
    chosen or rejected, or missing   of whole conversations: the turns that both have before the
                                     last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gyre.core.errors import InputError
from gyre.data.config import DataConfig
from gyre.data.problems import Prompting
from gyre.text.messages import Message

MODEL = "assistant"
ASKING = (
    "user",
    "system",
    "developer",
    "tool",
    "function",
    "ipython",
    "environment",
    "observation",
)
CALLS = ("tool_calls", "function_call")  # of a message; only its role and content are rendered
REASONING = ("reasoning_content", "reasoning", "thinking")
SHOWN_CHARS = 60


def take_prompt(row: Mapping[str, Any], where: str, config: DataConfig) -> Prompting:
    """Return the row's prompt. Raises InputError if there is none, or if it may contain the
    response."""
    field = config.prompt_field
    pair = (config.chosen_field, config.rejected_field)
    if all(row.get(name) is not None for name in pair) and (
        field in pair or row.get(field) is None
    ):
        return _shared_turns(row, where, pair, field)
    prompt = read_prompt(need(row, field, where, "prompt_field"), where, field)
    if isinstance(prompt, str):
        if field in (config.response_field, config.answer_field):
            key = "response_field" if field == config.response_field else "answer_field"
            raise InputError(
                f"{where}: data.prompt_field and data.{key} are both '{field}', which holds a "
                "text: the prompt would "
                "show what is to be learned",
                hint="name two fields, or give a conversation: its last assistant turn is the "
                "response",
            )
        return prompt
    if prompt[-1].role != MODEL:
        return prompt
    others = [
        name
        for name in (config.response_field, *pair)
        if name != field and row.get(name) is not None
    ]
    if others:
        raise InputError(
            f"{where}: field '{field}' ends with the assistant's turn, and field '{others[0]}' "
            "holds a response too: "
            "where the prompt ends is not sure",
            hint=f"end '{field}' with the user's turn, or set data.response_field = \"{field}\" "
            "to learn its last turn",
        )
    return _asking(prompt[:-1], where, field)


def is_split(row: Mapping[str, Any], prompt: Prompting, config: DataConfig) -> bool:
    """Return whether the prompt is shorter than the conversation in its field."""
    value = row.get(config.prompt_field)
    return isinstance(value, list) and not isinstance(prompt, str) and len(value) > len(prompt)


def read_prompt(value: Any, where: str, field: str) -> Prompting:
    """Return a text, or a conversation that ends with the user's or the assistant's turn."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(is_message(item) for item in value):
        _refuse_left_out(value, CALLS, where, field)
        turns = tuple(Message(role=item["role"], content=item["content"]) for item in value)
        return turns if turns[-1].role == MODEL else _asking(turns, where, field)
    raise InputError(
        f"{where}: field '{field}' holds {short(value)}; need a text or a list of messages",
        hint='a message is {"role": "user", "content": "…"}; empty prompts are refused',
    )


def read_response(
    row: Mapping[str, Any], field: str, where: str, key: str, prompt: Prompting
) -> str:
    """Return a response: a text, or a conversation whose last message is the assistant's. The
    messages before it must be empty or equal the prompt."""
    value = need(row, field, where, key)
    if isinstance(value, str):
        return value
    is_conversation = isinstance(value, list) and value and all(is_message(item) for item in value)
    if not is_conversation or value[-1]["role"] != MODEL:
        raise InputError(
            f"{where}: field '{field}' holds {short(value)}; need a text or messages that end "
            "with the assistant's",
            hint=f"set data.{key} to the field with the response, or repair the row",
        )
    _refuse_left_out(value[-1:], CALLS + REASONING, where, field)
    before = [(item["role"], item["content"].strip()) for item in value[:-1]]
    asked = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
    if before and before != [(turn.role, turn.content.strip()) for turn in asked]:
        raise InputError(
            f"{where}: the turns before the last one in field '{field}' are not the prompt",
            hint=f'set data.prompt_field = "{field}" to take the prompt from there, or leave only '
            "the last turn in it",
        )
    return value[-1]["content"]


def _refuse_left_out(
    messages: Sequence[Mapping[str, Any]], names: Sequence[str], where: str, field: str
) -> None:
    """Raise InputError for model output outside of a message's content."""
    left_out = next((name for message in messages for name in names if message.get(name)), None)
    if left_out:
        raise InputError(
            f"{where}: a message of field '{field}' has '{left_out}', and only its content would "
            "be rendered",
            hint="write it into the content as the model's chat template does, and take "
            f"'{left_out}' out",
        )


def need(row: Mapping[str, Any], field: str, where: str, key: str, also: str = "") -> Any:
    """Return the value of a required field that must not be null."""
    if row.get(field) is None:
        state = "is null" if field in row else "is missing"
        raise InputError(
            f"{where}: field '{field}' {state}; the row has {', '.join(row) or 'no fields'}",
            hint=f"set data.{key} to the field that holds it{also}, or repair the row",
        )
    return row[field]


def is_message(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and isinstance(item.get("role"), str)
        and isinstance(item.get("content"), str)
    )


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


def _shared_turns(
    row: Mapping[str, Any], where: str, pair: tuple[str, str], field: str
) -> Prompting:
    """Return the turns before the last of two whole conversations, which must be equal."""
    chosen, rejected = (
        read_prompt(need(row, name, where, "prompt_field"), where, name) for name in pair
    )
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise InputError(
            f"{where}: there is no prompt beside '{pair[0]}' and '{pair[1]}', which hold texts: "
            "where the prompt in "
            "them ends is not sure",
            hint="set data.prompt_field to a field with the prompt, or give whole conversations "
            "in both fields",
        )
    if chosen[-1].role != MODEL or rejected[-1].role != MODEL or chosen[:-1] != rejected[:-1]:
        raise InputError(
            f"{where}: '{pair[0]}' and '{pair[1]}' are no two answers to one conversation: need "
            "the same turns, and a "
            "last one of the assistant",
            hint=f"set data.prompt_field to a field with the prompt (it is '{field}'), or repair "
            "the row",
        )
    return _asking(chosen[:-1], where, pair[0])


def _asking(turns: tuple[Message, ...], where: str, field: str) -> tuple[Message, ...]:
    """Return turns that the model can respond to."""
    last = turns[-1].role if turns else None
    if last in ASKING:
        return turns
    got = f"a turn of '{last}'" if turns else "nothing"
    raise InputError(
        f"{where}: before the response, field '{field}' ends with {got}; need the turn of one of "
        f"{', '.join(ASKING)}",
        hint='a message is {"role": "user", "content": "…"}, and what the model said has the role '
        '"assistant"',
    )
