"""Every loss, value and gradient, against slow float64 loops written from the papers; any split
gives the same gradient; what is masked does not count; identities of a first step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.loop.evaluate import preferred
from gyre.objectives import terms
from gyre.objectives.api import add_sums, denominator, finish_sums, loss_sum
from gyre.objectives.config import (
    DpoConfig,
    GrpoConfig,
    PpoConfig,
    RmConfig,
    SftConfig,
    is_pairwise,
)
from gyre.objectives.ppo import value_loss
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

VARIANTS = ["grpo", "dapo", "dr_grpo", "gspo", "rloo", "reinforce_pp", "cispo"]
POLICIES = [
    *[GrpoConfig(variant=v, fixed_length_tokens=16) for v in VARIANTS],
    GrpoConfig(surrogate="reinforce", aggregation="token"),
    GrpoConfig(dual_clip=1.2, kl_coef=0.04, kl_estimator="k3"),
    GrpoConfig(variant="dapo", kl_coef=0.1, kl_estimator="k2", tis_cap=0.0),
    GrpoConfig(variant="dr_grpo", kl_coef=0.1, kl_estimator="k3_plus", fixed_length_tokens=16),
    GrpoConfig(variant="gspo", clip_low=0.1, clip_high=0.2, tis_cap=0.0),
    GrpoConfig(variant="gspo", clip_low=0.1, clip_high=0.2, entropy_coef=0.01, tis_cap=1.1),
    GrpoConfig(variant="dapo", entropy_coef=0.02, kl_coef=0.1, kl_clamp=0.02),
    GrpoConfig(kl_coef=0.1, kl_estimator="k3_plus", kl_clamp=0.02),
    GrpoConfig(kl_coef=0.1, kl_estimator="k2", kl_clamp=0.02),
    GrpoConfig(kl_coef=0.1, kl_ratio_weighted=True),
    GrpoConfig(variant="gspo", kl_coef=0.1, kl_ratio_weighted=True, kl_clamp=0.02),
    GrpoConfig(importance_level="sequence", tis_cap=1.5),
    GrpoConfig(
        tis_cap=5.0,
        rejection_level="token",
        rejection_band=(0.8, 1.4),
        kl_coef=0.1,
        entropy_coef=0.1,
    ),
    GrpoConfig(
        variant="dapo",
        importance_level="sequence",
        tis_cap=3.0,
        rejection_level="sequence",
        rejection_band=(0, 3),
    ),
    GrpoConfig(variant="gspo", rejection_level="sequence_mean", rejection_band=(0.9, 1.1)),
    GrpoConfig(tis_cap=0.0, rejection_level="token", rejection_band=(0.8, 1.4)),
    GrpoConfig(correction="icepop", kl_coef=0.1),
    GrpoConfig(off_policy_mask_threshold=0.05, kl_coef=0.1),
    GrpoConfig(variant="gspo", off_policy_mask_threshold=0.02, correction="none"),
    GrpoConfig(variant="dapo", chi2_coef=0.2, correction="icepop"),
    GrpoConfig(correction="none", off_policy_mask_threshold=0.01, chi2_coef=0.1),
]
PPOS = [
    PpoConfig(),
    PpoConfig(aggregation="sequence", value_clip=0.0, kl_coef=0.1, kl_in="loss", kl_estimator="k3"),
]
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


def test_corrections_say_what_they_did():
    """Shares of the tokens by hand, and the effective sample size of the weights as applied."""
    sequences = random_sequences(5, [4, 1, 9, 6], spread=0.6)
    config = GrpoConfig(tis_cap=1.3, rejection_level="token", rejection_band=(0.6, 1.8))
    ratios = torch.cat([(s.old - s.behavior).exp() for s in sequences])
    kept = (ratios >= 0.6) & (ratios <= 1.8)
    weights = torch.where(kept, ratios.clamp(max=1.3), torch.zeros(()))
    metrics = finish_sums(loss_sum(config, chunk_inputs(sequences))[1])
    expected = {
        "tis_weight": weights.mean(),
        "tis_ess": weights.sum() ** 2 / (len(weights) * weights.square().sum()),
        "tis_truncated_fraction": (ratios >= 1.3).double().mean(),
        "rejected_fraction": (~kept).double().mean(),
        "rejected_low_fraction": (ratios < 0.6).double().mean(),
        "rejected_high_fraction": (ratios > 1.8).double().mean(),
    }
    assert 0.1 < expected["rejected_fraction"] < 0.9
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-5), name
    assert "tis_weight_square" not in metrics
    none_kept = config.model_copy(update={"rejection_band": (1.0, 1.0000001)})
    assert finish_sums(loss_sum(none_kept, chunk_inputs(sequences))[1])["tis_ess"] == 0.0


def test_the_sequence_mask_says_what_it_took_and_asks_for_both_signs():
    """Bad answers that the policy has left are masked; good ones, and near ones, are kept."""
    config = GrpoConfig(off_policy_mask_threshold=0.1, correction="none", aggregation="token")
    sequences = random_sequences(3, [4, 4, 4, 4])
    shifts, signs = [-0.3, -0.3, 0.0, 0.3], [-1.0, 1.0, -1.0, -1.0]
    for sequence, shift, sign in zip(sequences, shifts, signs, strict=True):
        sequence.behavior[:] = sequence.logprobs.detach() - shift
        sequence.advantages[:] = sign
    loss, sums = loss_sum(config, chunk_inputs(sequences))
    loss.backward()
    assert finish_sums(sums)["off_policy_masked_fraction"] == pytest.approx(0.25)
    assert [bool(s.logprobs.grad.abs().sum() == 0) for s in sequences] == [
        True,
        False,
        False,
        False,
    ]


def test_chi2_is_the_variance_of_the_weights():
    """E[(r - 1)^2] = E[r^2] - 1 over the engine's own tokens, where E[r] = 1."""
    generator = torch.Generator().manual_seed(5)
    engine = torch.softmax(torch.randn(6, generator=generator, dtype=torch.float64), 0)
    policy = torch.softmax(torch.randn(6, generator=generator, dtype=torch.float64), 0)
    estimate = (engine * terms.chi2_estimate((policy / engine).log())).sum()
    torch.testing.assert_close(estimate, (policy.square() / engine).sum() - 1)


