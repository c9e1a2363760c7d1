"""The ring on several GPUs of one host: Ray, NCCL, one worker per GPU. Needs the extra `cluster`
and two GPUs."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))
from system_runs import events_of, gyre, read_story, tell_cluster_run, write_config

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.gpu,
    pytest.mark.timeout(600),
]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("zero", "tensor_ranks"), [(1, 1), (3, 1), (1, 2)])
def test_a_worker_per_gpu(tmp_path: Path, zero: int, tensor_ranks: int) -> None:
    """Over tensor ranks a worker has a part of the model, and an engine several workers."""
    sets = {
        "run.device": "cuda",
        "run.dtype": "bfloat16",
        "cold_start": None,
        "trainer.steps": 20,
        "model.shape.head_dim": 64,
        "model.shape.hidden_size": 128,
        "memory.residency": "phase",
        "cluster": {"kind": "ray", "num_workers": tensor_ranks if tensor_ranks > 1 else 0},
        "parallel.zero": zero,
        "parallel.tensor_ranks": tensor_ranks,
        "engine.tensor_ranks": tensor_ranks,
    }
    # sockets: short
    with tempfile.TemporaryDirectory(prefix="gyre-ray-", ignore_cleanup_errors=True) as ray_folder:
        answer = gyre(
            "train",
            write_config(tmp_path, sets),
            "--plain",
            folder=tmp_path,
            env={"RAY_TMPDIR": ray_folder},
        )
        folder = tmp_path / "runs" / "tiny"
        told = tell_cluster_run(answer, folder, Path(ray_folder))
    assert answer.code == 0 and not answer.left_behind, told
    assert len(read_story(folder).steps) == 20, told
    gates = [row for row in events_of(folder, "cluster.memory") if row["phase"] == "rollout"]
    workers = tensor_ranks if tensor_ranks > 1 else torch.cuda.device_count()
    assert len(gates[0]["device_bytes"]) == workers, told
    assert len({str(row["device_bytes"]) for row in gates[2:]}) == 1, (
        f"bytes grow over phase switches\n{told}"
    )
    copied = {row["copied_bytes"] for row in events_of(folder, "weights.published")}
    assert (copied == {0}) == (zero == 1), told
    gaps = [row["metrics"]["logprob_gap_max"] for row in events_of(folder, "step.done")]
    assert max(gaps) < 0.5, f"{gaps}\n{told}"
