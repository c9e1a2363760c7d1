"""Flat AdamW against torch.optim.AdamW, and the learning-rate schedule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.distributed.mesh import make_mesh
from gyre.distributed.process_group import alone
from gyre.trainer.adamw import adamw
from gyre.trainer.config import TrainerConfig
from gyre.trainer.optim.flat import FlatOptimizer
from gyre.trainer.optim.schedule import learning_rate_factor

SHAPES = {
    "a.weight": (7, 5),
    "norm.weight": (9,),
    "b.weight": (3, 4, 2),
    "b.bias": (11,),
    "scalar_head.weight": (1, 6),
}
DECAYED = {"a.weight", "b.weight"}


def make(dtype: torch.dtype, **options) -> tuple[dict[str, torch.nn.Parameter], FlatOptimizer]:
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }
    defaults = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return parameters, FlatOptimizer(
        parameters, **{**defaults, **options}, mesh=make_mesh(alone(), 0)
    )


def gradients(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def feed(parameters, grads) -> None:
    sum(
        (parameters[name] * grad.to(parameters[name].dtype)).sum() for name, grad in grads.items()
    ).backward()


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rate=st.sampled_from([1e-4, 1e-2]),
    decay=st.sampled_from([0.0, 0.1]),
    scale=st.sampled_from([1.0, 0.25]),
    block=st.sampled_from([16, 48, 1 << 17]),
)
def test_equals_torch_adamw_to_the_bit(seed, rate, decay, scale, block):
    parameters, ours = make(torch.float32, weight_decay=decay)
    theirs = {name: torch.nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    groups = [
        {"params": [theirs[name] for name in SHAPES if name in DECAYED], "weight_decay": decay},
        {"params": [theirs[name] for name in SHAPES if name not in DECAYED], "weight_decay": 0.0},
    ]
    theirs_adamw = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    whole, adamw.BLOCK_CPU = adamw.BLOCK_CPU, block
    try:
        for step in range(4):
            grads = gradients(seed + step)
            feed(parameters, grads)
            ours.update(learning_rate=rate, grad_scale=scale)
            for name, parameter in theirs.items():
                parameter.grad = grads[name] * scale
            theirs_adamw.step()
    finally:
        adamw.BLOCK_CPU = whole
    for name in SHAPES:
        assert torch.equal(parameters[name], theirs[name]), name


def test_gradients_add_up_in_float32_and_are_consumed():
    parameters, ours = make(torch.bfloat16)
    grads = {name: torch.full(shape, 1.0) for name, shape in SHAPES.items()}
    for _ in range(300):  # 300 is beyond what bfloat16 counts to one by one
        feed(parameters, grads)
    assert all(bool((grad == 300.0).all()) for grad in ours.grads().values())
    assert all(parameter.grad is None for parameter in parameters.values())
    numbers = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert ours.grad_norm() == pytest.approx(300.0 * numbers**0.5)
    ours.update(learning_rate=1e-3, grad_scale=1.0)
    assert not ours.grad_N.any()


def test_low_precision_weights_follow_float32_masters():
    parameters, ours = make(torch.bfloat16)
    storages = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    for step in range(50):
        feed(parameters, gradients(step))
        # far below what one bfloat16 step could hold
        ours.update(learning_rate=1e-5, grad_scale=1.0)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, ours.masters()[name].to(torch.bfloat16))
        assert parameter.data_ptr() == storages[name]
    start, _ = make(torch.bfloat16)
    assert any((ours.masters()[name] - start[name].float()).abs().max() > 1e-5 for name in SHAPES)


def test_float32_weights_are_the_master():
    parameters, ours = make(torch.float32)
    storage = ours.master_N.untyped_storage().data_ptr()
    assert all(
        parameter.untyped_storage().data_ptr() == storage for parameter in parameters.values()
    )


def test_schedule_by_hand():
    def rates(**settings):
        config = TrainerConfig(steps=6, **settings)
        return [round(learning_rate_factor(config, step), 4) for step in range(8)]

    assert rates(warmup_steps=2) == [0.5, 1, 1, 1, 1, 1, 1, 1]
    assert rates(warmup_steps=2, schedule="linear") == [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    assert rates(schedule="cosine", final_learning_rate_fraction=0.1) == [
        1.0,
        0.9397,
        0.775,
        0.55,
        0.325,
        0.1603,
        0.1,
        0.1,
    ]
