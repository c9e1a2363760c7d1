"""Whatever is asked is refused with a reason or answered, and who asked properly beside it gets the
usual tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from gyre.core.records import Partial, Request, Sampling
from sampling_cases import VOCAB, Letters, answer_all, save_tiny, some_tokens, with_engine

WILD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.just(10**400),
    st.lists(st.integers(), max_size=2).map(tuple),
)
IDS = st.integers(0, VOCAB - 1)
BEGUN = {
    "tokens": np.int32,
    "logprobs": np.float32,
    "raw_logprobs": np.float32,
    "versions": np.int32,
}
# Field → (values that can be satisfied most of the time, values that a careless caller may give)
SAMPLING_FIELDS: dict[str, tuple[st.SearchStrategy, st.SearchStrategy]] = {
    "temperature": (st.sampled_from([0.0, 1e-4, 0.7, 1.0, 1e4]), st.just(1e-40)),
    "top_p": (st.sampled_from([1.0, 0.5, 1e-12]), st.just(0.0)),
    "top_k": (st.sampled_from([0, 1, 50, 10**6]), st.just(2**70)),
    "min_p": (st.sampled_from([0.0, 0.1, 1.0]), st.just(1.5)),
    "max_tokens": (st.integers(1, 12), st.just(10**6)),
    "stop": (
        st.sampled_from([(), ("ab",), ("7",)]),
        st.sampled_from([("\ud800",), ("",), "ab", ("x" * 10**5,)]),
    ),
    "stop_ids": (
        st.lists(IDS, max_size=4).map(tuple),
        st.sampled_from([(VOCAB,), (-1,), tuple(range(VOCAB))]),
    ),
    "ignore_eos": (st.booleans(), st.just(2)),
    "n": (st.integers(1, 3), st.sampled_from([10**12, -1, 0])),
    "repetition_penalty": (
        st.sampled_from([1.0, 0.5, 1.7, 100.0]),
        st.sampled_from([0.0, 1e-30, -1.0]),
    ),
    "presence_penalty": (st.sampled_from([0.0, 2.0, -2.0]), st.just(3.0)),
    "frequency_penalty": (st.sampled_from([0.0, 0.3, -2.0]), st.just(-3.0)),
    "logit_bias": (
        st.dictionaries(IDS, st.floats(-100, 100), max_size=3).map(
            lambda bias: tuple(bias.items())
        ),
        st.sampled_from(
            [
                ((VOCAB, 1.0),),
                ((1,),),
                ((1, 1.0), (1, 2.0)),
                tuple((t, -100.0) for t in range(VOCAB)),
            ]
        ),
    ),
    "min_tokens": (st.integers(0, 1), st.integers(2, 15)),
    "top_logprobs": (st.sampled_from([0, 1, 20]), st.just(21)),
    "prompt_logprobs": (st.sampled_from([None, 0, 3, 20]), st.just(21)),
}
REQUEST_FIELDS: dict[str, tuple[st.SearchStrategy, st.SearchStrategy]] = {
    "tokens": (
        st.lists(IDS, min_size=1, max_size=20).map(lambda ids: np.asarray(ids, np.int32)),
        st.sampled_from(
            [
                np.zeros((2, 2), np.int32),
                np.ones(3),
                np.empty(0, np.int32),
                np.asarray([VOCAB]),
                [1, 2],
            ]
        ),
    ),
    "seed": (st.integers(), st.just(1.5)),
    "priority": (st.integers(-2, 2), st.just(2**80)),
    "deadline_s": (st.none(), st.sampled_from([-1.0, 0.0])),
    "tenant_salt": (st.text(max_size=2), st.just("\udfff")),
    "chunk_tokens": (st.integers(0, 4), st.just(2**70)),
    "partials": (
        st.just(()),
        st.builds(
            lambda **fields: (Partial(**fields),),
            index=st.sampled_from([0, 0, 1, -1, None]),
            **{
                name: st.one_of(
                    st.just(np.ones(2, kind)),
                    st.sampled_from([np.ones((2, 1), kind), [1, 2], None]),
                )
                for name, kind in BEGUN.items()
            },
        ),
    ),
    "grammar": (st.none(), st.just("root ::= x")),
}


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A request that is in order but for one field, or wholly in order."""
    spoilt = draw(
        st.one_of(st.none(), st.none(), st.sampled_from([*SAMPLING_FIELDS, *REQUEST_FIELDS]))
    )

    def fill(fields: dict[str, tuple[st.SearchStrategy, st.SearchStrategy]]) -> dict:
        return {
            name: draw(st.one_of(careless, WILD) if name == spoilt else proper)
            for name, (proper, careless) in fields.items()
        }

    return Request(
        request_id="", sampling=Sampling(**fill(SAMPLING_FIELDS)), **fill(REQUEST_FIELDS)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"), "llama")


SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
ASKED = given(wild=st.lists(requests(), min_size=1, max_size=8), overlap=st.booleans())


@settings(SETTINGS, max_examples=40)
@ASKED
def test_every_request_is_refused_with_a_reason_or_answered(folder, wild, overlap) -> None:
    refused_or_answered(folder, wild, overlap)


@pytest.mark.slow
@settings(SETTINGS, max_examples=120)
@ASKED
def test_every_one_of_many_requests_is_refused_or_answered(folder, wild, overlap) -> None:
    refused_or_answered(folder, wild, overlap)


def refused_or_answered(folder, wild, overlap) -> None:
    proper = Request(
        request_id="proper", tokens=some_tokens(9, 1), sampling=Sampling(max_tokens=8), seed=4
    )
    asked = [replace(request, request_id=f"r{i}") for i, request in enumerate(wild)]
    scarce = {"num_pages": 30, "page_tokens": 4, "max_running": 6, "token_budget": 16}

    async def use(engine):
        [[before]] = await answer_all(engine, [proper])
        answers = await answer_all(engine, [*asked, replace(proper, request_id="beside")])
        [[after]] = await answer_all(engine, [replace(proper, request_id="after")])
        assert (await engine.health()).ok
        return before, answers, after

    before, answers, after = with_engine(
        folder, use, tokenizer=Letters(), overlap=overlap, **scarce
    )
    assert before.tokens.tolist() == answers[-1][0].tokens.tolist() == after.tokens.tolist()
    event("answered: " + str(sum(parts[0].finish != "refused" for parts in answers[:-1])))
    for request, parts in zip(asked, answers, strict=False):
        sampling = request.sampling
        if parts[0].finish == "refused":
            assert all(part.reason for part in parts)
            continue
        assert len(parts) == sampling.n
        for part in parts:
            begun = sum(
                len(given.tokens) for given in request.partials if given.index == part.index
            )
            assert part.finish in ("stop", "length") or (
                part.finish == "deadline" and request.deadline_s is not None
            )
            assert len(part.tokens) <= sampling.max_tokens - begun
            assert np.isfinite(part.logprobs).all() and np.isfinite(part.raw_logprobs).all()
            if part.finish == "length":
                assert len(part.tokens) == sampling.max_tokens - begun
            if sampling.top_logprobs:
                assert part.top_ids is not None and part.top_ids.shape == (
                    len(part.tokens),
                    sampling.top_logprobs,
                )
            if sampling.prompt_logprobs is not None and len(part.tokens) and not begun:
                assert part.prompt_logprobs is not None and math.isfinite(
                    part.prompt_logprobs.logprobs.sum()
                )
