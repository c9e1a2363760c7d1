"""Completions: POST /v1/completions, of one prompt or several. In: the body. Out: requests in the
engine, and what forms their answer. Each prompt is a request of its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gyre.core.records import Request
from gyre.server.answers import TextAnswer
from gyre.server.batch import RequestBatch
from gyre.server.bodies.schema import ApiError, CompletionBody
from gyre.server.echo import Echo
from gyre.server.generation import (
    ServedModel,
    TokenUsage,
    check_top,
    make_request,
)
from gyre.server.respond import ActiveRequest, AnswerSource, Service
from gyre.text.tokenizer import Tokenizer

MOST_TOLD = 1 << 20  # log-probs of prompts in an answer, alternatives included


def open_completion(
    body: CompletionBody, prompts: Sequence[np.ndarray], service: Service, *, session_id: str = ""
) -> tuple[AnswerSource, TextAnswer]:
    """Return the requests and their answer; `prompts` are int32 ids of each. ApiError where one of
    them would be refused."""
    model = service.model
    prompt_only = body.echo and body.max_tokens == 0
    if body.max_tokens == 0 and not (prompt_only and body.min_tokens == 0):
        raise ApiError(
            400, "max_tokens = 0: need echo = true and no min_tokens with it", param="max_tokens"
        )
    name = f"{TextAnswer.prefix}-{uuid.uuid4().hex}"
    requests = _make_requests(body, prompts, model, name, session_id=session_id)
    answer = TextAnswer(
        name,
        model.name,
        model.tokenizer,
        logprobs=body.logprobs is not None,
        echoes=_make_echoes(body, requests, model.tokenizer) if body.echo else (),
        n=body.n,
    )
    usage = TokenUsage(prompt_tokens=sum(len(request.tokens) for request in requests))
    parts = [
        ActiveRequest(service, request, usage, prompt_only=prompt_only) for request in requests
    ]
    return (parts[0] if len(parts) == 1 else RequestBatch(name, parts, usage)), answer


def _make_requests(
    body: CompletionBody,
    prompts: Sequence[np.ndarray],
    model: ServedModel,
    name: str,
    *,
    session_id: str,
) -> list[Request]:
    """Return one request of each prompt. Log-probs of a prompt come with the first token after it:
    where none is allowed one is chosen all the same, and left out of the answer."""
    best = check_top(body.logprobs or 0, "logprobs")
    requests = [
        make_request(
            body,
            prompt,
            model,
            request_id=name if len(prompts) == 1 else f"{name}-{number}",
            stream=body.stream,
            n=body.n,
            most_tokens=1 if body.max_tokens == 0 else body.max_tokens,
            top_logprobs=best,
            prompt_logprobs=best if body.echo and body.logprobs is not None else None,
            session_id=session_id,
        )
        for number, prompt in enumerate(prompts)
    ]
    if len(requests) > 1:
        _refuse_too_many(requests, model)
    if body.echo and body.logprobs is not None:
        _refuse_too_much(requests)
    return requests


def _refuse_too_many(requests: Sequence[Request], model: ServedModel) -> None:
    """ApiError for more completions than any queue holds: asking again later would not help."""
    first, n = requests[0], requests[0].sampling.n
    as_one = replace(first, sampling=replace(first.sampling, n=len(requests) * n))
    if (reason := model.find_refusal(as_one)) is not None:
        raise ApiError(400, f"{len(requests)} prompts with n = {n}: {reason}", param="prompt")


def _refuse_too_much(requests: Sequence[Request]) -> None:
    """ApiError for more log-probs of prompts than an answer may hold."""
    sampling = requests[0].sampling
    tokens = sum(len(request.tokens) for request in requests)
    told = tokens * sampling.n * (1 + sampling.top_logprobs)
    if told > MOST_TOLD:
        raise ApiError(
            400,
            f"echo with logprobs = {sampling.top_logprobs}, n = {sampling.n} and {tokens} prompt "
            f"tokens: {told} log-probs, at most {MOST_TOLD}; send fewer prompts at a time",
            param="logprobs",
        )


def _make_echoes(
    body: CompletionBody, requests: Sequence[Request], tokenizer: Tokenizer
) -> list[Echo]:
    return [
        Echo(
            text=prompt if isinstance(prompt, str) else tokenizer.decode(prompt),
            tokens=request.tokens,
            prefix_tokens=len(tokenizer.prefix_ids) if isinstance(prompt, str) else 0,
        )
        for prompt, request in zip(body.prompts, requests, strict=True)
    ]
