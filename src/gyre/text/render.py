"""Rendering: a problem becomes prompt tokens, a response becomes the tokens to learn. In: text or messages. Out: ids.

The response format is R1's: <think>…</think><answer>…</answer> and the end token. Callers: data, cli.chat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gyre.core.errors import ConfigError
from gyre.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, str]]


def render_prompt(
    tokenizer: Tokenizer,
    prompt: str | Messages,
    *,
    template: str = "chat",
    system: str = "",
    options: Mapping[str, Any] | None = None,
) -> tuple[np.ndarray, str]:
    """Return (int32 ids, text) up to where the model speaks.

    `template` is "chat" (the tokenizer's own; ours writes the prompt and a newline) or a text that holds {prompt} and
    may hold {system}. A conversation needs "chat". `system` comes before the prompt's own messages.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if template == "chat":
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        text = tokenizer.render_chat(messages, options=options)
        return tokenizer.encode(text), text
    check_template(template)
    if not isinstance(prompt, str):
        raise ConfigError(
            f"data.template = {template!r} cannot render a conversation of {len(messages)} messages",
            hint='use data.template = "chat" for prompts that are lists of messages',
        )
    text = template.replace("{system}", system).replace("{prompt}", prompt)
    prefix = np.asarray(tokenizer.prefix_ids, dtype=np.int32)
    return np.concatenate([prefix, tokenizer.encode(text)]), text


def check_template(template: str) -> None:
    if template != "chat" and "{prompt}" not in template:
        raise ConfigError(
            f'data.template = {template!r}: need "chat" or a text that holds {{prompt}}',
            hint='for example "{system}\\n{prompt}\\n"',
        )


def render_example(tokenizer: Tokenizer, prompt_tokens: np.ndarray, response: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens int32 [T], loss_mask bool [T]): prompt, response, end token; the mask is True after the prompt.

    The response is encoded apart from the prompt, as sampling produces it: no token spans the border.
    """
    response_tokens = tokenizer.encode(response)
    if response_tokens.size == 0 or int(response_tokens[-1]) not in tokenizer.eos_ids:
        response_tokens = np.append(response_tokens, np.int32(tokenizer.end_id))
    tokens = np.concatenate([prompt_tokens, response_tokens]).astype(np.int32)
    loss_mask = np.arange(tokens.size) >= prompt_tokens.size
    return tokens, loss_mask


def r1_response(think: str, answer: str) -> str:
    """The text that the format checker accepts."""
    return f"<think>{think}</think><answer>{answer}</answer>"