def test_a_rejected_token_gives_nothing_even_where_its_loss_is_not_finite():
    config = GrpoConfig(rejection_level="token", rejection_band=(0.5, 2.0), surrogate="reinforce")
    sequence = random_sequences(7, [3], spread=0.0)[0]
    sequence.logprobs.data[1], sequence.old[1] = -torch.inf, -torch.inf
    loss, sums = loss_sum(config, chunk_inputs([sequence]))
    loss.backward()
    assert (
        loss.isfinite()
        and sequence.logprobs.grad.isfinite().all()
        and sequence.logprobs.grad[1] == 0.0
    )
    assert finish_sums(sums)["rejected_fraction"] == pytest.approx(1 / 3)


def test_from_the_engine_the_band_judges_the_current_policy_and_nothing_is_weighed():
    """ratio_base = "engine": the ratio holds the correction, as in verl's bypass mode."""
    sequences = random_sequences(9, [5, 8, 3])
    plain = GrpoConfig(ratio_base="engine")
    banded = GrpoConfig(ratio_base="engine", rejection_level="token", rejection_band=(0.8, 1.25))
    inputs = chunk_inputs(sequences, old=False)
    ratio_N = (inputs.logprobs_N - inputs.behavior_logprobs_N).detach().exp()
    kept_N = (ratio_N >= 0.8) & (ratio_N <= 1.25)
    loss, _ = loss_sum(banded, inputs)
    loss.backward()
    grads = torch.cat([s.logprobs.grad for s in sequences])
    assert 0 < kept_N.sum() < len(kept_N) and (grads[~kept_N] == 0.0).all()
    for s in sequences:
        s.clear()
    loss, sums = loss_sum(plain, chunk_inputs(sequences, old=False))
    loss.backward()
    assert "tis_weight" not in sums
    assert torch.equal(grads[kept_N], torch.cat([s.logprobs.grad for s in sequences])[kept_N])


def all_grads(sequences: list[Sequence]) -> np.ndarray:
    grads = np.concatenate([s.grads() for s in sequences])
    for s in sequences:
        s.clear()
    return grads


