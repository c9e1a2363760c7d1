"""Runs on Ray whose engine is cut over the trainer's two tensor ranks, each pair in one worker: they
give what a pod of the same layout gives, learn, and lose a worker as runs with whole models do."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from system_runs import (
    LEARNS,
    Fault,
    Story,
    check_learned,
    events_of,
    gyre,
    read_story,
    tell_cluster_run,
    write_config,
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory is a folder on Linux"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

CUT: Mapping[str, Any] = {
    "cold_start": None,
    "trainer.steps": 3,
    "snapshot.every_steps": 1,
    "rollout.ignore_eos": True,
    "parallel.tensor_ranks": 2,
    "engine.tensor_ranks": 2,
    "cluster": {
        "kind": "ray",
        "num_workers": 2,
        "cpus_per_worker": 0.5,
        "object_store_bytes": 200 << 20,
        "progress_tokens": 2,
    },
}
POD = {
    "kind": "pod",
    "num_workers": 2,
    "engine_workers": 1,
    "colocated": False,
    "progress_tokens": 2,
}
PHASES = ("handover", "rollout", "score", "train")


def finished(folder: Path, sets: Mapping[str, Any], **options: Any) -> Story:
    folder.mkdir(exist_ok=True)
    run = folder / "runs" / "tiny"
    # sockets: short
    with tempfile.TemporaryDirectory(prefix="gyre-ray-", ignore_cleanup_errors=True) as ray_folder:
        env = {"RAY_TMPDIR": ray_folder}
        config = write_config(folder, sets)
        answer = gyre("train", config, "--plain", folder=folder, env=env, **options)
        told = tell_cluster_run(answer, run, Path(ray_folder))
    assert answer.code == 0 and not answer.left_behind, told
    return read_story(run)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on Ray, whose phases take turns on the devices."""
    folder = tmp_path_factory.mktemp("ray")
    finished(folder, {**CUT, "memory.residency": "phase"})
    return folder / "runs" / "tiny"


def test_it_gives_what_a_pod_of_the_same_layout_gives(tmp_path: Path, undisturbed: Path) -> None:
    expected = finished(tmp_path, {**CUT, "cluster": POD})
    found = read_story(undisturbed)
    assert len(found.steps) == len(expected.steps) == 3
    for here, there in zip(found.steps, expected.steps, strict=True):
        assert here["num_tokens"] == there["num_tokens"]
        for name in ("loss", "grad_norm", "reward", "length", "entropy"):
            assert here["metrics"][name] == pytest.approx(
                there["metrics"][name], rel=1e-3, abs=1e-4
            ), name
        assert here["metrics"]["logprob_gap_max"] < 1e-4
    ours, theirs = (
        load_file(run / "export" / "model.safetensors")
        for run in (undisturbed, tmp_path / "runs" / "tiny")
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert float((ours[name] - tensor).abs().max()) < 1e-4 * float(tensor.abs().max()), name


def test_no_weight_is_copied(undisturbed: Path) -> None:
    published = events_of(undisturbed, "weights.published")
    assert [row["version"] for row in published] == [0, 1, 2, 3]
    assert [row["copied_bytes"] for row in published] == [0, 0, 0, 0]
    committed = events_of(undisturbed, "engine.committed")
    assert all(row["shared"] for row in committed)
    for worker in ("worker-0", "worker-1"):
        taken = [row["version"] for row in committed if row["worker"] == worker]
        assert taken == [0, 1, 2, 3]
    assert not events_of(undisturbed, "weights.gathered")


def test_each_worker_keeps_its_own_ledger(undisturbed: Path) -> None:
    """In each phase the same bytes every time, alike on both ranks, over more than ten changes."""
    ledgers = []
    for worker in ("worker-0", "worker-1"):
        rows = [row for row in events_of(undisturbed, "memory") if row["worker"] == worker]
        rows = [row for row in rows if row["phase"] in PHASES]
        assert len(rows) > 10
        found: dict[str, list[Any]] = {}
        for row in rows:
            owners = found.setdefault(row["phase"], [])
            owners.append(row["owners"])
        for phase, owners in found.items():
            assert all(one == owners[-1] for one in owners[1:]), phase
        assert found["rollout"][-1]["engine.kv"]["device"] > 0
        assert found["train"][-1]["engine.kv"]["device"] == 0
        ledgers.append({phase: owners[-1] for phase, owners in found.items()})
    assert ledgers[0] == ledgers[1]


@pytest.mark.parametrize(
    "worker", ["worker-1", pytest.param("worker-0", marks=pytest.mark.variant)]
)
def test_a_worker_killed_in_a_rollout_costs_a_restart_and_nothing_else(
    tmp_path: Path, undisturbed: Path, worker: str
) -> None:
    """As one with a whole model does, whichever rank of the engine it has."""
    fault = Fault(
        point="event",
        match="phase.started rollout",
        number=2,
        action="kill_worker",
        worker=worker,
    )
    story = finished(tmp_path, {**CUT, "memory.residency": "phase"}, fault=fault)
    assert story == read_story(undisturbed) and story.num_attempts == 2
    run = tmp_path / "runs" / "tiny"
    (restart,) = events_of(run, "retry.run_restarted")
    assert worker in restart["error"], restart
    assert worker == "worker-0" or "a rank of its engine, ended" in restart["error"]


@pytest.mark.variant
def test_it_learns(tmp_path: Path) -> None:
    check_learned(finished(tmp_path, {**CUT, **LEARNS}))
