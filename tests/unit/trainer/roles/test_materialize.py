"""How a trainer begins: every rank reads its own part of the weights, and all together begin as one
process does."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gyre.models.decoder import Decoder
from gyre.models.hub.load import export_hub, load_hub
from gyre.models.init import FreshWeights, init_weights
from start_cases import from_folder, from_seed, peak_bytes, resumed, started
from trainer_cases import CPU, SPEC, assert_same, make_trainer, whole_tensors
from zero_cases import SPECS, batch_for, decoder_on, saved, whole

CUT = ("zero2", "zero3", "hybrid3")
HUB = replace(SPECS["odd"], family="qwen2", qk_norm=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A hub folder whose tensors are fused with us and do not divide by the ranks."""
    path = tmp_path_factory.mktemp("hub") / "odd"
    decoder = Decoder(HUB, device=CPU, dtype=torch.float32)
    init_weights(decoder, 3)
    for bias in (
        parameter for name, parameter in decoder.named_parameters() if name.endswith("bias")
    ):
        torch.nn.init.normal_(bias)
    export_hub(decoder, path, dtype=torch.float32, tokenizer_files=None)
    return path


def live_start(kind: str, folder: Path, dtype: str, **settings) -> dict[str, np.ndarray]:
    """What a trainer holds that is given whole weights, as the hub's own reader loads them."""
    _, decoder = load_hub(folder, device=CPU, dtype=getattr(torch, dtype))
    return whole(make_trainer(kind, decoder=decoder, **settings))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_one_process_begins_with_the_weights_of_the_folder(folder, kind, dtype):
    """Masters are the weights rounded to what is computed with, whatever the file has."""
    settings = {"reference_moving_average": 0.5, "dtype": dtype}
    found, read, held, _ = from_folder(None, kind, folder, **settings)
    expected = live_start(kind, folder, **settings)
    assert_same(found, expected)
    master = torch.from_numpy(found["actor.master.layers.0.down.weight"])
    assert torch.equal(master, master.to(getattr(torch, dtype)).float())
    assert read == {name: 2 * count for name, count in held.items()}, "once for each of two models"


@pytest.mark.parametrize("layout", ["zero0", "zero1", *CUT, "mixed"])
@pytest.mark.parametrize(("kind", "dtype"), [("ppo", "float32"), ("grpo", "bfloat16")])
def test_ranks_begin_as_one_process_and_read_their_share(ranks, folder, layout, kind, dtype):
    expected, _, _, scores = from_folder(None, kind, folder, dtype=dtype)
    results = ranks.run(from_folder, kind, folder, dtype=dtype, layout=layout)
    assert_same(results[0][0], expected)
    for _, read, held, own in results:
        np.testing.assert_allclose(own, scores, rtol=1e-3, atol=1e-3)
        if layout in CUT:
            assert read == {name: 2 * count for name, count in held.items()}
        elif layout != "mixed":
            assert sum(read.values()) == 2 * HUB.num_parameters
    if layout in CUT:
        copies = 2 if layout == "hybrid3" else 1
        assert (
            sum(sum(read.values()) for _, read, _, _ in results) == 2 * copies * HUB.num_parameters
        )


def test_drawn_weights_are_the_same_in_every_layout(ranks):
    expected = from_seed(None, "grpo", spec="odd")
    decoder = decoder_on(CPU, torch.float32, spec="odd")
    init_weights(decoder, 5)
    for name, parameter in decoder.named_parameters():
        np.testing.assert_array_equal(expected[f"actor.master.{name}"], parameter.detach().numpy())
    for layout in ("zero1", "zero3"):
        assert_same(ranks.run(from_seed, "grpo", spec="odd", layout=layout)[0], expected)


@pytest.mark.slow
def test_a_rank_never_holds_a_whole_model(ranks):
    """Counted by torch's own tracker: the components of this rank, and one tensor while it is
    drawn."""
    deep = replace(SPEC, num_layers=12, hidden_size=64, mlp_size=128, vocab_size=256, head_dim=32)
    largest = max(np.prod(shape) for shape in deep.parameter_shapes().values())
    for layout in ("zero1", "zero3"):
        for dtype in ("float32", "bfloat16"):
            for peak, components in ranks.run(peak_bytes, deep, layout=layout, dtype=dtype):
                drawn = 3 * 4 * largest  # drawn, scaled, rounded
                assert components <= peak <= components + drawn + 0.02 * components, (layout, dtype)
                assert drawn < 0.5 * 4 * deep.num_parameters / 4, (
                    "or the bound would not tell shards from the whole"
                )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero3", "mixed"])
@pytest.mark.parametrize(("kind", "dtype"), [("ppo", "float32"), ("grpo", "bfloat16")])
def test_a_resumed_trainer_reads_no_weights_and_is_blank_until_it_is_restored(
    ranks, layout, kind, dtype
):
    settings = {"dtype": dtype, "reference_moving_average": 0.9, "spec": "odd"}
    state = saved(None, kind, steps=1, **settings)
    expected = {
        name: t.float().numpy() for name, t in whole_tensors(state["tensors"].values()).items()
    }
    for refused, found, updates in ranks.run(resumed, state, kind, layout=layout, **settings):
        assert (
            refused == ["refused", "SnapshotError, refused", "SnapshotError, refused"]
            and updates == 1
        )
        if found:
            assert_same(found, expected)


def test_shards_that_are_gathered_in_8_bits_begin_blank_too(ranks):
    """Filled from drawn weights, or by a snapshot, and trained: the scales are those of the numbers
    that came."""
    settings = {"matmul": "fp8", "dtype": "bfloat16", "spec": "tied"}
    assert_same(
        ranks.run(from_seed, "grpo", layout="zero3", **settings)[0],
        from_seed(None, "grpo", **settings),
    )
    state = saved(None, "grpo", steps=1, **settings)
    expected = {
        name: t.float().clone().numpy()
        for name, t in whole_tensors(state["tensors"].values()).items()
    }
    for refused, found, updates in ranks.run(resumed, state, "grpo", layout="zero3", **settings):
        assert refused[0] == "refused" and updates == 1
        if found:
            assert_same(found, expected)


def test_what_the_plan_parks_leaves_as_soon_as_it_is_made():
    """So the critic is gone from the device when the actor is made; the numbers are the same."""
    settings = {"weights": FreshWeights(SPEC, 3), "spec": SPEC, "dtype": "bfloat16"}
    parked = {"critic.grads": "none", "actor.grads": "none", "reward": "host"}
    parked |= dict.fromkeys(
        ("critic.params", "critic.master", "critic.optimizer", "actor.optimizer"), "host"
    )
    trainer = started(None, "ppo", reward=FreshWeights(SPEC, 4), parked=parked, **settings)
    tiers = {component.name: component.tier for component in trainer.components()}
    assert (
        tiers == {name: parked.get(name, "device") for name in tiers}
        and parked.keys() < tiers.keys()
    )
    assert all(trainer.measure()[name].device_bytes == 0 for name in parked)
    there = started(None, "ppo", reward=FreshWeights(SPEC, 4), **settings)
    assert_same(whole(trainer), whole(there))
    trainer.move([name for name, tier in parked.items() if tier == "host"], "device")
    batch = batch_for(8, seed=0)
    assert trainer.step_now(batch).metrics == there.step_now(batch).metrics


@pytest.mark.slow
def test_one_process_never_imports_what_cuts_weights():
    code = (
        "import sys, gyre.launch.commands, gyre.launch.placement.worker; "
        "print('torch.distributed.fsdp' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert ran.stdout.strip() == "False"
