"""KL in the reward, through the real run: it is between the trainer's own log-probs, so that a
policy that is its reference still has none, whatever the engine rounds otherwise, while memory
moves between the phases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from system_runs import events_of, gyre, write_config

pytestmark = pytest.mark.slow

BASE = {
    "cold_start": None,
    "objective.kl_coef": 0.05,
    "trainer.steps": 2,
    "trainer.epochs_per_batch": 2,
    "trainer.learning_rate": 1e-2,
    "eval.num_problems": 2,
    "memory.residency": "phase",
}
OBJECTIVES: dict[str, Mapping[str, Any]] = {
    "ppo": {"objective.kind": "ppo"},
    "reinforce_pp": {"objective.variant": "reinforce_pp", "run.dtype": "bfloat16"},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_it_is_exactly_0_before_the_first_update(tmp_path: Path, name: str) -> None:
    answer = gyre(
        "train", write_config(tmp_path, {**BASE, **OBJECTIVES[name]}), "--plain", folder=tmp_path
    )
    assert answer.code == 0, answer.err
    run = tmp_path / "runs" / "tiny"
    first, second = (row["metrics"] for row in events_of(run, "step.done"))
    assert first["kl_reference"] == 0.0
    assert first["logprob_gap"] > 0.0, "the engine's log-probs are not the trainer's to the bit"
    assert second["kl_reference"] != 0.0
    assert first["kl_old"] > 0.0, "the second epoch is measured against the policy before the step"
    phases = [row["phase"] for row in events_of(run, "phase.ended")]
    assert phases.count("score/policy") == phases.count("score/reference") == 2
