"""kill -9 at any moment, then --resume: the run tells the story that it would have told
uninterrupted, bit for bit."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from system_runs import Command, Fault, Story, events_of, gyre, read_story, write_config

from shown_settings import show

pytestmark = pytest.mark.slow

LONG_SYSTEM = (
    "Think about it in steps, one number after the other, and then say what the result "
    "of the problem is."
)

REFILLED = {
    "objective.variant": "dapo",
    "rollout.max_refills": 2,
    # right in one of seven: half of the groups teach nothing
    "eval.metric": {"part": "function", "threshold": 0.8},
    "engine.max_running": 3,
    "engine.max_queued": 3,  # of the sixteen completions of a step only six fit
}
VARIANTS: dict[str, Mapping[str, Any]] = {
    "grpo": {},
    "bf16": {"run.dtype": "bfloat16"},
    "partial": {
        "rollout.max_tokens_per_iteration": 5,
        "trainer.steps": 7,
        "snapshot.every_steps": 1,
    },
    "partial_bf16": {
        "rollout.max_tokens_per_iteration": 6,
        "run.dtype": "bfloat16",
        "rollout.top_k": 40,
    },
    "kl": {"objective.kl_coef": 0.05, "trainer.reference_refresh_steps": 2},
    "kl_moving": {
        "objective.kl_coef": 0.05,
        "trainer.reference_moving_average": 0.9,
        "run.dtype": "bfloat16",
    },
    "ppo": {
        "objective.kind": "ppo",
        "trainer.sequences_per_update": 8,
        "trainer.epochs_per_batch": 2,
    },
    "ppo_bf16": {"objective.kind": "ppo", "objective.kl_coef": 0.05, "run.dtype": "bfloat16"},
    "dpo": {"objective.kind": "dpo", "objective.pairs": "online"},
    "cached_prefixes": {
        "data.system": LONG_SYSTEM,
        "eval.every_steps": 1,
        "snapshot.every_steps": 1,
        "engine.page_tokens": 2,
    },
    "refilled": {**REFILLED, "rollout.max_tokens_per_iteration": 6, "snapshot.every_steps": 1},
    "epochs_end": {"data.num_problems": 24, "data.held_out_fraction": 0.35, "trainer.steps": 7},
    "no_eval": {"eval.num_problems": 0, "rollout.temperature": 0.7, "rollout.top_p": 0.9},
    "background": {"snapshot.background": True, "snapshot.every_steps": 1},
    "parked": {
        "memory.residency": "phase",
        "memory.disk_folder": "parked",
        "memory.leave": {"actor.optimizer": "disk", "engine": "destroy", "reference": "park"},
        "objective.kl_coef": 0.05,
    },
}
OFFLINE: dict[str, Mapping[str, Any]] = {
    name: {"cold_start": None, "snapshot.every_steps": 1, **sets}
    for name, sets in {
        "sft": {"objective.kind": "sft"},
        "rm": {"objective.kind": "rm"},
        "dpo_offline": {"objective.kind": "dpo", "objective.pairs": "offline"},
    }.items()
}
NO_COLD_START = {"cold_start": None}


Finished = Callable[[str], Path]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The run of a variant that nothing interrupted, made once; its tests do not write into it."""

    @cache
    def run_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        sets = {**VARIANTS, **OFFLINE}[name]
        answer = gyre(
            "train", write_config(folder, {**sets, "run.name": "whole"}), "--plain", folder=folder
        )
        assert answer.code == 0, answer.err
        return folder / "runs" / "whole"

    return run_of


def begin(folder: Path, sets: Mapping[str, Any], fault: Fault | None = None) -> Command:
    return Command(
        "train",
        write_config(folder, {**sets, "run.name": "killed"}),
        "--plain",
        folder=folder,
        fault=fault,
    )


def resume(folder: Path, fault: Fault | None = None) -> Command:
    return Command(
        "train", "--resume", folder / "runs" / "killed", "--plain", folder=folder, fault=fault
    )


def go_on_to_the_end(folder: Path) -> Story:
    answer = resume(folder).wait()
    assert answer.code == 0, answer.err
    assert not answer.left_behind
    return read_story(folder / "runs" / "killed")


def check_killed(command: Command) -> None:
    answer = command.wait()
    assert answer.code == -9, (answer.code, answer.err)
    assert not answer.left_behind, "a killed run leaves no process behind"


def kill_and_compare(folder: Path, finished: Finished, name: str, faults: list[Fault]) -> None:
    whole = read_story(finished(name))
    check_killed(begin(folder, {**VARIANTS, **OFFLINE}[name], faults[0]))
    for fault in faults[1:]:
        check_killed(resume(folder, fault))
    story = go_on_to_the_end(folder)
    assert story == whole
    assert story.num_attempts == len(faults) + 1


@pytest.mark.parametrize("name", ["grpo", "partial", "kl", "cached_prefixes"])
def test_killed_twice(tmp_path: Path, finished: Finished, name: str) -> None:
    """Once in a rollout of step 4, once after step 5 and before its snapshot."""
    faults = [
        Fault(point="event", match="phase.started rollout", number=4),
        Fault(point="event", match="step.done", number=2),
    ]
    kill_and_compare(tmp_path, finished, name, faults)


@pytest.mark.parametrize(
    "name",
    show(
        ("ppo", "refilled", "parked"),
        [name for name in VARIANTS if name not in ("grpo", "partial", "kl", "cached_prefixes")],
    ),
)
def test_killed_twice_in_other_runs(tmp_path: Path, finished: Finished, name: str) -> None:
    faults = [
        Fault(point="event", match="phase.started rollout", number=4),
        Fault(point="event", match="step.done", number=1),
    ]
    kill_and_compare(tmp_path, finished, name, faults)


