"""The cluster's decisions: books of requests, causes. Pure, so by property."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gyre.cluster.engine_pool.request_log import RequestLog
from gyre.cluster.engine_pool.routing import rest_tokens
from gyre.cluster.watchdog import find_cause
from gyre.core.errors import InputError, RankError, WorkerLost
from gyre.core.records import Partial, PromptLogprobs, Request, Sampling, TokenChunk

# ---- books

N, MAX = 3, 12


def request(chunk_tokens: int, begun: dict[int, int]) -> Request:
    partials = tuple(partial(index, 0, count) for index, count in begun.items() if count)
    sampling = Sampling(n=N, max_tokens=MAX)
    return Request(
        request_id="r",
        tokens=np.arange(5, dtype=np.int32),
        sampling=sampling,
        chunk_tokens=chunk_tokens,
        partials=partials,
        deadline_s=10.0,
    )


def numbers(index: int, start: int, stop: int) -> dict[str, np.ndarray]:
    """What the tokens of a completion are, by place."""
    places = np.arange(start, stop)
    return {
        "tokens": (100 * index + places).astype(np.int32),
        "logprobs": (-places / 7).astype(np.float32),
        "raw_logprobs": (-places / 5).astype(np.float32),
        "versions": (places // 4).astype(np.int32),
    }


def partial(index: int, start: int, stop: int) -> Partial:
    return Partial(index=index, **numbers(index, start, stop))


PROMPT = PromptLogprobs(
    logprobs=np.zeros(5, np.float32),
    versions=np.zeros(5, np.int32),
    top_ids=np.zeros((5, 0), np.int32),
    top_logprobs=np.zeros((5, 0), np.float32),
)


def chunk(
    index: int, start: int, stop: int, *, end: bool, prompt: PromptLogprobs | None = None
) -> TokenChunk:
    return TokenChunk(
        request_id="r",
        index=index,
        **numbers(index, start, stop),
        finish="length" if end else None,
        prompt_logprobs=prompt,
    )


MOVES = st.lists(
    st.lists(st.tuples(st.integers(0, N - 1), st.integers(1, 4)), max_size=6), max_size=5
)
REST = [(index, MAX) for index in range(N)]


@given(MOVES, st.integers(0, 4), st.lists(st.integers(0, 3), min_size=N, max_size=N))
def test_a_request_that_moves_between_engines_is_told_whole_once(
    engines, chunk_tokens, begun
) -> None:
    """Engines come and go in the middle of it; each begins where the books say. The caller gets
    every token after its own beginnings exactly once, in order, and one end for each completion.
    Each engine tells a completion's prompt log-probs with its first chunk; the caller gets them
    with the very first."""
    book = RequestLog(request(chunk_tokens, dict(enumerate(begun))), progress_tokens=2)
    told: list[TokenChunk] = []
    for moves in [*engines, REST]:
        asked = book.for_engine()
        assert asked.sampling == book.request.sampling and asked.chunk_tokens == (chunk_tokens or 2)
        at = [
            next((len(p.tokens) for p in asked.partials if p.index == index), 0)
            for index in range(N)
        ]
        for p in asked.partials:
            np.testing.assert_array_equal(p.tokens, numbers(p.index, 0, at[p.index])["tokens"])
            np.testing.assert_array_equal(p.logprobs, numbers(p.index, 0, at[p.index])["logprobs"])
        silent = set(range(N))  # of which this engine has not told the prompt's log-probs
        for index, count in moves:
            # an engine that was given a whole completion says so, and that is nothing new
            if index not in book.open:
                assert book.take(chunk(index, MAX, MAX, end=True)) == []
                continue
            stop = min(MAX, at[index] + count)
            prompt = PROMPT if index in silent else None
            silent.discard(index)
            told += book.take(chunk(index, at[index], stop, end=stop == MAX, prompt=prompt))
            at[index] = stop
    assert not book.open
    for index in range(N):
        mine = [one for one in told if one.index == index]
        tokens = np.concatenate([one.tokens for one in mine])
        np.testing.assert_array_equal(tokens, numbers(index, begun[index], MAX)["tokens"])
        assert [one.finish for one in mine][-1] == "length" and all(
            one.finish is None for one in mine[:-1]
        )
        assert [one.prompt_logprobs is PROMPT for one in mine] == [True] + [False] * (len(mine) - 1)
        if chunk_tokens == 0:
            assert len(mine) == 1
    assert book.outstanding_tokens == 0
    assert book.num_tokens == sum(MAX - count for count in begun)


@given(st.lists(st.integers(0, MAX), min_size=N, max_size=N), st.floats(0, 20))
def test_cost_and_deadline_of_what_is_left(begun, waited_s) -> None:
    book = RequestLog(request(1, dict(enumerate(begun))), progress_tokens=2)
    rest = sum(MAX - count for count in begun)
    assert rest_tokens(book.for_engine()) == rest == book.outstanding_tokens - 5
    assert book.for_engine(waited_s=waited_s).deadline_s == max(0.0, 10.0 - waited_s)


# ---- causes


def test_the_cause_is_the_rank_that_is_gone_then_the_one_with_an_error_of_its_own() -> None:
    saw, own, gone = RankError("rank 2 failed"), ValueError("mine"), WorkerLost("gone")
    assert find_cause({0: saw, 1: saw, 2: own}) == (2, own)
    assert find_cause({0: saw, 1: gone, 2: own}) == (1, gone)
    assert find_cause({1: saw, 3: saw}) == (1, saw)
    refused = InputError("no")
    assert find_cause({0: saw, 1: refused}) == (1, refused)
