"""Steps are accounted for: what is counted at the launch, what is written and handed out when the
values are there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gyre.core.records import Partial, Request, Sampling
from gyre.engine.kv_cache.prompt_logprobs import PromptSlice
from gyre.engine.scheduler.postprocess import (
    advance,
    commit_tokens,
    end_complete_partials,
    end_request,
)
from gyre.engine.scheduler.scheduler import schedule
from gyre.engine.scheduler.sequence import Sequence, sequences_of
from gyre.engine.scheduler.state import SchedulerState
from gyre.engine.scheduler.step import SampledTokens, Step
from gyre.engine.scheduler.swap import NO_SWAP

PAGE_TOKENS, VERSION, PROMPT = 4, 7, 5


def never(sequence: Sequence, tokens: np.ndarray) -> bool:
    raise AssertionError("nobody asked for a stop string")


def make(
    name: str, prompt_tokens: int = PROMPT, chunk_tokens: int = 1, partials=(), **sampling
) -> Request:
    return Request(
        request_id=name,
        tokens=np.full(prompt_tokens, ord(name), np.int32),
        sampling=Sampling(**{"max_tokens": 9, **sampling}),
        chunk_tokens=chunk_tokens,
        partials=partials,
    )


def given(*tokens: int) -> Partial:
    zeros = np.zeros(len(tokens), np.float32)
    ids = np.asarray(tokens, np.int32)
    return Partial(
        index=0, tokens=ids, logprobs=zeros, raw_logprobs=zeros, versions=zeros.astype(np.int32)
    )


def sample(*tokens: int, **fields) -> SampledTokens:
    """Token t has the log-prob -t and the raw one -10 t."""
    tokens_N = np.asarray(tokens, np.int32)
    made = SampledTokens(
        tokens=tokens_N,
        logprobs=-tokens_N.astype(np.float32),
        raw_logprobs=-10.0 * tokens_N,
        supports={},
    )
    return replace(made, **fields)


class Bench:
    """A scheduler state without a device: the test says what each step chose."""

    def __init__(self, *requests: Request, **sizes) -> None:
        self.events: list[tuple[str, dict]] = []
        self.state = SchedulerState(
            **{
                "max_running": 6,
                "num_pages": 40,
                "page_tokens": PAGE_TOKENS,
                "prefix_cache": True,
                "rates": NO_SWAP,
                "emit": lambda kind, **fields: self.events.append((kind, fields)),
                **sizes,
            }
        )
        self.sequences: dict[str, list[Sequence]] = {}
        for arrival, request in enumerate(requests):
            made = sequences_of(request, arrival=arrival, eos_ids=(3, 4))
            self.sequences[request.request_id] = made
            self.state.enqueue(made)

    def launch(self, budget: int = 64) -> Step:
        step = schedule(self.state, token_budget=budget, version=VERSION)
        assert step is not None
        advance(self.state, step)
        return step

    def book(self, step: Step, sampled: SampledTokens, text_stop=never):
        chunks = commit_tokens(self.state, step, sampled, text_stop=text_stop)
        self.state.check()
        return chunks

    def step(self, *tokens: int, text_stop=never, **fields):
        return self.book(self.launch(), sample(*tokens, **fields), text_stop)


def told(chunks) -> list[tuple[str, list[int], str | None]]:
    return [(chunk.request_id, chunk.tokens.tolist(), chunk.finish) for chunk in chunks]


def num_unanswered(bench: Bench) -> int:
    return sum(map(len, bench.state.requests.values()))


def test_a_launch_counts_what_will_be_computed_and_chosen() -> None:
    """Of a budget of 11 tokens the first prompt takes 5, the second 6 of its 8; then one token, and
    the last two."""
    bench = Bench(make("a"), make("b", 8))
    rows = bench.state.rows
    first = bench.launch(budget=11)
    assert rows.computed_R[:2].tolist() == [5, 6] and rows.length_R[:2].tolist() == [6, 8]
    assert bench.state.counters.steps == 1 and rows.known_R[:2].tolist() == [5, 8]
    second = bench.launch(budget=11)
    assert rows.computed_R[:2].tolist() == [6, 8] and rows.length_R[:2].tolist() == [7, 9]
    assert bench.state.counters.steps == 2 and bench.state.counters.generated_tokens == 0
    assert told(bench.book(first, sample(1))) == [("a", [1], None)]
    assert told(bench.book(second, sample(2, 1))) == [("a", [2], None), ("b", [1], None)]
    assert bench.state.counters.generated_tokens == 3 and rows.known_R[:2].tolist() == [7, 9]


def test_values_are_written_where_the_step_said() -> None:
    bench = Bench(make("a", chunk_tokens=0), make("b", 2, chunk_tokens=0))
    bench.step(1, 2)
    bench.step(5, 6)
    rows = bench.state.rows
    for row, start, tokens in ((0, 5, [1, 5]), (1, 2, [2, 6])):
        span = slice(start, start + 2)
        assert rows.tokens_RW[row, span].tolist() == tokens
        assert rows.logprobs_RW[row, span].tolist() == [-token for token in tokens]
        assert rows.raw_RW[row, span].tolist() == [-10 * token for token in tokens]
        assert rows.versions_RW[row, span].tolist() == [VERSION, VERSION]


def test_flights_are_booked_in_order() -> None:
    bench = Bench(make("a"))
    bench.launch()
    second = bench.launch()
    with pytest.raises(AssertionError, match="order"):
        bench.book(second, sample(1))


def test_what_was_computed_for_one_that_has_ended_is_dropped() -> None:
    """Three decode; the middle one ends in the first of two launched steps. The second step's
    values of the others stay beside their owners."""
    bench = Bench(*(make(name, top_k=3, top_logprobs=2, chunk_tokens=0) for name in "abc"))

    def values(first: int) -> dict:
        ids = {place: np.asarray([first + place, 50]) for place in range(3)}
        return {
            "supports": ids,
            "top_logprobs": {
                place: (np.append(held, 60), np.asarray([-1.0, -2.0, -3.0]))
                for place, held in ids.items()
            },
        }

    one, two = bench.launch(), bench.launch()
    assert told(bench.book(one, sample(1, 3, 1, **values(10)))) == [("b", [3], "stop")]
    assert told(bench.book(two, sample(5, 6, 7, **values(20)))) == []
    assert bench.state.counters.generated_tokens == 5
    for name, tokens, supports in (("a", [1, 5], [10, 20]), ("c", [1, 7], [12, 22])):
        (sequence,) = bench.sequences[name]
        assert (
            sequence.row is not None
            and bench.state.rows.chosen(sequence.row).tokens.tolist() == tokens
        )
        assert [ids.tolist() for ids in sequence.supports] == [[first, 50] for first in supports]
        assert [ids.tolist() for ids, _ in sequence.top_logprobs] == [
            [first, 50] for first in supports
        ]
        assert [logprobs.tolist() for _, logprobs in sequence.top_logprobs] == [[-1.0, -2.0]] * 2


def test_a_completion_ends_with_any_of_its_stop_ids_or_at_its_length() -> None:
    requests = [
        make("a", stop_ids=(8,)),
        make("b", ignore_eos=True),
        make("c", max_tokens=2),
        make("d", max_tokens=1),
    ]
    bench = Bench(*requests)
    assert told(bench.step(1, 3, 1, 1)) == [
        ("a", [1], None),
        ("b", [3], None),
        ("c", [1], None),
        ("d", [1], "length"),
    ]
    assert told(bench.step(8, 8, 1)) == [("a", [8], "stop"), ("b", [8], None), ("c", [1], "length")]
    assert told(bench.step(4)) == [("b", [4], None)]
    bench = Bench(make("a"), make("b", max_tokens=1))
    assert told(bench.step(4, 3)) == [("a", [4], "stop"), ("b", [3], "stop")]


def test_chunks_go_out_when_they_are_full() -> None:
    bench = Bench(make("a", chunk_tokens=2, max_tokens=5), make("b", chunk_tokens=0, max_tokens=5))
    out = [told(bench.step(token, token)) for token in (5, 6, 7, 8, 9)]
    assert out == [
        [],
        [("a", [5, 6], None)],
        [],
        [("a", [7, 8], None)],
        [("a", [9], "length"), ("b", [5, 6, 7, 8, 9], "length")],
    ]


def test_a_stop_string_is_looked_for_behind_the_least_tokens_and_where_no_stop_id_ended_it() -> (
    None
):
    asked: list[tuple[str, list[int]]] = []

    def text_stop(sequence: Sequence, tokens: np.ndarray) -> bool:
        asked.append((sequence.request.request_id, tokens.tolist()))
        return tokens[-1] == 6

    bench = Bench(make("a", stop=("x",), min_tokens=1), make("b", stop=("x",)), make("c"))
    assert told(bench.step(6, 3, 6, text_stop=text_stop)) == [
        ("a", [6], None),
        ("b", [3], "stop"),
        ("c", [6], None),
    ]
    assert asked == []
    assert told(bench.step(5, 5, text_stop=text_stop)) == [("a", [5], None), ("c", [5], None)]
    assert told(bench.step(6, 6, text_stop=text_stop)) == [("a", [6], "stop"), ("c", [6], None)]
    assert asked == [("a", [6, 5]), ("a", [6, 5, 6])]


@pytest.mark.parametrize("name", ["logprobs", "raw_logprobs"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite_end_a_completion_without_its_last_token(
    name: str, value: float
) -> None:
    bench = Bench(make("a", chunk_tokens=0, top_k=2, top_logprobs=1), make("b", chunk_tokens=0))
    held = {
        "supports": {0: np.asarray([9])},
        "top_logprobs": {0: (np.asarray([5]), np.asarray([-1.0]))},
    }
    bench.step(1, 1, **held)
    bench.step(2, 2, **held)
    pages = bench.state.rows.pages_of(0).copy()
    (chunk,) = bench.step(5, 5, **held, **{name: np.asarray([value, -1.0])})
    assert told([chunk]) == [("a", [1, 2], "abort")] and "non-finite" in chunk.reason
    assert chunk.logprobs.tolist() == [-1, -2] and chunk.raw_logprobs.tolist() == [-10, -20]
    assert chunk.versions.tolist() == [VERSION, VERSION]
    assert chunk.support is not None and chunk.support.offsets.tolist() == [0, 1, 2]
    assert chunk.top_ids is not None and chunk.top_ids.tolist() == [[5], [5]]
    assert bench.events == [
        ("engine.nonfinite", {"request_id": "a", "index": 0, "version": VERSION})
    ]
    (tainted,) = bench.state.tainted
    assert (
        tainted.tolist() == pages.tolist()
        and not bench.state.pages.still_hold(pages, np.ones(2)).any()
    )
    assert told(bench.step(4)) == [("b", [1, 2, 5, 4], "stop")]


def piece_for(sequence: Sequence, *logprobs: float) -> PromptSlice:
    assert sequence.prompt_store is not None
    none = np.zeros((len(logprobs), 0), np.int32)
    return PromptSlice(
        prompt_store=sequence.prompt_store,
        first=1,
        logprobs=np.asarray(logprobs),
        top_ids=none,
        top_logprobs=none,
    )


@pytest.mark.parametrize(("worst", "finish"), [(-4.0, None), (np.nan, "abort"), (-np.inf, "abort")])
def test_a_prompt_that_the_model_broke_on_is_noticed_at_the_first_token(
    worst: float, finish: str | None
) -> None:
    bench = Bench(make("a", prompt_logprobs=0), make("b"))
    (sequence,) = bench.sequences["a"]
    chunk, other = bench.step(1, 1, pieces=(piece_for(sequence, -1.0, -2.0, -3.0, worst),))
    assert (chunk.finish, other.finish) == (finish, None)
    assert chunk.tokens.tolist() == ([1] if finish is None else [])
    if finish is None:
        assert chunk.prompt_logprobs is not None and chunk.prompt_logprobs.versions.tolist() == [
            -1,
            *[VERSION] * 4,
        ]
        assert chunk.prompt_logprobs.logprobs.tolist() == [0.0, -1.0, -2.0, -3.0, -4.0]
        assert not bench.state.rows.scored_R.any(), "it is looked over once"
    else:
        assert chunk.prompt_logprobs is None and sequence.prompt_store is None


def test_a_token_that_is_not_finite_ends_a_completion_whose_prompt_was_sound() -> None:
    bench = Bench(make("a", prompt_logprobs=0, chunk_tokens=0))
    (sequence,) = bench.sequences["a"]
    bench.step(1, pieces=(piece_for(sequence, -1.0, -2.0, -3.0, -4.0),))
    (chunk,) = bench.step(1, raw_logprobs=np.asarray([np.nan]))
    assert told([chunk]) == [("a", [1], "abort")] and chunk.prompt_logprobs is not None


def test_prompts_are_shared_from_the_step_that_computed_them_on() -> None:
    """Beside one that decodes two prompts of three pages end in one step, the first of three
    siblings."""
    bench = Bench(make("a"))
    bench.step(1)
    for arrival, request in enumerate([make("b", 9, n=3), make("c", 9)]):
        bench.state.enqueue(sequences_of(request, arrival=9 + arrival, eos_ids=()))
    step = bench.launch()
    assert step.sample_chunks.tolist() == [0, 0, 0, 1]
    for name in "bc":
        (fresh,) = sequences_of(make(name, 9), arrival=0, eos_ids=())
        assert len(bench.state.find_hits(fresh, VERSION)) == 0
    bench.book(step, sample(1, 1, 1, 1, 1))
    for name in "bc":
        (fresh,) = sequences_of(make(name, 9), arrival=0, eos_ids=())
        assert len(bench.state.find_hits(fresh, VERSION)) == 2


def test_a_prompt_is_shared_that_ends_beside_more_that_decode() -> None:
    bench = Bench(make("a"), make("b"))
    bench.step(1, 1)
    bench.state.enqueue(sequences_of(make("c", 9), arrival=9, eos_ids=()))
    bench.step(1, 1, 1)
    (fresh,) = sequences_of(make("c", 9), arrival=0, eos_ids=())
    assert len(bench.state.find_hits(fresh, VERSION)) == 2


def test_pages_out_of_the_window_are_given_back() -> None:
    """With a window of 3 tokens, of which the newest is one, the first page is out of sight of the
    7th token."""
    bench = Bench(make("a"), window=3)
    bench.step(1)
    assert bench.state.rows.first_R[0] == 0
    bench.step(1)
    assert bench.state.rows.first_R[0] == 1 and bench.state.pages.num_available == 39


def test_a_request_ends_wherever_its_completions_are() -> None:
    """Of four siblings two run and two wait; of another request nothing ends."""
    bench = Bench(make("a", n=4, chunk_tokens=0), make("b"), max_running=3)
    bench.step(1, 2, 1)
    chunks, partials = end_request(bench.state, "a", "deadline", "late", version=VERSION)
    bench.state.check()
    assert told(chunks) == [
        ("a", [1], "deadline"),
        ("a", [2], "deadline"),
        *[("a", [], "deadline")] * 2,
    ]
    assert {chunk.reason for chunk in chunks} == {"late"} and [chunk.index for chunk in chunks] == [
        0,
        1,
        2,
        3,
    ]
    assert [(one.index, one.tokens.tolist()) for one in partials] == [
        (0, [1]),
        (1, [2]),
        (2, []),
        (3, []),
    ]
    assert end_request(bench.state, "a", "deadline", "late", version=VERSION) == ([], [])
    assert told(bench.step(4)) == [("b", [4], "stop")]


@pytest.mark.parametrize(
    ("tokens", "sampling", "finish"),
    [
        ((1,), {"max_tokens": 1}, "length"),
        ((3,), {"max_tokens": 2}, "stop"),
        ((1, 2), {"max_tokens": 2}, "length"),
        ((1, 2), {"max_tokens": 3}, None),
        ((1, 3), {"max_tokens": 3}, "stop"),
        ((1, 3), {"max_tokens": 2}, "stop"),
        ((3, 1), {"max_tokens": 3}, None),
        ((1, 3), {"max_tokens": 3, "min_tokens": 1}, "stop"),
        ((1, 3), {"max_tokens": 3, "min_tokens": 2}, None),
        ((1, 6), {"max_tokens": 3, "stop": ("x",)}, "stop"),
        ((1, 6), {"max_tokens": 3, "stop": ("x",), "min_tokens": 1}, "stop"),
        ((1, 6), {"max_tokens": 3, "stop": ("x",), "min_tokens": 2}, None),
        ((1, 6), {"max_tokens": 3}, None),
        ((1, 5), {"max_tokens": 3, "stop": ("x",)}, None),
        ((), {"max_tokens": 3, "stop": ("x",)}, None),
    ],
)
def test_a_given_beginning_may_be_a_whole_answer(
    tokens: tuple, sampling: dict, finish: str | None
) -> None:
    """The stop string ends with token 6, the model's stop ids are 3 and 4."""
    bench = Bench(make("a", partials=(given(*tokens),), **sampling))
    chunks = end_complete_partials(
        bench.state,
        bench.sequences["a"],
        version=VERSION,
        text_stop=lambda sequence, tokens: tokens[-1] == 6,
    )
    bench.state.check()
    assert told(chunks) == ([] if finish is None else [("a", [], finish)])
    assert num_unanswered(bench) == (1 if finish is None else 0)


def test_each_completion_with_a_whole_answer_ends() -> None:
    whole = [replace(given(1, 3), index=index) for index in (1, 3)]
    bench = Bench(make("a", n=4, partials=tuple(whole)))
    chunks = end_complete_partials(
        bench.state, bench.sequences["a"], version=VERSION, text_stop=never
    )
    assert [(chunk.index, chunk.finish) for chunk in chunks] == [(1, "stop"), (3, "stop")]
    assert num_unanswered(bench) == 2
    bench.state.check()
