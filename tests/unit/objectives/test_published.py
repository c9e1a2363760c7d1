"""Objectives against values that other projects publish in their tests (numbers re-stated, not
their code)."""

from __future__ import annotations

import math

import pytest
import torch

from gyre.objectives import terms
from gyre.objectives.advantages import kl_numpy
from gyre.objectives.api import denominator, finish_sums, loss_sum
from gyre.objectives.config import DpoConfig, GrpoConfig, SftConfig
from gyre.objectives.grpo import surrogate
from gyre.objectives.inputs import LossInputs


def one_sequence(**columns) -> LossInputs:
    n = len(next(iter(columns.values())))
    return LossInputs(
        num_sequences=1,
        sequence_index_N=torch.zeros(n, dtype=torch.int64),
        target_counts_S=torch.tensor([n]),
        **{name: torch.as_tensor(values, dtype=torch.float32) for name, values in columns.items()},
    )


def token_losses(config: GrpoConfig, ratios: list[float], advantages: list[float]) -> list[float]:
    ratio_N = torch.tensor(ratios)
    return surrogate(config, ratio_N, ratio_N.log(), torch.tensor(advantages)).tolist()


def mean_loss(config: GrpoConfig, inputs: LossInputs) -> float:
    return float(loss_sum(config, inputs)[0]) / denominator(config, inputs.target_counts_S.tolist())


def by_ratio(ratios: list[float], advantages: list[float]) -> LossInputs:
    old = torch.full((len(ratios),), -1.0)
    return one_sequence(
        logprobs_N=old + torch.tensor(ratios).log(),
        old_logprobs_N=old,
        advantages_N=torch.tensor(advantages),
    )


def test_ppo_clip():
    config = GrpoConfig(tis_cap=0.0)
    assert token_losses(config, [0.5, 1.0, 1.5], [1, -1, 2]) == pytest.approx([-0.5, 1.0, -2.4])
    assert mean_loss(config, by_ratio([0.5, 1.0, 1.5], [1, -1, 2])) == pytest.approx(
        -0.6333, abs=1e-4
    )


def test_gspo():
    config = GrpoConfig(variant="gspo", clip_low=0.2, clip_high=0.2, tis_cap=0.0)
    inputs = by_ratio([0.5, 1.0, 1.5], [1, -1, 2])
    loss, sums = loss_sum(config, inputs)
    assert finish_sums(sums)["ratio"] == pytest.approx(0.9086, abs=1e-4)
    assert float(loss) / denominator(config, [3]) == pytest.approx(-0.6057, abs=1e-4)


@pytest.mark.parametrize(
    ("bound", "ratios", "advantages", "losses"),
    [
        (3.0, [0.5, 1.0, 10.0], [1, -1, -4], [-0.5, 1.0, 12.0]),
        (1.5, [2.0, 2.0, 0.5], [2, -2, 2], [-2.4, 3.0, -1.0]),
    ],
)
def test_dual_clip(bound, ratios, advantages, losses):
    config = GrpoConfig(dual_clip=bound, tis_cap=0.0)
    assert token_losses(config, ratios, advantages) == pytest.approx(losses)
    assert mean_loss(config, by_ratio(ratios, advantages)) == pytest.approx(
        sum(losses) / 3, abs=1e-4
    )


def test_cispo_gradient_is_the_clipped_ratio_times_the_advantage():
    config = GrpoConfig(variant="cispo", clip_low=0.2, clip_high=0.28, tis_cap=0.0)
    ratios, advantages = [0.5, 0.9, 1.1, 3.0, 3.0], [1.0, -2.0, 0.5, 2.0, -1.0]
    inputs = by_ratio(ratios, advantages)
    inputs.logprobs_N.requires_grad_(True)
    loss_sum(config, inputs)[0].backward()
    clipped = [0.8, 0.9, 1.1, 1.28, 1.28]
    assert inputs.logprobs_N.grad.tolist() == pytest.approx(
        [-r * a for r, a in zip(clipped, advantages, strict=True)]
    )


