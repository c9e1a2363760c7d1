"""Model: what a server, or `gyre.Engine`, serves. In: a tokenizer, a config, the limits of an
engine. Out: a ServedModel, whose prompts are rendered as the run's own were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gyre.core.errors import InputError
from gyre.engine.frontend.admission import RequestLimits, find_refusal
from gyre.runconfig.run_config import RunConfig
from gyre.server.generation import ServedModel
from gyre.server.parsers.choose import choose_format
from gyre.text.messages import Message, Tool
from gyre.text.render import render_prompt
from gyre.text.tokenizer import Tokenizer


def served_model(
    tokenizer: Tokenizer,
    config: RunConfig,
    name: str,
    limits: RequestLimits,
    *,
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
    find_version: Callable[[], int] = lambda: 0,
) -> ServedModel:
    """Return the model as the API sees it: prompts are rendered as the run's own were."""
    has_template = config.data.template == "chat"
    answer_format = choose_format(
        tokenizer.tool_template_source if has_template else "",
        takes_tools=has_template and tokenizer.takes_tools,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        special_ids=tokenizer.special_ids,
    )
    _ = tokenizer.most_token_chars  # looks through the vocabulary once, before any request
    context_tokens = min(limits.context_tokens, limits.cache_tokens + 1)

    def render(
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        generation_prompt: bool = True,
        most_tokens: int | None = None,
    ) -> np.ndarray:
        return render_messages(
            tokenizer,
            messages,
            tools,
            config,
            most_tokens=context_tokens if most_tokens is None else most_tokens,
            generation_prompt=generation_prompt,
        )

    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        context_tokens=context_tokens,
        render=render,
        runs_template=has_template and tokenizer.runs_template,
        answer_format=answer_format,
        find_refusal=lambda request: find_refusal(request, limits),
        find_version=find_version,
    )


def render_messages(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    config: RunConfig,
    *,
    most_tokens: int | None = None,
    generation_prompt: bool = True,
) -> np.ndarray:
    """Return int32 ids of a conversation up to the model's turn, whose beginning is left out
    without `generation_prompt`. InputError where the run's template holds one question and the
    conversation is longer. PromptTooLong for one that certainly has more than `most_tokens`."""
    data = config.data
    prompt: Any = messages
    if data.template != "chat":
        if [message.role for message in messages] != ["user"]:
            raise InputError(
                "the run's data.template holds one question: need one message, of role user",
                hint="send each question by itself",
            )
        prompt = messages[0].content
    has_system = any(message.role == "system" for message in messages)
    tokens, _ = render_prompt(
        tokenizer,
        prompt,
        template=data.template,
        system="" if has_system else data.system,
        options=data.template_options,
        tools=tools,
        most_tokens=most_tokens,
        generation_prompt=generation_prompt,
    )
    return tokens
