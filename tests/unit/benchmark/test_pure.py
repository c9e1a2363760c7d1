"""Loads, arrivals, prompts, events and summaries: what is decided without a server."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.benchmark.answers import EventReader
from gyre.benchmark.loads import (
    NUM_UNITS,
    Lengths,
    PrefixLoad,
    RandomLoad,
    RequestPlace,
    TextLoad,
    poisson_times_s,
    sharegpt_requests,
    sharegpt_turns,
)
from gyre.benchmark.prompts import FIRST_TOKEN_ID, WORDS, RequestTemplate, as_text, fit_text
from gyre.benchmark.records import DrawnRequest, Level, RequestResult, TokenCounts
from gyre.benchmark.summary import percentiles, summarize
from gyre.core.errors import ConfigError, InputError

seeds = st.integers(0, 2**32)
places = st.builds(
    RequestPlace, level=st.integers(1, 9), warm_up=st.booleans(), index=st.integers(0, 999)
)
lengths = st.builds(
    Lengths,
    input_tokens=st.integers(1, 300),
    output_tokens=st.integers(1, 300),
    spread=st.floats(0, 0.99),
)


@given(seeds, st.floats(0.1, 1000))
def test_arrivals_grow_and_are_those_of_the_seed(seed: int, rate_per_s: float) -> None:
    first, again = (
        list(itertools.islice(poisson_times_s(rate_per_s, seed=(seed,)), 600)) for _ in range(2)
    )
    assert first == again
    assert first[0] > 0 and all(one < two for one, two in pairwise(first))


def test_arrivals_have_their_rate_and_the_spread_of_a_poisson_process() -> None:
    times = list(itertools.islice(poisson_times_s(4.0, seed=(1,)), 20_000))
    gaps = [two - one for one, two in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.25, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.05)


@given(lengths, seeds, places)
def test_a_random_prompt_has_its_length_and_depends_on_its_place_alone(
    lengths: Lengths, seed: int, place: RequestPlace
) -> None:
    load = RandomLoad(lengths=lengths, seed=seed)
    drawn = load.draw(place)
    load.draw(RequestPlace(level=3, warm_up=False, index=5))
    assert load.draw(place) == drawn == RandomLoad(lengths=lengths, seed=seed).draw(place)
    for count, mean in (
        (len(drawn.units), lengths.input_tokens),
        (drawn.max_tokens, lengths.output_tokens),
    ):
        assert abs(count - mean) <= lengths.spread * mean + 1 and count >= 1
    assert all(0 <= unit < NUM_UNITS for unit in drawn.units)


def test_prompts_of_levels_and_warm_up_share_nothing() -> None:
    load = RandomLoad(lengths=Lengths(input_tokens=16, output_tokens=1), seed=0)
    found = {
        load.draw(RequestPlace(level=level, warm_up=warm_up, index=index)).units
        for level in (1, 2)
        for warm_up in (True, False)
        for index in range(20)
    }
    assert len(found) == 80


@given(lengths, seeds, st.integers(1, 8), st.integers(1, 50), st.floats(0, 3), places)
def test_a_prompt_begins_with_one_of_the_prefixes(
    lengths: Lengths, seed: int, prefixes: int, prefix_tokens: int, zipf: float, place: RequestPlace
) -> None:
    load = PrefixLoad(
        lengths=lengths, prefixes=prefixes, prefix_tokens=prefix_tokens, zipf=zipf, seed=seed
    )
    drawn = load.draw(place)
    assert drawn.prefix in load._texts and len(load._texts) == prefixes
    assert len(drawn.prefix) == prefix_tokens and drawn.units


@pytest.mark.parametrize("zipf", [0.0, 1.0, 2.0])
def test_prefixes_have_the_shares_of_zipf(zipf: float) -> None:
    load = PrefixLoad(
        lengths=Lengths(input_tokens=1, output_tokens=1),
        prefixes=5,
        prefix_tokens=8,
        zipf=zipf,
        seed=3,
    )
    count = 4000
    drawn = (load.draw(RequestPlace(level=1, warm_up=False, index=index)) for index in range(count))
    found = Counter(load._texts.index(one.prefix) for one in drawn)
    weights = [rank**-zipf for rank in range(1, 6)]
    for number, weight in enumerate(weights):
        assert found[number] / count == pytest.approx(weight / sum(weights), abs=0.03)


def test_questions_are_taken_once_before_any_comes_again() -> None:
    load = TextLoad(
        drawn=[DrawnRequest(text=str(n), max_tokens=1) for n in range(30)], seed=1, per_level=10
    )
    found = [
        load.draw(RequestPlace(level=level, warm_up=False, index=index)).text
        for level in (1, 2, 3)
        for index in range(10)
    ]
    assert len(set(found)) == 30 and found != sorted(found, key=int)


ROWS = [
    {"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d e"}]},
    {"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "q q q q"}]},
    {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "user", "value": "four words are asked"},
            {"from": "assistant", "value": "and five words come back"},
        ]
    },
    {"conversations": [{"from": "human"}, {"from": "gpt", "value": 7}]},
    {"other": 1},
    7,
]


def test_a_conversation_is_its_first_question_and_answer() -> None:
    turns = sharegpt_turns(ROWS, source="f")
    assert turns == [("a b", "c d e"), ("four words are asked", "and five words come back")]
    free = sharegpt_requests(turns, max_tokens=9, count_tokens=None)
    assert [(one.text, one.max_tokens) for one in free] == [(turns[0][0], 9), (turns[1][0], 9)]
    (counted,) = sharegpt_requests(turns, max_tokens=9, count_tokens=lambda t: len(t.split()))
    assert (counted.text, counted.max_tokens) == (turns[1][0], 5)


@pytest.mark.parametrize("rows", [{}, [], [7], [{"conversations": []}], "text"])
def test_a_file_without_conversations_is_refused(rows: object) -> None:
    with pytest.raises(InputError, match=r"f\.json"):
        sharegpt_turns(rows, source="f.json")


@pytest.mark.parametrize("changed", [{"spread": 1.0}, {"spread": -0.1}, {"input_tokens": 0}])
def test_lengths_that_are_none_are_refused(changed: dict) -> None:
    with pytest.raises(ConfigError):
        Lengths(**{"input_tokens": 5, "output_tokens": 5} | changed)


def template(endpoint: str, stream: bool = True) -> RequestTemplate:
    return RequestTemplate(
        endpoint=endpoint, model="m", stream=stream, temperature=0.0, ignore_eos=True
    )


@given(st.lists(st.integers(0, NUM_UNITS - 1), min_size=1), st.integers(1, 99))
def test_a_completion_is_asked_with_as_many_ids(units: list[int], max_tokens: int) -> None:
    drawn = DrawnRequest(prefix=tuple(units[:2]), units=tuple(units), max_tokens=max_tokens)
    body = json.loads(template("completions").body(drawn, None))
    assert body["prompt"] == [FIRST_TOKEN_ID + unit for unit in [*units[:2], *units]]
    assert body["max_tokens"] == max_tokens and body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    whole = json.loads(template("completions", stream=False).body(drawn, None))
    assert "stream_options" not in whole and whole["stream"] is False


@given(
    st.integers(0, 40),
    st.integers(1, 5),
    st.integers(0, 400),
    st.integers(100, 400),
    seeds,
)
def test_a_text_has_about_the_tokens_that_were_asked(
    overhead: int, per_word: int, num_prefix: int, num_units: int, seed: int
) -> None:
    """For a server whose words have `per_word` tokens each."""
    fit = fit_text((16, 64), (overhead + 16 * per_word, overhead + 64 * per_word))
    units = tuple((seed + at * 7) % NUM_UNITS for at in range(num_units))
    drawn = DrawnRequest(prefix=tuple(range(num_prefix % 200)), units=units, max_tokens=1)
    text = as_text(drawn, fit)
    tokens = overhead + per_word * len(text.split())
    assert abs(tokens - len(drawn.prefix) - num_units) <= per_word
    other = as_text(DrawnRequest(prefix=drawn.prefix, units=units[::-1], max_tokens=1), fit)
    shared = round(len(drawn.prefix) / fit.tokens_per_word)
    assert text.split()[:shared] == other.split()[:shared]
    assert set(text.split()) <= {word.strip() for word in WORDS}


def test_a_server_that_counts_no_text_is_refused() -> None:
    with pytest.raises(InputError, match="counts 10 prompt tokens"):
        fit_text((16, 64), (10, 10))


@given(
    st.lists(st.text("ab{}\n é", max_size=8).filter(lambda text: "\n\n" not in text)),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.data(),
)
def test_events_are_the_same_wherever_their_bytes_are_split(
    texts: list[str], newline: str, data: st.DataObject
) -> None:
    events = ["".join(f"data: {line}{newline}" for line in text.split("\n")) for text in texts]
    raw = f": a comment{newline}{newline}".join(event + newline for event in events).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    reader, found = EventReader(), []
    for begin, end in pairwise([0, *cuts, len(raw)]):
        found += reader.feed(raw[begin:end])
    found += reader.feed(b"\n" if raw.endswith(b"\r") else b"")
    assert [one.decode() for one in found] == [text for text in texts if text]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_percentiles_lie_between_the_values_beside_them(values: list[float]) -> None:
    found, ordered = percentiles(values), sorted(values)
    assert found.count == len(values)
    for share, value_ms in ((0.5, found.p50_ms), (0.9, found.p90_ms), (0.99, found.p99_ms)):
        at = share * (len(ordered) - 1)
        low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
        expected = low + (high - low) * (at - math.floor(at))
        assert value_ms / 1000 == pytest.approx(expected, abs=1e-9)


def outcome(due_s: float, times_s: tuple[float, ...], ended_s: float, tokens: int) -> RequestResult:
    usage = TokenCounts(prompt_tokens=10, completion_tokens=tokens, cached_tokens=4)
    return RequestResult(
        due_s=due_s, sent_s=due_s + 0.5, ended_s=ended_s, text_times_s=times_s, usage=usage
    )


def test_a_level_worked_by_hand() -> None:
    outcomes = [
        outcome(0.0, (1.0, 2.0, 4.0), 5.0, tokens=9),
        outcome(1.0, (3.0, 3.0), 6.0, tokens=1),
        RequestResult(
            due_s=2.0, sent_s=2.0, ended_s=10.0, failure="429 queue_full", detail="first"
        ),
        RequestResult(
            due_s=2.0, sent_s=0.0, ended_s=3.0, failure="429 queue_full", detail="second"
        ),
        RequestResult(due_s=2.0, sent_s=2.0, ended_s=3.0, failure="timeout"),
        RequestResult(due_s=2.0, sent_s=2.0, ended_s=4.0),
    ]
    found = summarize(
        Level(concurrency=2), outcomes, failed_warm_up=2, unfinished=1, client_cpu_s=2.5
    )
    assert (found.ok, found.failed, found.unfinished, found.without_usage) == (3, 3, 1, 1)
    assert found.failures == {"429 queue_full": 2, "timeout": 1}
    assert found.failure_details["429 queue_full"] == "first"
    assert found.wall_s == 10.0 and found.client_cpu_share == 0.25
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (20, 10, 8)
    assert found.chunks == 5
    assert found.requests_per_s == pytest.approx(0.3)
    assert (found.output_tokens_per_s, found.total_tokens_per_s) == (1.0, 3.0)
    assert (found.ttft.count, found.ttft.p50_ms) == (2, 1500.0)  # 1 s and 2 s
    assert (found.itl.count, found.itl.p50_ms) == (3, 1000.0)  # 1 s, 2 s and 0 s
    assert (found.tpot.count, found.tpot.p50_ms) == (1, 500.0)  # 4 s for 8 tokens
    assert (found.e2e.count, found.e2e.p50_ms) == (3, 5000.0)  # 5 s, 5 s and 2 s
    assert found.send_delay.count == 5


def test_a_level_without_answers_has_zeros() -> None:
    found = summarize(Level(concurrency=1), [], failed_warm_up=0, unfinished=3, client_cpu_s=0.1)
    assert (found.ok, found.wall_s, found.output_tokens_per_s, found.itl.count) == (0, 0.0, 0.0, 0)
