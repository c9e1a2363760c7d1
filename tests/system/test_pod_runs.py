"""Runs in a pod: trainer ranks and engines in processes of their own give what one process gives,
with weights in shared memory; a process that is killed costs what the others can't carry."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from system_runs import Answer, Fault, Story, events_of, gyre, read_story, write_config

from gyre.launch.placement.worker_placement import name_run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory is a folder on Linux"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

IN_POD: Mapping[str, Any] = {
    "cold_start": None,
    "trainer.steps": 4,
    "snapshot.every_steps": 1,
    "cluster": {"kind": "pod", "num_workers": 1, "engine_workers": 1, "progress_tokens": 2},
}


def run(folder: Path, sets: Mapping[str, Any], *, code: int = 0, **options: Any) -> Answer:
    folder.mkdir(exist_ok=True)
    answer = gyre("train", write_config(folder, sets), "--plain", folder=folder, **options)
    told = f"{answer.err}\n{events_of(folder / 'runs' / 'tiny')[-40:]}"
    assert not answer.left_behind, told
    assert answer.code == code, told
    return answer


def finished(folder: Path, sets: Mapping[str, Any], **options: Any) -> Story:
    run(folder, sets, **options)
    return read_story(folder / "runs" / "tiny")


def segments(folder: Path) -> list[str]:
    """What a run has in shared memory."""
    run_id = name_run(folder / "runs" / "tiny")
    return [path.name for path in Path("/dev/shm").glob(f"gyre-{run_id}-*")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Story:
    folder = tmp_path_factory.mktemp("whole")
    story = finished(folder, IN_POD)
    assert not segments(folder), "a run that has ended leaves no shared memory"
    return story


def test_a_pod_gives_what_one_process_gives(tmp_path: Path, undisturbed: Story) -> None:
    alone = finished(tmp_path, {**IN_POD, "cluster": None})
    assert undisturbed == alone


@pytest.mark.parametrize("zero", [1, 3])
def test_ranks_and_engines_in_any_numbers(tmp_path: Path, undisturbed: Story, zero: int) -> None:
    cluster = {**IN_POD["cluster"], "num_workers": 2, "engine_workers": 1 + zero // 3}
    story = finished(tmp_path, {**IN_POD, "cluster": cluster, "parallel.zero": zero})
    assert len(story.steps) == len(undisturbed.steps)
    for here, there in zip(story.steps, undisturbed.steps, strict=True):
        assert here["num_tokens"] == there["num_tokens"]
        for name in ("loss", "grad_norm", "reward", "length", "entropy"):
            assert here["metrics"][name] == pytest.approx(
                there["metrics"][name], rel=1e-3, abs=1e-4
            ), name
        assert here["metrics"]["logprob_gap_max"] < 1e-4


@pytest.mark.parametrize("phase", ["train", "handover"])
def test_a_killed_trainer_costs_a_restart_and_nothing_else(
    tmp_path: Path, undisturbed: Story, phase: str
) -> None:
    fault = Fault(
        point="event",
        match=f"phase.started {phase}",
        number=3,
        action="kill_worker",
        worker="worker-0",
    )
    story = finished(tmp_path, IN_POD, fault=fault)
    assert story == undisturbed and story.num_attempts == 2
    assert not segments(tmp_path)


def test_a_killed_engine_costs_its_rollouts_only_and_comes_back(tmp_path: Path) -> None:
    """Scores of the step in which it is lost wait until it is back."""
    cluster = {**IN_POD["cluster"], "engine_workers": 2}
    part = {
        "kind": "function",
        "path": "system_rewards:varied_once_back",
        "options": {"events": str(tmp_path / "runs" / "tiny" / "events.jsonl")},
        "limit_s": 100.0,
    }
    sets = {
        **IN_POD,
        "cluster": cluster,
        "rewards": {"workers": 1, "parts": [part]},
        "rollout.max_tokens": 64,
        "rollout.ignore_eos": True,
    }
    fault = Fault(
        point="event",
        match="phase.started rollout",
        number=2,
        action="kill_worker",
        worker="engine-0",
    )
    story = finished(tmp_path, sets, fault=fault)
    folder = tmp_path / "runs" / "tiny"
    assert story.num_attempts == 1 and len(story.steps) == 4
    (lost,) = events_of(folder, "engine.lost")
    assert lost["engine"] == "engine-0"
    (back,) = events_of(folder, "engine.rejoined")
    assert back["engine"] == "engine-0"
    assert all(step["metrics"]["logprob_gap_max"] < 1e-4 for step in story.steps), story.steps
    assert not events_of(folder, "retry.run_restarted")


def test_ctrl_c_leaves_nothing_behind_and_the_run_goes_on(
    tmp_path: Path, undisturbed: Story
) -> None:
    fault = Fault(point="event", match="phase.started rollout", number=3, action="interrupt_group")
    run(tmp_path, IN_POD, fault=fault, code=130)
    assert not segments(tmp_path)
    answer = gyre("train", "--resume", tmp_path / "runs" / "tiny", "--plain", folder=tmp_path)
    assert answer.code == 0, answer.err
    assert read_story(tmp_path / "runs" / "tiny") == undisturbed


@pytest.mark.parametrize("update", ["drain", "continue"])
def test_rollouts_run_while_the_policy_trains(tmp_path: Path, update: str) -> None:
    """Each batch is at most one version behind; with `continue` a completion may have two."""
    sets = {
        **IN_POD,
        "trainer.steps": 6,
        "rollout.max_staleness": 1,
        "rollout.weight_update": update,
        "rollout.ignore_eos": True,
        "cluster": {**IN_POD["cluster"], "colocated": False},
    }
    story = finished(tmp_path, sets)
    assert len(story.steps) == 6
    stale = [step["metrics"]["staleness_max"] for step in story.steps]
    assert max(stale) == 1.0 and min(stale) >= 0.0, stale
    overlapped = events_of(tmp_path / "runs" / "tiny", "weights.published")
    assert [row["version"] for row in overlapped] == list(range(7))
