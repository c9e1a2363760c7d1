"""Rendering: a problem to prompt tokens, a response to target tokens. In: text or messages. Out:
ids.

The response format is R1's: <think>…</think><answer>…</answer> and the end token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gyre.core.errors import ConfigError, InputError
from gyre.text.messages import AnyMessage, Tool, as_turns
from gyre.text.prompt_bounds import encode_within
from gyre.text.tokenizer import Tokenizer

Messages = Sequence[AnyMessage]


def render_prompt(
    tokenizer: Tokenizer,
    prompt: str | Messages,
    *,
    template: str = "chat",
    system: str = "",
    options: Mapping[str, Any] | None = None,
    tools: Sequence[Tool] = (),
    most_tokens: int | None = None,
    generation_prompt: bool = True,
) -> tuple[np.ndarray, str]:
    """Return (int32 ids, text) up to the model's turn, whose beginning is left out without
    `generation_prompt`. With `most_tokens`, PromptTooLong where there are certainly more.

    `template` is "chat", the tokenizer's own; ours writes the prompt and a newline. Otherwise it is
    a text with {prompt}, and {system} if `system` is given. A conversation needs "chat". `system`
    precedes the prompt's messages. `tools` need "chat". Raises ConfigError for a template without a
    placeholder for the prompt or the system message. Raises InputError for `system` next to a
    system message of the prompt. Raises it, too, for what the chat template does not show: a later
    system message, or tools.
    """
    check_template(template, system)
    if template == "chat" and (
        system or any(message["role"] == "system" for message in _messages(prompt))
    ):
        check_system(tokenizer, options)
    (text,) = render_texts(
        tokenizer,
        [prompt],
        template=template,
        system=system,
        options=options,
        tools=tools,
        generation_prompt=generation_prompt,
    )
    tokens = encode_rendered(tokenizer, text, template=template, most_tokens=most_tokens)
    return tokens, text


def render_texts(
    tokenizer: Tokenizer,
    prompts: Sequence[str | Messages],
    *,
    template: str,
    system: str,
    options: Mapping[str, Any] | None,
    tools: Sequence[Tool] = (),
    generation_prompt: bool = True,
) -> list[str]:
    """Return the text of each prompt, as `render_prompt` does. Raises InputError for a system
    message that would not appear as given."""
    if template == "chat":
        conversations = [_conversation(prompt, system) for prompt in prompts]
        _check_later_systems(tokenizer, conversations, options)
        return tokenizer.render_chats(
            conversations, options=options, tools=tools, generation_prompt=generation_prompt
        )
    if tools:
        raise InputError(
            f"data.template = {template!r} shows no tools",
            hint='leave the tools out, or use data.template = "chat"',
        )
    if not generation_prompt:
        raise InputError(
            f"data.template = {template!r} does not tell where the model's turn begins",
            hint='leave add_generation_prompt out, or use data.template = "chat"',
        )
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise ConfigError(
                f"data.template = {template!r} cannot render a conversation of {len(prompt)} "
                "messages",
                hint='use data.template = "chat" for prompts that are lists of messages',
            )
    parts = [part.replace("{system}", system) for part in template.split("{prompt}")]
    return [prompt.join(parts) for prompt in prompts if isinstance(prompt, str)]


def encode_rendered(
    tokenizer: Tokenizer, text: str, *, template: str, most_tokens: int | None = None
) -> np.ndarray:
    """Return int32 ids of a rendered prompt. A chat template writes BOS itself; otherwise it is
    prepended, unless the template spells it."""
    if most_tokens is None:
        tokens = tokenizer.encode(text)
    else:
        tokens = encode_within(tokenizer, text, most_tokens)
    prefix = np.asarray(tokenizer.prefix_ids, dtype=np.int32)
    if template == "chat" or not prefix.size or np.array_equal(tokens[: prefix.size], prefix):
        return tokens
    spelled = set(tokenizer.encode(template.partition("{prompt}")[0]).tolist())
    return tokens if spelled >= set(tokenizer.prefix_ids) else np.concatenate([prefix, tokens])


def check_template(template: str, system: str = "") -> None:
    if template == "chat":
        return
    if "{prompt}" not in template:
        raise ConfigError(
            f'data.template = {template!r}: need "chat" or a text that holds {{prompt}}',
            hint='for example "{system}\\n{prompt}\\n"',
        )
    if system and "{system}" not in template:
        raise ConfigError(
            f"data.system is set, and data.template = {template!r} has no {{system}} where it "
            "could stand",
            hint="put {system} into data.template, or the system message's text itself, and leave "
            "data.system out",
        )


def check_system(tokenizer: Tokenizer, options: Mapping[str, Any] | None) -> None:
    """Raise ConfigError when the chat template omits a system message; InputError when it rejects
    one."""
    if not tokenizer.takes_system(options):
        raise ConfigError(
            "data.system, or a prompt's own system message, is set, and the model's chat template "
            "leaves it out",
            hint="leave data.system empty and put its text into the prompts, or set data.template "
            "to a text with "
            "{system} and {prompt}",
        )


def _conversation(prompt: str | Messages, system: str) -> list[dict[str, Any]]:
    messages = _messages(prompt)
    if not system:
        return messages
    if any(message["role"] == "system" for message in messages):
        raise InputError(
            "data.system is set, and the prompt has a system message of its own; a conversation "
            "takes one of them",
            hint="leave data.system empty, or take the system messages out of the rows",
        )
    return [{"role": "system", "content": system}, *messages]


def _check_later_systems(
    tokenizer: Tokenizer,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    options: Mapping[str, Any] | None,
) -> None:
    """Check later system messages: many chat templates show only one in the first position."""
    every = {tuple(message["role"] for message in messages) for messages in conversations}
    for roles in sorted(roles for roles in every if "system" in roles[1:]):
        if not tokenizer.takes_system(options, roles=roles):
            raise InputError(
                "the prompt has a system message that does not stand first, and the model's chat "
                "template leaves it "
                f"out; the roles are {', '.join(roles[:20])}",
                hint="put its text into the first system message or into a user's message",
            )


def _messages(prompt: str | Messages) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else as_turns(prompt)


def render_example(
    tokenizer: Tokenizer, prompt_tokens: np.ndarray, response: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens int32 [T], loss_mask bool [T]): prompt, response, end token; the mask is True
    after the prompt.

    The response is encoded separately from the prompt, as sampling produces it: no token spans the
    boundary.
    """
    response_tokens = tokenizer.encode(response)
    if response_tokens.size == 0 or int(response_tokens[-1]) not in tokenizer.eos_ids:
        response_tokens = np.append(response_tokens, np.int32(tokenizer.end_id))
    tokens = np.concatenate([prompt_tokens, response_tokens]).astype(np.int32)
    loss_mask = np.arange(tokens.size) >= prompt_tokens.size
    return tokens, loss_mask


def r1_response(think: str, answer: str) -> str:
    """Return the text that the format checker accepts."""
    return f"<think>{think}</think><answer>{answer}</answer>"
