"""FP16 with a dynamic loss scale, and products of 8-bit operands, in whole trainers."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from gyre.core.errors import ConfigError
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.trainer.optim.schedule import GOOD_UPDATES, LossScale
from gyre.trainer.trainer import NativeTrainer
from trainer_cases import (
    CPU,
    SPEC,
    assert_bits_equal,
    make_batch,
    make_decoder,
    make_trainer,
    weights_of,
)


def test_the_scale_is_that_of_torch_s_scaler():
    """Through overflows at random, one right after the other, and two runs of good updates that are
    long enough."""
    rng = np.random.default_rng(0)
    finite = [
        True,
        False,
        False,
        *[True] * (GOOD_UPDATES + 3),
        False,
        *[True] * (2 * GOOD_UPDATES),
        *(rng.random(200) < 0.9),
    ]
    parameter = torch.nn.Parameter(torch.zeros(1))
    scaler, sgd = torch.amp.GradScaler("cpu"), torch.optim.SGD([parameter], lr=0.0)
    ours = LossScale()
    for good in finite:
        assert ours.factor == float(scaler.scale(torch.ones(()))), ours
        parameter.grad = torch.full((1,), 1.0 if good else math.inf)
        scaler.step(sgd)
        scaler.update()
        ours = ours.after(finite=bool(good))
    assert {
        "scale": ours.factor,
        "_growth_tracker": ours.good_updates,
    }.items() <= scaler.state_dict().items()


def loss_scale_of(trainer: NativeTrainer) -> dict[str, float] | None:
    return trainer.snapshot_now()["state"].get("loss_scale")


def with_overflow(seed: int):
    """A batch with an advantage that no FP16 gradient holds."""
    batch = make_batch(seed=seed)
    batch.sequences[0].columns["advantages"][-1] = 1e9
    return batch


def test_updates_are_those_of_torch_s_scaler_over_the_same_gradients():
    """Scaled gradients as they were summed go to torch.amp.GradScaler, clip_grad_norm_ and AdamW as
    well."""
    trainer = make_trainer(
        "grpo", dtype=torch.float16, grad_clip=0.5, weight_decay=0.0, learning_rate=1e-3
    )
    optimizer = trainer.models.actor.optimizer
    theirs = torch.nn.Parameter(optimizer.master_N.clone())
    scaler, adamw = (
        torch.amp.GradScaler("cpu"),
        torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0),
    )
    scaler.scale(torch.ones(()))
    for step, batch in enumerate(
        [
            make_batch(seed=0),
            with_overflow(1),
            with_overflow(2),
            make_batch(seed=3),
            make_batch(seed=4),
        ]
    ):
        taken: list[torch.Tensor] = []
        optimizer.reduce = lambda taken=taken: taken.append(optimizer.grad_N.clone())
        report = trainer.step_now(replace(batch, step=step))
        (theirs.grad,) = taken
        scaler.unscale_(adamw)
        norm = torch.nn.utils.clip_grad_norm_([theirs], 0.5)
        scaler.step(adamw)
        scaler.update()
        assert report.metrics["loss_scale"] == scaler.get_scale()
        if report.num_updates:
            assert report.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        torch.testing.assert_close(optimizer.master_N, theirs.detach(), rtol=1e-4, atol=1e-6)
    skipped = 5 - optimizer.num_updates
    assert skipped in (2, 3) and scaler.get_scale() == 2.0 ** (16 - skipped)


def test_an_overflow_leaves_the_update_out_and_is_told():
    events: list = []
    trainer = make_trainer("ppo", dtype=torch.float16, events=events)
    before = weights_of(trainer)
    report = trainer.step_now(with_overflow(0))
    assert (
        report.num_updates,
        report.metrics["skipped_updates"],
        report.metrics["loss_scale"],
    ) == (0, 1.0, 2.0**15)
    assert [name for name, _ in events] == ["trainer.loss_scale", "trainer.update_skipped"]
    assert_bits_equal(weights_of(trainer), before)
    assert trainer.step_now(make_batch()).num_updates == 1


def test_metrics_are_of_the_gradient_before_scaling():
    trainers = [make_trainer("grpo", dtype=dtype) for dtype in (torch.float32, torch.float16)]
    state = trainers[1].snapshot_now()
    smaller = {**state["state"], "loss_scale": asdict(LossScale(2.0**10))}
    trainers[1].restore_now({**state, "state": smaller})
    wide, half = (trainer.step_now(make_batch()).metrics for trainer in trainers)
    assert "loss_scale" not in wide and half["loss_scale"] == 2.0**10
    for name in ("grad_norm", "loss", "entropy"):
        assert half[name] == pytest.approx(wide[name], rel=0.02, abs=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_float16_goes_on_from_a_snapshot_to_the_bit(kind, monkeypatch):
    after = LossScale.after
    settings = {"dtype": torch.float16, "sequences_per_update": 4}
    batches = [
        make_batch(seed=0),
        with_overflow(1),
        make_batch(seed=2),
        with_overflow(3),
        make_batch(seed=4),
    ]

    def run(trainer: NativeTrainer, steps: range) -> list:
        return [trainer.step_now(replace(batches[step], step=step)) for step in steps]

    whole, half, resumed = (make_trainer(kind, **settings) for _ in range(3))
    reports = run(whole, range(5))
    scales: list[LossScale] = []

    def note(scale: LossScale, *, finite: bool) -> LossScale:
        scales.append(after(scale, finite=finite))
        return scales[-1]

    with monkeypatch.context() as patch:
        patch.setattr(LossScale, "after", note)
        run(half, range(3))
    state = dict(half.snapshot_now())
    assert state["state"]["loss_scale"] == asdict(scales[-1]) and len(set(scales)) > 2
    resumed.restore_now(state)
    assert run(resumed, range(3, 5)) == reports[3:]
    assert loss_scale_of(resumed) == loss_scale_of(whole)
    assert_bits_equal(weights_of(resumed), weights_of(whole))


def test_a_snapshot_of_a_wider_run_starts_the_scale_anew():
    wide, half = make_trainer("sft"), make_trainer("sft", dtype=torch.float16)
    half.step_now(make_batch())
    half.restore_now(wide.snapshot_now())
    assert loss_scale_of(half) == asdict(LossScale())
    wide.restore_now(half.snapshot_now())
    assert loss_scale_of(wide) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"dtype": torch.float16}, {"matmul": "fp8"}, {"matmul": "fp8", "dtype": torch.bfloat16}],
    ids=str,
)
def test_a_model_learns(settings):
    """As far as wide products learn, on the same batch."""
    losses = {}
    for name, how in (("wide", {}), ("narrow", settings)):
        decoder = Decoder(SPEC, device=CPU, dtype=how.get("dtype", torch.float32))
        init_weights(decoder, 0)
        trainer = make_trainer(
            "sft",
            decoder=decoder,
            learning_rate=3e-3,
            **{k: v for k, v in how.items() if k != "dtype"},
        )
        losses[name] = [trainer.step_now(make_batch(6)).metrics["loss"] for _ in range(30)]
    assert losses["narrow"][0] == pytest.approx(losses["wide"][0], rel=0.02)
    assert losses["narrow"][-1] < 0.6 * losses["narrow"][0]
    assert losses["narrow"][-1] == pytest.approx(losses["wide"][-1], rel=0.25)


def test_8_bit_products_are_told_with_what_stays_wide():
    events: list = []
    make_trainer("ppo", matmul="fp8", events=events)
    assert [fields["learner"] for _, fields in events] == ["actor", "critic"]
    assert events[0] == (
        "trainer.float8",
        {
            "learner": "actor",
            "layers": ["down", "gate_up", "out", "qkv"],
            "gathered": [],
            "left_wide": {},
            "counted": False,
        },
    )
    odd = Decoder(replace(SPEC, mlp_size=44), device=CPU, dtype=torch.float32)
    init_weights(odd, 0)
    events.clear()
    trainer = make_trainer("sft", decoder=odd, matmul="fp8", events=events)
    assert events[0][1]["layers"] == ["out", "qkv"] and set(events[0][1]["left_wide"]) == {
        "gate_up",
        "down",
    }
    assert events[0][1]["counted"] and trainer.step_now(make_batch()).num_updates == 1


def test_8_bit_products_are_refused_where_they_cannot_be():
    with pytest.raises(ConfigError, match="float16"):
        make_trainer("sft", dtype=torch.float16, matmul="fp8")
    odd = Decoder(replace(SPEC, hidden_size=36), device=CPU, dtype=torch.float32)
    with pytest.raises(ConfigError, match="16 divides"):
        make_trainer("sft", decoder=odd, matmul="fp8")


@pytest.mark.parametrize("kind", ["grpo", "ppo", "dpo"])
def test_the_first_step_is_on_policy_and_on_the_reference(kind):
    """Old log-probs, reference and loss come from the same products: KL exactly 0, ratio 1."""
    trainer = make_trainer(kind, matmul="fp8", epochs_per_batch=2)
    batch = make_batch()
    ours, reference = (
        trainer.evaluate_now(batch, which).per_token
        for which in ("policy", "reference" if kind != "ppo" else "policy")
    )
    assert all(np.array_equal(a, b) for a, b in zip(ours, reference, strict=True))
    plain = make_trainer(kind).evaluate_now(batch, "policy").per_token
    gap = max(np.abs(a - b).max() for a, b in zip(ours, plain, strict=True))
    assert gap > 1e-4, "the products were not of 8-bit operands"


def test_masters_and_what_the_engine_gets_stay_wide():
    trainer = make_trainer("sft", decoder=make_decoder(torch.bfloat16), matmul="fp8")
    trainer.step_now(make_batch())
    optimizer = trainer.models.actor.optimizer
    for name, tensor in weights_of(trainer).items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, optimizer.masters()[name].to(torch.bfloat16))
