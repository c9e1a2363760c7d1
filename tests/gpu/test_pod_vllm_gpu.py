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

from gyre.observability.events import read_events
from gyre.observability.report.pod import pod_timeline
from gyre.observability.report.story import tell
from gyre.sidecars.vllm.engine import BEGUN_BYTES
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
    of_steps = [row for row in events_of(run, "memory") if row["step"] >= 2]
    rows = [row for row in of_steps if row["worker"] == "worker-0"]
    free = {
        phase: [row["device_free_bytes"] for row in rows if row["phase"] == phase]
        for phase in ("train", "rollout")
    }
    # vLLM's KV alone is 512 MiB
    assert min(free["train"]) > max(free["rollout"]) + 256 * MIB, free
    # the next start of one that was terminated may have begun, up to its bound
    begun = BEGUN_BYTES if during_training == "terminate" else 0
    assert max(free["train"]) - min(free["train"]) <= 64 * MIB + begun, free
    look_at_vllms_memory(run, during_training)


def look_at_vllms_memory(run: Path, during_training: str) -> None:
    """What vLLM says that it has is what the device has beside the rank's: each release is proved, and
    told as an activity with its bytes."""
    rows = [
        row for row in events_of(run, "memory") if row["worker"] == "engine-0" and row["step"] >= 2
    ]
    held = {
        phase: [row["owners"]["engine.vllm"]["device"] for row in rows if row["phase"] == phase]
        for phase in ("train", "rollout")
    }
    assert min(held["rollout"]) > 512 * MIB, held
    assert max(held["train"]) < min(held["rollout"]) - 256 * MIB, held
    if during_training == "terminate":
        assert not any(held["train"]), held
    missing = [row["what"] for row in events_of(run, "fallback.device_reading")]
    assert "device" not in missing, "its ledger reads the device"
    counted = {row["read_from"] for row in rows if row["phase"] == "rollout"}
    assert counted == ({"allocators"} if "driver" in missing else {"driver"})
    outside = [row["outside_bytes"] for row in rows]
    assert max(map(abs, outside)) <= 1024 * MIB, outside
    data = pod_timeline(tell(read_events(run / "events.jsonl")))
    assert data is not None
    told = {row["activity"]: row for row in data["rows"]}
    leaves, comes = {"terminate": ("terminate", "dummy_start"), "sleep": ("park", "wake")}[
        during_training
    ]
    assert told[leaves]["bytes"] > 256 * MIB and told[comes]["bytes"] > 256 * MIB, told
    assert told["terminate" if leaves == "park" else "park"]["absent"]
