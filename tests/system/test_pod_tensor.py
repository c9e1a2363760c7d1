"""A pod whose engine is cut over two ranks: it gives what an engine of one rank gives, and a rank
that is killed ends its engine, whose requests go on with the ranks that are started again. With
trainer ranks on the same devices it gives what it gives on devices of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from system_runs import (
    LEARNS,
    Fault,
    Story,
    check_learned,
    events_of,
    gyre,
    read_story,
    write_config,
)

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory is a folder on Linux"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

IN_POD: Mapping[str, Any] = {
    "cold_start": None,
    "trainer.steps": 2,
    "cluster": {
        "kind": "pod",
        "num_workers": 1,
        "engine_workers": 1,
        "colocated": False,
        "progress_tokens": 2,
    },
}

CUT = {**IN_POD, "rollout.ignore_eos": True, "engine.tensor_ranks": 2}


# trainer ranks and engine ranks in pairs, each of which leaves for the other
TOGETHER = {
    **CUT,
    "parallel.tensor_ranks": 2,
    "memory.residency": "phase",
    "cluster": {**IN_POD["cluster"], "num_workers": 2, "engine_workers": 0, "colocated": True},
}
APART = {**TOGETHER, "cluster": {**TOGETHER["cluster"], "engine_workers": 1, "colocated": False}}


def finished(folder: Path, sets: Mapping[str, Any], **options: Any) -> Story:
    folder.mkdir(exist_ok=True)
    answer = gyre("train", write_config(folder, sets), "--plain", folder=folder, **options)
    told = f"{answer.err}\n{events_of(folder / 'runs' / 'tiny')[-40:]}"
    assert answer.code == 0 and not answer.left_behind, told
    return read_story(folder / "runs" / "tiny")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an engine of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    finished(folder, CUT)
    return folder / "runs" / "tiny"


def same_steps(found: Story, expected: Story) -> None:
    """The same tokens, and numbers within rounding: an engine over ranks sums in another order."""
    assert len(found.steps) == len(expected.steps) == 2
    for here, there in zip(found.steps, expected.steps, strict=True):
        assert here["num_tokens"] == there["num_tokens"]
        for name in ("loss", "grad_norm", "reward", "length", "entropy"):
            assert here["metrics"][name] == pytest.approx(
                there["metrics"][name], rel=1e-3, abs=1e-4
            ), name
        assert here["metrics"]["logprob_gap_max"] < 1e-4


def test_an_engine_of_two_ranks_gives_what_one_gives(tmp_path: Path, undisturbed: Path) -> None:
    same_steps(read_story(undisturbed), finished(tmp_path, {**CUT, "engine.tensor_ranks": 1}))
    (_, started) = events_of(undisturbed, "cluster.started")
    assert sorted(started["workers"]) == ["engine-0", "engine-0.1"]
    assert [row["version"] for row in events_of(undisturbed, "engine.committed")] == [0, 1, 2]
    assert not events_of(undisturbed, "engine.lost")


@pytest.mark.parametrize(
    ("worker", "action"),
    [
        ("engine-0.1", "kill_worker"),
        ("engine-0.1", "stop_worker"),
        pytest.param("engine-0", "kill_worker", marks=pytest.mark.variant),
    ],
)
def test_a_lost_rank_ends_its_engine_which_comes_back_with_all_ranks(
    tmp_path: Path, undisturbed: Path, worker: str, action: Any
) -> None:
    """Killed, or standing still. What was asked of it is asked again, and has the same tokens."""
    fault = Fault(
        point="event",
        match="phase.started rollout",
        number=2,
        action=action,
        worker=worker,
    )
    sets = {**CUT, "cluster": {**CUT["cluster"], "hang_s": 6.0}}
    same_steps(finished(tmp_path, sets, fault=fault), read_story(undisturbed))
    run = tmp_path / "runs" / "tiny"
    (lost,) = events_of(run, "engine.lost")
    assert lost["engine"] == "engine-0"
    if action == "stop_worker":
        assert "no progress of the engine for 6 s" in lost["cause"]
    elif worker != "engine-0":
        assert "rank 1" in lost["cause"]
    (back,) = events_of(run, "engine.rejoined")
    assert back["version"] == 1, "the version that the trainer has registered"
    assert not events_of(run, "retry.run_restarted")


def test_batch_invariant_ranks_of_both_sides_have_the_same_logprobs(tmp_path: Path) -> None:
    """To the bit, so importance ratios are 1 with weights of the current version; not without the
    mode (`undisturbed`, whose trainer has one rank)."""
    sets = {
        **CUT,
        "cluster": {**CUT["cluster"], "num_workers": 2},
        "parallel": {"tensor_ranks": 2},
        "engine.batch_invariant": True,
        "objective": {"kind": "grpo", "kl_coef": 0.04, "ratio_base": "engine"},
        "trainer.steps": 3,
    }
    steps = finished(tmp_path, sets).steps
    assert len(steps) == 3
    for step in steps:
        found = step["metrics"]
        assert found["logprob_gap_max"] == found["engine_kl"] == 0.0
        assert found["ratio"] == 1.0 and found["grad_norm"] > 0.0
    assert [step["metrics"]["kl_reference"] > 0.0 for step in steps] == [False, True, True]


def test_without_the_mode_some_differ(undisturbed: Path) -> None:
    gaps = [step["metrics"]["logprob_gap_max"] for step in read_story(undisturbed).steps]
    assert all(0.0 < gap < 1e-4 for gap in gaps)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A run with two trainer ranks that share layers, and an engine of two ranks beside them."""
    return finished(tmp_path_factory.mktemp("apart"), APART)


