"""Contract suite of Scorer: what the loop relies on, for the shipped rule scorer and the fake."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from fakes.scorer import TableScorer
from gyre.core.records import Prompt, Rollout, Sampling
from gyre.rewards.config import RewardsConfig
from gyre.rewards.score import RuleScorer

PARTS = [
    {"kind": "answer", "forms": ["plain"], "compare": "exact"},
    {"kind": "format", "weight": 0.5},
]


def _rule(emit):
    return RuleScorer(
        RewardsConfig.model_validate({"parts": PARTS, "workers": 2}),
        emit=emit,
        clock=time.monotonic,
    )


def _table(emit):
    return TableScorer(emit=emit)


SCORERS = {"rule": _rule, "table": _table}
ZEROS = np.zeros(4, np.float32)
ROLLOUT = Rollout(
    rollout_id="",
    group_id="g",
    prompt=Prompt(
        prompt_id="p",
        tokens=np.arange(2, dtype=np.int32),
        text="?",
        task={"answer": "5"},
        source="test",
    ),
    tokens=np.arange(4, dtype=np.int32),
    sampled=np.arange(4) >= 2,
    logprobs=ZEROS,
    raw_logprobs=ZEROS,
    versions=np.zeros(4, np.int32),
    sampling=Sampling(),
    finish="stop",
    text="5",
)
STRANGE = [
    "",
    " ",
    "\x00",
    "\ud800",
    "💥" * 1000,
    "</answer><answer>",
    "\\boxed{" * 500,
    "{" * 5000,
    "9^" * 500,
    "a" * 200_000,
]


@pytest.fixture(params=sorted(SCORERS))
def make(request):
    return SCORERS[request.param]


def _score(make, rollouts, *, deadline_s=60.0):
    async def go():
        scorer = make(lambda kind, **fields: None)
        try:
            return await scorer.score(rollouts, deadline_s=deadline_s)
        finally:
            await scorer.close()

    return asyncio.run(go())


def _rollouts(texts):
    return [replace(ROLLOUT, rollout_id=f"r{n}", text=text) for n, text in enumerate(texts)]


def test_same_length_and_order(make):
    texts = ["5" if n % 3 == 0 else "4" for n in range(50)]
    scores = _score(make, _rollouts(texts))
    assert [score.rollout_id for score in scores] == [f"r{n}" for n in range(50)]
    assert [score.value > 0.0 for score in scores] == [text == "5" for text in texts]


def test_nothing_to_score(make):
    assert list(_score(make, [])) == []


def test_never_raises_for_what_a_rollout_contains(make):
    scores = _score(make, _rollouts(STRANGE))
    assert len(scores) == len(STRANGE)
    for score in scores:
        assert np.isfinite(score.value) and score.parts and all(part.reason for part in score.parts)


def test_never_raises_for_what_a_task_contains(make):
    tasks = [
        {},
        {"answer": None},
        {"answer": ["5"]},
        {"answer": {"a": 1}},
        {"other": "5"},
        {"answer": "5" * 10_000},
    ]
    rollouts = [
        replace(ROLLOUT, rollout_id=f"r{n}", prompt=replace(ROLLOUT.prompt, task=task))
        for n, task in enumerate(tasks)
    ]
    assert [score.value for score in _score(make, rollouts)] == [0.0] * len(tasks)


def test_value_is_the_weighted_sum_of_the_parts(make):
    for score in _score(make, _rollouts(["5", "4", "<think></think><answer></answer>"])):
        assert score.value == pytest.approx(sum(part.weight * part.value for part in score.parts))
        assert all(part.outcome in ("ok", "timeout", "error", "invalid") for part in score.parts)


def test_deadline_is_kept_with_a_score_for_each(make):
    scores = _score(make, _rollouts(["5"] * 20), deadline_s=0.0)
    assert [score.rollout_id for score in scores] == [f"r{n}" for n in range(20)]
    for score in scores:
        assert (
            all(part.outcome == "timeout" and part.value == 0.0 for part in score.parts)
            and score.value == 0.0
        )


def test_times_are_on_the_monotonic_clock(make):
    before = time.monotonic()
    scores = _score(make, _rollouts(["5"] * 3))
    after = time.monotonic()
    assert all(before <= score.started_s <= score.ended_s <= after for score in scores)


def test_calls_overlap(make):
    async def go():
        scorer = make(lambda kind, **fields: None)
        calls = [scorer.score(_rollouts([text] * 9), deadline_s=60.0) for text in ("5", "4", "5")]
        answers = await asyncio.gather(*calls)
        await scorer.close()
        return answers

    right, wrong, again = asyncio.run(go())
    assert all(score.value > 0.0 for score in [*right, *again]) and all(
        score.value == 0.0 for score in wrong
    )


def test_the_same_rollouts_score_the_same(make):
    rollouts = _rollouts(["5", "4", "x"])
    first, second = ([(s.value, s.parts) for s in _score(make, rollouts)] for _ in range(2))
    assert first == second
