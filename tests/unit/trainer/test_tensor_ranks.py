"""A trainer whose ranks share layers, real processes over gloo, does what one process does, with
ZeRO beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rank_pool import RankPool
from trainer_cases import OBJECTIVES, assert_close, assert_same, whole_tensors
from zero_cases import (
    SPECS,
    TENSOR_LAYOUTS,
    WIDE_LAYOUTS,
    carry_on,
    copied,
    evaluate,
    gradients,
    measures,
    of_one_process,
    registered,
    resume,
    saved,
    train,
    with_a_bad_number,
)

BFLOAT16 = pytest.param("bfloat16", marks=pytest.mark.variant)
# of what depends on how copies and parts lie, and hardly on the ZeRO stage
FEW_LAYOUTS = [
    name
    if name in ("tensor4", "zero1_tensor2", "zero3_tensor2", "mixed_tensor2")
    else pytest.param(name, marks=pytest.mark.variant)
    for name in TENSOR_LAYOUTS
]
# neighbors differ in their ZeRO stage and in their tensor ranks
CHAIN = [
    *("zero0", "zero3_tensor4", "zero1_tensor2", "zero2", "zero0_tensor4", "zero3_tensor2"),
    *("zero1", "zero2_tensor4", "zero0_tensor2", "zero3", "tensor4", "zero2_tensor2"),
    *("zero3_once_tensor2", "mixed_tensor2"),
]


def numbers_of(state: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a snapshot."""
    whole = whole_tensors(state["tensors"].values())
    return {name: tensor.float().numpy() for name, tensor in whole.items()}


@pytest.mark.parametrize(
    "each",
    [*TENSOR_LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in WIDE_LAYOUTS)],
)
def test_gradients_and_norms_are_those_of_one_process(ranks: RankPool, each: str) -> None:
    """Of copied norms and KV heads, too: summed, counted once, and equal on all ranks. `make test`
    runs every layout of the others."""
    expected, norms = of_one_process(gradients, "ppo", spec="parted")
    results = ranks.run(gradients, "ppo", spec="parted", layout=each)
    assert_close(results[0][0], expected, relative=1e-5)
    assert all(result[1] == results[0][1] for result in results)
    assert results[0][1] == pytest.approx(norms, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in OBJECTIVES if kind != "ppo"])
@pytest.mark.parametrize("spec", ["tied", "parted"])
def test_gradients_of_every_objective(
    pair: RankPool, ranks: RankPool, kind: str, spec: str
) -> None:
    """Where two ranks have the only KV head and the embedding is the head, too; and where four have
    padding of a head of their own."""
    expected, norms = of_one_process(gradients, kind, spec=spec)
    pool, layout = (pair, "zero1_tensor2") if spec == "tied" else (ranks, "tensor4")
    results = pool.run(gradients, kind, spec=spec, layout=layout)
    assert_close(results[0][0], expected, relative=1e-5)
    assert all(result[1] == results[0][1] for result in results)
    assert results[0][1] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("layout", ["tensor4", "zero3_tensor2"])
def test_gradients_of_truncated_rollouts(ranks: RankPool, layout: str) -> None:
    """Of the tokens that were choosable each rank has those of its part of the vocabulary."""
    settings: dict[str, Any] = {"spec": "parted", "narrow": True}
    expected, norms = of_one_process(gradients, "grpo", **settings)
    whole, _ = of_one_process(gradients, "grpo", spec="parted")
    assert not np.allclose(whole["actor.head.weight"], expected["actor.head.weight"], atol=1e-3)
    results = ranks.run(gradients, "grpo", layout=layout, **settings)
    assert_close(results[0][0], expected, relative=1e-5)
    assert results[0][1] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("layout", ["tensor4", "zero3_tensor2"])
def test_bfloat16_over_ranks_is_as_near_to_float32_as_in_one_process(
    ranks: RankPool, layout: str
) -> None:
    """Partial sums round once more: by norm, errors are those of one process to a quarter."""
    wide, _ = of_one_process(gradients, "ppo", spec="parted")
    one, norms = of_one_process(gradients, "ppo", spec="parted", dtype="bfloat16")
    results = ranks.run(gradients, "ppo", spec="parted", dtype="bfloat16", layout=layout)
    norm, names = np.linalg.norm, [name for name, grad in wide.items() if grad.any()]
    expected, found = (
        np.array([norm(each[name] - wide[name]) / norm(wide[name]) for name in names])
        for each in (one, results[0][0])
    )
    assert expected.max() > 0.01 and found.max() < 1.25 * expected.max()
    assert np.median(found) < 1.25 * np.median(expected)
    assert all(result[1] == results[0][1] for result in results)
    assert results[0][1] == pytest.approx(norms, rel=0.02)


