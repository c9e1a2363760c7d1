"""A request becomes its completions; what they chose goes out once, in chunks and in what a later
request goes on from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest

from gyre.core.records import Partial, Request, Sampling
from gyre.engine.kv_cache.prompt_logprobs import PromptSlice
from gyre.engine.scheduler.sequence import (
    GeneratedTokens,
    Sequence,
    State,
    make_chunk,
    make_partial,
    make_support,
    sequences_of,
    truncates,
)

PROMPT = 3


def make(**sampling) -> Request:
    return Request(
        request_id="r", tokens=np.arange(PROMPT, dtype=np.int32), sampling=Sampling(**sampling)
    )


def begin(request: Request, **fields) -> list[Sequence]:
    return sequences_of(request, **{"arrival": 0, "eos_ids": (), **fields})


def chose(count: int) -> GeneratedTokens:
    """Tokens 0, 1, …; log-probs -0, -1, … and raw ones ten times that; versions 100, 101, …"""
    numbers = np.arange(count)
    return GeneratedTokens(
        tokens=numbers.astype(np.int32),
        logprobs=-numbers.astype(np.float32),
        raw_logprobs=-10 * numbers.astype(np.float32),
        versions=(100 + numbers).astype(np.int32),
    )


def given(count: int, index: int = 0, supports: Seq[list[int]] | None = None) -> Partial:
    made = chose(count)
    return Partial(
        index=index,
        tokens=made.tokens.astype(np.int64),
        logprobs=made.logprobs.astype(np.float64),
        raw_logprobs=made.raw_logprobs.astype(np.float64),
        versions=made.versions.astype(np.int64),
        support=None if supports is None else make_support([np.asarray(ids) for ids in supports]),
    )


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, False),
        ({"top_k": 1}, True),
        ({"top_k": 9, "temperature": 0.5}, True),
        ({"top_p": 0.999}, True),
        ({"top_p": 0.0}, True),
        ({"min_p": 0.001}, True),
        ({"top_k": 9, "top_p": 0.5, "min_p": 0.1, "temperature": 0.0}, False),
    ],
)
def test_what_can_remove_tokens(sampling: dict, expected: bool) -> None:
    """Greedy choice needs no truncation set, and 0, 1 and 0 are the values that remove nothing."""
    request = make(**sampling)
    assert truncates(request) is expected and begin(request)[0].truncates is expected


def test_a_request_becomes_n_completions_that_stop_at_its_ids_and_those_of_the_model() -> None:
    sequences = begin(make(n=3, stop_ids=(9, 4)), arrival=7, eos_ids=(2, 9))
    assert [(one.index, one.arrival, one.state, one.row) for one in sequences] == [
        (index, 7, State.WAITING, None) for index in range(3)
    ]
    assert {one.stop_ids for one in sequences} == {(2, 4, 9)}
    assert begin(make(ignore_eos=True, stop_ids=(9, 4)), eos_ids=(2,))[0].stop_ids == (4, 9)
    assert [one.known_tokens().tolist() for one in sequences] == [[0, 1, 2]] * 3
    first = sequences[0]
    nothing = make_partial(first, first.chosen)
    assert {
        len(part)
        for part in (nothing.tokens, nothing.logprobs, nothing.raw_logprobs, nothing.versions)
    } == {0}
    assert (first.emitted, first.top_from, first.hits_given_up, first.lost_tokens) == (0, 0, 0, 0)
    assert len({one.key for one in sequences}) == 3


def test_larger_priority_starts_first_then_earlier_arrival_then_smaller_index() -> None:
    ranked = [
        *begin(replace(make(n=2), priority=2), arrival=9),
        *begin(replace(make(), priority=1), arrival=3),
        *begin(replace(make(n=2), priority=1), arrival=4),
        *begin(make(), arrival=1),
    ]
    assert [one.rank for one in ranked] == sorted(one.rank for one in ranked)
    assert len({one.rank for one in ranked}) == len(ranked)


def test_a_sequence_changes_state_only_as_the_diagram_allows() -> None:
    allowed = {
        State.WAITING: "prefilling decoding finished",
        State.PREFILLING: "decoding preempted swapped finished",
        State.DECODING: "preempted swapped finished",
        State.PREEMPTED: "prefilling finished",
        State.SWAPPED: "prefilling decoding preempted finished",
        State.FINISHED: "",
    }
    for before, names in allowed.items():
        for after in State:
            (sequence,) = begin(make())
            sequence.state = before
            if after.value in names.split():
                sequence.enter(after)
                assert sequence.state is after
            else:
                with pytest.raises(AssertionError):
                    sequence.enter(after)


def test_a_given_beginning_is_where_its_completion_goes_on() -> None:
    """The second of three has two tokens already: they count as out, and need no prompt
    log-probs."""
    request = replace(make(n=3, top_k=5, prompt_logprobs=2), partials=(given(2, 1, [[7, 8], [9]]),))
    first, second, third = begin(request)
    assert (
        second.known_tokens().tolist() == [0, 1, 2, 0, 1]
        and second.known_tokens().dtype == np.int32
    )
    assert (second.emitted, second.top_from) == (2, 2) and second.prompt_store is None
    assert [ids.tolist() for ids in second.supports] == [[7, 8], [9]]
    dtypes = {
        name: getattr(second.chosen, name).dtype
        for name in ("tokens", "logprobs", "raw_logprobs", "versions")
    }
    assert dtypes == {
        "tokens": np.int32,
        "logprobs": np.float32,
        "raw_logprobs": np.float32,
        "versions": np.int32,
    }
    assert second.chosen.raw_logprobs.tolist() == [0, -10] and second.chosen.versions.tolist() == [
        100,
        101,
    ]
    assert first.prompt_store is not None and first.prompt_store is third.prompt_store
    assert first.prompt_store.num_tokens == PROMPT and first.prompt_store.best == 2
    assert first.emitted == third.emitted == 0 and first.supports == []


def test_an_empty_beginning_is_none() -> None:
    request = replace(make(top_k=5, prompt_logprobs=0), partials=(given(0, 0, []),))
    (sequence,) = begin(request)
    assert sequence.prompt_store is not None and sequence.emitted == 0 and sequence.supports == []


def test_what_truncation_left_of_a_beginning_counts_only_where_the_rest_truncates() -> None:
    (sequence,) = begin(replace(make(), partials=(given(1, 0, [[7, 8]]),)))
    assert sequence.supports == []
    (sequence,) = begin(replace(make(top_k=2), partials=(given(1),)))
    assert sequence.supports == []


def test_supports_are_packed_one_after_the_other() -> None:
    support = make_support([np.asarray([3, 5]), np.asarray([], np.int64), np.asarray([1])])
    assert support.offsets.tolist() == [0, 2, 2, 3] and support.ids.tolist() == [3, 5, 1]
    assert support.offsets.dtype == np.int64 and support.ids.dtype == np.int32
    empty = make_support([])
    assert (
        empty.offsets.tolist() == [0] and empty.ids.tolist() == [] and empty.ids.dtype == np.int32
    )


def test_each_chosen_token_goes_out_once_with_all_that_belongs_to_it() -> None:
    (sequence,) = begin(make(top_k=5, top_logprobs=2))
    supports = [np.asarray([at, at + 10]) for at in range(4)]
    told = [(np.asarray([at, at + 1]), np.asarray([-at, -at - 0.5])) for at in range(4)]
    sequence.supports, sequence.top_logprobs = supports[:1], told[:1]
    one = make_chunk(sequence, chose(1), None)
    sequence.supports, sequence.top_logprobs = supports, told
    rest = make_chunk(sequence, chose(4), "length", "why")
    assert [(chunk.tokens.tolist(), chunk.finish, chunk.reason) for chunk in (one, rest)] == [
        ([0], None, ""),
        ([1, 2, 3], "length", "why"),
    ]
    assert rest.logprobs.tolist() == [-1, -2, -3] and rest.raw_logprobs.tolist() == [-10, -20, -30]
    assert rest.versions.tolist() == [101, 102, 103] and sequence.emitted == 4
    assert one.support is not None and one.support.ids.tolist() == [0, 10]
    assert rest.support is not None and rest.support.ids.tolist() == [1, 11, 2, 12, 3, 13]
    assert rest.top_ids is not None and rest.top_ids.tolist() == [[1, 2], [2, 3], [3, 4]]
    assert rest.top_logprobs is not None and rest.top_logprobs.tolist() == [
        [-1, -1.5],
        [-2, -2.5],
        [-3, -3.5],
    ]
    nothing = make_chunk(sequence, chose(4), "abort")
    assert (
        nothing.tokens.tolist() == []
        and nothing.top_ids is not None
        and nothing.top_ids.shape == (0, 2)
    )


def test_what_was_not_asked_for_is_not_told() -> None:
    chunk = make_chunk(begin(make())[0], chose(2), None)
    assert chunk.support is chunk.top_ids is chunk.top_logprobs is chunk.prompt_logprobs is None


def enter(sequence: Sequence, targets: int) -> None:
    """Enter the log-probs of the prompt's first targets, which begin at token 1."""
    assert sequence.prompt_store is not None
    numbers = np.arange(1, 1 + targets, dtype=np.float32)
    ids = np.zeros((targets, 0), np.int32)
    piece = PromptSlice(
        prompt_store=sequence.prompt_store,
        first=1,
        logprobs=-numbers,
        top_ids=ids,
        top_logprobs=ids.astype(np.float32),
    )
    sequence.prompt_store.enter(piece, 4)


