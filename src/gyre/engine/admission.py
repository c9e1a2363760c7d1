"""Admission: may this request enter? In: a Request, the engine's limits, what is unanswered. Out: None, or the reason
to refuse it, in words that say what we got and what we accept. Pure. Callers: native, desk (`given_tokens`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gyre.core.records import Partial, Request, Sampling
from gyre.engine.requests import truncates


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a single request."""

    vocab_size: int
    context_tokens: int  # longest sequence of the model
    cache_tokens: int  # tokens that the whole KV cache holds
    can_decode: bool  # a tokenizer is there, so stop strings can be found


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is unanswered, or may be: what fits into rows and cache, and as much again as may wait."""

    completions: int
    tokens: int  # given ones: of prompts and beginnings


def given_tokens(request: Request) -> int:
    """Return how many tokens come with a request; completions share its prompt."""
    return len(request.tokens) + sum(len(partial.tokens) for partial in request.partials)


def find_overload(request: Request, load: Load, most: Load) -> str | None:
    """Return why there is no place for the request now, or None. Counts what is unanswered and not what happens to
    run already, so that the verdict depends on no timing."""
    if load.completions + request.sampling.n > most.completions:
        return (
            f"the queue is full: {load.completions} completions are unanswered, this request asks for "
            f"{request.sampling.n}, and {most.completions} (engine.max_running + engine.max_queued) fit"
        )
    if load.tokens and load.tokens + given_tokens(request) > most.tokens:
        return (
            f"the queue is full: {load.tokens} given tokens are unanswered, this request has {given_tokens(request)}, "
            f"and {most.tokens} (the KV cache + engine.max_queued_tokens) fit"
        )
    return None


def find_refusal(request: Request, limits: Limits) -> str | None:
    """Return why the engine will not run this request, or None."""
    return (
        _bad_sampling(request.sampling)
        or _bad_tokens(request, limits)
        or _bad_size(request, limits)
        or _bad_partials(request, limits)
        or _unsupported(request, limits)
    )


def _bad_sampling(s: Sampling) -> str | None:
    checks = (
        (
            math.isfinite(s.temperature) and s.temperature >= 0.0,
            f"temperature = {s.temperature}: need 0 (greedy) or more",
        ),
        (0.0 < s.top_p <= 1.0, f"top_p = {s.top_p}: need more than 0 and at most 1"),
        (s.top_k >= 0, f"top_k = {s.top_k}: need 0 (all) or more"),
        (0.0 <= s.min_p <= 1.0, f"min_p = {s.min_p}: need 0 to 1"),
        (s.max_tokens >= 1, f"max_tokens = {s.max_tokens}: need 1 or more"),
        (s.n >= 1, f"n = {s.n}: need 1 or more"),
        (all(s.stop), "an empty stop string: it would end every completion at once"),
    )
    return next((reason for ok, reason in checks if not ok), None)


def _bad_tokens(request: Request, limits: Limits) -> str | None:
    if len(request.tokens) == 0:
        return "an empty prompt: need at least one token"
    low, high = int(request.tokens.min()), int(request.tokens.max())
    if low < 0 or high >= limits.vocab_size:
        return f"prompt token {low if low < 0 else high}: the vocabulary has 0 to {limits.vocab_size - 1}"
    if request.chunk_tokens < 0:
        return f"chunk_tokens = {request.chunk_tokens}: need 0 (one chunk at the end) or more"
    return None


def _bad_size(request: Request, limits: Limits) -> str | None:
    prompt, wanted = len(request.tokens), request.sampling.max_tokens
    if prompt >= limits.context_tokens:
        return (
            f"prompt of {prompt} tokens: the context is {limits.context_tokens} tokens and one must be left to choose"
        )
    if prompt + 1 > limits.cache_tokens:
        return f"prompt of {prompt} tokens: the whole KV cache holds {limits.cache_tokens}; raise engine.kv_bytes"
    if prompt + wanted > limits.context_tokens:
        return (
            f"max_tokens = {wanted} after a prompt of {prompt}: the context is {limits.context_tokens} tokens, "
            f"so at most {limits.context_tokens - prompt} can be chosen"
        )
    if prompt + wanted - 1 > limits.cache_tokens:  # the last chosen token's KV is never needed
        return (
            f"max_tokens = {wanted} after a prompt of {prompt}: the whole KV cache holds {limits.cache_tokens} tokens; "
            "raise engine.kv_bytes or lower max_tokens"
        )
    return None


def _bad_partials(request: Request, limits: Limits) -> str | None:
    seen: set[int] = set()
    for partial in request.partials:
        if not 0 <= partial.index < request.sampling.n or partial.index in seen:
            return f"partial with index {partial.index}: need distinct indices below n = {request.sampling.n}"
        seen.add(partial.index)
        if reason := _bad_partial(partial, request, limits):
            return f"partial {partial.index}: {reason}"
    return None


def _bad_partial(partial: Partial, request: Request, limits: Limits) -> str | None:
    count = len(partial.tokens)
    if count > request.sampling.max_tokens:
        return f"{count} tokens, more than max_tokens = {request.sampling.max_tokens}"
    if not len(partial.logprobs) == len(partial.raw_logprobs) == len(partial.versions) == count:
        return "tokens, logprobs, raw_logprobs and versions differ in length"
    if count and not 0 <= int(partial.tokens.min()) <= int(partial.tokens.max()) < limits.vocab_size:
        return f"a token outside 0 to {limits.vocab_size - 1}"
    if count and truncates(request):
        if partial.support is None:
            return "the request truncates, but the partial lacks the truncation sets of its tokens"
        if len(partial.support.offsets) != count + 1 or int(partial.support.offsets[-1]) != len(partial.support.ids):
            return "truncation sets that do not fit its tokens"
    return None


def _unsupported(request: Request, limits: Limits) -> str | None:
    if request.grammar is not None:
        return "a grammar: this engine has no grammar support"
    if request.sampling.stop and not limits.can_decode:
        return "stop strings: this engine was built without a tokenizer; use stop_ids"
    if not (isinstance(request.seed, (int, np.integer)) and isinstance(request.priority, (int, np.integer))):
        return f"seed = {request.seed!r}, priority = {request.priority!r}: need whole numbers"
    return None
