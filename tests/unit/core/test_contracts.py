"""What an engine says that it cannot do is refused, by name, and nothing else is."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.contracts import (
    EngineAbilities,
    find_unable,
    find_unable_commit,
    join_abilities,
)
from gyre.core.records import Request, Sampling

ABLE = EngineAbilities(engine="e", grammars=True)
PLAIN = Request(request_id="r", tokens=np.arange(3, dtype=np.int32), sampling=Sampling())
ASKED = {
    "truncation_sets": replace(PLAIN, sampling=Sampling(top_p=0.5)),
    "prompt_logprobs": replace(PLAIN, sampling=Sampling(prompt_logprobs=0)),
    "penalties": replace(PLAIN, sampling=Sampling(repetition_penalty=1.1)),
    "logit_bias": replace(PLAIN, sampling=Sampling(logit_bias=((1, 2.0),))),
    "min_tokens": replace(PLAIN, sampling=Sampling(min_tokens=1)),
    "stop_strings": replace(PLAIN, sampling=Sampling(stop=("x",))),
    "priorities": replace(PLAIN, priority=-1),
    "deadlines": replace(PLAIN, deadline_s=1.0),
    "traces": replace(PLAIN, traced=True),
    "grammars": replace(PLAIN, grammar="root ::= x"),
}
# of the answer, of draws, of a commit or of a parked engine; `find_unable` is about requests
OTHERS = {
    *("engine", "draws_by_position", "raw_logprobs", "most_top_logprobs", "commit_policies"),
    *("prepares_on_device", "sources", "sleep_levels"),
}


def test_every_ability_is_looked_at() -> None:
    assert {field.name for field in fields(EngineAbilities)} == ASKED.keys() | OTHERS


@pytest.mark.parametrize("ability", ASKED)
def test_only_what_needs_a_missing_ability_is_refused(ability: str) -> None:
    without = replace(ABLE, **{ability: False})
    assert find_unable(PLAIN, without) is None
    for name, request in ASKED.items():
        assert find_unable(request, ABLE) is None
        reason = find_unable(request, without)
        assert (reason is None) == (name != ability)
        assert reason is None or reason.startswith("e cannot do what the request asks for: ")


def test_greedy_choices_need_no_truncation_sets() -> None:
    greedy = replace(PLAIN, sampling=Sampling(temperature=0.0, top_k=3))
    assert find_unable(greedy, replace(ABLE, truncation_sets=False)) is None


def test_alternatives_are_bounded() -> None:
    few = replace(ABLE, most_top_logprobs=2)
    assert find_unable(replace(PLAIN, sampling=Sampling(top_logprobs=2)), few) is None
    reason = find_unable(replace(PLAIN, sampling=Sampling(top_logprobs=3)), few)
    assert reason is not None and "top_logprobs = 3 (at most 2)" in reason


def test_a_commit_has_a_policy_that_the_engine_takes() -> None:
    only = replace(ABLE, commit_policies=("drain",))
    assert find_unable_commit("drain", only) is None
    reason = find_unable_commit("continue", only)
    assert reason == "e cannot commit with policy 'continue'; it takes drain"


@given(st.lists(st.sets(st.sampled_from(sorted(ASKED))), min_size=1, max_size=3))
def test_engines_of_several_kinds_can_do_what_each_can(missing: list[set[str]]) -> None:
    engines = [
        replace(ABLE, engine=f"e{at}", **dict.fromkeys(names, False))
        for at, names in enumerate(missing)
    ]
    together = join_abilities(engines)
    for request in ASKED.values():
        refused = any(find_unable(request, one) for one in engines)
        assert (find_unable(request, together) is not None) == refused


def test_bounds_and_choices_of_engines_of_several_kinds() -> None:
    few = replace(ABLE, engine="f", most_top_logprobs=2, commit_policies=("drain",))
    sleeping = replace(ABLE, sleep_levels=(1, 2))
    together = join_abilities([ABLE, few, sleeping])
    assert together.most_top_logprobs == 2 and together.commit_policies == ("drain",)
    assert together.sleep_levels == () and together.engine == "e and f"
    assert join_abilities([few, few]) == few
