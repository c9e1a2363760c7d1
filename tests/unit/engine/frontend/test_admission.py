"""Admission and config: each refusal names what it got and what is accepted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from gyre.core.records import Partial, Request, Sampling, Support
from gyre.engine.config import EngineConfig, plan_num_pages
from gyre.engine.frontend.admission import Load, RequestLimits, find_overload, find_refusal

LIMITS = RequestLimits(vocab_size=50, context_tokens=64, cache_tokens=48, can_decode=False)
GOOD = Request(
    request_id="r", tokens=np.arange(10, dtype=np.int32), sampling=Sampling(max_tokens=20, n=2)
)


def with_sampling(**fields) -> Request:
    return replace(GOOD, sampling=replace(GOOD.sampling, **fields))


def partial(**fields) -> Partial:
    made = Partial(
        index=0,
        tokens=np.asarray([1, 2], np.int32),
        logprobs=np.zeros(2, np.float32),
        raw_logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int32),
    )
    return replace(made, **fields)


REFUSED: dict[str, tuple[Request, str]] = {
    "negative temperature": (with_sampling(temperature=-1.0), "temperature = -1.0"),
    "temperature not a number": (with_sampling(temperature=float("nan")), "temperature = nan"),
    "top_p of 0": (with_sampling(top_p=0.0), "top_p = 0.0"),
    "top_p over 1": (with_sampling(top_p=1.5), "top_p = 1.5"),
    "negative top_k": (with_sampling(top_k=-1), "top_k = -1"),
    "min_p over 1": (with_sampling(min_p=2.0), "min_p = 2.0"),
    "no tokens wanted": (with_sampling(max_tokens=0), "max_tokens = 0"),
    "no completions wanted": (with_sampling(n=0), "n = 0"),
    "empty stop string": (with_sampling(stop=("",)), "empty stop string"),
    "stop strings without tokenizer": (with_sampling(stop=("x",)), "use stop_ids"),
    "too cold": (with_sampling(temperature=1e-30), "need 0 (greedy), or 0.0001 to 10000"),
    "temperature in words": (
        with_sampling(temperature="hot"),
        "temperature = 'hot': need a finite number",
    ),
    "presence beyond 2": (
        with_sampling(presence_penalty=2.5),
        "presence_penalty = 2.5: need -2 to 2",
    ),
    "frequency below -2": (
        with_sampling(frequency_penalty=-3.0),
        "frequency_penalty = -3.0: need -2 to 2",
    ),
    "repetition of 0": (
        with_sampling(repetition_penalty=0.0),
        "repetition_penalty = 0.0: need 0.01 to 100",
    ),
    "infinite repetition": (
        with_sampling(repetition_penalty=float("inf")),
        "repetition_penalty = inf",
    ),
    "bias outside the vocabulary": (
        with_sampling(logit_bias=((50, 1.0),)),
        "logit_bias of token 50: the vocabulary",
    ),
    "bias beyond 100": (with_sampling(logit_bias=((5, 101.0),)), "need -100 to 100"),
    "bias that is no number": (
        with_sampling(logit_bias=((5, float("nan")),)),
        "(token id, finite number)",
    ),
    "bias given twice": (with_sampling(logit_bias=((5, 1.0), (5, 2.0))), "names token 5 twice"),
    "too many biases": (with_sampling(logit_bias=((5, 1.0),) * 1025), "1025 tokens: at most 1024"),
    "every token biased away": (
        with_sampling(logit_bias=tuple((t, -100.0) for t in range(50))),
        "no token to choose",
    ),
    "every token a stop id": (
        with_sampling(min_tokens=1, stop_ids=tuple(range(50))),
        "leave no token to choose",
    ),
    "stop id outside the vocabulary": (
        with_sampling(stop_ids=(-1,)),
        "stop id -1: the vocabulary has 0 to 49",
    ),
    "more least than most tokens": (
        with_sampling(min_tokens=21),
        "min_tokens = 21: more than max_tokens = 20",
    ),
    "too many alternatives": (with_sampling(top_logprobs=21), "top_logprobs = 21: need 0 to 20"),
    "too many for the prompt": (
        with_sampling(prompt_logprobs=-1),
        "prompt_logprobs = -1: need None, or 0 to 20",
    ),
    "too many completions": (with_sampling(n=2**40), "completions fit"),
    "deadline not a number": (replace(GOOD, deadline_s=float("nan")), "deadline_s = nan"),
    "salt beyond UTF-8": (replace(GOOD, tenant_salt="\ud800"), "tenant_salt"),
    "priority beyond int64": (replace(GOOD, priority=2**70), "priority = "),
    "prompt of floats": (
        replace(GOOD, tokens=np.ones(3)),
        "not a one-dimensional array of whole numbers",
    ),
    "empty prompt": (replace(GOOD, tokens=np.empty(0, np.int32)), "empty prompt"),
    "token beyond the vocabulary": (
        replace(GOOD, tokens=np.asarray([50], np.int32)),
        "prompt token 50",
    ),
    "negative token": (replace(GOOD, tokens=np.asarray([-1], np.int32)), "prompt token -1"),
    "negative chunk size": (replace(GOOD, chunk_tokens=-1), "chunk_tokens = -1"),
    "prompt longer than the context": (
        replace(GOOD, tokens=np.zeros(64, np.int32)),
        "the context is 64",
    ),
    "prompt longer than the cache": (
        replace(GOOD, tokens=np.zeros(50, np.int32)),
        "whole KV cache holds 48",
    ),
    "max_tokens beyond the context": (with_sampling(max_tokens=55), "at most 54"),
    "max_tokens beyond the cache": (
        with_sampling(max_tokens=40),
        "raise engine.kv_bytes or lower max_tokens",
    ),
    "grammar": (replace(GOOD, grammar="root ::= x"), "no grammar support"),
    "seed that is no number": (replace(GOOD, seed="x"), "seed = 'x'"),  # type: ignore[arg-type]
    "partial of an unknown index": (replace(GOOD, partials=(partial(index=2),)), "below n = 2"),
    "two partials of one index": (replace(GOOD, partials=(partial(), partial())), "distinct"),
    "partial too long": (
        replace(with_sampling(max_tokens=1), partials=(partial(),)),
        "2 tokens, more than max_tokens = 1",
    ),
    "partial of unequal arrays": (
        replace(GOOD, partials=(partial(versions=np.zeros(1, np.int32)),)),
        "differ in length",
    ),
    "partial beyond the vocabulary": (
        replace(GOOD, partials=(partial(tokens=np.asarray([1, 99], np.int32)),)),
        "outside 0 to 49",
    ),
    "request id that is no text": (
        replace(GOOD, request_id=["r"]),
        "request_id = ['r']: need text",
    ),  # type: ignore[arg-type]
    "partials that are none": (
        replace(GOOD, partials=(None,)),
        "partials = (None,): need a tuple of Partial",
    ),  # type: ignore[arg-type]
    "partial of a worded index": (replace(GOOD, partials=(partial(index="0"),)), "index '0'"),
    "partial of a list": (
        replace(GOOD, partials=(partial(tokens=[1, 2]),)),
        "tokens is not a one-dimensional array of whole",
    ),
    "partial of two dimensions": (
        replace(GOOD, partials=(partial(tokens=np.ones((2, 1), np.int32)),)),
        "tokens is not a one-dimensional array of whole numbers",
    ),
    "partial of broken tokens": (
        replace(GOOD, partials=(partial(tokens=np.ones(2)),)),
        "tokens is not a one-dimensional",
    ),
    "partial of broken versions": (
        replace(GOOD, partials=(partial(versions=np.ones(2)),)),
        "versions is not a one-dimensional array of whole numbers",
    ),
    "partial without log-probs": (
        replace(GOOD, partials=(partial(logprobs=None),)),
        "array of float numbers",
    ),
    "partial without truncation sets": (
        replace(with_sampling(top_k=3), partials=(partial(),)),
        "lacks",
    ),
    "partial with foreign truncation sets": (
        replace(
            with_sampling(top_k=3),
            partials=(
                partial(support=Support(offsets=np.asarray([0, 1]), ids=np.asarray([1], np.int32))),
            ),
        ),
        "do not fit",
    ),
}


# of a partial's two tokens
SUPPORT = Support(offsets=np.asarray([0, 1, 3]), ids=np.asarray([1, 2, 7], np.int32))


@pytest.mark.parametrize(
    "wrong",
    [
        {"offsets": np.asarray([0, 3, 3])},  # the second token has none to be in
        {"offsets": np.asarray([0, 4, 3])},
        {"offsets": np.asarray([1, 2, 3])},
        {"offsets": [0, 1, 3]},
        {"offsets": np.asarray([[0, 1, 3]])},
        {"ids": np.asarray([1, 2, 50], np.int32)},
        {"ids": np.asarray([-1, 2, 7], np.int32)},
        {"ids": np.asarray([1.0, 2.0, 7.0])},
        {"ids": None},
    ],
)
def test_truncation_sets_must_fit(wrong: dict) -> None:
    request = with_sampling(top_k=3)
    assert find_refusal(replace(request, partials=(partial(support=SUPPORT),)), LIMITS) is None
    reason = find_refusal(
        replace(request, partials=(partial(support=replace(SUPPORT, **wrong)),)), LIMITS
    )
    assert reason == "partial 0: truncation sets that do not fit its tokens"


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_reason(case: str) -> None:
    request, words = REFUSED[case]
    reason = find_refusal(request, LIMITS)
    assert reason is not None and words in reason


@pytest.mark.parametrize(
    "request_",
    [
        GOOD,
        with_sampling(temperature=0.0, top_k=5, top_p=1.0),
        with_sampling(max_tokens=39),  # the last token's KV is never needed: 10 + 39 - 1 fit in 48
        replace(GOOD, partials=(partial(), partial(index=1))),
        # begun by an engine that cannot tell raw log-probs
        replace(GOOD, partials=(partial(raw_logprobs=np.full(2, np.nan, np.float32)),)),
    ],
)
def test_what_fits_is_admitted(request_: Request) -> None:
    assert find_refusal(request_, LIMITS) is None


@pytest.mark.parametrize("load", [Load(completions=9, tokens=0), Load(completions=0, tokens=91)])
def test_a_full_queue_takes_what_a_lost_engine_had(load: Load) -> None:
    most = Load(completions=10, tokens=100)
    reason = find_overload(GOOD, load, most)
    assert reason is not None and "the queue is full" in reason
    assert find_overload(replace(GOOD, resumed=True), load, most) is None


def test_pages_come_from_the_first_setting_given() -> None:
    sizes = {"page_bytes": 1000, "context_tokens": 100, "free_bytes": 1_000_000}
    assert plan_num_pages(EngineConfig(page_tokens=16, num_pages=7, kv_bytes=5000), **sizes) == 7
    assert (
        plan_num_pages(EngineConfig(page_tokens=16, kv_bytes=5500, kv_fraction=0.5), **sizes) == 5
    )
    assert plan_num_pages(EngineConfig(page_tokens=16, kv_fraction=0.5), **sizes) == 500
    assert plan_num_pages(EngineConfig(page_tokens=16, max_running=4), **sizes) == 4 * 7
    # a quarter of what is free
    assert plan_num_pages(EngineConfig(page_tokens=16, max_running=256), **sizes) == 250


def test_config_refuses_a_budget_below_its_rows_and_unknown_keys() -> None:
    with pytest.raises(ValidationError, match="token_budget = 8 is below max_running = 9"):
        EngineConfig(token_budget=8, max_running=9)
    with pytest.raises(ValidationError, match="did you mean 'max_running'"):
        EngineConfig(max_runing=3)  # type: ignore[call-arg]


def test_config_refuses_parts_of_the_vocabulary_where_there_are_none_or_bits_count() -> None:
    with pytest.raises(ValidationError, match="sharded_sampling = true with batch_invariant"):
        EngineConfig(sharded_sampling=True, batch_invariant=True)
    with pytest.raises(ValidationError, match="sharded_sampling = true with tensor_ranks = 1: one"):
        EngineConfig(sharded_sampling=True)
    assert EngineConfig(sharded_sampling=True, tensor_ranks=2).sharded_sampling
