"""A trainer on several ranks, real processes over gloo, does what one process does."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.torch
import torch

from gyre.core.errors import SnapshotError
from gyre.distributed.layout import BoxRun
from gyre.models.hub.load import load_hub, verify_export
from gyre.models.hub.verify import verify_runs
from trainer_cases import OBJECTIVES, assert_close, whole_tensors
from zero_cases import (
    AWAY,
    LAYOUTS,
    away,
    equal_away,
    evaluate,
    exported,
    gathered,
    gradients,
    held_bytes,
    measures,
    moved,
    of_one_process,
    overflowed,
    refused_mixture,
    resume,
    resume_first,
    saved,
    shared,
    sums_by_parts,
    train,
    with_a_bad_number,
)

# Every layout with the objective that has the most models; every objective with the layouts that
# differ most.
PAIRS = [("ppo", layout) for layout in LAYOUTS]
PAIRS += [(kind, layout) for kind in OBJECTIVES if kind != "ppo" for layout in ("zero1", "hybrid3")]


@pytest.mark.parametrize(("kind", "layout"), PAIRS)
def test_gradients_equal_one_process(ranks, kind, layout):
    expected, norms = of_one_process(gradients, kind, spec="odd")
    results = ranks.run(gradients, kind, spec="odd", layout=layout)
    assert_close(results[0][0], expected, relative=1e-5)
    assert all(result[1] == results[0][1] for result in results)
    assert results[0][1] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("layout", ["zero1", "zero3", "zero3_once", "zero1_tensor2"])
@pytest.mark.parametrize("tokens_per_chunk", [16, 45, 10_000])
def test_any_split_into_chunks_gives_the_same_gradient(pair, layout, tokens_per_chunk):
    expected, _ = of_one_process(gradients, "grpo", tokens_per_chunk=10_000)
    found, _ = pair.run(gradients, "grpo", layout=layout, tokens_per_chunk=tokens_per_chunk)[0]
    assert_close(found, expected, relative=1e-5)


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_changes_no_gradient(pair, layout, mode):
    """What a pass runs again needs its weights again, wherever they lie."""
    expected, _ = of_one_process(gradients, "ppo", spec="odd")
    found, _ = pair.run(gradients, "ppo", spec="odd", layout=layout, checkpointing=mode)[0]
    assert_close(found, expected, relative=1e-5)


@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero2", "zero3"])
def test_two_ranks_train_as_one_process(pair, layout):
    expected, state = of_one_process(train, "dpo", spec="odd")
    results = pair.run(train, "dpo", spec="odd", layout=layout)
    assert results[0][0] == results[1][0]
    assert [r.metrics["loss"] for r in results[0][0]] == pytest.approx(
        [r.metrics["loss"] for r in expected], rel=1e-5
    )
    assert_close(results[0][1], state, relative=2e-4)


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_update_on_all(ranks, layout):
    for updates, events, same in ranks.run(with_a_bad_number, "ppo", layout=layout):
        assert updates == [0, 1] and events == ["trainer.update_skipped", "trainer.idle_ranks"]
        assert same


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3", "hybrid1", "hybrid2", "hybrid3"])
def test_training_equals_one_process(ranks, layout):
    """Two epochs of three updates, twice: reports are the same on every rank, weights and moments
    as alone."""
    settings = {
        "epochs_per_batch": 2,
        "sequences_per_update": 4,
        "weight_decay": 0.1,
        "reference_moving_average": 0.5,
    }
    expected, state = of_one_process(train, "grpo", **settings)
    results = ranks.run(train, "grpo", layout=layout, **settings)
    assert all(reports == results[0][0] for reports, _ in results)
    for report, one in zip(results[0][0], expected, strict=True):
        assert (report.version, report.num_tokens, report.num_updates) == (
            one.version,
            one.num_tokens,
            one.num_updates,
        )
        assert report.metrics.keys() == one.metrics.keys()
        metrics = {name: value for name, value in one.metrics.items() if name != "padding_share"}
        assert {name: report.metrics[name] for name in metrics} == pytest.approx(
            metrics, rel=2e-4, abs=2e-6
        )
    assert_close(results[0][1], state, relative=2e-4)
    assert not any(state for _, state in results[1:])


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
@pytest.mark.parametrize("num_sequences", [2, 6])
def test_ranks_without_work_stay_in_step(ranks, layout, num_sequences):
    expected, state = of_one_process(train, "ppo", num_sequences=num_sequences, tokens_per_chunk=16)
    results = ranks.run(
        train, "ppo", num_sequences=num_sequences, tokens_per_chunk=16, layout=layout
    )
    assert results[0][0][0].metrics["loss"] == pytest.approx(expected[0].metrics["loss"], rel=1e-4)
    assert_close(results[0][1], state, relative=2e-4)


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3", "mixed"])
@pytest.mark.parametrize(
    ("kind", "which"),
    [
        ("ppo", "critic"),
        pytest.param("grpo", "reference", marks=pytest.mark.slow),
        pytest.param("rm", "reward", marks=pytest.mark.slow),
    ],
)
def test_evaluation_gives_every_rank_the_whole_batch(ranks, kind, which, layout):
    """Before a step and after it: nothing that was gathered for the first pass is read by the
    second."""
    settings = {"reference_refresh_steps": 1} if which == "reference" else {}
    expected = of_one_process(evaluate, kind, which, **settings)
    for found in ranks.run(evaluate, kind, which, layout=layout, **settings):
        for own, one in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, one, atol=2e-4)


def test_the_policy_is_evaluated_with_its_new_weights(ranks):
    expected = of_one_process(evaluate, "grpo", "policy", learning_rate=1e-2)
    assert np.abs(expected[0] - expected[9]).max() > 1e-2
    for layout in ("zero1", "zero2", "zero3"):
        for found in ranks.run(evaluate, "grpo", "policy", layout=layout, learning_rate=1e-2):
            for own, one in zip(found, expected, strict=True):
                np.testing.assert_allclose(own, one, atol=5e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_follows_float32_masters(ranks, dtype):
    """Every split rounds and sums in its own order; they stay as near to each other as bfloat16
    lets them."""
    expected, norms = of_one_process(gradients, "rm", dtype=dtype)
    for layout in ("zero1", "zero3"):
        found, own = ranks.run(gradients, "rm", dtype=dtype, layout=layout)[0]
        assert_close(found, expected, relative=1e-5 if dtype == "float32" else 0.03)
        assert own == pytest.approx(norms, rel=0.02)


def test_a_head_that_no_pass_reads_may_be_summed_once_per_update(pair):
    """A scalar head's trunk has a head of its own, which is never gathered."""
    settings = {"spec": "odd", "dtype": "bfloat16", "tokens_per_chunk": 40}
    expected, _ = of_one_process(gradients, "rm", **settings)
    found, _ = pair.run(gradients, "rm", layout="zero3_once", **settings)[0]
    assert_close(found, expected, relative=0.03)


