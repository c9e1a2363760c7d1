"""What a check that failed is worth: never more than a wrong answer, whatever the part, its values
and its weight."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.records import Score, ScorePart
from gyre.core.scores import lower_failed_parts
from gyre.rewards.config import RewardsConfig
from gyre.rewards.score import RuleScorer
from rewards_cases import Events, rollout

TOWER = r"<answer>9^{9^{9^{9^{9^9}}}}</answer>"
MODULE = """
import time

def signed(task, completion):
    if "hang" in completion:
        time.sleep(1000)
    if "raise" in completion:
        raise ValueError("no")
    if "none" in completion:
        return None
    return {"worst": -3.0, "wrong": -1.0}.get(completion, 1.0)
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_signed.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def score(
    parts: list[dict], texts: list[str], *, deadline_s: float = 60.0, workers: int = 1
) -> list[Score]:
    async def go() -> list[Score]:
        config = RewardsConfig.model_validate({"parts": parts, "workers": workers})
        scorer = RuleScorer(config, emit=Events().emit, clock=time.monotonic)
        try:
            rollouts = [rollout(n, text, {"answer": "5 + x"}) for n, text in enumerate(texts)]
            return list(await scorer.score(rollouts, deadline_s=deadline_s))
        finally:
            await scorer.close()

    return asyncio.run(go())


@pytest.mark.slow
def test_an_answer_that_hangs_the_matcher_gains_nothing() -> None:
    cases = [
        {"wrong": -1.0},
        {"wrong": -1.0, "unreadable": -2.0},
        {"right": 3.0, "wrong": 1.0, "unreadable": 2.0},
    ]
    parts = [
        {"kind": "answer", "name": f"{number} {weight}", "limit_s": 1.0, "weight": weight, **values}
        for number, values in enumerate(cases)
        for weight in (1.0, -0.5)
    ]
    texts = ["<answer>71</answer>", "nothing", "<answer>5 + x</answer>", TOWER]
    *others, tower = score([*parts, {"kind": "format"}], texts, workers=3)
    for place in range(len(parts)):
        failed = tower.parts[place]
        assert failed.outcome == "timeout"
        assert failed.weight * failed.value == min(
            s.parts[place].weight * s.parts[place].value for s in others
        )
    assert tower.value == pytest.approx(sum(part.weight * part.value for part in tower.parts))


@pytest.mark.parametrize("weight", [1.0, -1.0])
@pytest.mark.parametrize("failure", ["raise", "none", "hang"])
def test_a_function_that_breaks_gains_nothing(failure: str, weight: float) -> None:
    part = {"kind": "function", "path": "my_signed:signed", "limit_s": 2.0, "weight": weight}
    broken, *others = score([part, {"kind": "format"}], [failure, "right", "wrong", "worst"])
    assert broken.parts[0].outcome != "ok" and broken.is_scored
    assert broken.value == min(other.value for other in others)


def test_a_function_s_failure_is_worth_what_the_config_says() -> None:
    part = {"kind": "function", "path": "my_signed:signed", "failed": -7.0}
    assert [s.value for s in score([part], ["raise", "right", "worst"])] == [-7.0, 1.0, -3.0]


def test_parts_that_no_check_reached_in_time_count_as_their_least() -> None:
    parts = [
        {"kind": "answer", "wrong": -1.0},
        {"kind": "format"},
        {"kind": "format", "name": "against", "weight": -1.0},
        {"kind": "length", "soft_tokens": 4, "max_tokens": 8},
        {"kind": "reasoning_gym"},
    ]
    (late,) = score(parts, ["<answer>5</answer>"], deadline_s=0.0)
    assert [part.value for part in late.parts] == [-1.0, 0.0, 1.0, -1.0, 0.0] and not late.is_scored


@given(
    st.lists(
        st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.booleans(), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
def test_no_failure_is_worth_more_than_any_value(rows, first_weight, second_weight) -> None:
    def part(name, value, weight, ok):
        return ScorePart(
            name=name, value=value, weight=weight, reason="", outcome="ok" if ok else "error"
        )

    scores = []
    for number, (first, second, first_ok, second_ok) in enumerate(rows):
        parts = (
            part("a", first, first_weight, first_ok),
            part("b", second, second_weight, second_ok),
        )
        value = float(sum(p.weight * p.value for p in parts))
        scores.append(Score(rollout_id=str(number), value=value, parts=parts))
    lowered = lower_failed_parts(scores)
    for place in (0, 1):
        worth = [
            (s.parts[place].weight * s.parts[place].value, s.parts[place].outcome) for s in lowered
        ]
        for value, outcome in worth:
            assert outcome == "ok" or value == min(value for value, _ in worth)
    for before, after in zip(scores, lowered, strict=True):
        assert after.value == pytest.approx(sum(p.weight * p.value for p in after.parts))
        assert [p for p in after.parts if p.outcome == "ok"] == [
            p for p in before.parts if p.outcome == "ok"
        ]
    assert lower_failed_parts(lowered) == lowered
    assert lower_failed_parts([*lower_failed_parts(scores[:3]), *scores[3:]]) == lowered
