"""Every loss, value and gradient, against slow float64 loops written from the papers; any split gives the same
gradient; what is masked does not count; identities of a first step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives_cases import (
    Sequence,
    chunk_inputs,
    random_sequences,
    slow_dpo,
    slow_policy,
    slow_rm,
    slow_sft,
    slow_values,
)

from gyre.objectives import terms
from gyre.objectives.api import (
    DpoConfig,
    GrpoConfig,
    PpoConfig,
    RmConfig,
    SftConfig,
    add_sums,
    denominator,
    finish_sums,
    is_pairwise,
    loss_sum,
)
from gyre.objectives.ppo import value_loss

VARIANTS = ["grpo", "dapo", "dr_grpo", "gspo", "rloo", "reinforce_pp", "cispo"]
POLICIES = [
    *[GrpoConfig(variant=v, fixed_length_tokens=16) for v in VARIANTS],
    GrpoConfig(surrogate="reinforce", aggregation="token"),
    GrpoConfig(dual_clip=1.2, kl_coef=0.04, kl_estimator="k3"),
    GrpoConfig(variant="dapo", kl_coef=0.1, kl_estimator="k2", tis_cap=0.0),
    GrpoConfig(variant="dr_grpo", kl_coef=0.1, kl_estimator="k3_plus", fixed_length_tokens=16),
    GrpoConfig(variant="gspo", clip_low=0.1, clip_high=0.2, tis_cap=0.0),
    GrpoConfig(variant="gspo", clip_low=0.1, clip_high=0.2, entropy_coef=0.01, tis_cap=1.1),
]
PPOS = [PpoConfig(), PpoConfig(aggregation="sequence", value_clip=0.0, kl_coef=0.1, kl_in="loss", kl_estimator="k3")]
PAIRED = [
    DpoConfig(),
    DpoConfig(label_smoothing=0.2, beta=0.5),
    DpoConfig(loss="ipo", beta=0.3),
    DpoConfig(loss="ipo", average_logprobs=True, sft_coef=0.7),
    RmConfig(),
    RmConfig(center_coef=0.01),
]
PLAIN = [SftConfig(), SftConfig(aggregation="sequence")]
EVERYTHING = [*POLICIES, *PPOS, *PAIRED, *PLAIN]


def label(config) -> str:
    variant = getattr(config, "variant", "")
    return f"{config.kind}-{variant}-{EVERYTHING.index(config)}"


def slow_loss(config, sequences: list[Sequence]) -> torch.Tensor:
    match config:
        case SftConfig():
            return slow_sft(config, sequences)
        case DpoConfig():
            return slow_dpo(config, sequences)
        case RmConfig():
            return slow_rm(config, sequences)
        case PpoConfig():
            return slow_policy(config, sequences) + config.vf_coef * slow_values(config, sequences)
    return slow_policy(config, sequences)


def all_grads(sequences: list[Sequence]) -> np.ndarray:
    grads = np.concatenate([s.grads() for s in sequences])
    for s in sequences:
        s.clear()
    return grads


def train_once(
    config, sequences: list[Sequence], chunks: list[list[int]]
) -> tuple[float, np.ndarray, dict[str, float]]:
    """One optimiser step's loss, gradients and metrics from the given split."""
    whole = denominator(config, [len(s) for s in sequences])
    value, total = 0.0, {}
    for chunk in chunks:
        loss, sums = loss_sum(config, chunk_inputs([sequences[i] for i in chunk]))
        (loss / whole).backward()
        value, total = value + loss.item() / whole, add_sums(total, sums)
    return value, all_grads(sequences), finish_sums(total)


