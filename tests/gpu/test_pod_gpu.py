"""A pod on GPUs: trainer ranks and engines in processes of their own, on the same devices. Weights
go by shared memory; after 50 switches no byte of either is left on the other's device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))
from system_runs import events_of, gyre, read_story, write_config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
MIB = 1 << 20
ON_GPUS = {
    "run.device": "cuda",
    "run.dtype": "bfloat16",
    "cold_start": None,
    "model.shape.head_dim": 64,
    "model.shape.hidden_size": 128,
}


def train(folder: Path, sets: dict[str, Any]) -> Path:
    config = write_config(folder, {**ON_GPUS, **sets})
    answer = gyre("train", config, "--plain", folder=folder)
    run = folder / "runs" / "tiny"
    assert answer.code == 0 and not answer.left_behind, f"{answer.err}\n{events_of(run)[-20:]}"
    return run


def test_residual_bytes_are_constant_over_switches(tmp_path: Path) -> None:
    sets = {
        "trainer.steps": 26,
        "memory.residency": "phase",
        "cluster": {"kind": "pod", "num_workers": 1, "engine_workers": 1},
    }
    run = train(tmp_path, sets)
    assert len(read_story(run).steps) == 26
    rows = [row for row in events_of(run, "memory") if row["step"] >= 2]
    assert {row["worker"] for row in rows} == {"worker-0", "engine-0"}
    for phase in ("rollout", "train", "handover"):
        for worker in ("worker-0", "engine-0"):
            at = [row for row in rows if (row["phase"], row["worker"]) == (phase, worker)]
            assert len(at) >= 24
            free = [row["device_free_bytes"] for row in at]
            assert max(free) - min(free) <= 64 * MIB, (phase, worker, free)
            assert len({str(row["owners"]) for row in at}) == 1, (phase, worker)
            outside = [row["outside_bytes"] for row in at]
            assert max(outside) - min(outside) <= 64 * MIB, (phase, worker, outside)
    trains = [row for row in rows if row["phase"] == "train" and row["worker"] == "worker-0"]
    assert all(row["neighbor_bytes"] > 0 for row in trains), "buffers of the engine stay"
    gaps = [row["metrics"]["logprob_gap_max"] for row in events_of(run, "step.done")]
    assert max(gaps) < 0.5, gaps


@TWO_GPUS
def test_residual_bytes_are_constant_with_an_engine_and_a_trainer_over_the_same_two_gpus(
    tmp_path: Path,
) -> None:
    """Trainer ranks and engine ranks take turns on two GPUs, 20 times. Each process owns what it
    has, the memory that the engine's ranks write to each other among it."""
    sets = {
        "trainer.steps": 22,
        "memory.residency": "phase",
        "parallel.tensor_ranks": 2,
        "engine.tensor_ranks": 2,
        "cluster": {"kind": "pod", "num_workers": 2, "engine_workers": 1},
    }
    run = train(tmp_path, sets)
    assert len(read_story(run).steps) == 22 and not events_of(run, "engine.lost")
    rows = [row for row in events_of(run, "memory") if row["step"] >= 2]
    engines, ranks = ("engine-0", "engine-0.1"), ("worker-0", "worker-1")
    assert {row["worker"] for row in rows} == {*engines, *ranks}
    nccl_sums = bool(events_of(run, "engine.nccl_sums"))  # of GPUs that are no peers
    for phase in ("rollout", "train", "handover"):
        for worker in (*engines, *ranks):
            at = [row for row in rows if (row["phase"], row["worker"]) == (phase, worker)]
            assert len(at) >= 20
            free = [row["device_free_bytes"] for row in at]
            assert max(free) - min(free) <= 64 * MIB, (phase, worker, free)
            assert len({str(row["owners"]) for row in at}) == 1, (phase, worker)
            outside = [row["outside_bytes"] for row in at]
            assert max(outside) - min(outside) <= 64 * MIB, (phase, worker, outside)
    for worker in engines:
        owners = [
            row["owners"] for row in rows if (row["phase"], row["worker"]) == ("train", worker)
        ]
        for held in owners:
            stays = {name for name, sizes in held.items() if sizes["device"]}
            assert stays == (set() if nccl_sums else {"engine.peers"}), held
    trains = [row for row in rows if row["phase"] == "train" and row["worker"] in ranks]
    assert all(row["neighbor_bytes"] > 0 for row in trains), "buffers of the engine stay"
    gaps = [row["metrics"]["logprob_gap_max"] for row in events_of(run, "step.done")]
    assert max(gaps) < 0.5, gaps


