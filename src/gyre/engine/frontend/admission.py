"""Admission: may this request enter? In: a Request, the engine's limits, what is unanswered. Out:
None, or the reason to refuse it, in words that say what we got and what we accept. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre.core.records import Partial, Request, Support
from gyre.engine.frontend.sampling_params import (
    LARGEST_COUNT,
    find_bad_sampling,
    is_number,
    is_text,
    is_whole,
)
from gyre.engine.scheduler.sequence import truncates

WHOLE = "iu"  # kinds of whole numbers, as numpy names them
PARTIAL_COLUMNS = {"tokens": WHOLE, "versions": WHOLE, "logprobs": "f", "raw_logprobs": "f"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What bounds a single request."""

    vocab_size: int
    context_tokens: int  # longest sequence of the model
    cache_tokens: int  # tokens that the whole KV cache holds
    can_decode: bool  # a tokenizer is there, so stop strings can be found
    most_completions: int = LARGEST_COUNT  # of one request: what runs and waits together
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is unanswered, or may be: what fits into rows and cache, and as much again as may
    wait."""

    completions: int
    tokens: int  # given ones: of prompts and beginnings


def given_tokens(request: Request) -> int:
    """Return how many tokens come with a request; completions share its prompt."""
    return len(request.tokens) + sum(len(partial.tokens) for partial in request.partials)


def find_overload(request: Request, load: Load, most: Load) -> str | None:
    """Return why the engine has no capacity for the request now, or None. Counts unanswered
    requests, running or not, so the answer does not depend on timing. A request that a lost
    engine had admitted is admitted here too."""
    if request.resumed:
        return None
    if load.completions + request.sampling.n > most.completions:
        return (
            f"the queue is full: {load.completions} completions are unanswered, this request asks "
            "for "
            f"{request.sampling.n}, and {most.completions} (engine.max_running + "
            "engine.max_queued) fit"
        )
    if load.tokens and load.tokens + given_tokens(request) > most.tokens:
        return (
            f"the queue is full: {load.tokens} given tokens are unanswered, this request has "
            f"{given_tokens(request)}, "
            f"and {most.tokens} (the KV cache + engine.max_queued_tokens) fit"
        )
    return None


def find_refusal(request: Request, limits: RequestLimits) -> str | None:
    """Return why the engine will not run this request, or None."""
    return (
        find_bad_sampling(
            request.sampling,
            vocab_size=limits.vocab_size,
            most_completions=limits.most_completions,
            eos_ids=limits.eos_ids,
        )
        or _bad_fields(request)
        or _bad_tokens(request, limits)
        or _bad_size(request, limits)
        or _bad_partials(request, limits)
        or _unsupported(request, limits)
    )


def _is_row(value: Any, kinds: str) -> bool:
    """Return whether `value` is a one-dimensional array of these numpy kinds."""
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in kinds


def _bad_fields(request: Request) -> str | None:
    if not is_text(request.request_id):
        return f"request_id = {request.request_id!r}: need text that UTF-8 can hold"
    for name in ("seed", "priority", "chunk_tokens"):
        value = getattr(request, name)
        if not (is_whole(value) or isinstance(value, np.integer)):
            return f"{name} = {value!r}: need a whole number"
    if abs(request.priority) > LARGEST_COUNT:
        return f"priority = {request.priority}: need {-LARGEST_COUNT} to {LARGEST_COUNT}"
    if not 0 <= request.chunk_tokens <= LARGEST_COUNT:
        return (
            f"chunk_tokens = {request.chunk_tokens}: need 0 (one chunk at the end) or more, "
            f"to {LARGEST_COUNT}"
        )
    if request.deadline_s is not None and not is_number(request.deadline_s):
        return f"deadline_s = {request.deadline_s!r}: need None or a finite number"
    if not is_text(request.tenant_salt):
        return f"tenant_salt = {request.tenant_salt!r}: need text that UTF-8 can hold"
    if not _is_row(request.tokens, WHOLE):
        return "the prompt is not a one-dimensional array of whole numbers"
    if not (
        isinstance(request.partials, (tuple, list))
        and all(isinstance(one, Partial) for one in request.partials)
    ):
        return f"partials = {str(request.partials)[:200]}: need a tuple of Partial"
    return None


def _bad_tokens(request: Request, limits: RequestLimits) -> str | None:
    if len(request.tokens) == 0:
        return "an empty prompt: need at least one token"
    low, high = int(request.tokens.min()), int(request.tokens.max())
    if low < 0 or high >= limits.vocab_size:
        return (
            f"prompt token {low if low < 0 else high}: the vocabulary has 0 to "
            f"{limits.vocab_size - 1}"
        )
    return None


def _bad_size(request: Request, limits: RequestLimits) -> str | None:
    prompt, wanted = len(request.tokens), request.sampling.max_tokens
    if prompt >= limits.context_tokens:
        return (
            f"prompt of {prompt} tokens: the context is {limits.context_tokens} tokens and "
            "one must be left to choose"
        )
    if prompt + 1 > limits.cache_tokens:
        return (
            f"prompt of {prompt} tokens: the whole KV cache holds {limits.cache_tokens}; "
            "raise engine.kv_bytes"
        )
    if prompt + wanted > limits.context_tokens:
        return (
            f"max_tokens = {wanted} after a prompt of {prompt}: the context is "
            f"{limits.context_tokens} tokens, "
            f"so at most {limits.context_tokens - prompt} can be chosen"
        )
    if prompt + wanted - 1 > limits.cache_tokens:  # the last chosen token's KV is never needed
        return (
            f"max_tokens = {wanted} after a prompt of {prompt}: the whole KV cache holds "
            f"{limits.cache_tokens} tokens; "
            "raise engine.kv_bytes or lower max_tokens"
        )
    return None


def _bad_partials(request: Request, limits: RequestLimits) -> str | None:
    seen: set[int] = set()
    for partial in request.partials:
        if (
            not is_whole(partial.index)
            or not 0 <= partial.index < request.sampling.n
            or partial.index in seen
        ):
            return (
                f"partial with index {partial.index!r}: need distinct indices below n = "
                f"{request.sampling.n}"
            )
        seen.add(partial.index)
        if reason := _bad_partial(partial, request, limits):
            return f"partial {partial.index}: {reason}"
    return None


def _bad_partial(partial: Partial, request: Request, limits: RequestLimits) -> str | None:
    for name, kinds in PARTIAL_COLUMNS.items():
        if not _is_row(getattr(partial, name), kinds):
            return (
                f"{name} is not a one-dimensional array of "
                f"{'whole numbers' if kinds == WHOLE else 'float numbers'}"
            )
    count = len(partial.tokens)
    if count > request.sampling.max_tokens:
        return f"{count} tokens, more than max_tokens = {request.sampling.max_tokens}"
    if not len(partial.logprobs) == len(partial.raw_logprobs) == len(partial.versions) == count:
        return "tokens, logprobs, raw_logprobs and versions differ in length"
    if (
        count
        and not 0 <= int(partial.tokens.min()) <= int(partial.tokens.max()) < limits.vocab_size
    ):
        return f"a token outside 0 to {limits.vocab_size - 1}"
    if count and truncates(request):
        if partial.support is None:
            return "the request truncates, but the partial lacks the truncation sets of its tokens"
        if not _fits(partial.support, count, limits):
            return "truncation sets that do not fit its tokens"
    return None


def _fits(support: Support, count: int, limits: RequestLimits) -> bool:
    offsets, ids = support.offsets, support.ids
    if not (_is_row(offsets, WHOLE) and _is_row(ids, WHOLE) and len(offsets) == count + 1):
        return False
    if offsets[0] != 0 or offsets[-1] != len(ids) or (offsets[1:] <= offsets[:-1]).any():
        return False  # each token is in its own set
    return int(ids.min()) >= 0 and int(ids.max()) < limits.vocab_size


def _unsupported(request: Request, limits: RequestLimits) -> str | None:
    if request.grammar is not None:
        return "a grammar: this engine has no grammar support"
    if request.sampling.stop and not limits.can_decode:
        return "stop strings: this engine was built without a tokenizer; use stop_ids"
    return None
