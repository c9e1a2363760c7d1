"""Memory through the real run: what parks, saves, frees or restarts components changes no number,
and the log proves where the bytes were in each phase."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from system_runs import Story, events_of, gyre, read_story, write_config

pytestmark = pytest.mark.slow

BASE = {"objective.kl_coef": 0.05, "trainer.steps": 4}
LEAVE: dict[str, Mapping[str, str]] = {
    "park": {},
    "disk": {"actor": "disk", "reference": "disk"},
    "destroy": {"engine": "destroy", "actor.grads": "destroy"},
    "mixed": {"actor.optimizer": "disk", "engine": "destroy", "reference": "park"},
}
# the optimizer outside phase train
WHERE = {"park": "host", "disk": "disk", "destroy": "host", "mixed": "disk"}


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("resident")
    config = write_config(folder, {**BASE, "memory.residency": "resident"})
    answer = gyre("train", config, "--plain", folder=folder)
    assert answer.code == 0, answer.err
    return read_story(folder / "runs" / "tiny")


def run_with(folder: Path, sets: Mapping[str, Any]) -> Path:
    memory = {"memory.residency": "phase", "memory.disk_folder": "parked"}
    answer = gyre(
        "train", write_config(folder, {**BASE, **memory, **sets}), "--plain", folder=folder
    )
    assert answer.code == 0, answer.err
    assert not answer.left_behind
    return folder / "runs" / "tiny"


def boundaries(run: Path) -> list[dict[str, Any]]:
    """Memory events of the main stage's steps."""
    return [
        row for row in events_of(run, "memory") if row["step"] > 0 and "engine.kv" in row["owners"]
    ]


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=() if how == "mixed" else pytest.mark.slow) for how in LEAVE]
)
def test_moves_change_no_number(tmp_path: Path, resident: Story, how: str) -> None:
    run = run_with(tmp_path, {"memory.leave": LEAVE[how]})
    assert read_story(run) == resident
    rows = boundaries(run)
    for row in rows:
        owners, phase = row["owners"], row["phase"]
        on_device = {name for name, usage in owners.items() if usage["device"]}
        assert ("actor.optimizer" in on_device) == (phase == "train"), row
        assert ("reference" in on_device) == (phase == "score"), row
        assert ("engine.kv" in on_device) == (phase in ("rollout", "evaluate")), row
        assert ("actor.grads" in on_device) == (phase == "train"), row
        assert "actor.params" in on_device, "shared with the engine, needed in every phase"
        if phase != "train":
            assert owners["actor.optimizer"][WHERE[how]] > 0
        assert owners["actor.grads"]["host"] == owners["actor.grads"]["disk"] == 0, (
            "nothing in them to keep"
        )
    by_phase: dict[str, set[tuple[int, ...]]] = {}
    for row in rows:
        totals = tuple(
            sum(usage[tier] for usage in row["owners"].values())
            for tier in ("device", "host", "disk")
        )
        by_phase.setdefault(row["phase"], set()).add(totals)
    assert {"rollout", "score", "train", "handover"} <= set(by_phase)
    assert all(len(totals) == 1 for totals in by_phase.values()), (
        f"bytes drift over the iterations: {by_phase}"
    )
    restarts = [row for row in events_of(run, "engine.started") if row["dummy"]]
    assert bool(restarts) == (LEAVE[how].get("engine") == "destroy")
    if restarts:
        assert len(events_of(run, "engine.terminated")) >= 4, "once a step"
    assert not [path for path in (run / "parked").rglob("*") if path.is_file()], (
        "files of the disk tier are gone"
    )


@pytest.mark.parametrize(
    "sets",
    [
        {"objective.kind": "ppo", "memory.leave": {"critic": "disk", "engine": "destroy"}},
        {"run.dtype": "bfloat16", "memory.leave": {"actor": "disk", "engine": "destroy"}},
        {
            "rollout.max_tokens_per_iteration": 5,
            "memory.leave": {"actor": "disk", "engine": "destroy"},
        },
    ],
    ids=["ppo", "bf16", "partial"],
)
def test_other_runs_too(tmp_path: Path, sets: Mapping[str, Any]) -> None:
    plain = gyre(
        "train", write_config(tmp_path, {**BASE, **sets, "memory": {}}), "--plain", folder=tmp_path
    )
    assert plain.code == 0, plain.err
    whole = read_story(tmp_path / "runs" / "tiny")
    moved = tmp_path / "moved"
    moved.mkdir()
    assert read_story(run_with(moved, sets)) == whole


def test_a_budget_too_small_names_the_owners(tmp_path: Path) -> None:
    answer = gyre(
        "train",
        write_config(tmp_path, {"memory.device_budget_bytes": 200_000}),
        "--json",
        folder=tmp_path,
    )
    assert answer.code == 2, answer.err
    error = answer.json["error"]
    assert error["kind"] in ("memory", "config")
    assert "actor.params" in error["message"] and error["hint"], error
    assert "Traceback" not in answer.err


def test_a_tight_budget_spills(tmp_path: Path, resident: Story) -> None:
    """A budget that holds each phase, and not all components at once, is met by moving what is not
    needed."""
    peak = max(
        row["planned_peak_device_bytes"] for row in events_of(run_with(tmp_path, {}), "memory")
    )
    tight = tmp_path / "tight"
    tight.mkdir()
    config = write_config(tight, {**BASE, "memory.device_budget_bytes": peak + 1000})
    answer = gyre("train", config, "--plain", folder=tight)
    assert answer.code == 0, answer.err
    assert events_of(tight / "runs" / "tiny", "memory.move"), "something had to move"
    assert read_story(tight / "runs" / "tiny") == resident