@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero2", "zero3", "zero3_once"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_8_bit_products_are_the_same_over_ranks(pair, layout, dtype):
    """Scales are of a chunk's numbers, so each sequence is a chunk here, wherever it goes. What is
    left is the order of sums: in float32 its last bits; in bfloat16 gradients of chunks are rounded
    before they are added."""
    settings = {
        "dtype": dtype,
        "matmul": "fp8",
        "tokens_per_chunk": 16,
        "longer_than": 8,
        "num_sequences": 16,
    }
    expected, norms = of_one_process(gradients, "ppo", **settings)
    results = pair.run(gradients, "ppo", layout=layout, **settings)
    assert_close(results[0][0], expected, relative=1e-5 if dtype == "float32" else 0.02)
    assert (
        results[1][1]
        == results[0][1]
        == pytest.approx(norms, rel=1e-5 if dtype == "float32" else 0.01)
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_training_with_8_bit_products_goes_on_from_another_layout_s_snapshot(pair, layout):
    """The scales of gathered weights follow the weights that were read."""
    settings = {"matmul": "fp8", "dtype": "bfloat16"}
    state = saved(None, "sft", steps=2, **settings)
    written = {
        name: t.float().clone().numpy()
        for name, t in whole_tensors(state["tensors"].values()).items()
    }
    results = pair.run(resume, state, "sft", steps=range(0), layout=layout, **settings)
    for name, tensor in written.items():
        np.testing.assert_array_equal(results[0][1][name], tensor, err_msg=name)
    on = [
        pair.run(resume, state, "sft", steps=range(2, 4), layout=each, **settings)[0]
        for each in (layout, "zero0")
    ]
    assert_close(on[0][1], on[1][1], relative=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_8_bit_products_of_parked_components_and_of_the_reference(pair, layout):
    """Shards that were away are gathered as before; the reference, never trained, multiplies what
    the policy does."""
    settings = {"matmul": "fp8", "dtype": "bfloat16", "layout": layout}
    expected = pair.run(train, "grpo", **settings)[0][1]
    assert_close(pair.run(moved, "grpo", **settings)[0], expected, relative=1e-6)
    ours, theirs = (
        pair.run(evaluate, "grpo", which, **settings)[0] for which in ("policy", "reference")
    )
    assert all(np.array_equal(a, b) for a, b in zip(ours[:9], theirs[:9], strict=True))


@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero2", "zero3", "zero1_tensor2"])
def test_an_overflow_in_float16_is_skipped_on_all_ranks_alike(pair, layout):
    expected, state = of_one_process(overflowed)
    results = pair.run(overflowed, layout=layout)
    assert results[0][0] == results[1][0]
    assert [row[:2] for row in results[0][0]] == [row[:2] for row in expected] and expected[1][
        0
    ] == 0
    assert expected[1][1] == expected[0][1] / 2
    assert_close(results[0][1], state, relative=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1", "zero3", "hybrid3", "mixed"])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_snapshots_fit_any_number_of_ranks(ranks, layout, dtype):
    """One process's into four ranks and back, to the bit; and the run goes on from it."""
    settings = {"dtype": dtype, "reference_moving_average": 0.9, "spec": "odd"}
    state = saved(None, "ppo", steps=2, **settings)
    written = {
        name: t.float().numpy() for name, t in whole_tensors(state["tensors"].values()).items()
    }
    results = ranks.run(resume, state, "ppo", steps=range(0), layout=layout, **settings)
    assert results[0][1].keys() == written.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(results[0][1][name], tensor, err_msg=name)
    assert results[0][2]["state"] == state["state"]
    back = resume(None, results[0][2], "ppo", steps=range(0), **settings)[1]
    for name, tensor in written.items():
        np.testing.assert_array_equal(back[name], tensor, err_msg=name)
    if dtype == "float32":
        on, after, _ = resume(None, state, "ppo", steps=range(2, 4), **settings)
        results = ranks.run(resume, state, "ppo", steps=range(2, 4), layout=layout, **settings)
        assert [r.version for r in results[0][0]] == [r.version for r in on] == [3, 4]
        assert_close(results[0][1], after, relative=1e-3)


@pytest.mark.parametrize("layout", ["zero1", "zero3", "hybrid3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rank_gets_the_version_whole(ranks, layout, dtype):
    """Through buckets smaller than a tensor, on each rank the weights that the forward pass
    computes with."""
    versions = ranks.run(
        gathered, bucket_bytes=1000, layout=layout, dtype=dtype, spec="odd", learning_rate=1e-2
    )
    manifest, expected = of_one_process(
        gathered, bucket_bytes=0, dtype=dtype, spec="odd", learning_rate=1e-2
    )
    for own, found in versions:
        assert {(e.name, e.dtype, e.shape) for e in own.entries} == {
            (e.name, e.dtype, e.shape) for e in manifest.entries
        }
        assert own.version == 1 and own.shared == (layout == "zero1")
        # after an update, as everywhere: AdamW enlarges the last bits of small gradients
        assert_close(found, expected, relative=2e-4 if dtype == "float32" else 0.05)
        for name, tensor in versions[0][1].items():
            np.testing.assert_array_equal(found[name], tensor, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout", "dtype"),
    [("ppo", layout, "float32") for layout in ("zero1", "zero3", "hybrid3")]
    + [("rm", layout, "bfloat16") for layout in ("zero0", "zero1", "zero2", "hybrid1")],
)
def test_state_away_from_the_device_changes_no_bit(ranks, tmp_path, kind, layout, dtype):
    hows = list(AWAY) if dtype == "bfloat16" else ["disk and gradients"]
    results = ranks.run(
        equal_away, kind, hows, str(tmp_path), layout=layout, dtype=dtype, spec="odd"
    )
    assert results == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_snapshots_of_state_away_fit_state_on_the_device_and_back(ranks, tmp_path, layout):
    state = saved(None, "ppo", steps=2, dtype="bfloat16")
    written = {
        name: t.float().numpy() for name, t in whole_tensors(state["tensors"].values()).items()
    }
    for how in ("disk", "host and gradients"):
        settings = {"steps": range(0), "layout": layout, "dtype": "bfloat16"}
        results = ranks.run(
            away, resume_first, "ppo", how, f"{tmp_path}/{how}", state=state, **settings
        )
        back = resume(None, results[0][2], "ppo", steps=range(0), dtype="bfloat16")[1]
        for name, tensor in written.items():
            np.testing.assert_array_equal(results[0][1][name], tensor, err_msg=name)
            np.testing.assert_array_equal(back[name], tensor, err_msg=name)


def test_gradients_in_host_memory_are_summed_over_ranks_by_parts(pair):
    for layout in ("zero0", "zero1", "zero3"):
        assert pair.run(sums_by_parts, layout=layout) == [0.0, 0.0]


def test_parked_components_of_state_away_come_back(ranks, tmp_path):
    _, expected = of_one_process(train, "ppo")
    found = ranks.run(away, moved, "ppo", "disk and gradients", str(tmp_path), layout="zero1")[0]
    assert_close(found, expected, relative=2e-4)


@pytest.mark.parametrize("layout", ["zero1", "zero3", "mixed"])
def test_parked_components_come_back(ranks, layout):
    _, expected = of_one_process(train, "ppo")
    assert_close(ranks.run(moved, "ppo", layout=layout)[0], expected, relative=2e-4)


def test_what_each_layout_holds(ranks):
    """Bytes per parameter of the actor, in units of the float32 model, up to the padding of small
    tensors."""
    alone = held_bytes(None, "grpo", dtype="bfloat16")
    count = alone["actor.grads"] / 4
    for layout, (params, grads, rest) in {
        "zero0": (2, 4, 12),
        "zero1": (2, 4, 3),
        "zero3": (1, 1, 2),
        "hybrid1": (2, 4, 6),
        "hybrid3": (2, 2, 4),
    }.items():
        for held in ranks.run(held_bytes, "grpo", dtype="bfloat16", layout=layout):
            got = (
                held["actor.params"],
                held["actor.grads"],
                held["actor.optimizer"] + held.get("actor.master", 0),
            )
            assert [size / count for size in got] == pytest.approx(
                [params, grads, rest], rel=0.05
            ), layout


def test_an_export_streams_from_the_shards(ranks, tmp_path):
    """No rank ever holds more than two buckets, and a block on the way to the disk, beside its
    shard."""
    folder = tmp_path / "export"
    results = ranks.run(exported, str(folder), layout="zero3")
    model_bytes = sum(tensor.nbytes for tensor in results[0]["tensors"].values())
    assert model_bytes > 4 << 20
    for result in results:
        assert 1 << 17 <= result["tensor_bytes"] < 3 << 17, result["tensor_bytes"]
        assert result["python_bytes"] < model_bytes / 8, result["python_bytes"]
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 2 and (folder / "model.safetensors.index.json").is_file()
    spec, decoder = load_hub(folder, device=torch.device("cpu"), dtype=torch.float32)
    for name, parameter in decoder.named_parameters():
        np.testing.assert_array_equal(
            parameter.detach().numpy(), results[0]["tensors"][name], err_msg=name
        )
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    stored = {name: file for file in files for name in safetensors.torch.load_file(file)}
    assert {name: file.name for name, file in stored.items()} == index
    verify_export(folder, decoder)
    runs = [
        (name, BoxRun(start=0, stop=p.numel()), p.detach().view(-1))
        for name, p in decoder.named_parameters()
    ]
    verify_runs(folder, spec, runs)
    with torch.no_grad():
        decoder.get_parameter("layers.1.down.weight")[3, 5] += 1
    with pytest.raises(SnapshotError, match=r"content of layers\.1\.down\.weight"):
        verify_runs(folder, spec, runs)


# What the metrics say of ranks
# ------------------------------------------------------------------------------------------


def test_ranks_count_the_work_of_one_process_together(ranks):
    alone = measures(None, "ppo", tokens_per_chunk=40)
    for layout in ("zero1", "zero3"):
        results = ranks.run(measures, "ppo", layout=layout, tokens_per_chunk=40)
        assert sum(result["flops"] for result in results) == pytest.approx(
            alone["flops"], rel=1e-12
        )


def test_the_first_rank_writes_the_trace(pair, tmp_path):
    results = pair.run(measures, "sft", layout="zero3", folder=str(tmp_path))
    ((kind, told),) = results[0]["events"]
    assert kind == "trace.written" and not results[1]["events"]
    assert (tmp_path / told["file"]).is_file() and len(list((tmp_path / "traces").iterdir())) == 1
    assert told["communication_s"] > 0.0 and told["compute_s"] > 0.0
    assert set(results[0]["measured"]) == {
        "sent_bytes/all_gather",
        "sent_bytes/all_reduce",
        "sent_bytes/reduce_scatter",
    }


def test_ranks_with_different_devices_refuse_each_other(ranks):
    same = ranks.run(refused_mixture, ["NVIDIA H200"] * 4)
    assert same == [""] * 4
    for told in ranks.run(
        refused_mixture, ["NVIDIA H200", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA H200"]
    ):
        assert (
            "ranks 0, 1, 3 (node-0, node-1): NVIDIA H200 with 1.0 GiB, compute capability 9.0"
            in told
        )
        assert "rank 2 (node-1): NVIDIA A100-SXM4-80GB" in told


def test_ranks_share_texts_of_any_length(pair):
    # six bytes a letter: a frame ends between the fourth and fifth
    sizes = [0, 1, 300, 330, 340, 345, 2000, 40_000]
    for told in pair.run(shared, sizes):
        for size, (first, second) in zip(sizes, told, strict=True):
            assert first == {"text": "é", "rank": 0} and second == {"text": "é" * size, "rank": 1}
