"""Requests in vLLM's words, and its answers as chunks: nothing lost, nothing twice, and a wrong number
of tokens is told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.chunks import as_partial, complete, join_chunks
from gyre.core.records import Partial, Request, Sampling, TokenChunk
from gyre.sidecars.vllm.requests import (
    Growth,
    TokenLimits,
    find_refusal,
    sampling_arguments,
    stop_ids_of,
    tell_logprobs,
)
from gyre.sidecars.vllm.versions import build_for

LIMITS = TokenLimits(vocab_size=50, context_tokens=40, most_completions=8, eos_ids=(7,))
ABILITIES = build_for("cpu").abilities()


def ask(**fields) -> Request:
    request = {
        "request_id": "r",
        "tokens": np.arange(1, 5, dtype=np.int32),
        "sampling": Sampling(max_tokens=20),
        "seed": 3,
    }
    return Request(**{**request, **fields})


def begun(tokens: list[int], index: int = 0) -> Partial:
    zeros = np.zeros(len(tokens), np.float32)
    return Partial(
        index=index,
        tokens=np.asarray(tokens, np.int32),
        logprobs=zeros,
        raw_logprobs=zeros,
        versions=np.ones(len(tokens), np.int32),
    )


@given(st.lists(st.integers(0, 6), max_size=12), st.integers(0, 5), st.integers(0, 4))
def test_all_tokens_are_passed_on_once(pieces: list[int], chunk_tokens: int, first: int) -> None:
    """Whatever pieces vLLM tells them in, and with a beginning or not."""
    total = first + sum(pieces)
    request = ask(
        sampling=Sampling(max_tokens=max(1, total)),
        chunk_tokens=chunk_tokens,
        partials=(begun(list(range(first))),) if first else (),
    )
    growth = Growth(request, 0, LIMITS.eos_ids)
    growth.version = 4
    chunks, told = [], first
    for count in pieces:
        growth.add(list(range(told, told + count)), [-0.5] * count)
        told += count
        chunks += growth.take()
    chunks += growth.take("abort", "why")
    whole = complete(chunks)
    assert whole.tokens.tolist() == list(range(first, total)) and whole.finish == "abort"
    assert (whole.versions == 4).all() and len(whole.logprobs) == total - first
    assert all(len(chunk.tokens) == chunk_tokens for chunk in chunks[:-1])
    assert growth.partial().tokens.tolist() == list(range(total))


def test_nothing_of_a_wrong_number_of_tokens_is_taken() -> None:
    request = ask(sampling=Sampling(max_tokens=3), chunk_tokens=1)
    growth = Growth(request, 0, ())
    with pytest.raises(ValueError, match="2 tokens came with 1 log-probs"):
        growth.add([1, 2], [-1.0])
    growth.add([1, 2], [-1.0, -1.0])
    with pytest.raises(ValueError, match="ended by its length with 2 of 3 tokens"):
        growth.add([], [], "length")
    with pytest.raises(ValueError, match="4 tokens of at most 3"):
        growth.add([3, 4], [-1.0, -1.0])
    assert complete(growth.take("abort")).tokens.tolist() == [1, 2]
    again = replace(request, partials=(growth.partial(),))
    assert find_refusal(again, LIMITS, ABILITIES, unanswered=0) is None


def test_a_whole_answer_of_too_many_tokens_leaves_the_request_as_it_was() -> None:
    growth = Growth(ask(sampling=Sampling(max_tokens=3), chunk_tokens=1), 0, ())
    with pytest.raises(ValueError, match="4 tokens of at most 3"):
        growth.add([1, 2, 3, 4], [-1.0] * 4, "length")
    (end,) = growth.take("abort")
    assert len(end.tokens) == 0 and len(growth.partial().tokens) == 0


def test_what_goes_on_draws_by_another_seed_and_to_the_same_length() -> None:
    request = ask(sampling=Sampling(max_tokens=20, min_tokens=5, stop_ids=(9,), n=2))
    first, other = (
        sampling_arguments(request, index, begun_tokens=0, eos_ids=(7,)) for index in (0, 1)
    )
    later = sampling_arguments(request, 0, begun_tokens=4, eos_ids=(7,))
    assert len({first["seed"], other["seed"], later["seed"]}) == 3
    assert (later["max_tokens"], later["min_tokens"]) == (16, 1)
    assert first["stop_token_ids"] == [9, 7] and first["ignore_eos"]
    assert stop_ids_of(Sampling(ignore_eos=True), (7,)) == []


@pytest.mark.parametrize(
    ("tokens", "finish"), [([1, 2], None), ([1, 7], "stop"), ([1, 2, 3], "length")]
)
def test_a_beginning_that_is_a_whole_completion_is_answered_at_once(tokens, finish) -> None:
    request = ask(sampling=Sampling(max_tokens=3), partials=(begun(tokens),))
    assert Growth(request, 0, (7,)).ended_before() == finish


def test_the_log_prob_is_that_which_the_trainer_compares_with() -> None:
    told = np.array([-1.0, -2.0], np.float32)
    assert all((found == told).all() for found in tell_logprobs(told, Sampling()))
    processed, raw = tell_logprobs(told, Sampling(temperature=0.5))
    assert (processed == told).all() and np.isnan(raw).all()
    processed, raw = tell_logprobs(told, Sampling(temperature=0.0))
    assert (processed == 0.0).all() and (raw == told).all()


def test_a_completion_of_two_kinds_of_engines_has_the_log_probs_of_its_sampling() -> None:
    """One that a lost engine began goes on at another kind. The raw ones say which tokens vLLM
    chose, as it cannot tell them."""
    request = ask(sampling=Sampling(max_tokens=4, temperature=0.7))
    growth = Growth(request, 0, LIMITS.eos_ids)
    growth.version = 4
    growth.add([1, 2], [-0.5, -1.5])
    first = join_chunks(growth.take("interrupted"))
    rest = TokenChunk(
        request_id="r",
        index=0,
        tokens=np.asarray([3, 4], np.int32),
        logprobs=np.asarray([-2.0, -3.0], np.float32),
        raw_logprobs=np.asarray([-1.75, -2.5], np.float32),
        versions=np.full(2, 4, np.int32),
        finish="length",
    )
    whole = as_partial(0, [first, rest])
    assert whole.logprobs.tolist() == [-0.5, -1.5, -2.0, -3.0]
    assert np.isnan(whole.raw_logprobs).tolist() == [True, True, False, False]
    again = replace(request, partials=(as_partial(0, [rest, first]),))
    assert Growth(again, 0, LIMITS.eos_ids).partial().logprobs.tolist() == [-2.0, -3.0, -0.5, -1.5]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ask(tokens=np.empty(0, np.int32)), "an empty prompt"),
        (ask(tokens=np.array([50], np.int32)), "outside 0 to 49"),
        (ask(sampling=Sampling(max_tokens=37)), "the context is 40 tokens"),
        (ask(sampling=Sampling(max_tokens=0)), "max_tokens = 0"),
        (ask(sampling=Sampling(max_tokens=4, temperature=0.001)), "takes 0, or 0.01 to 2"),
        (ask(sampling=Sampling(max_tokens=4, n=7)), "2 completions are unanswered"),
        (ask(partials=(begun([1]), begun([2]))), "need distinct indices"),
        (ask(sampling=Sampling(max_tokens=4, top_k=3)), "cannot do what the request asks for"),
    ],
)
def test_a_request_that_vllm_would_change_or_break_on_is_refused(request_, reason) -> None:
    found = find_refusal(request_, LIMITS, ABILITIES, unanswered=2)
    assert found is not None and reason in found


def test_a_request_that_fits_is_taken() -> None:
    request = ask(sampling=Sampling(max_tokens=36, n=6))
    assert find_refusal(request, LIMITS, ABILITIES, unanswered=2) is None
    assert find_refusal(replace(request, deadline_s=1.0), LIMITS, ABILITIES, unanswered=2) is None
    assert find_refusal(request, LIMITS, ABILITIES, unanswered=3) is not None
    resumed = replace(request, resumed=True)
    assert find_refusal(resumed, LIMITS, ABILITIES, unanswered=3) is None
