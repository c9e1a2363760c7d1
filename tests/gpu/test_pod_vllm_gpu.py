"""vLLM's GPU build in a pod: versions reach it from shared memory under its CUDA graphs, its log-probs
are those of the trainer, and its device memory is gone while the policy trains, whichever way it is
given back.

Needs vLLM 0.25.1 in `.venvs/vllm` (gyre sidecar install vllm --folder .venvs/vllm).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))
from system_runs import events_of, gyre, read_story, write_config

from vllm_sidecar import environment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
MIB = 1 << 20
STEPS = 4


def train(folder: Path, vllm: dict[str, Any]) -> Path:
    sets = {
        "run.device": "cuda",
        "run.dtype": "bfloat16",
        "cold_start": None,
        "model.shape.head_dim": 64,
        "model.shape.hidden_size": 128,
        "trainer.steps": STEPS,
        "trainer.learning_rate": 1e-2,
        "memory.residency": "phase",
        "engine": {
            "kind": "vllm",
            "max_running": 64,
            "vllm": {"environment": str(environment()), "kv_bytes": 512 * MIB, **vllm},
        },
        "cluster": {"kind": "pod", "num_workers": 1, "engine_workers": 1, "hang_s": 240.0},
    }
    answer = gyre("train", write_config(folder, sets), "--plain", folder=folder)
    run = folder / "runs" / "tiny"
    assert answer.code == 0 and not answer.left_behind, f"{answer.err}\n{events_of(run)[-20:]}"
    return run


@pytest.mark.parametrize("during_training", ["sleep", "terminate"])
def test_a_run_turns_with_vllm_on_the_trainers_device(tmp_path: Path, during_training: str) -> None:
    run = train(tmp_path, {"during_training": during_training, "enforce_eager": False})
    gaps = [step["metrics"]["logprob_gap_max"] for step in read_story(run).steps]
    assert len(gaps) == STEPS
    # two programs with bfloat16 products in other orders; weights of another version give far more
    assert max(gaps) < 0.5, gaps
    versions = [row["version"] for row in events_of(run, "weights.published")]
    assert versions == list(range(STEPS + 1))
    rows = [row for row in events_of(run, "memory") if row["step"] >= 2]
    free = {
        phase: [row["device_free_bytes"] for row in rows if row["phase"] == phase]
        for phase in ("train", "rollout")
    }
    # vLLM's KV alone is 512 MiB
    assert min(free["train"]) > max(free["rollout"]) + 256 * MIB, free
    assert max(free["train"]) - min(free["train"]) <= 64 * MIB, free
