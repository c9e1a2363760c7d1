"""A completion that repeats itself ends, at the same token whenever the loop looks."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.chunks import first_tokens
from gyre.core.records import Partial, Support
from gyre.loop.config import RolloutConfig
from gyre.loop.repetition import CHECK_TOKENS, RepetitionFinder, RepetitionRule
from gyre.objectives.config import GrpoConfig
from loop_cases import GROUPS_OF_4, TOKENIZER, Bench, turn

RULE = {"stop_repetition": 3, "repetition_pattern_tokens": (4, 8), "max_tokens": 200}
LOOPING = GROUPS_OF_4.model_copy(update=RULE)


def slow_find(tokens: list[int], rule: RepetitionRule) -> int | None:
    """By definition: the first place behind `count` equal patterns."""
    for end in range(1, len(tokens) + 1):
        for size in range(rule.min_pattern, rule.max_pattern + 1):
            start = end - size * rule.count
            pattern = tokens[end - size : end]
            if start >= 0 and tokens[start:end] == pattern * rule.count:
                return end
    return None


rules = st.builds(
    lambda count, low, more: RepetitionRule(count=count, min_pattern=low, max_pattern=low + more),
    st.integers(2, 4),
    st.integers(1, 4),
    st.integers(0, 4),
)


@given(rules, st.lists(st.integers(0, 2), max_size=60), st.integers(1, 9))
def test_it_is_found_where_the_definition_has_it_for_any_pieces(rule, tokens, size):
    finder, found = RepetitionFinder(rule), None
    for start in range(0, len(tokens), size):
        found = finder.find(tokens[start : start + size])
        if found is not None:
            break
    assert found == slow_find(tokens, rule)


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6), st.data())
def test_the_first_tokens_of_a_partial_keep_their_support(choices, data):
    count = data.draw(st.integers(0, len(choices)))
    numbers = np.arange(len(choices))
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in choices])])
    whole = Partial(
        index=2,
        tokens=numbers.astype(np.int32),
        logprobs=numbers.astype(np.float32),
        raw_logprobs=-numbers.astype(np.float32),
        versions=numbers.astype(np.int32),
        support=Support(offsets=offsets, ids=np.array(list(chain(*choices)), dtype=np.int32)),
    )
    cut = first_tokens(whole, count)
    assert cut.tokens.tolist() == cut.versions.tolist() == list(range(count))
    assert cut.logprobs.tolist() == (-cut.raw_logprobs).tolist() == list(range(count))
    assert cut.support is not None and len(cut.support.offsets) == count + 1
    assert cut.support.ids.tolist() == list(chain(*choices[:count]))


def loop_script(request: Any, index: int, version: int) -> list[int]:
    """Every other completion falls into a loop of 5 digits behind its first 7."""
    if request.request_id.endswith((".1", ".3")):
        return [*TOKENIZER.encode("9876543" + "12345" * 60).tolist(), TOKENIZER.end_id]
    return [*TOKENIZER.encode("42").tolist(), TOKENIZER.end_id]


def made(folder, **more: Any) -> Bench:
    settings = {
        "rollout": LOOPING,
        "script": loop_script,
        "table": lambda rollout: float(rollout.text == "42"),
        "objective": GrpoConfig(mask_truncated=True),
        "steps": 2,
    }
    return Bench(folder, **(settings | more))


def test_a_loop_ends_early_is_trained_on_and_counted(tmp_path):
    bench = made(tmp_path)
    turn(bench)
    by_finish = {
        finish: [rollout for rollout in bench.seen if rollout.finish == finish]
        for finish in ("stop", "repetition")
    }
    assert [len(found) for found in by_finish.values()] == [16, 16]
    texts = {rollout.text for rollout in by_finish["repetition"]}
    assert texts == {"9876543" + "12345" * 3}, "to the end of the third pattern, and no further"
    assert [row["count"] for row in bench.rows("rollouts.repetition_stopped")] == [8, 8]
    assert [row["repetition_share"] for row in bench.steps()] == [0.5, 0.5]
    assert not bench.rows("drop.truncated"), "it is no truncation: the objective sees it"
    for batch in bench.trainer.batches:
        assert len(batch.sequences) == 16
        bad = [s for s in batch.sequences if s.scalars["score"] == 0.0]
        assert len(bad) == 8 and all(s.columns["advantages"].min() < 0 for s in bad)
    assert not bench.engine.live
    generated = max(len(r.tokens) - len(r.prompt.tokens) for r in by_finish["repetition"])
    assert generated == 22 < CHECK_TOKENS


def test_without_the_option_it_runs_to_its_end(tmp_path):
    plain = GROUPS_OF_4.model_copy(update={"max_tokens": 200})
    bench = made(tmp_path, rollout=plain.model_copy(update={"max_tokens_per_iteration": 200}))
    turn(bench)
    assert {rollout.finish for rollout in bench.seen} == {"stop", "length"}
    assert max(int(rollout.sampled.sum()) for rollout in bench.seen) == 200
    assert not bench.rows("rollouts.repetition_stopped")


@pytest.mark.parametrize("cap", [3, 10, 17])
def test_a_loop_across_iterations_ends_at_the_same_token(tmp_path, cap):
    capped = LOOPING.model_copy(update={"max_tokens_per_iteration": cap})
    bench = made(tmp_path, rollout=capped, steps=9)
    turn(bench)
    found = [rollout for rollout in bench.seen if rollout.finish == "repetition"]
    assert found and {rollout.text for rollout in found} == {"9876543" + "12345" * 3}
    assert all(len(rollout.logprobs) == len(rollout.tokens) for rollout in found)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"stop_repetition": 1}, "need 2 or more"),
        ({"repetition_pattern_tokens": (0, 4)}, "1 <= shortest <= longest"),
        ({"repetition_pattern_tokens": (9, 4)}, "1 <= shortest <= longest"),
        ({"repetition_pattern_tokens": (9, 4000)}, "1024"),
    ],
)
def test_what_cannot_be_looked_for_is_refused(values, says):
    with pytest.raises(ValueError, match=says):
        RolloutConfig(**values)
