"""Tokenize: a text or a conversation as token ids, with the fields that vLLM's route has. In: a
parsed body. Out: the answer's body, or an ApiError that names the field. Caller: server/app.py.
"""

from __future__ import annotations

from starlette.requests import Request as HttpRequest

from gyre.server.bodies.schema import ApiError, TokenizeBody
from gyre.server.conversation import read_messages, read_tools
from gyre.server.parsers.choose import AnswerFormat
from gyre.server.prompt_reader import PromptReader

OF_MESSAGES = ("tools", "add_generation_prompt")


def check_tokenize(body: TokenizeBody) -> None:
    """ApiError where it is not either a text or a conversation, or has fields of the other."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: need either a prompt or messages", param="prompt")
    for name in OF_MESSAGES if body.messages is None else ():
        if name in body.model_fields_set and getattr(body, name) is not None:
            raise ApiError(400, f"{name}: need messages with it; leave it out", param=name)


async def tokenize(
    body: TokenizeBody, prompts: PromptReader, form: AnswerFormat, http: HttpRequest
) -> bytes:
    """Return the answer of POST /tokenize to a body that `check_tokenize` lets pass."""
    special = body.add_special_tokens
    if body.prompt is not None:
        return await prompts.tokenize(body.prompt, http, adds_prefix=special is not False)
    return await prompts.tokenize_messages(
        read_messages(body),
        read_tools(body, form),
        http,
        generation_prompt=body.add_generation_prompt,
        adds_prefix=special is True,
    )