def test_reinforce():
    config = GrpoConfig(surrogate="reinforce", tis_cap=0.0)
    inputs = one_sequence(logprobs_N=[-0.5, -1.0, -1.5], advantages_N=[1.0, -1.0, 2.0])
    assert mean_loss(config, inputs) == pytest.approx(0.8333, abs=1e-4)


@pytest.mark.parametrize(
    ("estimator", "clamp", "expected"),
    [
        ("k1", 0.0, [-1.0, 14.0, 29.0]),
        ("k2", 0.0, [0.5, 98.0, 420.5]),
        ("k3", 0.0, [0.7183, 13.0, 28.0]),
        ("k3", 10.0, [0.7183, 10.0, 10.0]),
        ("k3_plus", 0.0, [0.7183, 13.0, 28.0]),
        ("k3_plus", 10.0, [0.7183, 10.0, 10.0]),
        ("k1", 10.0, [-1.0, 10.0, 10.0]),
        ("k2", 10.0, [0.5, 10.0, 10.0]),
    ],
)
def test_kl_estimators(estimator, clamp, expected):
    logprobs, reference = torch.full((3,), -1.0), torch.tensor([0.0, -15.0, -30.0])
    assert terms.kl_estimate(estimator, logprobs, reference, clamp).tolist() == pytest.approx(
        expected, abs=1e-4
    )
    assert kl_numpy(
        estimator, logprobs.numpy(), reference.numpy(), clamp
    ).tolist() == pytest.approx(expected, abs=1e-4)
    counted = terms.kl_bounded(estimator, logprobs, reference, clamp).tolist()
    assert counted == ([0.0, 1.0, 1.0] if clamp else [0.0, 0.0, 0.0])


@pytest.mark.parametrize("clamp", [0.0, 0.1])
def test_k3_plus_has_the_gradient_of_k2(clamp):
    """Beyond the bound too, as verl's k3+."""
    logprobs, reference = torch.tensor([-1.0, -0.3, -4.0]), torch.tensor([0.0, -2.0, -3.5])
    grads = {}
    for estimator in ("k2", "k3_plus"):
        leaf = logprobs.clone().requires_grad_(True)
        terms.kl_estimate(
            estimator, leaf, reference, clamp if estimator == "k3_plus" else 0.0
        ).sum().backward()
        grads[estimator] = leaf.grad.tolist()
    assert grads["k3_plus"] == pytest.approx(grads["k2"])
    assert grads["k2"] == pytest.approx((logprobs - reference).tolist())


def test_dpo_at_initialization():
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.25])
    inputs = LossInputs(
        num_sequences=2,
        sequence_index_N=torch.tensor([0, 0, 1, 1, 1]),
        target_counts_S=torch.tensor([2, 3]),
        logprobs_N=logprobs,
        reference_logprobs_N=logprobs.clone(),
        chosen_P=torch.tensor([0]),
        rejected_P=torch.tensor([1]),
    )
    loss, sums = loss_sum(DpoConfig(), inputs)
    assert float(loss) / denominator(DpoConfig(), [2, 3]) == pytest.approx(math.log(2), abs=1e-6)
    assert finish_sums(sums)["reward_margin"] == 0.0


def test_uniform_policy_costs_log_vocabulary():
    vocab = 32
    inputs = one_sequence(logprobs_N=torch.zeros(vocab).log_softmax(0)[:3])
    assert float(loss_sum(SftConfig(), inputs)[0]) / denominator(SftConfig(), [3]) == pytest.approx(
        math.log(vocab)
    )


def test_token_sum_is_thirteen_per_rank():
    """A mask with 13 targets and a loss of 1 each: every rank adds 13, whatever their number."""
    for ranks in (1, 2, 4):
        chunks = [one_sequence(logprobs_N=-torch.ones(13)) for _ in range(ranks)]
        assert sum(float(loss_sum(SftConfig(), chunk)[0]) for chunk in chunks) == 13.0 * ranks
        assert denominator(SftConfig(), [13] * ranks) == 13.0 * ranks
