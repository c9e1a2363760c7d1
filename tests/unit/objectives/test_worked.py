"""Every loss and every metric on a few tokens whose numbers are worked out by hand; bounds, ties
and edges with them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gyre.objectives import terms
from gyre.objectives.api import add_sums, denominator, finish_sums, loss_sum
from gyre.objectives.config import DpoConfig, GrpoConfig, PpoConfig, RmConfig, SftConfig
from gyre.objectives.inputs import LossInputs

LOG2 = math.log(2.0)


def inputs_of(lengths: list[int], **columns) -> LossInputs:
    """A chunk of sequences with these numbers of targets. Only log-probs, values, scores and
    entropy have a gradient."""
    made = {name: torch.as_tensor(values, dtype=torch.float64) for name, values in columns.items()}
    for name in ("logprobs_N", "values_N", "scores_S", "entropy_N"):
        if name in made:
            made[name].requires_grad_(True)
    for name in ("chosen_P", "rejected_P"):
        if name in made:
            made[name] = made[name].long()
    index = [s for s, length in enumerate(lengths) for _ in range(length)]
    return LossInputs(
        num_sequences=len(lengths),
        sequence_index_N=torch.tensor(index, dtype=torch.int64),
        target_counts_S=torch.tensor(lengths),
        **made,
    )


def worked(config, inputs: LossInputs) -> tuple[float, dict[str, float], dict[str, list[float]]]:
    """The summed loss, the metrics, and the gradient of each leaf."""
    loss, sums = loss_sum(config, inputs)
    loss.backward()
    leaves = {
        name: getattr(inputs, name) for name in ("logprobs_N", "values_N", "scores_S", "entropy_N")
    }
    grads = {
        name: leaf.grad.tolist()
        for name, leaf in leaves.items()
        if leaf is not None and leaf.grad is not None
    }
    return loss.item(), finish_sums(sums), grads


# sft


@pytest.mark.parametrize(
    ("aggregation", "loss", "mean", "grads"),
    [("token", 6.0, 2.0, [-1.0, -1.0, -1.0]), ("sequence", 4.5, 2.25, [-0.5, -0.5, -1.0])],
)
def test_sft_is_the_mean_over_tokens_or_over_sequences(aggregation, loss, mean, grads):
    inputs = inputs_of([2, 0, 1], logprobs_N=[-1.0, -2.0, -3.0], entropy_N=[0.5, 1.0, 3.0])
    got, metrics, gradient = worked(SftConfig(aggregation=aggregation), inputs)
    assert got == pytest.approx(loss) and gradient["logprobs_N"] == pytest.approx(grads)
    assert metrics == pytest.approx({"loss": mean, "token_nll": 2.0, "entropy": 1.5})
    assert "entropy" not in worked(SftConfig(), inputs_of([1], logprobs_N=[-1.0]))[1]


# rm

PAIRS = {"chosen_P": [0, 2, 4], "rejected_P": [1, 3, 5]}
SCORES = [1.5, 1.0, 0.5, 1.5, 2.0, 2.0]  # gaps of 0.5, -1 and 0


def test_rm_is_the_log_odds_of_the_gap():
    loss, metrics, grads = worked(RmConfig(), inputs_of([1] * 6, scores_S=SCORES, **PAIRS))
    sigmoid = [1 / (1 + math.exp(-gap)) for gap in (0.5, -1.0, 0.0)]
    assert loss == pytest.approx(-sum(math.log(p) for p in sigmoid))
    assert grads["scores_S"] == pytest.approx([g for p in sigmoid for g in (p - 1, 1 - p)])
    assert metrics == pytest.approx(
        {
            "loss": loss / 3,
            "pair_accuracy": (1 + 0 + 0.5) / 3,  # the third pair is a tie
            "score_margin": -0.5 / 3,
            "score_chosen": 4 / 3,
            "score_rejected": 1.5,
        },
        rel=1e-6,
    )


def test_rm_centres_the_sum_of_a_pairs_scores():
    plain = worked(RmConfig(), inputs_of([1] * 6, scores_S=SCORES, **PAIRS))[0]
    centred, metrics, _ = worked(
        RmConfig(center_coef=0.1), inputs_of([1] * 6, scores_S=SCORES, **PAIRS)
    )
    assert centred - plain == pytest.approx(0.1 * (6.25 + 4 + 16))
    assert metrics["loss"] == pytest.approx(centred / 3, rel=1e-6)


def test_rm_asks_for_its_margin():
    inputs = inputs_of([1, 1], scores_S=[3.0, 1.0], margins_P=[1.5], chosen_P=[0], rejected_P=[1])
    loss, metrics, _ = worked(RmConfig(), inputs)
    assert loss == pytest.approx(math.log1p(math.exp(-0.5)))
    assert metrics["score_margin"] == 2.0, "as scored, without the margin that was asked for"


# dpo


def pair_inputs() -> LossInputs:
    """Chosen: two tokens, each 0.5 above the reference. Rejected: one token, 1.0 below it. The gap
    is 2."""
    return inputs_of(
        [2, 1],
        logprobs_N=[-1.0, -2.0, -3.0],
        reference_logprobs_N=[-1.5, -2.5, -2.0],
        chosen_P=[0],
        rejected_P=[1],
    )


def test_dpo_and_what_it_reports():
    loss, metrics, grads = worked(DpoConfig(beta=0.1), pair_inputs())
    assert loss == pytest.approx(math.log1p(math.exp(-0.2)))
    wrong = 0.1 / (1 + math.exp(0.2))
    assert grads["logprobs_N"] == pytest.approx([-wrong, -wrong, wrong])
    assert metrics == pytest.approx(
        {
            "loss": loss,
            "preference_loss": loss,
            "chosen_nll": 1.5,
            "reward_accuracy": 1.0,
            "reward_margin": 0.2,
            "reward_chosen": 0.1,
            "reward_rejected": -0.1,
        },
        rel=1e-6,
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"label_smoothing": 0.2},
            0.8 * math.log1p(math.exp(-0.2)) + 0.2 * math.log1p(math.exp(0.2)),
        ),
        ({"loss": "ipo"}, (2.0 - 5.0) ** 2),
        ({"loss": "ipo", "average_logprobs": True}, (1.5 - 5.0) ** 2),
        ({"loss": "ipo", "sft_coef": 0.5}, 9.0 + 0.5 * 1.5),
    ],
)
def test_variants_of_dpo(options, expected):
    loss, metrics, _ = worked(DpoConfig(beta=0.1, **options), pair_inputs())
    assert loss == pytest.approx(expected) and metrics["loss"] == pytest.approx(expected)
    assert metrics["preference_loss"] == pytest.approx(9.0 if "sft_coef" in options else expected)


def test_the_rewards_of_dpo_are_beta_times_the_log_ratios():
    inputs = replace(
        pair_inputs(), reference_logprobs_N=torch.tensor([-2.0, -3.0, -2.5], dtype=torch.float64)
    )
    metrics = worked(DpoConfig(beta=0.1), inputs)[1]
    assert metrics["reward_chosen"] == pytest.approx(0.2) and metrics[
        "reward_rejected"
    ] == pytest.approx(-0.05)
    assert metrics["reward_margin"] == pytest.approx(0.25)


def test_a_pair_that_is_not_told_apart_is_half_right():
    inputs = replace(
        pair_inputs(), reference_logprobs_N=torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    )
    assert worked(DpoConfig(), inputs)[1]["reward_accuracy"] == 0.5


# ppo: the critic


def critic_inputs(**more) -> LossInputs:
    """Errors 1, -0.5, -1 and 1. The first has moved away from the old value towards nothing better,
    the third and the fourth have moved towards the return further than 0.2: their clipped errors
    are 1.3 and 1.8."""
    return inputs_of(
        [3, 1],
        values_N=[1.0, 2.0, 1.0, 0.0],
        old_values_N=[0.5, 2.0, 0.5, 1.0],
        returns_N=[0.0, 2.5, 2.0, -1.0],
        **more,
    )


def test_the_value_loss_is_half_the_larger_of_two_squares():
    loss, metrics, grads = worked(PpoConfig(vf_coef=1.0, value_clip=0.2), critic_inputs())
    squares = [1.0, 0.25, 1.3**2, 1.8**2]
    assert loss == pytest.approx(sum(squares) / 2)
    assert grads["values_N"] == pytest.approx([1.0, -0.5, 0.0, 0.0])
    assert metrics == pytest.approx(
        {
            "value_loss": loss / 4,
            "value": 1.0,
            "value_error": 3.5 / 4,
            "return": 3.5 / 4,
            "value_clip_fraction": 0.5,
        },
        rel=1e-6,
    )


def test_the_plain_value_loss_asks_for_no_old_values():
    config = PpoConfig(vf_coef=0.25, value_clip=0.0, aggregation="sequence")
    loss, metrics, _ = worked(config, replace(critic_inputs(), old_values_N=None))
    assert loss == pytest.approx(0.25 * (2.25 / 2 / 3 + 1.0 / 2))
    assert (
        metrics["value_loss"] == pytest.approx((2.25 / 2 / 3 + 1.0 / 2) / 2)
        and "value_clip_fraction" not in metrics
    )


def test_ppo_trains_the_policy_the_critic_or_both():
    policy = {"logprobs_N": [-1.0] * 4, "advantages_N": [1.0, 1.0, 1.0, -2.0]}
    config = PpoConfig(tis_cap=0.0, vf_coef=0.5, value_clip=0.0)
    both, metrics, _ = worked(config, critic_inputs(**policy))
    alone, fewer, _ = worked(config, replace(critic_inputs(**policy), values_N=None))
    assert alone == pytest.approx(-1.0) and both == pytest.approx(-1.0 + 0.5 * 3.25 / 2)
    assert metrics["policy_loss"] == fewer["policy_loss"] == -0.25 and metrics[
        "value_loss"
    ] == pytest.approx(3.25 / 8)
    assert "value_loss" not in fewer
    with pytest.raises(AssertionError, match="logprobs_N, values_N or both"):
        loss_sum(config, inputs_of([1]))


# the policy


def policy_inputs(
    log_ratios: list[float], advantages: list[float], lengths=None, **more
) -> LossInputs:
    """Old log-probs of -1, from which the policy has moved by these log-ratios."""
    old = torch.full((len(log_ratios),), -1.0, dtype=torch.float64)
    return inputs_of(
        lengths or [len(log_ratios)],
        logprobs_N=old + torch.tensor(log_ratios, dtype=torch.float64),
        old_logprobs_N=old,
        advantages_N=advantages,
        **more,
    )


def plain(**more) -> GrpoConfig:
    return GrpoConfig(**{"aggregation": "token", "tis_cap": 0.0, **more})


def test_what_the_clip_did_is_counted_where_it_took_the_gradient():
    """Ratios 2, 1/2, 2, 1/2, 2, 1/2 with advantages 1, -1, -1, 1, 0, 0: the first two are
    clipped."""
    log_ratios, advantages = [LOG2, -LOG2] * 3, [1.0, -1.0, -1.0, 1.0, 0.0, 0.0]
    loss, metrics, grads = worked(plain(), policy_inputs(log_ratios, advantages))
    assert loss == pytest.approx(-1.2 + 0.8 + 2.0 - 0.5)
    assert grads["logprobs_N"] == pytest.approx([0.0, 0.0, 2.0, -0.5, 0.0, 0.0])
    assert metrics["ratio"] == pytest.approx(1.25)
    assert metrics["clip_fraction"] == pytest.approx(2 / 6)
    assert metrics["clip_low_fraction"] == metrics["clip_high_fraction"] == pytest.approx(1 / 6)
    assert metrics["kl_old"] == pytest.approx(((2 - 1 - LOG2) + (0.5 - 1 + LOG2)) / 2)
    assert metrics["policy_loss"] == metrics["loss"] == pytest.approx(loss / 6)
    cispo = worked(
        plain(variant="cispo", clip_low=0.2, clip_high=0.2), policy_inputs(log_ratios, advantages)
    )[1]
    assert cispo["clip_low_fraction"] == cispo["clip_high_fraction"] == 0.5, (
        "whatever the advantage"
    )


def test_a_ratio_at_the_end_of_the_clip_is_not_clipped():
    config = plain(clip_low=0.0, clip_high=0.0)
    assert worked(config, policy_inputs([0.0, 0.0], [1.0, -1.0]))[1]["clip_fraction"] == 0.0


def test_dual_clip_bounds_what_a_negative_advantage_costs():
    """A ratio of 8: the loss of -0.5 would be 4.0, and 0.5 gains 0.6 as ever."""
    loss, _, grads = worked(plain(dual_clip=3.0), policy_inputs([3 * LOG2, 3 * LOG2], [-0.5, 0.5]))
    assert loss == pytest.approx(1.5 - 0.6) and grads["logprobs_N"] == [0.0, 0.0]


def test_one_ratio_for_a_sequence_is_the_geometric_mean_and_each_token_learns_from_it():
    inputs = policy_inputs([0.2, -0.1, 0.1], [1.0, 1.0, -1.0], [2, 1])
    loss, metrics, grads = worked(plain(ratio="sequence"), inputs)
    first, second = math.exp(0.05), math.exp(0.1)
    assert loss == pytest.approx(-2 * first + second)
    assert grads["logprobs_N"] == pytest.approx([-first, -first, second])
    assert metrics["ratio"] == pytest.approx((2 * first + second) / 3)


def test_a_log_ratio_of_twenty_is_bounded():
    metrics = worked(plain(), policy_inputs([20.0, -20.0, 19.0, -19.0, -21.0], [-1.0] * 5))[1]
    assert metrics["ratio_bounded_fraction"] == pytest.approx(3 / 5)


def test_within_the_clip_and_the_bound_nothing_is_counted():
    metrics = worked(plain(), policy_inputs([0.1, -0.1, 0.1, -0.1], [1.0, -1.0, -1.0, 1.0]))[1]
    assert (
        metrics["clip_fraction"]
        == metrics["clip_low_fraction"]
        == metrics["clip_high_fraction"]
        == 0.0
    )
    rare = inputs_of([1], logprobs_N=[-15.0], old_logprobs_N=[-14.0], advantages_N=[1.0])
    assert worked(plain(), rare)[1]["ratio_bounded_fraction"] == 0.0, (
        "the ratio, not how rare the token is"
    )


def test_a_ratio_to_the_engine_takes_the_engines_logprobs_and_no_weight():
    inputs = policy_inputs([0.0, 0.0], [1.0, -1.0], behavior_logprobs_N=[-1.1, -0.9])
    loss, metrics, _ = worked(GrpoConfig(aggregation="token", ratio_base="engine"), inputs)
    assert loss == pytest.approx(-math.exp(0.1) + math.exp(-0.1)) and "tis_weight" not in metrics
    with pytest.raises(AssertionError, match="ratio_base = 'engine' needs behavior_logprobs_N"):
        loss_sum(GrpoConfig(ratio_base="engine"), policy_inputs([0.0], [1.0]))


@pytest.mark.parametrize(
    ("aggregation", "loss", "mean"),
    [("token", -4.0, -1.0), ("sequence", -8 / 3, -4 / 3), ("fixed_length", -4.0, -4.0 / 16)],
)
def test_what_the_policy_loss_is_a_mean_over(aggregation, loss, mean):
    inputs = policy_inputs([0.0] * 4, [1.0, 0.0, 1.0, 2.0], [3, 0, 1])
    config = plain(aggregation=aggregation, fixed_length_tokens=8)
    got, metrics, _ = worked(config, inputs)
    assert got == pytest.approx(loss) and metrics["loss"] == metrics[
        "policy_loss"
    ] == pytest.approx(mean)
    assert got / denominator(config, [3, 0, 1]) == pytest.approx(mean)


def test_the_gap_to_the_engine():
    """The trainer is 1.0 above at one token and 0.5 below at another; a factor of two exactly is no
    large gap."""
    behavior = [-2.0, -0.5, -1.0 + LOG2]
    metrics = worked(plain(), policy_inputs([0.3] * 3, [1.0] * 3, behavior_logprobs_N=behavior))[1]
    assert metrics["logprob_gap"] == pytest.approx((1.0 + 0.5 + LOG2) / 3)
    assert metrics["logprob_gap_mult"] == pytest.approx((math.e + math.exp(0.5) + 2.0) / 3)
    assert metrics["logprob_gap_above"] == pytest.approx(1 / 3)
    k3 = (math.e - 2.0, math.exp(-0.5) - 0.5, 0.5 - 1.0 + LOG2)
    assert metrics["engine_kl"] == pytest.approx(sum(k3) / 3)
    zero = inputs_of(
        [2],
        logprobs_N=[0.0, 0.0],
        advantages_N=[1.0, 1.0],
        behavior_logprobs_N=[-LOG2, -LOG2 - 1e-9],
    )
    assert worked(plain(), zero)[1]["logprob_gap_large_fraction"] == 0.5
    assert "logprob_gap" not in worked(plain(), policy_inputs([0.0], [1.0]))[1]


# engine corrections


def engine_inputs(log_weights: list[float], lengths=None, **more) -> LossInputs:
    """The policy has not moved; trainer / engine probabilities have these logarithms. Every
    advantage is 1."""
    behavior = [-1.0 - one for one in log_weights]
    return policy_inputs(
        [0.0] * len(log_weights),
        [1.0] * len(log_weights),
        lengths,
        behavior_logprobs_N=behavior,
        **more,
    )


def test_each_token_is_weighed_by_the_engine_up_to_the_cap():
    loss, metrics, _ = worked(plain(tis_cap=2.0), engine_inputs([math.log(3.0), -LOG2]))
    assert loss == pytest.approx(-2.5) and metrics["tis_weight"] == pytest.approx(1.25)
    assert metrics["tis_truncated_fraction"] == 0.5
    assert metrics["tis_ess"] == pytest.approx(1.25**2 / ((4.0 + 0.25) / 2))
    assert metrics["policy_loss"] == pytest.approx(-1.0), "the surrogate, before it is weighed"
    assert metrics["loss"] == pytest.approx(-1.25)


def test_a_cap_of_one_weighs_and_a_weight_at_the_cap_counts_as_truncated():
    metrics = worked(plain(tis_cap=1.0), engine_inputs([0.0, -LOG2]))[1]
    assert metrics["tis_truncated_fraction"] == 0.5 and metrics["tis_weight"] == pytest.approx(0.75)


def test_without_corrections_nothing_of_the_engine_is_asked_for():
    metrics = worked(plain(), policy_inputs([0.0], [1.0]))[1]
    assert not {"tis_weight", "tis_ess", "rejected_fraction"} & metrics.keys()
    with pytest.raises(AssertionError, match="need behavior_logprobs_N"):
        loss_sum(plain(tis_cap=2.0), policy_inputs([0.0], [1.0]))


def test_one_weight_for_a_whole_sequence():
    """The product over the sequence: 2 * 2 / 8 = 1/2 at three tokens, and 3 at a single one."""
    inputs = engine_inputs([LOG2, LOG2, -3 * LOG2, math.log(3.0)], [3, 1])
    loss, metrics, _ = worked(plain(importance_level="sequence", tis_cap=2.5), inputs)
    assert loss == pytest.approx(-(3 * 0.5 + 2.5)) and metrics["tis_truncated_fraction"] == 0.25


@pytest.mark.parametrize(
    ("level", "kept", "low", "high"),
    [
        ("token", [0.0, 1.0, 1.0, 1.0], 0.25, 0.0),  # ratios 1/4, 1, 2, 1
        ("sequence", [1.0, 1.0, 1.0, 1.0], 0.0, 0.0),  # products 1/2 and 1
        ("sequence_mean", [1.0, 1.0, 1.0, 1.0], 0.0, 0.0),
    ],
)
def test_the_ends_of_the_band_are_kept(level, kept, low, high):
    inputs = engine_inputs([-2 * LOG2, 0.0, LOG2, 0.0], [3, 1])
    config = plain(rejection_level=level, rejection_band=(0.5 - 1e-9, 2.0 + 1e-9))
    loss, metrics, grads = worked(config, inputs)
    assert loss == pytest.approx(-sum(kept)) and grads["logprobs_N"] == pytest.approx(
        [-k for k in kept]
    )
    assert metrics["rejected_low_fraction"] == low and metrics["rejected_high_fraction"] == high
    assert metrics["rejected_fraction"] == low + high and metrics["tis_weight"] == sum(kept) / 4
    below, above = (
        terms.out_of_band(torch.zeros(1), (1.0, 2.0)),
        terms.out_of_band(torch.zeros(1), (0.5, 1.0)),
    )
    assert not any(side.item() for side in (*below, *above))


def test_the_band_judges_a_sequence_by_its_product_or_its_mean():
    """Two tokens of ratio 2: the product is 4, the geometric mean 2."""
    for level, rejected in (("sequence", 1.0), ("sequence_mean", 0.0)):
        config = plain(rejection_level=level, rejection_band=(0.5, 3.0))
        metrics = worked(config, engine_inputs([LOG2, LOG2], [2]))[1]
        assert metrics["rejected_high_fraction"] == metrics["rejected_fraction"] == rejected
        assert metrics.get("tis_ess") == (0.0 if rejected else 1.0)


def test_what_judges_a_token_is_bounded_at_twenty():
    index, counts = torch.tensor([0, 0, 1]), torch.tensor([2, 1, 0])
    gaps = torch.tensor([25.0, -3.0, -30.0])
    for level, expected in (
        ("token", [20.0, -3.0, -20.0]),
        ("sequence", [20.0, 20.0, -20.0]),
        ("sequence_mean", [11.0, 11.0, -20.0]),
    ):
        assert terms.importance_log_ratio(level, gaps, index, counts).tolist() == expected


# KL and entropy


def test_a_kl_in_the_loss_is_added_and_reported():
    """Log-probs 0.5 below the reference: k3 = e^0.5 - 1.5, of gradient 1 - e^0.5."""
    inputs = policy_inputs([0.0], [1.0], reference_logprobs_N=[-0.5])
    loss, metrics, grads = worked(plain(kl_coef=0.1), inputs)
    k3 = math.exp(0.5) - 1.5
    assert loss == pytest.approx(-1.0 + 0.1 * k3) and metrics["policy_loss"] == -1.0
    assert grads["logprobs_N"] == pytest.approx([-1.0 + 0.1 * (1 - math.exp(0.5))])
    assert metrics["kl_reference"] == pytest.approx(k3) and metrics["kl_bounded_fraction"] == 0.0


def test_a_kl_in_the_reward_is_none_of_the_loss():
    metrics = worked(PpoConfig(kl_coef=0.1, tis_cap=0.0), policy_inputs([0.0], [1.0]))[1]
    assert metrics["loss"] == -1.0 and "kl_reference" not in metrics and "entropy" not in metrics


@pytest.mark.parametrize(
    ("ratio", "weights"), [("token", [2.0, 0.5, 1.0]), ("sequence", [1.0, 1.0, 1.0])]
)
def test_the_policys_ratio_weighs_the_kl(ratio, weights):
    """k2 stands at 0 where log-probs are the reference's: k3 of one token 1.0 below it, in a
    sequence of two."""
    inputs = policy_inputs(
        [LOG2, -LOG2, 0.0], [0.0] * 3, [2, 1], reference_logprobs_N=[0.0, 0.0, -1.0]
    )
    gaps = [1.0 - LOG2, 1.0 + LOG2, 0.0]  # reference over policy
    k3 = [math.exp(gap) - 1 - gap for gap in gaps]
    config = plain(ratio=ratio, kl_coef=1.0, kl_ratio_weighted=True)
    loss, metrics, grads = worked(config, inputs)
    assert loss == pytest.approx(sum(w * k for w, k in zip(weights, k3, strict=True)))
    assert metrics["kl_reference"] == pytest.approx(loss / 3)
    slopes = [w * (1 - math.exp(gap)) for w, gap in zip(weights, gaps, strict=True)]
    own = [w * k for w, k in zip(weights, k3, strict=True)]  # of the ratio itself
    own = own if ratio == "token" else [sum(own[:2]) / 2] * 2 + [own[2]]
    assert grads["logprobs_N"] == pytest.approx([s + o for s, o in zip(slopes, own, strict=True)])


def test_a_kl_at_its_bound_gives_its_ratio_no_gradient():
    inputs = policy_inputs([0.5], [0.0], reference_logprobs_N=[4.5])
    loss, metrics, grads = worked(plain(kl_coef=1.0, kl_ratio_weighted=True, kl_clamp=10.0), inputs)
    assert loss == pytest.approx(10.0 * math.exp(0.5))
    assert metrics["kl_bounded_fraction"] == 1.0 and grads["logprobs_N"] == [0.0]


def test_a_kl_of_exactly_the_bound_is_not_bounded():
    gap = torch.tensor([2.0, -2.0, 3.0])
    zero = torch.zeros(3)
    assert terms.kl_bounded("k2", gap, zero, 2.0).tolist() == [0.0, 0.0, 1.0]
    assert terms.kl_bounded("k2", gap, zero, 0.0).tolist() == [0.0, 0.0, 0.0]
    for estimator in ("k3", "k3_plus"):
        assert terms.kl_bounded(
            estimator, torch.tensor([-20.0, -21.0, 21.0]), zero, 0.0
        ).tolist() == [0.0, 1.0, 0.0]
        far = terms.kl_estimate(estimator, torch.tensor([-19.0, -25.0]), torch.zeros(2))
        assert far.tolist() == pytest.approx(
            [math.exp(19.0) - 20.0, math.exp(20.0) - 21.0], rel=1e-5
        )


def test_the_entropy_bonus_is_subtracted_and_weighed_by_nothing():
    inputs = engine_inputs([-LOG2, -LOG2], entropy_N=[1.0, 3.0])
    loss, metrics, grads = worked(plain(tis_cap=2.0, entropy_coef=0.1), inputs)
    assert loss == pytest.approx(-1.0 - 0.4) and grads["entropy_N"] == pytest.approx([-0.1, -0.1])
    assert metrics["entropy"] == 2.0
    measured, metrics, grads = worked(
        plain(tis_cap=2.0), engine_inputs([-LOG2, -LOG2], entropy_N=[1.0, 3.0])
    )
    assert (
        measured == pytest.approx(-1.0) and metrics["entropy"] == 2.0 and "entropy_N" not in grads
    )


def test_an_entropy_bonus_is_measured_without_gradients_where_there_are_none():
    inputs = policy_inputs([0.0], [1.0], entropy_N=[2.0])
    inputs = replace(
        inputs, logprobs_N=inputs.logprobs_N.detach(), entropy_N=inputs.entropy_N.detach()
    )
    assert loss_sum(plain(entropy_coef=0.1), inputs)[0].item() == pytest.approx(-1.2)
    with pytest.raises(AssertionError, match="entropy's gradient"):
        loss_sum(
            plain(entropy_coef=0.1),
            replace(inputs, logprobs_N=inputs.logprobs_N.requires_grad_(True)),
        )


# terms


def test_a_sequence_without_targets_has_a_mean_of_zero():
    values, index, counts = (
        torch.tensor([1.0, 4.0, 5.0]),
        torch.tensor([0, 2, 2]),
        torch.tensor([1, 0, 2]),
    )
    assert terms.sequence_means(values, index, counts).tolist() == [1.0, 0.0, 4.5]
    assert terms.sequence_sums(values, index, 3).tolist() == [1.0, 0.0, 9.0]


def test_a_log_ratio_stays_within_twenty():
    near = terms.log_ratio(torch.tensor([25.0, -25.0, 3.0]), torch.tensor([1.0, -1.0, 1.0]))
    assert near.tolist() == [20.0, -20.0, 2.0]


def test_nothing_counted_is_left_out_of_a_report():
    total = {
        "seen": torch.tensor([3.0, 2.0]),
        "half": torch.tensor([0.25, 0.5]),
        "none": torch.tensor([0.0, 0.0]),
    }
    assert finish_sums(total) == {"seen": 1.5, "half": 0.5}


def test_metrics_of_chunks_add_up_though_not_every_chunk_has_each():
    first = {"loss": torch.tensor([3.0, 2.0]), "entropy": torch.tensor([1.0, 2.0])}
    second = {"loss": torch.tensor([5.0, 6.0]), "kl": torch.tensor([4.0, 1.0])}
    total = add_sums(add_sums({}, first), second)
    assert finish_sums(total) == {"loss": 1.0, "entropy": 0.5, "kl": 4.0}


def test_pairs_come_in_twos():
    for config in (RmConfig(), DpoConfig()):
        assert denominator(config, [3, 2, 4, 1]) == 2.0
        with pytest.raises(AssertionError, match="even number of sequences, got 3"):
            denominator(config, [1, 1, 1])


def test_the_policy_and_the_pairs_say_what_they_miss():
    with pytest.raises(AssertionError, match="logprobs_N"):
        loss_sum(SftConfig(), inputs_of([1]))
    with pytest.raises(AssertionError, match="values_N"):
        loss_sum(PpoConfig(value_clip=0.2), inputs_of([1], values_N=[1.0], returns_N=[0.0]))