def train_once(
    config, sequences: list[Sequence], chunks: list[list[int]]
) -> tuple[float, np.ndarray, dict[str, float]]:
    """One optimizer step's loss, gradients and metrics from the given split."""
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
    lengths = data.draw(
        st.lists(
            st.integers(low, 9), min_size=units * (1 + pairwise), max_size=units * (1 + pairwise)
        )
    )
    if not any(lengths):
        lengths[0] = 1
    sequences = random_sequences(data.draw(st.integers(0, 10_000)), lengths, per_token=True)
    order = data.draw(st.permutations(range(units)))
    cuts = sorted(data.draw(st.sets(st.integers(1, units - 1)))) if units > 1 else []
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, units], strict=True)]
    chunks = [
        [i for u in part for i in ((2 * u, 2 * u + 1) if pairwise else (u,))] for part in parts
    ]
    whole_value, whole_grads, whole_metrics = train_once(
        config, sequences, [list(range(len(lengths)))]
    )
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
    """Policy = reference = old = engine: ratio 1, every KL exactly 0, nothing clipped, gradient =
    -A / denominator."""
    config = config.model_copy(update={"kl_coef": 0.04, "kl_in": "loss", "kl_estimator": "k3"})
    sequences = random_sequences(3, [5, 2, 8])
    for s in sequences:
        s.old = s.behavior = s.reference = s.logprobs.detach().clone()
    inputs = chunk_inputs(sequences, old=old_given)
    loss, sums = loss_sum(config, inputs)
    (loss / denominator(config, [5, 2, 8])).backward()
    metrics = finish_sums(sums)
    assert metrics["ratio"] == 1.0
    assert metrics["logprob_gap_mult"] == 1.0
    assert metrics["tis_weight"] == 1.0
    zero = (
        "kl_old",
        "kl_reference",
        "logprob_gap",
        "engine_kl",
        "clip_fraction",
        "ratio_bounded_fraction",
    )
    assert [metrics[name] for name in zero] == [0.0] * len(zero)
    shares = {
        "token": [1 / 15] * 3,
        "sequence": [1 / 5 / 3, 1 / 2 / 3, 1 / 8 / 3],
        "fixed_length": [1 / 48] * 3,
    }
    for s, share in zip(sequences, shares[config.aggregation], strict=True):
        np.testing.assert_allclose(s.logprobs.grad, -s.advantages * share, rtol=1e-6)


def test_one_update_per_batch_needs_no_old_logprobs():
    sequences = random_sequences(4, [5, 3])
    for s in sequences:
        s.old = s.logprobs.detach().clone()
    for config in POLICIES:
        with_old, without = (
            loss_sum(config, chunk_inputs(sequences, old=old))[0] for old in (True, False)
        )
        assert with_old.item() == without.item()


def test_the_ratio_can_start_from_the_engine():
    sequences = random_sequences(8, [4, 4])
    config = GrpoConfig(ratio_base="engine")
    loss, sums = loss_sum(config, chunk_inputs(sequences))
    for s in sequences:
        s.old = s.behavior
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
    s.old, s.behavior, s.reference = (
        s.logprobs.detach() + shift for shift in (-300.0, -300.0, 400.0)
    )
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
    assert finish_sums(sums)["clip_fraction"] == pytest.approx(
        float((s.logprobs.grad == 0).double().mean())
    )


def test_an_entropy_bonus_needs_the_entropys_gradient():
    inputs = chunk_inputs(random_sequences(1, [3]))
    without = type(inputs)(
        **{
            name: getattr(inputs, name)
            for name in inputs.__dataclass_fields__
            if name != "entropy_N"
        },
        entropy_N=torch.ones(3),
    )
    with pytest.raises(AssertionError, match="entropy's gradient"):
        loss_sum(GrpoConfig(entropy_coef=0.1), without)


