"""Parameters: can this Sampling be satisfied? In: a Sampling, whatever is in it, and the engine's
limits. Out: None, or the reason to refuse it, in words that say what we got and what we accept.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from gyre.core.records import Sampling

COLDEST, HOTTEST = 1e-4, 1e4  # temperatures: within, logits stay finite in float32
PENALTY = 2.0  # of presence and frequency, either way
WEAKEST_REPETITION, STRONGEST_REPETITION = 0.01, 100.0
MOST_TOLD = 20  # alternatives per token, of completion or prompt
MOST_BIASED = 1024  # tokens with a bias
LARGEST_BIAS = 100.0
MOST_STOP_IDS, MOST_STOPS, LONGEST_STOP = 256, 64, 1024
LARGEST_COUNT = 2**31 - 1

Check = tuple[bool, str]


def find_bad_sampling(
    s: Sampling, *, vocab_size: int, most_completions: int, eos_ids: Iterable[int]
) -> str | None:
    """Return why these parameters cannot be satisfied, or None. Types are looked at first."""
    return (
        _first(_check_types(s))
        or _first(_check_ranges(s, most_completions))
        or _first(_check_ids(s, vocab_size))
        or _first(_check_sense(s, vocab_size, eos_ids))
    )


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return a finite number that float64 holds."""
    try:
        return (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        )
    except OverflowError:
        return False


def is_text(value: Any) -> bool:
    """Return a str that UTF-8 can hold."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _first(checks: Iterable[Check]) -> str | None:
    return next((reason for ok, reason in checks if not ok), None)


def _each(is_right: Callable[[Any], bool], values: Any) -> bool:
    return isinstance(values, (tuple, list)) and all(is_right(value) for value in values)


def _is_bias(pair: Any) -> bool:
    return (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and is_whole(pair[0])
        and is_number(pair[1])
    )


def _check_types(s: Sampling) -> Iterable[Check]:
    numbers = (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
    for name in numbers:
        yield is_number(getattr(s, name)), f"{name} = {getattr(s, name)!r}: need a finite number"
    for name in ("top_k", "max_tokens", "n", "min_tokens", "top_logprobs"):
        yield is_whole(getattr(s, name)), f"{name} = {getattr(s, name)!r}: need a whole number"
    told = s.prompt_logprobs
    yield told is None or is_whole(told), f"prompt_logprobs = {told!r}: need None or a whole number"
    yield isinstance(s.ignore_eos, bool), f"ignore_eos = {s.ignore_eos!r}: need True or False"
    yield _each(is_text, s.stop), f"stop = {s.stop!r}: need a tuple of strings that UTF-8 can hold"
    yield _each(is_whole, s.stop_ids), f"stop_ids = {s.stop_ids!r}: need a tuple of token ids"
    biases = "need a tuple of (token id, finite number)"
    yield _each(_is_bias, s.logit_bias), f"logit_bias = {str(s.logit_bias)[:200]}: {biases}"


def _check_ranges(s: Sampling, most_completions: int) -> Iterable[Check]:
    warm = s.temperature == 0.0 or COLDEST <= s.temperature <= HOTTEST
    yield warm, f"temperature = {s.temperature}: need 0 (greedy), or {COLDEST:g} to {HOTTEST:g}"
    yield 0.0 < s.top_p <= 1.0, f"top_p = {s.top_p}: need more than 0 and at most 1"
    yield (
        0 <= s.top_k <= LARGEST_COUNT,
        f"top_k = {s.top_k}: need 0 (all) or more, to {LARGEST_COUNT}",
    )
    yield 0.0 <= s.min_p <= 1.0, f"min_p = {s.min_p}: need 0 to 1"
    yield s.max_tokens >= 1, f"max_tokens = {s.max_tokens}: need 1 or more"
    yield s.n >= 1, f"n = {s.n}: need 1 or more"
    yield (
        s.n <= most_completions,
        f"n = {s.n}: running and waiting together, {most_completions} completions fit",
    )
    repetition, span = (
        s.repetition_penalty,
        f"{WEAKEST_REPETITION:g} to {STRONGEST_REPETITION:g}; 1 is off",
    )
    within = WEAKEST_REPETITION <= repetition <= STRONGEST_REPETITION
    yield within, f"repetition_penalty = {repetition}: need {span}"
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(s, name)
        yield (
            -PENALTY <= value <= PENALTY,
            f"{name} = {value}: need {-PENALTY:g} to {PENALTY:g}; 0 is off",
        )
    yield (
        0 <= s.top_logprobs <= MOST_TOLD,
        f"top_logprobs = {s.top_logprobs}: need 0 to {MOST_TOLD}",
    )
    told = s.prompt_logprobs
    yield (
        told is None or 0 <= told <= MOST_TOLD,
        f"prompt_logprobs = {told}: need None, or 0 to {MOST_TOLD}",
    )
    yield s.min_tokens >= 0, f"min_tokens = {s.min_tokens}: need 0 or more"
    yield (
        s.min_tokens <= s.max_tokens,
        f"min_tokens = {s.min_tokens}: more than max_tokens = {s.max_tokens}",
    )
    yield all(s.stop), "an empty stop string: it would end every completion at once"
    yield len(s.stop) <= MOST_STOPS, f"{len(s.stop)} stop strings: at most {MOST_STOPS}"
    longest = max(map(len, s.stop), default=0)
    yield longest <= LONGEST_STOP, f"a stop string of {longest} characters: at most {LONGEST_STOP}"
    yield len(s.stop_ids) <= MOST_STOP_IDS, f"{len(s.stop_ids)} stop_ids: at most {MOST_STOP_IDS}"
    yield (
        len(s.logit_bias) <= MOST_BIASED,
        f"logit_bias for {len(s.logit_bias)} tokens: at most {MOST_BIASED}",
    )


def _check_ids(s: Sampling, vocab_size: int) -> Iterable[Check]:
    vocabulary = f"the vocabulary has 0 to {vocab_size - 1}"
    for token in s.stop_ids:
        yield 0 <= token < vocab_size, f"stop id {token}: {vocabulary}"
    seen = set()
    for token, value in s.logit_bias:
        yield 0 <= token < vocab_size, f"logit_bias of token {token}: {vocabulary}"
        yield token not in seen, f"logit_bias names token {token} twice"
        seen.add(token)
        limit = f"need {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}"
        yield (
            -LARGEST_BIAS <= value <= LARGEST_BIAS,
            f"logit_bias of {value} for token {token}: {limit}",
        )
    for name in ("top_logprobs", "prompt_logprobs"):
        told = getattr(s, name) or 0
        yield told <= vocab_size, f"{name} = {told}: {vocabulary}"


def _check_sense(s: Sampling, vocab_size: int, eos_ids: Iterable[int]) -> Iterable[Check]:
    banned = {token for token, value in s.logit_bias if value == -LARGEST_BIAS}
    if s.min_tokens:
        banned |= set(s.stop_ids) | (set() if s.ignore_eos else set(eos_ids))
    left = "min_tokens and a logit_bias of -100 leave no token to choose"
    yield (
        len(banned & set(range(vocab_size))) < vocab_size if len(banned) >= vocab_size else True,
        left,
    )