@pytest.mark.parametrize("layout", TENSOR_LAYOUTS)
def test_training_equals_one_process(ranks: RankPool, layout: str) -> None:
    """Two epochs of three clipped updates, twice: reports are the same on every rank, weights,
    moments and the reference's average as alone."""
    settings = {
        "spec": "parted",
        "epochs_per_batch": 2,
        "sequences_per_update": 4,
        "weight_decay": 0.1,
        "grad_clip": 0.1,
        "reference_moving_average": 0.5,
    }
    expected, state = of_one_process(train, "grpo", **settings)
    results = ranks.run(train, "grpo", layout=layout, **settings)
    for reports, _ in results:
        assert [replace(report, measured={}) for report in reports] == [
            replace(report, measured={}) for report in results[0][0]
        ]
    for report, one in zip(results[0][0], expected, strict=True):
        assert (report.version, report.num_tokens, report.num_updates) == (
            one.version,
            one.num_tokens,
            one.num_updates,
        )
        metrics = {name: value for name, value in one.metrics.items() if name != "padding_share"}
        assert one.metrics["grad_norm"] > 0.1
        assert {name: report.metrics[name] for name in metrics} == pytest.approx(
            metrics, rel=2e-4, abs=2e-6
        )
    assert_close(results[0][1], state, relative=2e-4)


@pytest.mark.parametrize("layout", FEW_LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", BFLOAT16])
def test_copies_stay_equal_to_the_bit(ranks: RankPool, layout: str, dtype: str) -> None:
    """Norms and KV heads that several ranks hold, after some steps."""
    results = ranks.run(copied, "ppo", layout=layout, spec="parted", dtype=dtype)
    for held, owned in results:
        assert_same(held, owned)
    names = {name.rpartition(".")[0] for held, _ in results for name in held}
    parts = ("layers.1.qkv.weight",) if layout == "tensor4" else ()
    for name in ("layers.0.q_norm.weight", "final_norm.weight", "scalar_head.weight", *parts):
        assert f"critic.{name}" in names


@pytest.mark.parametrize("layout", FEW_LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "which"),
    [
        ("ppo", "critic"),
        pytest.param("grpo", "reference", marks=pytest.mark.slow),
        pytest.param("rm", "reward", marks=pytest.mark.slow),
    ],
)
def test_evaluation_gives_every_rank_the_whole_batch(
    ranks: RankPool, kind: str, which: str, layout: str
) -> None:
    settings = {"reference_refresh_steps": 1} if which == "reference" else {}
    expected = of_one_process(evaluate, kind, which, spec="parted", **settings)
    for found in ranks.run(evaluate, kind, which, layout=layout, spec="parted", **settings):
        for own, one in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, one, atol=2e-4)


@pytest.mark.variant
@pytest.mark.parametrize("layout", TENSOR_LAYOUTS)
def test_snapshots_of_bfloat16_fit_any_layout(ranks: RankPool, layout: str) -> None:
    """One process's into four ranks and back, to the bit."""
    settings = {"dtype": "bfloat16", "reference_moving_average": 0.9, "spec": "parted"}
    state = saved(None, "ppo", steps=2, **settings)
    written = numbers_of(state)
    results = ranks.run(resume, state, "ppo", steps=range(0), layout=layout, **settings)
    assert_same(results[0][1], written)
    assert results[0][2]["state"] == state["state"]
    back = resume(None, results[0][2], "ppo", steps=range(0), **settings)[1]
    assert_same(back, written)


@pytest.mark.slow
def test_a_run_goes_from_each_layout_to_the_next(ranks: RankPool) -> None:
    """Every ZeRO stage over 1, 2 and 4 tensor ranks reads to the bit what the layout before it
    wrote, columns to other columns, and so does one process. The next step is that of one."""
    settings = {"reference_moving_average": 0.9, "spec": "parted"}
    state = saved(None, "ppo", steps=1, **settings)
    for step, layout in enumerate(CHAIN, start=1):
        written = numbers_of(state)
        alone, expected, after = carry_on(None, state, "ppo", step=step, **settings)
        results = ranks.run(carry_on, state, "ppo", step=step, layout=layout, **settings)
        read, report, state = results[0]
        assert_same(read, written)
        assert_same(alone, written)
        assert state["state"] == after["state"]
        assert report.version == expected.version == step + 1
        for name in ("loss", "grad_norm"):
            assert report.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4), layout
        assert_close(numbers_of(state), numbers_of(after), relative=2e-4)