def held_by(run: Path, worker: str, phase: str) -> list[dict[str, Any]]:
    """What a worker's components held after each change to a phase."""
    rows = events_of(run, "memory")
    return [row["owners"] for row in rows if (row["worker"], row["phase"]) == (worker, phase)]


@pytest.mark.parametrize("leave", ["park", pytest.param("destroy", marks=pytest.mark.variant)])
def test_ranks_in_turns_on_a_device_give_what_ranks_apart_give(
    tmp_path: Path, apart: Story, leave: str
) -> None:
    """To the bit: who holds the memory changes no number. With "destroy" the engine ends whenever
    its devices are wanted."""
    sets = {"memory.leave": {"engine": "destroy"}} if leave == "destroy" else {}
    story = finished(tmp_path, {**TOGETHER, **sets})
    assert story == apart and story.num_attempts == 1
    run = tmp_path / "runs" / "tiny"
    started = events_of(run, "cluster.started")
    assert [sorted(row["workers"]) for row in started] == [
        ["worker-0", "worker-1"],
        ["engine-0", "engine-0.1"],
    ]
    assert not events_of(run, "engine.lost")
    for worker in ("engine-0", "engine-0.1"):
        for owners in held_by(run, worker, "train"):
            assert not any(sizes["device"] for sizes in owners.values()), worker
            away = owners["engine.weights"]["host"]
            assert away > 0 if leave == "park" else not away
        for owners in held_by(run, worker, "rollout"):
            assert owners["engine.weights"]["device"] > 0 < owners["engine.kv"]["device"]
    for worker in ("worker-0", "worker-1"):
        assert all(owners["actor.params"]["device"] for owners in held_by(run, worker, "train"))
        for owners in held_by(run, worker, "rollout"):
            assert not any(sizes["device"] for sizes in owners.values()), worker


def test_ledgers_of_all_ranks_return_to_the_same_numbers(tmp_path: Path) -> None:
    """Over 20 switches between trainer and engine, in each of the four processes."""
    story = finished(tmp_path, {**TOGETHER, "trainer.steps": 11, "rollout.max_tokens": 8})
    assert len(story.steps) == 11
    run, compared = tmp_path / "runs" / "tiny", 0
    for worker in ("worker-0", "worker-1", "engine-0", "engine-0.1"):
        for phase in ("rollout", "score", "train", "handover"):
            first, *others = held_by(run, worker, phase)[1:]  # the first step makes what stays
            assert len(others) >= 9 and all(one == first for one in others), (worker, phase)
            compared += len(others)
    assert compared >= 4 * 4 * 9
    parts = [held_by(run, f"engine-0{rank}", "rollout")[-1] for rank in ("", ".1")]
    assert parts[0] == parts[1], "ranks of an engine hold equal parts"


@pytest.mark.parametrize(
    "action", ["kill_worker", pytest.param("stop_worker", marks=pytest.mark.variant)]
)
def test_a_rank_that_is_lost_in_a_phase_change_is_named_and_its_engine_comes_back(
    tmp_path: Path, apart: Story, action: Any
) -> None:
    """It is killed, or stands still, as the devices are wanted for scoring. No token is lost."""
    fault = Fault(
        point="event",
        match="phase.ended rollout",
        number=1,
        action=action,
        worker="engine-0.1",
    )
    sets = {**TOGETHER, "cluster": {**TOGETHER["cluster"], "hang_s": 20.0}}
    story = finished(tmp_path, sets, fault=fault)
    assert story == apart and story.num_attempts == 1
    run = tmp_path / "runs" / "tiny"
    (lost,) = events_of(run, "engine.lost")
    assert lost["engine"] == "engine-0" and lost["requests"] == 0
    assert "could not enter phase score of step 1" in lost["cause"]
    assert "engine-0.1" in lost["cause"] or "rank 1" in lost["cause"]
    (back,) = events_of(run, "engine.rejoined")
    assert back["version"] in (0, 1)
    assert not events_of(run, "retry.run_restarted")


def test_a_run_whose_trainer_and_engine_have_two_ranks_learns(tmp_path: Path) -> None:
    check_learned(finished(tmp_path, {**TOGETHER, **LEARNS}))
