"""Runs stopped anywhere and resumed: each prompt is taken once, and each group is trained on once,
dropped and counted once, or carried."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.config import FakeEngineConfig, FakeTrainerConfig
from fakes.source import ListSource
from gyre.loop.stopping import StopRequest
from gyre.objectives.config import GrpoConfig
from loop_cases import GROUPS_OF_4, TRAIN, Bench, digit_share, digits_script, turn
from unit.loop.asynchronous.test_overlap import ask_at, trained_groups

STEPS = 6
ENGINE = FakeEngineConfig(token_delay_s=0.001)
TRAINER = FakeTrainerConfig(step_delay_s=0.01)


def begun_prompts(benches: list[Bench]) -> dict[tuple[int, int], tuple[int, ...]]:
    """Prompt tokens of each group that the engine was asked for, by (step, place)."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for bench in benches:
        for _, request in bench.engine.asked:
            step, place = request.request_id.split(".")[:2]
            tokens = tuple(request.tokens.tolist())
            assert found.setdefault((int(step), int(place)), tokens) == tokens
    return dict(sorted(found.items()))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    bound=st.integers(0, 3),
    weight_update=st.sampled_from(["drain", "continue"]),
    cap=st.sampled_from([0, 0, 4, 7]),
    phase=st.sampled_from(["rollout", "score", "train", "handover"]),
    step=st.integers(1, STEPS),
    deadline_s=st.sampled_from([0.0, 0.02, 30.0]),
)
def test_a_stop_anywhere_loses_and_repeats_nothing(
    bound, weight_update, cap, phase, step, deadline_s
):
    rollout = GROUPS_OF_4.model_copy(
        update={
            "max_staleness": bound,
            "weight_update": weight_update if bound else "drain",
            "max_tokens_per_iteration": cap,
        }
    )
    keys: dict[str, Any] = {
        "script": digits_script,
        "table": digit_share,
        "objective": GrpoConfig(),
        "steps": STEPS,
        "rollout": rollout,
        "engine": ENGINE,
        "trainer": TRAINER,
    }
    with tempfile.TemporaryDirectory() as folder:
        benches = [Bench(Path(folder), stop=StopRequest(deadline_s=deadline_s), **keys)]
        ask_at(benches[0], phase, step)
        progress = turn(benches[0])
        if not progress.done:
            benches.append(Bench(Path(folder), **keys))
            kept = benches[0].shelf.kept
            progress = turn(benches[1], kept=kept[max(kept)])
        rows = benches[-1].rows
        dropped = sum(row["count"] for row in rows("drop.stale"))
        ages = [int(age) for row in rows("rollouts.staleness") for age in row["tokens"]]
        assert [row["step"] for row in rows("step.done")] == list(range(1, STEPS + 1))
    assert progress.done and progress.step == STEPS
    prompts = begun_prompts(benches)
    source = ListSource(TRAIN, seed=5).take(len(prompts))
    assert list(prompts.values()) == [tuple(prompt.tokens.tolist()) for prompt in source]
    trained = [group for bench in benches for group in trained_groups(bench)]
    carried = {group.group_id for group in progress.in_flight}
    assert len(trained) == len(set(trained)) and not carried & set(trained)
    assert len(prompts) == len(trained) + dropped + len(carried)
    assert max(ages, default=0) <= bound
