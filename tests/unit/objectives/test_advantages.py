"""Advantages of every variant against slow loops, GAE against its definition as a sum, and a step's
estimates."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.objectives.advantages import (
    Sample,
    advantages,
    equal_groups,
    estimate,
    gae,
    kl_numpy,
    rank_pairs,
)
from gyre.objectives.config import DpoConfig, GrpoConfig, PpoConfig

VARIANTS = ["grpo", "dapo", "dr_grpo", "gspo", "rloo", "reinforce_pp", "cispo"]
rewards_lists = st.lists(
    st.lists(st.floats(-5, 5).map(lambda x: round(x, 2)), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)


def config_of(variant: str, **more) -> GrpoConfig:
    return GrpoConfig(variant=variant, fixed_length_tokens=64, **more)


def slow_group(variant: str, rewards: list[float]) -> list[float]:
    """One group, from the papers, with the statistics module."""
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    if variant == "rloo":
        return [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    if variant == "dr_grpo":
        return [r - mean for r in rewards]
    return [(r - mean) / (statistics.stdev(rewards) + 1e-6) for r in rewards]


@given(groups=rewards_lists, variant=st.sampled_from([v for v in VARIANTS if v != "reinforce_pp"]))
def test_group_advantages_equal_the_slow_ones(groups, variant):
    ours = advantages(config_of(variant), [np.array(g) for g in groups])
    for got, group in zip(ours, groups, strict=True):
        assert got.tolist() == pytest.approx(slow_group(variant, group), rel=1e-6, abs=1e-9)


@given(groups=rewards_lists)
def test_reinforce_pp_normalizes_over_the_batch(groups):
    flat = [r for g in groups for r in g]
    mean, std = statistics.fmean(flat), statistics.pstdev(flat)
    ours = np.concatenate(advantages(config_of("reinforce_pp"), [np.array(g) for g in groups]))
    assert ours.tolist() == pytest.approx(
        [(r - mean) / (std + 1e-6) for r in flat], rel=1e-5, abs=1e-6
    )


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "reinforce_pp"])
def test_equal_groups_teach_nothing_and_are_named(variant):
    rewards = [np.array([0.1] * 3), np.array([0.0, 1.0, 0.0]), np.array([0.7]), np.array([0.3] * 7)]
    given_advantages = advantages(config_of(variant), rewards)
    assert equal_groups(rewards) == [0, 2, 3]
    assert [float(np.abs(a).max()) for i, a in enumerate(given_advantages) if i != 1] == [
        0.0,
        0.0,
        0.0,
    ]
    assert np.abs(given_advantages[1]).min() > 0


def samples_of(
    groups: list[list[float]], lengths: list[list[int]], rng: np.random.Generator
) -> list[Sample]:
    return [
        Sample(
            group_id=f"g{g}",
            score=score,
            num_tokens=length,
            logprobs_C=-rng.exponential(1.0, length),
            reference_logprobs_C=-rng.exponential(1.0, length),
            values_C=rng.normal(size=length),
        )
        for g, (scores, counts) in enumerate(zip(groups, lengths, strict=True))
        for score, length in zip(scores, counts, strict=True)
    ]


GROUPS = [[1.0, 0.0, 0.5], [0.2, 0.2], [0.9, -1.0, 0.0]]
LENGTHS = [[3, 1, 4], [2, 5], [6, 0, 2]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_estimate_spreads_a_samples_advantage_over_its_tokens(variant):
    samples = samples_of(GROUPS, LENGTHS, np.random.default_rng(0))
    made = estimate(config_of(variant), samples)
    counts = [np.array(c) for c in LENGTHS]
    expected = np.concatenate(advantages(config_of(variant), [np.array(g) for g in GROUPS], counts))
    assert made.equal_groups == ("g1",)
    assert made.returns is None
    assert made.kls is None
    for got, value, sample in zip(made.advantages, expected, samples, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, np.full(sample.num_tokens, value), rtol=1e-6)


def test_estimate_does_not_depend_on_the_order_of_samples():
    samples = samples_of(GROUPS, LENGTHS, np.random.default_rng(0))
    order = np.random.default_rng(1).permutation(len(samples))
    for config in (config_of("grpo"), config_of("rloo"), PpoConfig(whiten=False)):
        straight, mixed = estimate(config, samples), estimate(config, [samples[i] for i in order])
        for place, i in enumerate(order):
            np.testing.assert_allclose(mixed.advantages[place], straight.advantages[i], rtol=1e-6)


def test_kl_in_the_reward_of_a_group_is_taken_from_the_whole_sample():
    samples = samples_of([[1.0, 0.0, 0.5]], [[3, 2, 4]], np.random.default_rng(2))
    made = estimate(config_of("rloo", kl_coef=0.1, kl_in="reward", kl_estimator="k1"), samples)
    totals = []
    for s in samples:
        total = s.score
        for policy, reference in zip(s.logprobs_C, s.reference_logprobs_C, strict=True):
            total -= 0.1 * (policy - reference)
        totals.append(total)
    for got, want in zip(made.advantages, slow_group("rloo", totals), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    sums = [float((s.logprobs_C - s.reference_logprobs_C).sum()) for s in samples]
    assert made.kls == pytest.approx(sums)


def test_reinforce_pp_with_kl_sees_only_the_kl_still_to_come():
    samples = samples_of([[1.0, 0.0]], [[3, 2]], np.random.default_rng(3))
    made = estimate(config_of("reinforce_pp", kl_coef=0.1), samples)
    raw = []
    for s in samples:
        kls = [p - r for p, r in zip(s.logprobs_C, s.reference_logprobs_C, strict=True)]
        raw += [s.score - 0.1 * math.fsum(kls[t:]) for t in range(s.num_tokens)]
    mean, std = statistics.fmean(raw), statistics.pstdev(raw)
    expected = [(a - mean) / (std + 1e-6) for a in raw]
    assert np.concatenate(made.advantages).tolist() == pytest.approx(expected, rel=1e-5)


@given(
    steps=st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), max_size=12),
    gamma=st.floats(0.1, 1.0),
    lam=st.floats(0.0, 1.0),
    last=st.floats(-2, 2),
)
def test_gae_is_the_discounted_sum_of_temporal_differences(steps, gamma, lam, last):
    rewards, values = np.array([r for r, _ in steps]), np.array([v for _, v in steps])
    got, returns = gae(rewards, values, gamma, lam, last_value=last)
    after = [*values[1:], last]
    deltas = [rewards[t] + gamma * after[t] - values[t] for t in range(len(steps))]
    for t in range(len(steps)):
        expected = math.fsum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(steps)))
        assert got[t] == pytest.approx(expected, abs=1e-9)
        assert returns[t] == pytest.approx(expected + values[t], abs=1e-9)


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=12))
def test_gae_ends_are_monte_carlo_and_one_step(steps):
    rewards, values = np.array([r for r, _ in steps]), np.array([v for _, v in steps])
    full, returns = gae(rewards, values, 1.0, 1.0)
    to_go = np.array([rewards[t:].sum() for t in range(len(steps))])
    np.testing.assert_allclose(full, to_go - values, atol=1e-9)
    np.testing.assert_allclose(returns, to_go, atol=1e-9)
    one_step, _ = gae(rewards, values, 0.9, 0.0)
    np.testing.assert_allclose(
        one_step, rewards + 0.9 * np.append(values[1:], 0.0) - values, atol=1e-9
    )


def test_ppo_rewards_end_with_the_score_and_pay_kl_per_token():
    samples = samples_of([[1.0, 0.0]], [[3, 2]], np.random.default_rng(4))
    config = PpoConfig(kl_coef=0.2, whiten=False, gamma=0.99, lam=0.9)
    made = estimate(config, samples)
    assert made.returns is not None
    for i, s in enumerate(samples):
        rewards = [
            -0.2 * (p - r) for p, r in zip(s.logprobs_C, s.reference_logprobs_C, strict=True)
        ]
        rewards[-1] += s.score
        expected, returns = gae(np.array(rewards), s.values_C, 0.99, 0.9)
        np.testing.assert_allclose(made.advantages[i], expected, rtol=1e-5)
        np.testing.assert_allclose(made.returns[i], returns, rtol=1e-5)


def test_ppo_whitens_over_the_steps_tokens_and_leaves_returns_alone():
    samples = samples_of(GROUPS, LENGTHS, np.random.default_rng(5))
    plain, white = estimate(PpoConfig(whiten=False), samples), estimate(PpoConfig(), samples)
    flat = np.concatenate(white.advantages)
    assert float(flat.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(flat.std()) == pytest.approx(1.0, abs=1e-4)
    for a, b in zip(plain.returns, white.returns, strict=True):
        np.testing.assert_array_equal(a, b)


def test_clamped_kl_penalties():
    assert kl_numpy("k1", np.array([-1.0, -1.0]), np.array([-30.0, 20.0]), 10.0).tolist() == [
        10.0,
        -10.0,
    ]


def test_online_pairs_are_best_with_worst():
    rewards = np.array([0.2, 1.0, 0.0, 1.0, 0.5])
    config = DpoConfig(pairs="online")
    assert rank_pairs(config, rewards) == [(1, 2)]
    assert rank_pairs(config.model_copy(update={"pairs_per_group": 9}), rewards) == [(1, 2), (3, 0)]
    assert rank_pairs(
        config.model_copy(update={"pairs_per_group": 9, "min_reward_gap": 0.9}), rewards
    ) == [(1, 2)]
    assert rank_pairs(config, np.array([0.5, 0.5])) == []
    assert rank_pairs(config, np.array([0.5])) == []


def one(score: float, length: int = 1, group: str = "g", **more) -> Sample:
    return Sample(group_id=group, score=score, num_tokens=length, **more)


def test_a_kl_in_the_loss_takes_nothing_from_the_reward():
    """No log-probs are asked for, and no KL of the reward is reported."""
    made = estimate(config_of("rloo", kl_coef=0.1, kl_in="loss"), [one(1.0), one(0.0)])
    assert [a.tolist() for a in made.advantages] == [[1.0], [-1.0]]
    assert made.kls is None and made.kls_bounded is None


def test_a_kl_of_exactly_the_bound_is_not_counted_as_bounded():
    logprobs, reference = np.array([-1.0, -1.0, -1.0]), np.array([-1.25, -1.5, -0.75])
    sample = one(1.0, 3, logprobs_C=logprobs, reference_logprobs_C=reference)
    config = config_of("reinforce_pp", kl_coef=0.1, kl_clamp=0.25)
    assert estimate(config, [sample]).kls_bounded == (1,)


def test_a_kl_is_unbounded_where_no_bound_is_asked_for():
    assert kl_numpy("k1", np.array([-1.0, -1.0]), np.array([-30.0, 20.0])).tolist() == [29.0, -21.0]


def test_an_empty_group_teaches_nothing():
    assert equal_groups([np.array([]), np.array([0.0, 1.0]), np.array([2.0])]) == [0, 2]


def test_one_token_alone_is_whitened_to_zero():
    (only,) = estimate(config_of("reinforce_pp"), [one(3.0)]).advantages
    assert only.tolist() == [0.0]


def test_what_is_left_out_of_the_loss_counts_in_no_statistic():
    """Trained on: 1 and 3, of mean 2 and deviation 1; the sample that is left out is measured by
    the same."""
    made = estimate(config_of("reinforce_pp"), [one(1.0), one(3.0), one(7.0, in_loss=False)])
    assert [a[0] for a in made.advantages] == pytest.approx([-1.0, 1.0, 5.0], abs=1e-5)
    none = estimate(config_of("reinforce_pp"), [one(1.0, in_loss=False), one(3.0, in_loss=False)])
    assert [a[0] for a in none.advantages] == [1.0, 3.0], (
        "nothing is trained on: there is nothing to divide by"
    )


def test_without_a_baseline_a_sample_alone_keeps_its_reward():
    alone, pair = advantages(GrpoConfig(baseline="none"), [np.array([0.5]), np.array([1.0, 0.0])])
    assert alone.tolist() == [0.5]
    assert pair.tolist() == pytest.approx([math.sqrt(2.0), 0.0], rel=1e-5)


def test_a_spread_of_the_size_of_a_rounding_is_not_blown_up():
    """Deviations of 1e-6 count half: what they are divided by is never below 1e-6."""
    close = [one(0.0), one(2e-6)]
    whitened = estimate(config_of("reinforce_pp"), close).advantages
    assert [a[0] for a in whitened] == pytest.approx([-0.5, 0.5])
    grouped = estimate(config_of("grpo"), close).advantages
    half = 0.5**0.5 * 2e-6  # the deviation with G - 1 is sqrt(2) 1e-6
    assert [a[0] for a in grouped] == pytest.approx([-1e-6 / (half + 1e-6), 1e-6 / (half + 1e-6)])
