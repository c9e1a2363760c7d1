"""Parameters: can this Sampling be satisfied? In: a Sampling, whatever is in it, and the engine's
limits. Out: None, or the reason to refuse it, in words that say what we got and what we accept.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
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
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
COUNTS = ("top_k", "max_tokens", "n", "min_tokens", "top_logprobs")


def find_bad_sampling(
    s: Sampling, *, vocab_size: int, most_completions: int, eos_ids: Iterable[int]
) -> str | None:
    """Return why these parameters cannot be satisfied, or None. Types are looked at first."""
    reasons = chain(
        _wrong_types(s),
        _wrong_ranges(s, most_completions),
        _wrong_ids(s, vocab_size),
        _nonsense(s, vocab_size, eos_ids),
    )
    return next(reasons, None)


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


def _each(is_right: Callable[[Any], bool], values: Any) -> bool:
    return isinstance(values, (tuple, list)) and all(is_right(value) for value in values)


def _is_bias(pair: Any) -> bool:
    return (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and is_whole(pair[0])
        and is_number(pair[1])
    )


def _wrong_types(s: Sampling) -> Iterator[str]:
    """Yield reasons. They are formed where there is one: every request comes by here."""
    for name in NUMBERS:
        if not is_number(getattr(s, name)):
            yield f"{name} = {getattr(s, name)!r}: need a finite number"
    for name in COUNTS:
        if not is_whole(getattr(s, name)):
            yield f"{name} = {getattr(s, name)!r}: need a whole number"
    told = s.prompt_logprobs
    if not (told is None or is_whole(told)):
        yield f"prompt_logprobs = {told!r}: need None or a whole number"
    if not isinstance(s.ignore_eos, bool):
        yield f"ignore_eos = {s.ignore_eos!r}: need True or False"
    if not _each(is_text, s.stop):
        yield f"stop = {s.stop!r}: need a tuple of strings that UTF-8 can hold"
    if not _each(is_whole, s.stop_ids):
        yield f"stop_ids = {s.stop_ids!r}: need a tuple of token ids"
    if not _each(_is_bias, s.logit_bias):
        yield f"logit_bias = {str(s.logit_bias)[:200]}: need a tuple of (token id, finite number)"


def _wrong_ranges(s: Sampling, most_completions: int) -> Iterator[str]:
    if not (s.temperature == 0.0 or COLDEST <= s.temperature <= HOTTEST):
        yield f"temperature = {s.temperature}: need 0 (greedy), or {COLDEST:g} to {HOTTEST:g}"
    if not 0.0 < s.top_p <= 1.0:
        yield f"top_p = {s.top_p}: need more than 0 and at most 1"
    if not 0 <= s.top_k <= LARGEST_COUNT:
        yield f"top_k = {s.top_k}: need 0 (all) or more, to {LARGEST_COUNT}"
    if not 0.0 <= s.min_p <= 1.0:
        yield f"min_p = {s.min_p}: need 0 to 1"
    if s.max_tokens < 1:
        yield f"max_tokens = {s.max_tokens}: need 1 or more"
    if s.n < 1:
        yield f"n = {s.n}: need 1 or more"
    if s.n > most_completions:
        yield f"n = {s.n}: running and waiting together, {most_completions} completions fit"
    if not WEAKEST_REPETITION <= s.repetition_penalty <= STRONGEST_REPETITION:
        span = f"{WEAKEST_REPETITION:g} to {STRONGEST_REPETITION:g}; 1 is off"
        yield f"repetition_penalty = {s.repetition_penalty}: need {span}"
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(s, name)
        if not -PENALTY <= value <= PENALTY:
            yield f"{name} = {value}: need {-PENALTY:g} to {PENALTY:g}; 0 is off"
    if not 0 <= s.top_logprobs <= MOST_TOLD:
        yield f"top_logprobs = {s.top_logprobs}: need 0 to {MOST_TOLD}"
    told = s.prompt_logprobs
    if not (told is None or 0 <= told <= MOST_TOLD):
        yield f"prompt_logprobs = {told}: need None, or 0 to {MOST_TOLD}"
    if s.min_tokens < 0:
        yield f"min_tokens = {s.min_tokens}: need 0 or more"
    if s.min_tokens > s.max_tokens:
        yield f"min_tokens = {s.min_tokens}: more than max_tokens = {s.max_tokens}"
    yield from _wrong_lengths(s)


def _wrong_lengths(s: Sampling) -> Iterator[str]:
    if not all(s.stop):
        yield "an empty stop string: it would end every completion at once"
    if len(s.stop) > MOST_STOPS:
        yield f"{len(s.stop)} stop strings: at most {MOST_STOPS}"
    if (longest := max(map(len, s.stop), default=0)) > LONGEST_STOP:
        yield f"a stop string of {longest} characters: at most {LONGEST_STOP}"
    if len(s.stop_ids) > MOST_STOP_IDS:
        yield f"{len(s.stop_ids)} stop_ids: at most {MOST_STOP_IDS}"
    if len(s.logit_bias) > MOST_BIASED:
        yield f"logit_bias for {len(s.logit_bias)} tokens: at most {MOST_BIASED}"


def _wrong_ids(s: Sampling, vocab_size: int) -> Iterator[str]:
    vocabulary = f"the vocabulary has 0 to {vocab_size - 1}"
    for token in s.stop_ids:
        if not 0 <= token < vocab_size:
            yield f"stop id {token}: {vocabulary}"
    seen = set()
    for token, value in s.logit_bias:
        if not 0 <= token < vocab_size:
            yield f"logit_bias of token {token}: {vocabulary}"
        if token in seen:
            yield f"logit_bias names token {token} twice"
        seen.add(token)
        if not -LARGEST_BIAS <= value <= LARGEST_BIAS:
            limit = f"need {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}"
            yield f"logit_bias of {value} for token {token}: {limit}"
    for name in ("top_logprobs", "prompt_logprobs"):
        told = getattr(s, name) or 0
        if told > vocab_size:
            yield f"{name} = {told}: {vocabulary}"


def _nonsense(s: Sampling, vocab_size: int, eos_ids: Iterable[int]) -> Iterator[str]:
    banned = {token for token, value in s.logit_bias if value == -LARGEST_BIAS}
    if s.min_tokens:
        banned |= set(s.stop_ids) | (set() if s.ignore_eos else set(eos_ids))
    if len(banned) >= vocab_size and len(banned & set(range(vocab_size))) >= vocab_size:
        yield "min_tokens and a logit_bias of -100 leave no token to choose"
