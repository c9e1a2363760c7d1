"""A trainer on several GPUs, over NCCL, does what one GPU does. The cases are those of
tests/unit/trainer/test_ranks.py. Needs two GPUs; four show the hybrid layouts."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from fsdp_cases import gathered_dtypes, waited_for_a_late_device
from gyre.kernels.float8 import CAPABILITY
from rank_pool import RankPool, by_itself
from trainer_cases import assert_close, assert_same, whole_tensors
from zero_cases import (
    LAYOUTS,
    TENSOR_LAYOUTS,
    broken_step,
    copied,
    evaluate,
    gathered,
    gradients,
    moved,
    overflowed,
    registered,
    resume,
    saved,
    steps_again,
    train,
)

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")]
SIZE = 4 if NUM_GPUS >= 4 else 2
NAMES = [
    name
    for name, config in LAYOUTS.items()
    if SIZE == 4 or not (config.shard_ranks or name == "mixed")
]
# of two ranks to a layer; with two GPUs no ZeRO is beside them
TENSOR_NAMES = [name for name, config in TENSOR_LAYOUTS.items() if config.tensor_ranks == 2]


@pytest.fixture(scope="module")
def ranks():
    pool = RankPool(SIZE, backend="nccl", device="cuda", timeout_s=60.0)
    yield pool
    pool.close()


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize(("dtype", "relative"), [("float32", 1e-4), ("bfloat16", 0.08)])
def test_gradients_equal_one_gpu(ranks, layout, dtype, relative):
    expected, norms = ranks.run(by_itself, gradients, "ppo", dtype=dtype)[0]
    results = ranks.run(gradients, "ppo", dtype=dtype, layout=layout)
    assert_close(results[0][0], expected, relative=relative)
    assert all(result[1] == results[0][1] for result in results)
    assert results[0][1] == pytest.approx(norms, rel=relative)


@pytest.mark.parametrize("layout", TENSOR_NAMES)
@pytest.mark.parametrize(("dtype", "relative"), [("float32", 1e-4), ("bfloat16", 0.08)])
def test_gradients_of_gpus_that_share_layers(ranks, layout, dtype, relative):
    expected, norms = ranks.run(by_itself, gradients, "ppo", dtype=dtype)[0]
    results = ranks.run(gradients, "ppo", dtype=dtype, layout=layout)
    assert_close(results[0][0], expected, relative=relative)
    assert all(result[1] == results[0][1] for result in results)
    assert results[0][1] == pytest.approx(norms, rel=relative)


@pytest.mark.parametrize("layout", ["zero1_tensor2", "zero3_tensor2"])
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize(("dtype", "relative"), [("float32", 1e-4), ("bfloat16", 0.08)])
def test_gpus_that_share_layers_with_checkpointing(ranks, layout, checkpointing, dtype, relative):
    """Rows are split over the ranks, and exchanges run beside products."""
    expected, norms = ranks.run(by_itself, gradients, "ppo", dtype=dtype)[0]
    settings = {"dtype": dtype, "layout": layout, "checkpointing": checkpointing}
    results = ranks.run(gradients, "ppo", **settings)
    assert_close(results[0][0], expected, relative=relative)
    assert all(result[1] == results[0][1] for result in results)
    assert results[0][1] == pytest.approx(norms, rel=relative)


@pytest.mark.parametrize("layout", ["zero0_tensor2", "zero3_tensor2"])
def test_training_of_gpus_that_share_layers_equals_one_gpu(ranks, layout):
    settings = {"epochs_per_batch": 2, "sequences_per_update": 4, "weight_decay": 0.1}
    expected, state = ranks.run(by_itself, train, "grpo", **settings)[0]
    results = ranks.run(train, "grpo", layout=layout, **settings)
    for report, one in zip(results[0][0], expected, strict=True):
        assert report.metrics["grad_norm"] == pytest.approx(one.metrics["grad_norm"], rel=1e-3)
    assert_close(results[0][1], state, relative=2e-3)


@pytest.mark.parametrize("layout", TENSOR_NAMES)
def test_gpus_that_share_layers_keep_copies_equal_and_give_whole_weights(ranks, layout):
    for held, owned in ranks.run(copied, "ppo", layout=layout, dtype="bfloat16"):
        assert_same(held, owned)
    results = ranks.run(registered, layout=layout, dtype="bfloat16")
    state = results[0][2]
    for _, found, _ in results:
        for name, tensor in found.items():
            master = torch.from_numpy(state[f"actor.master.{name}"])
            np.testing.assert_array_equal(tensor, master.bfloat16().float().numpy(), err_msg=name)


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
def test_waits_for_a_late_gpu_are_told(ranks, layout):
    """Beside the computation too, where FSDP2 waits for its own collectives."""
    usual_s, late_s = ranks.run(waited_for_a_late_device, layout)[0]
    assert 0.0 < usual_s < 0.2 and 0.3 < late_s - usual_s < 1.0, (usual_s, late_s)


@pytest.mark.skipif(
    NUM_GPUS and torch.cuda.get_device_capability() < CAPABILITY,
    reason="multiplies no 8-bit floats",
)
@pytest.mark.parametrize("layout", [name for name in NAMES if name != "mixed"])
def test_8_bit_products_are_the_same_over_gpus(ranks, layout):
    """Each sequence is a chunk, so that scales are the same; gradients of chunks are rounded before
    they are added."""
    settings = {
        "dtype": "bfloat16",
        "matmul": "fp8",
        "tokens_per_chunk": 16,
        "longer_than": 8,
        "num_sequences": 16,
    }
    expected, norms = ranks.run(by_itself, gradients, "ppo", **settings)[0]
    results = ranks.run(gradients, "ppo", layout=layout, **settings)
    assert_close(results[0][0], expected, relative=0.05)
    assert all(result[1] == results[0][1] for result in results)
    assert results[0][1] == pytest.approx(norms, rel=0.05)


@pytest.mark.skipif(
    NUM_GPUS and torch.cuda.get_device_capability() < CAPABILITY,
    reason="multiplies no 8-bit floats",
)
def test_layers_are_gathered_in_8_bits(ranks):
    (wide, _, wide_bytes), (before, after, narrow_bytes) = (
        ranks.run(gathered_dtypes, m)[0] for m in ("same", "fp8")
    )
    assert set(wide) == {"bfloat16"} and before == after and before.count("float8_e4m3fn") == 4
    assert 0.5 < narrow_bytes / wide_bytes < 0.52


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_an_overflow_in_float16_is_skipped_on_all_gpus_alike(ranks, layout):
    results = ranks.run(overflowed, layout=layout)
    rows = results[0][0]
    assert (
        all(result[0] == rows for result in results)
        and rows[1][0] == 0
        and rows[1][1] == rows[0][1] / 2
    )


@pytest.mark.parametrize("layout", NAMES)
def test_training_equals_one_gpu(ranks, layout):
    settings = {
        "epochs_per_batch": 2,
        "sequences_per_update": 4,
        "weight_decay": 0.1,
        "reference_moving_average": 0.5,
    }
    expected, state = ranks.run(by_itself, train, "grpo", **settings)[0]
    results = ranks.run(train, "grpo", layout=layout, **settings)
    assert all(reports == results[0][0] for reports, _ in results)
    for report, one in zip(results[0][0], expected, strict=True):
        metrics = {name: value for name, value in one.metrics.items() if name != "padding_share"}
        assert {name: report.metrics[name] for name in metrics} == pytest.approx(
            metrics, rel=1e-3, abs=1e-4
        )
    assert_close(results[0][1], state, relative=2e-3)


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
def test_evaluation_and_ranks_without_work(ranks, layout):
    expected = ranks.run(by_itself, evaluate, "ppo", "critic", num_sequences=2)[0]
    for found in ranks.run(evaluate, "ppo", "critic", num_sequences=2, layout=layout):
        for own, one in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, one, atol=2e-3)


@pytest.mark.parametrize(
    "layout", [name for name in ("zero1", "zero3", "hybrid3") if name in NAMES]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_snapshots_fit_any_number_of_gpus(ranks, layout, dtype):
    settings = {"dtype": dtype, "reference_moving_average": 0.9, "spec": "tied"}
    state = saved(None, "ppo", steps=1, **settings)  # on the CPU
    written = {
        name: t.float().numpy() for name, t in whole_tensors(state["tensors"].values()).items()
    }
    found = ranks.run(resume, state, "ppo", steps=range(0), layout=layout, **settings)[0][1]
    for name, tensor in written.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


@pytest.mark.parametrize(
    "layout", [name for name in ("zero1", "zero3", "hybrid3") if name in NAMES]
)
def test_every_gpu_gets_the_version_whole(ranks, layout):
    versions = ranks.run(gathered, bucket_bytes=4096, layout=layout, dtype="bfloat16")
    for _, found in versions:
        for name, tensor in versions[0][1].items():
            assert not np.isnan(tensor).any()
            np.testing.assert_array_equal(found[name], tensor, err_msg=name)


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parked_components_come_back(ranks, layout, dtype):
    """The compute weights of zero 1 lie in virtual memory and keep their addresses."""
    _, expected = ranks.run(train, "ppo", layout=layout, dtype=dtype)[0]
    assert_close(ranks.run(moved, "ppo", layout=layout, dtype=dtype)[0], expected, relative=1e-3)


@pytest.mark.parametrize("how", ["raise", "die"])
@pytest.mark.parametrize("layout", ["zero1", "zero3", "zero0_tensor2"])
def test_a_broken_rank_is_named(how, layout):
    pool = RankPool(2, backend="nccl", device="cuda", timeout_s=60.0)
    try:
        assert pool.run(steps_again) == [1, 1]
        pool.send(broken_step, how, victim=1, layout=layout)
        failed, answer = pool.answer(0)
        assert not failed, answer
        seconds, text = answer
        assert seconds < 30.0 and text.startswith("RankError: step 1 ended on rank 0: rank 1"), text
    finally:
        pool.close()