@pytest.mark.parametrize("name", show(("rm",), OFFLINE))
def test_killed_twice_without_rollouts(tmp_path: Path, finished: Finished, name: str) -> None:
    faults = [
        Fault(point="event", match="phase.started train", number=4),
        Fault(point="event", match="step.done", number=1),
    ]
    kill_and_compare(tmp_path, finished, name, faults)


def test_partial_rollouts_cross_the_snapshot(finished: Finished) -> None:
    """The property that the comparison above needs: something was in flight when the run was
    killed."""
    run = finished("partial")
    assert len(events_of(run, "rollouts.carried")) >= 4
    samples = read_story(run).samples
    assert samples and max(len(sample["tokens"]) for sample in samples) > 10


def test_groups_are_refilled_through_a_narrow_queue(tmp_path: Path) -> None:
    """The property that the comparison above needs: groups were replaced, and no request of the
    loop was refused."""
    answer = gyre(
        "train", write_config(tmp_path, {**REFILLED, **NO_COLD_START}), "--plain", folder=tmp_path
    )
    assert answer.code == 0, answer.err
    run = tmp_path / "runs" / "tiny"
    assert events_of(run, "rollouts.refilled") and not events_of(run, "engine.refused")
    steps = [row["metrics"] for row in events_of(run, "step.done")]
    assert len(steps) == 5 and any(step["refilled_prompts"] > 0 for step in steps)
    assert any(step.get("sampled_per_kept", 0.0) > 1.0 for step in steps)


POINTS = {
    "the folder is made": Fault(point="copy", match=".*config.toml"),
    "a tokenizer is trained": Fault(point="event", match="run.started"),
    "cold start, first step": Fault(point="event", match="step.done", number=1),
    "half a line": Fault(point="line", match="step.done", number=3),
    "half a sample": Fault(point="line", match="sample", number=9),
    "snapshot, tensors": Fault(point="fsync", number=10),
    "snapshot, state": Fault(point="fsync", number=11),
    "snapshot, manifest": Fault(point="fsync", number=14),
    "snapshot, rename": Fault(point="rename", match=".*step-00000002", number=2),
    "snapshot, renamed": Fault(point="event", match="snapshot.saved", number=3),
    "between the stages": Fault(point="event", match="stage.done", number=1),
    "first evaluation": Fault(point="event", match="phase.started evaluate", number=3),
    "scoring": Fault(point="event", match="phase.started score", number=2),
    "training": Fault(point="event", match="phase.started train", number=8),
    "handover": Fault(point="event", match="phase.started handover", number=5),
    "last snapshot": Fault(point="event", match="snapshot.saved", number=5),
    "export, aside": Fault(point="event", match="phase.started export"),
    "export, swap": Fault(point="rename", match=".*/export$"),
    "all but the end": Fault(point="event", match="export.verified"),
}


@pytest.fixture(scope="module")
def whole(finished: Finished) -> Story:
    return read_story(finished("grpo"))


QUICK_POINTS = ("snapshot, rename",)
SHOWN_POINTS = (
    "cold start, first step",
    "half a sample",
    "snapshot, manifest",
    "between the stages",
    "handover",
    "export, swap",
)


@pytest.mark.parametrize("where", QUICK_POINTS)
def test_killed_at(tmp_path: Path, whole: Story, where: str) -> None:
    killed_at(tmp_path, whole, where)


@pytest.mark.parametrize(
    "where", show(SHOWN_POINTS, [where for where in POINTS if where not in QUICK_POINTS])
)
def test_killed_at_other_points(tmp_path: Path, whole: Story, where: str) -> None:
    killed_at(tmp_path, whole, where)


def killed_at(folder: Path, whole: Story, where: str) -> None:
    check_killed(begin(folder, {}, POINTS[where]))
    if not (folder / "runs" / "killed").exists():
        assert where == "the folder is made"  # nothing was begun, so there is nothing to go on with
        check = begin(folder, {}).wait()
        assert check.code == 0, check.err
        assert read_story(folder / "runs" / "killed") == whole
        return
    assert go_on_to_the_end(folder) == whole


@pytest.mark.parametrize("seed", show((0, 1), range(4)))
def test_killed_at_random_moments(
    tmp_path: Path, finished: Finished, whole: Story, seed: int
) -> None:
    """By a clock, from outside, again and again: whatever the process was doing."""
    draws, codes = random.Random(seed), []
    times = [row["t"] for row in events_of(finished("grpo"))]
    command = begin(tmp_path, {})
    for _ in range(6):
        # the whole run may have had to wait for others, and this one not
        time.sleep(draws.uniform(0.0, 0.3 * (times[-1] - times[0])))
        if command.process.exitcode is not None:
            break
        command.kill()
        codes.append(command.wait().code)
        command = (
            resume(tmp_path) if (tmp_path / "runs" / "killed").exists() else begin(tmp_path, {})
        )
    answer = command.wait()
    assert answer.code == 0, answer.err
    assert -9 in codes, "the run was killed at least once"
    assert read_story(tmp_path / "runs" / "killed") == whole


def test_resume_of_a_finished_run_changes_nothing(
    tmp_path: Path, finished: Finished, whole: Story
) -> None:
    run = shutil.copytree(finished("grpo"), tmp_path / "whole")
    again = gyre("train", "--resume", run, "--plain", "--json", folder=tmp_path)
    assert again.code == 0, again.err
    assert again.json["step"] == 5
    assert read_story(run) == whole
