"""Optimizer state, gradients and weights away from a GPU: the same bits as on it, and less of its
memory."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from gyre.distributed.config import ParallelConfig
from gyre.distributed.mesh import Splitter, make_mesh
from gyre.distributed.process_group import alone
from gyre.models.decoder import Decoder
from gyre.models.init import FreshWeights
from gyre.trainer.config import TrainerConfig
from gyre.trainer.offload.state_placement import StatePlacement
from gyre.trainer.optim.flat import FlatOptimizer
from gyre.trainer.passes.forward import chunk_logprobs
from gyre.trainer.roles.materialize import start_frozen
from rank_pool import RankPool
from weight_cases import ALL, SMALL
from zero_cases import AWAY, DEEP, away, batch_for, moved, sums_by_parts, train, trainer_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
SHAPES = {
    "a.weight": (2000, 700),
    "norm.weight": (1999,),
    "b.weight": (300, 41, 7),
    "b.bias": (11,),
}


def make(
    dtype: torch.dtype, home: StatePlacement | None
) -> tuple[dict[str, nn.Parameter], FlatOptimizer]:
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(CUDA, dtype))
        for name, shape in SHAPES.items()
    }
    mesh = make_mesh(alone(CUDA), 0)
    optimizer = FlatOptimizer(
        parameters, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, mesh=mesh, home=home
    )
    return parameters, optimizer


def homes(folder: Path, how: str) -> StatePlacement:
    config = TrainerConfig(**AWAY[how], offload_cut_bytes=1 << 20, offload_deadline_s=60.0)
    return StatePlacement("actor", CUDA, config, folder=folder)


@pytest.mark.parametrize("how", AWAY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_the_same_to_the_bit(tmp_path, how, dtype) -> None:
    """Several updates of two chunks each, queued without a wait between them."""
    found = []
    for home in (None, homes(tmp_path, how)):
        parameters, optimizer = make(dtype, home)
        generator = torch.Generator(device=CUDA).manual_seed(1)
        for _ in range(4):
            for _ in range(2):
                grads = {
                    name: torch.randn(p.shape, generator=generator, device=CUDA)
                    for name, p in parameters.items()
                }
                sum((p * grads[name].to(dtype)).sum() for name, p in parameters.items()).backward()
            optimizer.reduce()
            assert all(parameter.grad is None for parameter in parameters.values())
            optimizer.update(learning_rate=1e-2, grad_scale=0.5)
        optimizer.settle_gradients()
        assert not optimizer.grad_N.any()
        found.append({name: p.detach().cpu() for name, p in parameters.items()})
        found[-1] |= {
            f"master.{name}": m.detach().cpu().clone() for name, m in optimizer.masters().items()
        }
        found[-1] |= {name: moment_N.cpu().clone() for name, moment_N in optimizer.moments.items()}
        if home is not None:
            traffic = home.take_traffic()
            assert traffic.in_bytes > 0 and traffic.waited_s >= 0.0
        optimizer.close()
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


def test_state_away_takes_no_device_memory_but_its_cuts(tmp_path, allocated) -> None:
    held = []
    for home in (None, homes(tmp_path, "host and gradients")):
        before = allocated()
        parameters, optimizer = make(torch.bfloat16, home)
        held.append(allocated() - before)
        numbers = sum(parameter.numel() for parameter in parameters.values())
        optimizer.close()
        del parameters, optimizer
    assert held[0] >= 18 * numbers
    assert held[1] <= 2 * numbers + 3 * (1 << 20) + (1 << 16)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_weights_in_host_memory_compute_as_on_the_device(mode) -> None:
    """Forward passes to the bit, with rooms that hold NaN before each visit; attention's backward
    pass sums in no fixed order, so what is trained lies within bounds."""
    found = []
    for models in ((), ALL):
        settings = {
            "spec": "deep",
            "dtype": "bfloat16",
            "checkpointing": mode,
            "tokens_per_chunk": 64,
        }
        trainer = trainer_on(alone(CUDA), "grpo", **settings, **SMALL, offload_parameters=models)
        streams, values = trainer.memory.streams.values(), []
        for which in ("policy", "reference", "reward"):
            for stream in streams:
                stream.buffers_B.fill_(255)  # every bfloat16 of it a NaN
            told = trainer.evaluate_now(batch_for(12, seed=3), which)
            values += [*told.per_token, *([] if told.per_sequence is None else [told.per_sequence])]
        for step in range(3):
            for stream in streams:
                stream.buffers_B.fill_(255)
            report = trainer.step_now(batch_for(12, seed=step))
            assert report.num_updates == 1
        places = {parameter.device.type for parameter in trainer.models.actor.decoder.parameters()}
        assert places == {"cpu" if models else CUDA.type}
        weights = {
            name: tensor.float().cpu().numpy()
            for name, tensor in trainer.register_now().source.tensors.items()
        }
        found.append((values, report, weights))
    (values, report, weights), (own_values, own, own_weights) = found
    for expected, got in zip(values, own_values, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert own.metrics["loss"] == pytest.approx(report.metrics["loss"], rel=1e-2, abs=1e-3)
    assert own.metrics["grad_norm"] == pytest.approx(report.metrics["grad_norm"], rel=2e-2)
    assert own.measured["offload_in_bytes"] > 0 and own.measured["offload_wait_seconds"] >= 0.0
    for name, tensor in weights.items():
        assert np.linalg.norm(own_weights[name] - tensor) <= 2e-2 * np.linalg.norm(tensor), name


def test_a_frozen_model_in_host_memory_takes_two_layers_of_the_device(allocated) -> None:
    """While it stands and while it computes: 24 layers of 12.6 MB, of which 22 are never there."""
    spec = replace(
        DEEP,
        num_layers=24,
        hidden_size=1024,
        mlp_size=1536,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
    )
    split = Splitter(alone(CUDA), ParallelConfig()).split("reference")
    decoder = Decoder(spec, device=torch.device("meta"), dtype=torch.bfloat16)
    trainer = trainer_on(alone(CUDA), "grpo", dtype="bfloat16")
    (update,) = trainer.plan(batch_for(4, seed=0)).updates
    before = allocated()
    config = TrainerConfig(offload_parameters=("reference",))
    away = start_frozen("reference", decoder, None, config, split, FreshWeights(spec, 0))
    assert away is not None
    stream = away.stream
    held, standing = stream.sizes(), allocated() - before

    def compute() -> None:
        with stream.visit(), torch.inference_mode():
            logprobs_N, _ = chunk_logprobs(decoder, update.chunks[0])
        assert bool(logprobs_N.isfinite().all())

    compute()  # the process's workspaces, as large as the bound below, are made here
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    compute()
    computing = torch.cuda.max_memory_allocated() - before
    assert held["layer_buffer_bytes"] < held["size_bytes"] / 8
    room = held["layer_buffer_bytes"] + held["size_bytes"] / 8
    assert standing + computing < room, "activations of four short sequences are small"
    assert stream.take_traffic().in_bytes >= 2 * held["size_bytes"]


@pytest.fixture(scope="module")
def ranks():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    pool = RankPool(2, backend="nccl", device="cuda", timeout_s=60.0)
    yield pool
    pool.close()


@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("how", ["host and gradients", "disk and gradients"])
def test_ranks_train_as_without(ranks, tmp_path, layout, how) -> None:
    """Attention's backward pass sums in no fixed order on a GPU, so the last bits may differ
    between any two runs."""
    expected, state = ranks.run(train, "grpo", layout=layout)[0]
    reports, own = ranks.run(away, train, "grpo", how, str(tmp_path), layout=layout)[0]
    for report, one in zip(reports, expected, strict=True):
        assert report.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-3, abs=1e-4)
    for name, tensor in state.items():
        np.testing.assert_allclose(
            own[name], tensor, atol=2e-3 * np.abs(tensor).max(), rtol=0, err_msg=name
        )


def test_sums_by_parts_and_parking(ranks, tmp_path) -> None:
    assert max(ranks.run(sums_by_parts, layout="zero1")) < 1e-2
    state = ranks.run(away, moved, "ppo", "disk and gradients", str(tmp_path), layout="zero1")[0]
    expected = ranks.run(train, "ppo", layout="zero1")[0][1]
    for name, tensor in expected.items():
        np.testing.assert_allclose(
            state[name], tensor, atol=2e-3 * np.abs(tensor).max(), rtol=0, err_msg=name
        )


@pytest.mark.parametrize("layout", ["zero0", "zero1"])
def test_ranks_with_weights_in_host_memory_train_as_without(ranks, layout) -> None:
    """New weights are gathered through the device a part at a time with zero 1."""
    settings = {"layout": layout, "spec": "deep"}
    expected, state = ranks.run(train, "grpo", **settings)[0]
    reports, own = ranks.run(train, "grpo", **settings, **SMALL, offload_parameters=ALL)[0]
    for report, one in zip(reports, expected, strict=True):
        assert report.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-2, abs=1e-3)
    for name, tensor in state.items():
        assert np.linalg.norm(own[name] - tensor) <= 2e-2 * np.linalg.norm(tensor), name