@TWO_GPUS
@pytest.mark.parametrize("colocated", [True, False])
def test_shards_reach_engines_in_other_processes(tmp_path: Path, colocated: bool) -> None:
    """Two ranks with zero 3 to two engines on the same GPUs; one rank to an engine on another GPU,
    while it trains."""
    ranks = 2 if colocated else 1
    sets = {
        "trainer.steps": 8,
        "parallel.zero": 3,
        "rollout.max_staleness": 0 if colocated else 1,
        "cluster": {
            "kind": "pod",
            "num_workers": ranks,
            "engine_workers": ranks,
            "colocated": colocated,
        },
    }
    run = train(tmp_path, sets)
    done = events_of(run, "step.done")
    assert len(done) == 8
    published = [row["version"] for row in events_of(run, "weights.published")]
    assert published == list(range(9))
    assert len(events_of(run, "weights.read")) >= 9 * ranks
    if colocated:  # else a batch may be older than the weights that it trains
        gaps = [row["metrics"]["logprob_gap_max"] for row in done]
        assert max(gaps) < 0.5, gaps


@pytest.mark.parametrize(
    ("transport", "ranks", "colocated"),
    [
        ("cuda-ipc", 1, True),
        pytest.param("cuda-ipc", 2, True, marks=TWO_GPUS),
        pytest.param("nccl", 1, False, marks=TWO_GPUS),
    ],
)
def test_weights_go_from_device_to_device(
    tmp_path: Path, transport: str, ranks: int, colocated: bool
) -> None:
    sets = {
        "trainer.steps": 6,
        "parallel.zero": 3,
        "cluster": {
            "kind": "pod",
            "num_workers": ranks,
            "engine_workers": ranks,
            "colocated": colocated,
            "weight_transport": transport,
        },
    }
    run = train(tmp_path, sets)
    reads = events_of(run, "weights.read")
    assert len(reads) >= 7 * ranks and {row["transport"] for row in reads} == {transport}
    assert not events_of(run, "weights.slot_used") and not events_of(run, "weights.slot_failed")
    gaps = [row["metrics"]["logprob_gap_max"] for row in events_of(run, "step.done")]
    assert len(gaps) == 6 and max(gaps) < 0.5, gaps


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs")
@pytest.mark.parametrize("transport", ["shm", "cuda-ipc"])
def test_an_engine_over_two_gpus_takes_the_ranks_versions(tmp_path: Path, transport: str) -> None:
    """In bfloat16, with the collectives inside its graphs."""
    sets = {
        "trainer.steps": 6,
        "engine.tensor_ranks": 2,
        "cluster": {
            "kind": "pod",
            "num_workers": 1,
            "engine_workers": 1,
            "colocated": False,
            "weight_transport": transport,
        },
    }
    run = train(tmp_path, sets)
    assert [row["version"] for row in events_of(run, "engine.committed")] == list(range(7))
    assert events_of(run, "engine.graphs_captured") and not events_of(run, "engine.torch_kernels")
    assert {row["transport"] for row in events_of(run, "weights.read")} == {transport}
    gaps = [row["metrics"]["logprob_gap_max"] for row in events_of(run, "step.done")]
    assert len(gaps) == 6 and max(gaps) < 0.5, gaps