@pytest.mark.parametrize("layout", TENSOR_LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", BFLOAT16])
def test_every_rank_gets_the_version_whole(ranks: RankPool, layout: str, dtype: str) -> None:
    """Through buckets smaller than a tensor, to the bit the numbers of a snapshot, rounded."""
    results = ranks.run(registered, layout=layout, dtype=dtype, spec="parted")
    state, shapes = results[0][2], SPECS["parted"].parameter_shapes()
    expected = {
        name: torch.from_numpy(state[f"actor.master.{name}"]).to(getattr(torch, dtype)).float()
        for name in shapes
    }
    for manifest, found, _ in results:
        assert {(e.name, e.dtype, e.shape) for e in manifest.entries} == {
            (name, dtype, shape) for name, shape in shapes.items()
        }
        assert manifest.version == 2 and not manifest.shared
        assert_same(found, {name: tensor.numpy() for name, tensor in expected.items()})


@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_ranks_count_the_work_of_one_process_together(ranks: RankPool, layout: str) -> None:
    """Neither repeated KV heads nor padding of the vocabulary are work of the model."""
    settings = {"tokens_per_chunk": 40, "spec": "parted"}
    alone = measures(None, "ppo", **settings)
    results = ranks.run(measures, "ppo", layout=layout, **settings)
    assert sum(one["flops"] for one in results) == pytest.approx(alone["flops"], rel=1e-12)


@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_a_gradient_that_is_not_finite_skips_the_update_on_all(
    ranks: RankPool, layout: str
) -> None:
    for updates, events, same in ranks.run(with_a_bad_number, "ppo", spec="parted", layout=layout):
        assert updates == [0, 1] and same
        assert [event for event in events if event != "trainer.idle_ranks"] == [
            "trainer.update_skipped"
        ]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1_tensor2", "zero3_tensor2"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_changes_no_gradient(ranks: RankPool, layout: str, mode: str) -> None:
    expected, _ = of_one_process(gradients, "ppo", spec="parted")
    found, _ = ranks.run(gradients, "ppo", spec="parted", layout=layout, checkpointing=mode)[0]
    assert_close(found, expected, relative=1e-5)


@pytest.mark.parametrize("layout", ["zero0_tensor2", "zero1_tensor2", "zero3_tensor2"])
@pytest.mark.parametrize("dtype", ["float32", BFLOAT16])
def test_8_bit_products_over_ranks_are_those_of_one_process(
    ranks: RankPool, layout: str, dtype: str
) -> None:
    """Each sequence is a chunk, as scales are of a chunk's numbers, and none is padded. A sum of two
    parts now and then moves a number by a step of its format, and what follows with it: by norm,
    less than half of what 8 bits cost. A sum in BF16 is off by up to 2^-8 and a step is 2^-3, so it
    moves some 3 % of the numbers, each by √12 times the error of rounding: √(12 · 0.03) = 0.6 of
    what 8 bits cost at the median, and less than the whole for each tensor. Scales of each rank's
    own give 0.8 to 1.3, the median past 1. Of one product test_tensor_float8 has the bits."""
    share, median = (0.5, 0.5) if dtype == "float32" else (1.0, 0.8)
    settings: dict[str, Any] = {
        "spec": "blocks_apart",
        "dtype": dtype,
        "tokens_per_chunk": 16,
        "longer_than": 8,
        "divided_by": 2,
        "num_sequences": 24,
    }
    wide, _ = of_one_process(gradients, "ppo", **settings)
    expected, norms = of_one_process(gradients, "ppo", matmul="fp8", **settings)
    results = ranks.run(gradients, "ppo", layout=layout, matmul="fp8", **settings)
    ratios = []
    for name, whole in expected.items():
        cost = np.linalg.norm(whole - wide[name])
        assert cost > 1e-3 * np.linalg.norm(whole), name
        ratios.append(np.linalg.norm(results[0][0][name] - whole) / cost)
        assert ratios[-1] <= share, name
    assert np.median(ratios) <= median
    assert all(result[1] == results[0][1] for result in results)
    assert results[0][1] == pytest.approx(norms, rel=3e-2)


@pytest.mark.slow
def test_snapshots_of_8_bit_products_fit_any_layout(ranks: RankPool) -> None:
    settings = {"spec": "blocks_parted", "matmul": "fp8", "dtype": "bfloat16"}
    state = saved(None, "sft", steps=1, **settings)
    results = ranks.run(resume, state, "sft", steps=range(0), layout="zero3_tensor2", **settings)
    assert_same(results[0][1], numbers_of(state))


@pytest.mark.parametrize("mode", ["selective", pytest.param("full", marks=pytest.mark.slow)])
def test_8_bit_products_are_made_again_from_the_same_numbers(ranks: RankPool, mode: str) -> None:
    settings = {"spec": "blocks_parted", "matmul": "fp8", "layout": "zero3_tensor2"}
    expected = ranks.run(gradients, "grpo", **settings)[0][0]
    found = ranks.run(gradients, "grpo", checkpointing=mode, **settings)[0][0]
    assert_close(found, expected, relative=1e-6)