def test_a_ratio_weighted_k3_has_the_gradient_of_the_kl():
    """Over the whole vocabulary, sampled from an older policy: E[r k3] = KL(policy || reference), E[grad] = grad KL;
    the plain k3 has neither."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(17, dtype=torch.float64, generator=generator).requires_grad_(True)
    reference, old = (
        torch.randn(17, dtype=torch.float64, generator=generator).log_softmax(0) for _ in range(2)
    )
    logprobs = logits.log_softmax(0)
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    (exact,) = torch.autograd.grad(kl, logits, retain_graph=True)
    k3 = terms.kl_estimate("k3", logprobs, reference)
    weighted = (old.exp() * terms.ratio_weighted(k3, torch.zeros(17), logprobs - old)).sum()
    torch.testing.assert_close(weighted, kl)
    torch.testing.assert_close(torch.autograd.grad(weighted, logits, retain_graph=True)[0], exact)
    (plain,) = torch.autograd.grad((old.exp() * k3).sum(), logits)
    assert (plain - exact).abs().max() > 0.1 * exact.abs().max()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_ratio_weighted_kl_is_trls(level):
    """As GRPOTrainer of TRL 1.16 writes it (`use_bias_correction_kl`, loss_type "grpo"), on padded
    rows."""
    lengths, beta = [5, 2, 9], 0.3
    sequences = random_sequences(14, lengths, spread=1.0)
    for s in sequences:
        s.advantages = torch.zeros_like(s.advantages)
    config = GrpoConfig(ratio=level, kl_coef=beta, kl_ratio_weighted=True)
    value, grads, metrics = train_once(config, sequences, [[0, 1], [2]])

    leaves = [s.logprobs.detach().clone().requires_grad_(True) for s in sequences]
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones(n, dtype=torch.float64) for n in lengths], batch_first=True)
    logps, old, ref = (
        pad(rows, batch_first=True)
        for rows in (leaves, [s.old for s in sequences], [s.reference for s in sequences])
    )
    weights = logps - old
    if level == "sequence":
        weights = ((weights * mask).sum(-1) / mask.sum(-1)).unsqueeze(-1)
    kl = (torch.exp(ref - logps) - (ref - logps) - 1) * torch.exp(weights)
    loss = ((beta * kl * mask).sum(-1) / mask.sum(-1)).mean()
    loss.backward()
    assert value == pytest.approx(loss.item(), rel=1e-12)
    ours = np.concatenate(
        [grad[:n] for grad, n in zip(split_by(grads, sequences), lengths, strict=True)]
    )
    np.testing.assert_allclose(
        ours, torch.cat([leaf.grad for leaf in leaves]).numpy(), rtol=1e-10, atol=1e-14
    )
    assert metrics["kl_reference"] > 0.0 and metrics["kl_bounded_fraction"] == 0.0


def split_by(grads: np.ndarray, sequences: list[Sequence]) -> list[np.ndarray]:
    return np.split(grads, np.cumsum([len(s.grads()) for s in sequences])[:-1])


def test_a_bound_of_the_weighted_kl_does_not_push_away_from_the_reference():
    """The gradient of ratio · bound would lower a log-prob that is far below the reference's
    already."""
    sequences = random_sequences(3, [1])
    s = sequences[0]
    s.advantages, s.old, s.reference = (
        torch.zeros(1),
        s.logprobs.detach(),
        s.logprobs.detach() + 9.0,
    )
    for clamp, gradient in ((10.0, 0.0), (0.0, -0.1 * 9.0)):
        config = GrpoConfig(kl_coef=0.1, kl_ratio_weighted=True, kl_clamp=clamp)
        loss, sums = loss_sum(config, chunk_inputs(sequences))
        loss.backward()
        assert all_grads(sequences)[0] == pytest.approx(gradient, abs=1e-9)
        assert finish_sums(sums)["kl_bounded_fraction"] == float(clamp > 0)


def test_a_token_far_below_the_reference_is_bounded_by_default():
    """verl's form: value 10, no gradient under k3; k3_plus keeps k2's."""
    for estimator, gradient in (("k3", 0.0), ("k3_plus", -7.0)):
        sequences = random_sequences(3, [1])
        s = sequences[0]
        s.advantages, s.old, s.reference = (
            torch.zeros(1),
            s.logprobs.detach(),
            s.logprobs.detach() + 7.0,
        )
        loss, sums = loss_sum(
            GrpoConfig(kl_coef=1.0, kl_estimator=estimator), chunk_inputs(sequences)
        )
        loss.backward()
        assert loss.item() == pytest.approx(10.0) and all_grads(sequences)[0] == pytest.approx(
            gradient
        )
        assert finish_sums(sums)["kl_bounded_fraction"] == 1.0


def test_k3_is_unbiased_and_k2_has_the_gradient_of_the_kl():
    """Over the whole vocabulary: E[k1] = E[k3] = KL, and E[grad k2] = grad KL."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(17, dtype=torch.float64, generator=generator).requires_grad_(True)
    reference = torch.randn(17, dtype=torch.float64, generator=generator).log_softmax(0)
    logprobs = logits.log_softmax(0)
    probs = logprobs.exp().detach()
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    for estimator in ("k1", "k3", "k3_plus"):
        assert (
            probs * terms.kl_estimate(estimator, logprobs, reference)
        ).sum().item() == pytest.approx(kl.item())
    (exact,) = torch.autograd.grad(kl, logits, retain_graph=True)
    for estimator in ("k2", "k3_plus"):
        sampled = (probs * terms.kl_estimate(estimator, logprobs, reference)).sum()
        torch.testing.assert_close(
            torch.autograd.grad(sampled, logits, retain_graph=True)[0], exact
        )


def test_a_tie_is_half_a_hit_in_training_as_it_is_in_evaluation():
    gaps = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3.0, -torch.inf])
    assert (
        terms.told_apart(gaps).tolist() == preferred(gaps.numpy()) == [0.5, 0.5, 1.0, 0.0, 1.0, 0.0]
    )


@pytest.mark.parametrize(
    ("config", "metric"), [(RmConfig(), "pair_accuracy"), (DpoConfig(), "reward_accuracy")]
)
def test_a_model_that_prefers_neither_is_at_one_half(config, metric):
    inputs = chunk_inputs(random_sequences(1, [3, 3]))
    fields = {key: getattr(inputs, key) for key in inputs.__dataclass_fields__}
    even = {
        "scores_S": torch.zeros_like(inputs.scores_S),
        "logprobs_N": inputs.reference_logprobs_N,
    }
    metrics = finish_sums(loss_sum(config, type(inputs)(**{**fields, **even}))[1])
    assert metrics[metric] == 0.5


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