@pytest.mark.parametrize("config", EVERYTHING, ids=label)
@pytest.mark.parametrize("per_token", [False, True])
def test_value_and_gradient_equal_the_slow_reference(config, per_token):
    lengths = [3, 7, 1, 12, 5, 2] if is_pairwise(config) else [3, 7, 1, 0, 12, 5]
    sequences = random_sequences(11, lengths, per_token=per_token)
    expected = slow_loss(config, sequences)
    expected.backward()
    expected_grads = all_grads(sequences)
    value, grads, metrics = train_once(config, sequences, [list(range(len(lengths)))])
    assert value == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(grads, expected_grads, rtol=1e-10, atol=1e-14)
    if "loss" in metrics and not isinstance(config, PpoConfig):
        assert metrics["loss"] == pytest.approx(value, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("config", EVERYTHING, ids=label)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_split_gives_the_same_gradient_and_metrics(config, data):
    pairwise = is_pairwise(config)
    low = 1 if pairwise else 0
    units = data.draw(st.integers(1, 6), label="pairs or sequences")
    lengths = data.draw(st.lists(st.integers(low, 9), min_size=units * (1 + pairwise), max_size=units * (1 + pairwise)))
    if not any(lengths):
        lengths[0] = 1
    sequences = random_sequences(data.draw(st.integers(0, 10_000)), lengths, per_token=True)
    order = data.draw(st.permutations(range(units)))
    cuts = sorted(data.draw(st.sets(st.integers(1, units - 1)))) if units > 1 else []
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, units], strict=True)]
    chunks = [[i for u in part for i in ((2 * u, 2 * u + 1) if pairwise else (u,))] for part in parts]
    whole_value, whole_grads, whole_metrics = train_once(config, sequences, [list(range(len(lengths)))])
    value, grads, metrics = train_once(config, sequences, chunks)
    assert value == pytest.approx(whole_value, rel=1e-10, abs=1e-12)
    np.testing.assert_allclose(grads, whole_grads, rtol=1e-9, atol=1e-13)
    assert metrics.keys() == whole_metrics.keys()
    for name, mean in metrics.items():
        assert mean == pytest.approx(whole_metrics[name], rel=1e-4, abs=1e-5), name


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(0, 20))
def test_the_denominator_adds_over_any_split(counts, cut):
    for config in (*POLICIES, *PPOS, *PLAIN):
        parts = denominator(config, counts[:cut]) + denominator(config, counts[cut:])
        assert parts == denominator(config, counts)


@pytest.mark.parametrize("config", [*POLICIES, *PPOS, *PLAIN], ids=label)
def test_fully_masked_sequences_do_not_count(config):
    bare = random_sequences(5, [4, 6])
    masked = [bare[0], *random_sequences(6, [0, 0]), bare[1]]
    assert denominator(config, [4, 6]) == denominator(config, [4, 0, 0, 6])
    value, grads, metrics = train_once(config, bare, [[0, 1]])
    again, more_grads, more_metrics = train_once(config, masked, [[0, 1, 2, 3]])
    assert again == pytest.approx(value)
    np.testing.assert_allclose(more_grads[np.abs(more_grads) > 0], grads[np.abs(grads) > 0])
    assert np.isfinite(more_grads).all()
    assert more_metrics == pytest.approx(metrics)
    alone = loss_sum(config, chunk_inputs(random_sequences(6, [0, 0])))
    assert alone[0].item() == 0.0
    assert denominator(config, [0, 0]) == 0.0
    assert finish_sums(alone[1]) == {}


@pytest.mark.parametrize("config", POLICIES[:7], ids=label)
@pytest.mark.parametrize("old_given", [False, True])
def test_first_step_identities(config, old_given):
    """Policy = reference = old = engine: ratio 1, every KL exactly 0, nothing clipped, gradient = -A / denominator."""
    config = config.model_copy(update={"kl_coef": 0.04, "kl_in": "loss", "kl_estimator": "k3"})
    sequences = random_sequences(3, [5, 2, 8])
    for s in sequences:
        s.old = s.behaviour = s.reference = s.logprobs.detach().clone()
    inputs = chunk_inputs(sequences, old=old_given)
    loss, sums = loss_sum(config, inputs)
    (loss / denominator(config, [5, 2, 8])).backward()
    metrics = finish_sums(sums)
    assert metrics["ratio"] == 1.0
    assert metrics["logprob_gap_mult"] == 1.0
    assert metrics["tis_weight"] == 1.0
    zero = ("kl_old", "kl_reference", "logprob_gap", "engine_kl", "clip_fraction", "ratio_bounded_fraction")
    assert [metrics[name] for name in zero] == [0.0] * len(zero)
    shares = {"token": [1 / 15] * 3, "sequence": [1 / 5 / 3, 1 / 2 / 3, 1 / 8 / 3], "fixed_length": [1 / 48] * 3}
    for s, share in zip(sequences, shares[config.aggregation], strict=True):
        np.testing.assert_allclose(s.logprobs.grad, -s.advantages * share, rtol=1e-6)


def test_one_update_per_batch_needs_no_old_logprobs():
    sequences = random_sequences(4, [5, 3])
    for s in sequences:
        s.old = s.logprobs.detach().clone()
    for config in POLICIES:
        with_old, without = (loss_sum(config, chunk_inputs(sequences, old=old))[0] for old in (True, False))
        assert with_old.item() == without.item()


def test_the_ratio_can_start_from_the_engine():
    sequences = random_sequences(8, [4, 4])
    config = GrpoConfig(ratio_base="engine")
    loss, sums = loss_sum(config, chunk_inputs(sequences))
    for s in sequences:
        s.old = s.behaviour
    expected = slow_policy(GrpoConfig(tis_cap=0.0), sequences)
    assert loss.item() / denominator(config, [4, 4]) == pytest.approx(expected.item())
    assert "tis_weight" not in sums