def test_prompt_logprobs_go_out_once_beside_the_first_token() -> None:
    (sequence,) = begin(make(prompt_logprobs=0))
    enter(sequence, 2)
    assert make_chunk(sequence, chose(0), None).prompt_logprobs is None
    told = make_chunk(sequence, chose(1), None).prompt_logprobs
    assert (
        told is not None
        and told.logprobs.tolist() == [0, -1, -2]
        and told.versions.tolist() == [-1, 4, 4]
    )
    assert make_chunk(sequence, chose(2), "length").prompt_logprobs is None


@pytest.mark.parametrize(
    ("finish", "is_fault"), [(None, True), ("stop", True), ("length", True), ("abort", False)]
)
def test_prompt_logprobs_with_gaps_go_out_with_no_sound_token(finish, is_fault: bool) -> None:
    (sequence,) = begin(make(prompt_logprobs=0))
    enter(sequence, 1)
    if is_fault:
        with pytest.raises(AssertionError, match="gaps"):
            make_chunk(sequence, chose(1), finish)
    else:
        assert (
            make_chunk(sequence, chose(1), finish).prompt_logprobs is None
            and sequence.prompt_store is not None
        )


def test_a_partial_holds_everything_chosen_whatever_went_out() -> None:
    sequence, plain = begin(make(n=2, top_k=3))[1], begin(make())[0]
    sequence.supports = [np.asarray([5, 6]), np.asarray([7])]
    chosen = chose(2)
    sequence.emitted = 1
    partial = make_partial(sequence, chosen)
    assert (
        partial.index == 1
        and partial.tokens.tolist() == [0, 1]
        and partial.logprobs.tolist() == [0, -1]
    )
    assert partial.raw_logprobs.tolist() == [0, -10] and partial.versions.tolist() == [100, 101]
    assert partial.support is not None and partial.support.offsets.tolist() == [0, 2, 3]
    chosen.tokens[0] = 99  # a row is used again
    assert partial.tokens.tolist() == [0, 1]
    assert make_partial(plain, chosen).support is None
