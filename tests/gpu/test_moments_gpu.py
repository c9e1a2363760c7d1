"""Moments in 8 bits on a GPU: bitsandbytes' kernel beside torch's operations; memory; state away;
ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from gyre.distributed.mesh import make_mesh
from gyre.distributed.process_group import alone
from gyre.trainer.adamw import adamw_8bit
from gyre.trainer.adamw.adamw import Numbers
from gyre.trainer.adamw.adamw_8bit import CodedUpdate, _blank
from gyre.trainer.adamw.blocks import BLOCK
from gyre.trainer.config import TrainerConfig
from gyre.trainer.offload.state_placement import StatePlacement
from gyre.trainer.optim.flat import FlatOptimizer
from rank_pool import RankPool
from zero_cases import AWAY, coded_updates

pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
SHAPES = {
    "a.weight": (3000, 1024),
    "odd.weight": (300, 100),
    "b.weight": (41, 256),
    "norm.weight": (1999,),
}


def numbers_of(count: int, *, decay: float = 0.1) -> Numbers:
    return Numbers(
        learning_rate=1e-3,
        grad_scale=0.5,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=decay,
        num_updates=count,
    )


@pytest.mark.parametrize("spread", [0.0, 4.0])
@pytest.mark.parametrize("num_blocks", [1, 7, 5000])
def test_the_kernel_is_torchs_operations(num_blocks: int, spread: float) -> None:
    """From the same state: weights within the kernel's quick powers and quotients; codes the same
    but at the edge between two; a code of zero for the same second moments."""
    generator = torch.Generator(CUDA).manual_seed(num_blocks)
    update, span = CodedUpdate(CUDA), _blank(num_blocks, CUDA)
    span.weight_N.normal_(generator=generator)
    for count in range(1, 6):
        grad_N = torch.randn(num_blocks * BLOCK, device=CUDA, generator=generator)
        grad_N *= 10.0 ** (-spread * torch.rand(grad_N.shape, device=CUDA, generator=generator))
        grad_N[:BLOCK] = 0.0  # a row that is not seen
        span.grad_N.copy_(grad_N)
        other = replace(
            span,
            **{
                name: getattr(span, name).clone()
                for name in span.__slots__
                if name[-2:] in ("_N", "_B")
            },
        )
        update.by_kernel(span, numbers_of(count))
        update.by_torch(other, numbers_of(count))
        torch.testing.assert_close(span.weight_N, other.weight_N, rtol=1e-5, atol=2e-3 * 1e-3)
        for name in ("exp_avg_scale_B", "exp_avg_sq_scale_B"):
            torch.testing.assert_close(
                getattr(span, name), getattr(other, name), rtol=1e-5, atol=0.0
            )
        for name, scale in (
            ("exp_avg_N", "exp_avg_scale_B"),
            ("exp_avg_sq_N", "exp_avg_sq_scale_B"),
        ):
            some_B = getattr(span, scale) > 0
            codes = [getattr(one, name).view(-1, BLOCK)[some_B].int() for one in (span, other)]
            apart = (codes[0] - codes[1]).abs()
            assert apart.numel() == 0 or (
                int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 0.01
            ), name
        assert bool((span.exp_avg_sq_N.view(-1, BLOCK)[span.exp_avg_sq_scale_B > 0] > 0).all())
        assert not span.grad_N.any()


def largest_update(seed: int) -> float:
    update, span, largest = CodedUpdate(CUDA), _blank(16, CUDA), 0.0
    generator = torch.Generator(CUDA).manual_seed(seed)
    for count in range(1, 40):
        grad_N = torch.randn(16 * BLOCK, device=CUDA, generator=generator)
        grad_N *= 10.0 ** (-4.0 * torch.rand(grad_N.shape, device=CUDA, generator=generator))
        span.grad_N.copy_(grad_N * float(torch.rand((), device=CUDA, generator=generator) < 0.3))
        before_N = span.weight_N.clone()
        update([span], numbers_of(count, decay=0.0))
        largest = max(largest, float((span.weight_N - before_N).abs().max()) / 1e-3)
    return largest


@pytest.mark.parametrize("seed", range(4))
def test_no_update_leaps_where_a_second_moment_is_small(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel alone would: this is what is done after it."""
    assert largest_update(seed) < 6.0
    monkeypatch.setattr(adamw_8bit, "_keep_from_zero", lambda codes_sq_N, scale_sq_B: None)
    monkeypatch.setattr(CodedUpdate, "_try_kernel", lambda self, device: None)
    assert largest_update(seed) > 100.0


def make(
    dtype: torch.dtype, home: StatePlacement | None
) -> tuple[dict[str, nn.Parameter], FlatOptimizer]:
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(CUDA, dtype))
        for name, shape in SHAPES.items()
    }
    settings = {
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "mesh": make_mesh(alone(CUDA), 0),
    }
    update = CodedUpdate(CUDA)
    return parameters, FlatOptimizer(
        parameters, **settings, home=home, codes=True, update_spans=update
    )


@pytest.mark.parametrize("how", AWAY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_with_state_away_are_the_same_to_the_bit(
    tmp_path: Path, how: str, dtype: torch.dtype
) -> None:
    found = []
    config = TrainerConfig(**AWAY[how], offload_cut_bytes=1 << 20, offload_deadline_s=60.0)
    home = StatePlacement("actor", CUDA, config, folder=tmp_path)
    for where in (None, home):
        parameters, optimizer = make(dtype, where)
        generator = torch.Generator(device=CUDA).manual_seed(1)
        for _ in range(4):
            grads = {
                name: torch.randn(p.shape, generator=generator, device=CUDA)
                for name, p in parameters.items()
            }
            sum((p * grads[name].to(dtype)).sum() for name, p in parameters.items()).backward()
            optimizer.reduce()
            optimizer.update(learning_rate=1e-2, grad_scale=0.5)
        optimizer.settle_gradients()
        found.append({name: p.detach().cpu() for name, p in parameters.items()})
        found[-1] |= {name: moment.cpu().clone() for name, moment in optimizer.moments.items()}
        optimizer.close()
    assert found[0]["exp_avg_sq_codes"].any()
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


def test_an_update_takes_no_memory_beside_its_state(allocated) -> None:
    """Of moments 2 bytes and a 32nd per number; an update needs no copy of them."""
    update = CodedUpdate(CUDA)  # its trial is over
    before = allocated()
    num_blocks = 1 << 18
    span = _blank(num_blocks, CUDA)
    held = torch.cuda.memory_allocated() - before - 8 * num_blocks * BLOCK  # weights and gradient
    assert held == pytest.approx(num_blocks * (2 * BLOCK + 8), rel=0.01)
    torch.cuda.reset_peak_memory_stats()
    now = torch.cuda.memory_allocated()
    update([span], numbers_of(1))
    assert torch.cuda.max_memory_allocated() - now <= 16 * num_blocks


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    pool = RankPool(2, backend="nccl", device="cuda", timeout_s=120.0)
    yield pool
    pool.close()


def test_every_layout_updates_to_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    """From the same gradients; ranks on GPUs of their own."""
    expected, _ = ranks.run(coded_updates, dtype="bfloat16", layout="zero0")[0]
    for layout in ("zero1", "zero2", "zero3"):
        for how in (None, "host and gradients", "disk"):
            found, _ = ranks.run(
                coded_updates, dtype="bfloat16", layout=layout, how=how, folder=str(tmp_path)
            )[0]
            wrong = [
                name for name, tensor in expected.items() if not np.array_equal(found[name], tensor)
            ]
            assert wrong == [], (layout, how)