def test_ppo_losses_add_up_whether_called_together_or_apart():
    sequences, config = random_sequences(9, [4, 6]), PpoConfig()
    both = chunk_inputs(sequences)
    together = loss_sum(config, both)[0]
    actor = loss_sum(config, _without(both, "values_N"))[0]
    critic = loss_sum(config, _without(both, "logprobs_N"))[0]
    assert together.item() == pytest.approx((actor + critic).item(), rel=1e-12)
    assert critic.item() == pytest.approx(config.vf_coef * value_loss(config, both)[0].item())


def _without(inputs, name):
    fields = {key: getattr(inputs, key) for key in inputs.__dataclass_fields__}
    return type(inputs)(**{**fields, name: None})


def test_a_far_policy_gives_finite_gradients_and_is_counted():
    sequences = random_sequences(2, [4])
    s = sequences[0]
    s.old, s.behaviour, s.reference = (s.logprobs.detach() + shift for shift in (-300.0, -300.0, 400.0))
    for estimator in ("k2", "k3", "k3_plus"):
        config = GrpoConfig(kl_coef=0.1, kl_estimator=estimator)
        loss, sums = loss_sum(config, chunk_inputs(sequences))
        loss.backward()
        assert torch.isfinite(s.logprobs.grad).all()
        metrics = finish_sums(sums)
        assert metrics["ratio_bounded_fraction"] == 1.0
        assert metrics["kl_bounded_fraction"] == (0.0 if estimator == "k2" else 1.0)


def test_clip_fractions_count_tokens_that_lost_their_gradient():
    sequences = random_sequences(21, [200], per_token=True, spread=0.5)
    s, config = sequences[0], GrpoConfig(tis_cap=0.0)
    loss, sums = loss_sum(config, chunk_inputs(sequences))
    loss.backward()
    assert finish_sums(sums)["clip_fraction"] == pytest.approx(float((s.logprobs.grad == 0).double().mean()))


def test_the_entropy_gradient_of_samples_is_the_exact_one_in_expectation():
    """Summed over the whole vocabulary with its probabilities, the score-function form is grad H itself."""
    logits = torch.randn(13, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    logprobs = logits.log_softmax(0)
    entropy = -(logprobs.exp() * logprobs).sum()
    (exact,) = torch.autograd.grad(entropy, logits, retain_graph=True)
    shown = terms.entropy_term(entropy.detach().expand(13), logprobs, torch.ones(13))
    (sampled,) = torch.autograd.grad((logprobs.exp().detach() * shown).sum(), logits)
    torch.testing.assert_close(sampled, exact)
    assert shown.detach().tolist() == pytest.approx([float(entropy.detach())] * 13)


def test_an_entropy_with_gradient_is_used_as_it_is():
    entropy = torch.rand(3, requires_grad=True)
    assert terms.entropy_term(entropy, torch.zeros(3), torch.ones(3)) is entropy


def test_k3_is_unbiased_and_k2_has_the_gradient_of_the_kl():
    """Over the whole vocabulary: E[k1] = E[k3] = KL, and E[grad k2] = grad KL."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(17, dtype=torch.float64, generator=generator).requires_grad_(True)
    reference = torch.randn(17, dtype=torch.float64, generator=generator).log_softmax(0)
    logprobs = logits.log_softmax(0)
    probs = logprobs.exp().detach()
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    for estimator in ("k1", "k3", "k3_plus"):
        assert (probs * terms.kl_estimate(estimator, logprobs, reference)).sum().item() == pytest.approx(kl.item())
    (exact,) = torch.autograd.grad(kl, logits, retain_graph=True)
    for estimator in ("k2", "k3_plus"):
        sampled = (probs * terms.kl_estimate(estimator, logprobs, reference)).sum()
        torch.testing.assert_close(torch.autograd.grad(sampled, logits, retain_graph=True)[0], exact)


def test_margins_raise_the_bar_of_the_reward_model():
    sequences = random_sequences(1, [1, 1])
    inputs = chunk_inputs(sequences)
    fields = {key: getattr(inputs, key) for key in inputs.__dataclass_fields__}
    margin = type(inputs)(**{**fields, "margins_P": torch.tensor([2.0])})
    gap = float((sequences[0].score - sequences[1].score).detach())
    assert loss_sum(RmConfig(), margin)[0].item() == pytest.approx(np.log1p(np.exp(-(gap - 2.0))))
    metrics = finish_sums(loss_sum(RmConfig(), margin)[1])
    assert metrics["pair_accuracy"] == float(gap > 0)
    assert metrics["score_margin"] == pytest.approx(gap)
