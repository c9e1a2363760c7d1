"""A trainer whose two GPUs share layers, over NCCL: its snapshots, and what it keeps in host memory. The
cases are those of tests/unit/trainer/test_tensor_ranks.py and offload/."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from gyre.kernels.float8 import CAPABILITY
from rank_pool import RankPool, by_itself
from trainer_cases import assert_close, assert_same, whole_tensors
from zero_cases import (
    away,
    carry_on,
    gradients,
    moved,
    resume,
    saved,
    train,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
LAYOUT = "zero0_tensor2"
CHAIN = ("zero3", LAYOUT, "zero1", LAYOUT, "zero2")


def numbers_of(state: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a snapshot."""
    whole = whole_tensors(state["tensors"].values())
    return {name: tensor.float().numpy() for name, tensor in whole.items()}


@pytest.fixture(scope="module")
def pair():
    pool = RankPool(2, backend="nccl", device="cuda", timeout_s=60.0)
    yield pool
    pool.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_snapshots_go_into_two_gpus_and_back(pair: RankPool, dtype: str) -> None:
    settings = {"dtype": dtype, "reference_moving_average": 0.9, "spec": "parted"}
    state = saved(None, "ppo", steps=1, **settings)  # on the CPU
    written = numbers_of(state)
    results = pair.run(resume, state, "ppo", steps=range(0), layout=LAYOUT, **settings)
    assert_same(results[0][1], written)
    back = resume(None, results[0][2], "ppo", steps=range(0), **settings)[1]
    assert_same(back, written)


def test_a_run_goes_from_each_layout_to_the_next(pair: RankPool) -> None:
    """Each reads to the bit what the one before it wrote; its next step is that of one GPU."""
    settings = {"reference_moving_average": 0.9, "spec": "parted"}
    state = saved(None, "ppo", steps=1, **settings)
    for step, layout in enumerate(CHAIN, start=1):
        written = numbers_of(state)
        _, expected, after = pair.run(by_itself, carry_on, state, "ppo", step=step, **settings)[0]
        read, report, state = pair.run(
            carry_on, state, "ppo", step=step, layout=layout, **settings
        )[0]
        assert_same(read, written)
        for name in ("loss", "grad_norm"):
            assert report.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-3), layout
        assert_close(numbers_of(state), numbers_of(after), relative=2e-3)


@pytest.mark.parametrize("how", ["host and gradients", "disk and gradients"])
def test_state_away_from_the_device_trains_alike(pair: RankPool, tmp_path: Path, how: str) -> None:
    """Within rounding: gradients of embeddings are added in any order here. Over gloo it is equal to
    the bit."""
    settings = {"spec": "parted", "layout": LAYOUT}
    _, expected = pair.run(train, "ppo", **settings)[0]
    results = pair.run(away, train, "ppo", how, str(tmp_path), **settings)
    assert all(report.measured["offload_in_bytes"] > 0 for report in results[0][0])
    assert_close(results[0][1], expected, relative=1e-3)


@pytest.mark.parametrize(
    ("kind", "models"), [("ppo", ("actor", "critic", "reward")), ("grpo", ("actor", "reference"))]
)
def test_weights_in_host_memory(pair: RankPool, kind: str, models: tuple[str, ...]) -> None:
    settings = {"spec": "parted", "reference_refresh_steps": 1}
    _, expected = pair.run(by_itself, train, kind, **settings)[0]
    settings |= {"offload_optimizer": "host", "offload_cut_bytes": 8192}
    results = pair.run(train, kind, layout=LAYOUT, offload_parameters=models, **settings)
    assert_close(results[0][1], expected, relative=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parked_components_come_back(pair: RankPool, dtype: str) -> None:
    settings = {"layout": LAYOUT, "dtype": dtype}
    _, expected = pair.run(train, "ppo", **settings)[0]
    assert_close(pair.run(moved, "ppo", **settings)[0], expected, relative=1e-3)


@pytest.mark.skipif(
    bool(torch.cuda.device_count()) and torch.cuda.get_device_capability() < CAPABILITY,
    reason="multiplies no 8-bit floats",
)
def test_8_bit_products_are_those_of_one_gpu(pair: RankPool) -> None:
    """By norm, off by less than what 8 bits cost; tests/unit/trainer has the bounds' reasons."""
    settings: dict[str, Any] = {
        "spec": "blocks_apart",
        "dtype": "bfloat16",
        "tokens_per_chunk": 16,
        "longer_than": 8,
        "divided_by": 2,
        "num_sequences": 24,
    }
    wide, _ = pair.run(by_itself, gradients, "ppo", **settings)[0]
    expected, norms = pair.run(by_itself, gradients, "ppo", matmul="fp8", **settings)[0]
    results = pair.run(gradients, "ppo", layout=LAYOUT, matmul="fp8", **settings)
    ratios = [
        np.linalg.norm(results[0][0][name] - whole) / np.linalg.norm(whole - wide[name])
        for name, whole in expected.items()
    ]
    assert max(ratios) <= 1.0 and np.median(ratios) <= 0.8, ratios
    assert results[1][1] == results[0][1] == pytest.approx(norms, rel=5e-2)
