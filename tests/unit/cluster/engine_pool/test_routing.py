"""Routing decisions, by property: which engine gets a request, and what that bounds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gyre.cluster.engine_pool.routing import (
    ANSWER_WEIGHT,
    EngineCandidate,
    RequestWork,
    choose,
    estimate_work,
    follow_mean,
    rest_tokens,
)
from gyre.core.records import Partial, Request, Sampling

NEEDS = st.builds(
    RequestWork,
    prompt_tokens=st.integers(0, 4000),
    answer_work=st.integers(0, 4 * ANSWER_WEIGHT * 500),
)
SHARES = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.1, 1.0))
POLICIES = st.sampled_from(["prefix", "least_tokens", "round_robin"])


@st.composite
def asked(draw, shares=SHARES):
    """A need, and engines whose hits are parts of its prompt."""
    need = draw(NEEDS)
    count = draw(st.integers(1, 8))
    session = draw(st.integers(-1, count - 1))
    candidates = [
        EngineCandidate(
            name=f"engine-{place}",
            place=place,
            load=draw(st.integers(0, 100_000)),
            share=draw(shares),
            hit_tokens=draw(st.integers(0, need.prompt_tokens)),
            has_session=place == session,
            num_routed=draw(st.integers(0, 50)),
        )
        for place in range(count)
    ]
    return need, candidates


@given(asked(), POLICIES, st.integers(0, 9), st.randoms())
def test_the_order_in_which_engines_are_named_decides_nothing(case, policy, turn, random) -> None:
    need, candidates = case
    chosen = choose(candidates, need, policy=policy, turn=turn)
    random.shuffle(candidates)
    assert choose(candidates, need, policy=policy, turn=turn) == chosen


@given(asked(), POLICIES, st.integers(0, 9))
def test_an_ejected_engine_is_chosen_only_where_all_are(case, policy, turn) -> None:
    need, candidates = case
    chosen = choose(candidates, need, policy=policy, turn=turn)
    assert chosen.share > 0.0 or all(one.share == 0.0 for one in candidates)


@given(asked(shares=st.just(1.0)))
def test_neither_hits_nor_a_session_outweigh_much_more_load(case) -> None:
    """The chosen engine has at most twice the prompt more to do than any other."""
    need, candidates = case
    chosen = choose(candidates, need, policy="prefix")
    assert chosen.load - min(one.load for one in candidates) <= 2 * need.prompt_tokens
    plain = [one for one in candidates if not one.hit_tokens and not one.has_session]
    if len(plain) == len(candidates):
        assert chosen.load == min(one.load for one in candidates)


@given(asked(shares=st.just(1.0)))
def test_of_equal_loads_the_one_with_more_of_the_prompt_is_chosen(case) -> None:
    need, candidates = case
    same = [
        EngineCandidate(name=one.name, place=one.place, load=7, hit_tokens=one.hit_tokens)
        for one in candidates
    ]
    most = max(one.hit_tokens for one in same)
    assert choose(same, need, policy="prefix").hit_tokens == most


@given(NEEDS, st.integers(0, 100_000), st.integers(0, 20_000))
def test_a_session_stays_unless_its_engine_has_much_more_to_do(need, load, more) -> None:
    here = EngineCandidate(name="a", place=0, load=load + more, has_session=True, num_routed=9)
    there = EngineCandidate(name="b", place=1, load=load)
    stays = choose([here, there], need, policy="prefix") is here
    assert stays == (more < need.prompt_tokens / 2)


@given(asked(shares=st.just(1.0)), st.sampled_from([0.1, 0.3, 0.9]))
def test_one_that_returns_gets_no_more_than_its_share(case, share) -> None:
    """With whole shares elsewhere it is chosen only below its share of another's load."""
    need, candidates = case
    first, *others = [
        EngineCandidate(name=one.name, place=one.place, load=one.load) for one in candidates
    ]
    returning = EngineCandidate(name=first.name, place=first.place, load=first.load, share=share)
    chosen = choose([returning, *others], need, policy="least_tokens")
    work = need.prompt_tokens + need.answer_work
    if others and chosen is returning:
        least = min(one.load for one in others)
        assert returning.load + work <= share * (least + work) + 1e-6


@given(st.integers(1, 8), st.integers(0, 30), NEEDS)
def test_round_robin_takes_each_in_turn(count, requests, need) -> None:
    candidates = [EngineCandidate(name=str(place), place=place, load=0) for place in range(count)]
    turn, places = 0, []
    for _ in range(requests):
        places.append(choose(candidates, need, policy="round_robin", turn=turn).place)
        turn = places[-1] + 1
    assert places == [number % count for number in range(requests)]


@given(
    st.lists(st.integers(0, 900), max_size=30),
    st.lists(st.integers(0, 5000), min_size=1, max_size=6),
)
def test_least_tokens_is_greedy_and_balanced(costs, loads) -> None:
    now = list(loads)
    for cost in costs:
        candidates = [
            EngineCandidate(name=str(i), place=i, load=load) for i, load in enumerate(now)
        ]
        need = RequestWork(prompt_tokens=0, answer_work=cost)
        place = choose(candidates, need, policy="least_tokens").place
        assert now[place] == min(now) and place == now.index(min(now))
        now[place] += cost
    touched = [now[i] for i in range(len(now)) if now[i] > loads[i]]
    if touched:
        assert max(touched) - min(now) <= max(costs)


@given(
    st.integers(0, 40), st.integers(1, 4), st.integers(0, 60), st.integers(0, 60),
    st.none() | st.floats(0.0, 100.0),
)  # fmt: skip
def test_the_estimate_is_at_most_what_may_come(prompt, n, longest, begun, mean) -> None:
    empty = np.empty(0, np.float32)
    begin = Partial(
        index=0, tokens=np.zeros(begun, np.int32), logprobs=empty, raw_logprobs=empty,
        versions=np.empty(0, np.int32),
    )  # fmt: skip
    request = Request(
        request_id="r",
        tokens=np.zeros(prompt, np.int32),
        sampling=Sampling(n=n, max_tokens=longest),
        partials=(begin,),
    )
    need = estimate_work(request, mean)
    assert need.prompt_tokens == prompt
    most = ANSWER_WEIGHT * rest_tokens(request)
    assert 0 <= need.answer_work <= most
    if mean is None:
        assert need.answer_work == most


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50))
def test_the_mean_is_within_what_was_seen(lengths) -> None:
    mean = None
    for length in lengths:
        mean = follow_mean(mean, length)
    assert min(lengths) - 1e-6 <= mean <= max(lengths) + 1e-6
