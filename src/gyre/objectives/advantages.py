"""Advantages: rewards to the credit of each token. In: scores, values and log-probs of a step's
samples (numpy). Out: advantages and returns per sampled token; the groups without a learning
signal; preference pairs of completions. Pure, float64 inside, torch-free.

G samples of one group (siblings of one prompt), C sampled tokens of one sample, T steps of an
episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gyre.objectives.config import DpoConfig, Estimator, GrpoConfig, PpoConfig

# Keeps a division finite; far below the spread of any real reward.
EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The inputs of one rollout's advantages."""

    group_id: str  # shared by siblings
    score: float  # the weighted sum of its rewards
    num_tokens: int  # C, sampled tokens
    # the policy's by the trainer, needed when the KL is in the reward
    logprobs_C: np.ndarray | None = None
    reference_logprobs_C: np.ndarray | None = None  # needed when the KL is in the reward
    values_C: np.ndarray | None = None  # the critic's, needed by ppo
    # the critic's value after the last token where returns are bootstrapped; else 0
    last_value: float = 0.0
    in_loss: bool = True  # False: counts in its group's baseline, but not in the batch's statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Advantages and what comes with them, one entry per sample, in the order given."""

    advantages: tuple[np.ndarray, ...]  # float32 [C] each
    # float32 [C] each, the critic's targets; None without a critic
    returns: tuple[np.ndarray, ...] | None
    # KL summed over each sample's tokens; None unless the KL is in the reward
    kls: tuple[float, ...] | None
    # tokens of each sample whose KL is held by kl_clamp; None likewise
    kls_bounded: tuple[int, ...] | None
    equal_groups: tuple[str, ...]  # groups whose scores are all equal, in order of first appearance


def estimate(config: GrpoConfig | PpoConfig, samples: Sequence[Sample]) -> Estimates:
    """Compute advantages (and returns) of all samples of a step, for any online objective."""
    penalties = [_penalty(config, sample) for sample in samples]
    members = _by_group(samples)
    scores = [np.array([samples[i].score for i in group]) for group in members.values()]
    names = list(members)
    if isinstance(config, PpoConfig):
        per_token, returns = _with_critic(config, samples, penalties)
    else:
        per_token = _without_critic(config, samples, penalties, list(members.values()))
        returns = None
    in_reward = config.kl_in == "reward" and config.kl_coef > 0.0
    return Estimates(
        advantages=tuple(values.astype(np.float32) for values in per_token),
        returns=None if returns is None else tuple(values.astype(np.float32) for values in returns),
        kls=tuple(float(p.sum()) / config.kl_coef for p in penalties) if in_reward else None,
        kls_bounded=tuple(_num_bounded(config, sample) for sample in samples)
        if in_reward
        else None,
        equal_groups=tuple(names[i] for i in equal_groups(scores)),
    )


def advantages(
    config: GrpoConfig,
    rewards: Sequence[np.ndarray],
    token_counts: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Compute one advantage per sample, group by group. `token_counts` weighs samples under scale =
    "batch_std" (REINFORCE++ normalizes over tokens); without it each sample counts once. All-equal
    groups get exactly 0 wherever there is a group baseline."""
    centered = [_center(config, np.asarray(rewards_G, dtype=np.float64)) for rewards_G in rewards]
    if config.scale != "batch_std":
        return centered
    weights = [
        np.ones(len(c)) if token_counts is None else np.asarray(token_counts[i])
        for i, c in enumerate(centered)
    ]
    return whiten(centered, weights)


def equal_groups(rewards: Sequence[np.ndarray]) -> list[int]:
    """Return the indices of groups whose rewards are all equal, which therefore have no learning
    signal."""
    return [
        i for i, rewards_G in enumerate(rewards) if len(rewards_G) == 0 or np.ptp(rewards_G) == 0.0
    ]


def gae(
    rewards_T: np.ndarray,
    values_T: np.ndarray,
    gamma: float,
    lam: float,
    *,
    last_value: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute generalized advantage estimates. Returns (advantages_T, returns_T), returns =
    advantages + values.

    Schulman et al. 2016, arXiv 1506.02438, eq. 11, 12 and 16, truncated at the end of the episode:
    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}.
    """
    rewards = np.asarray(rewards_T, dtype=np.float64)
    values = np.asarray(values_T, dtype=np.float64)
    assert rewards.shape == values.shape, (
        f"rewards {rewards.shape} and values {values.shape} differ in shape"
    )
    deltas = rewards + gamma * np.append(values[1:], last_value)[: len(values)] - values
    advantages_T, running = np.empty_like(deltas), 0.0
    for t in range(len(deltas) - 1, -1, -1):
        running = deltas[t] + gamma * lam * running
        advantages_T[t] = running
    return advantages_T, advantages_T + values


def whiten(
    values: Sequence[np.ndarray], weights: Sequence[np.ndarray] | None = None
) -> list[np.ndarray]:
    """Shift and scale ragged arrays by their common (weighted) mean and standard deviation."""
    if not len(values):
        return []
    flat = np.concatenate([np.asarray(v, dtype=np.float64) for v in values])
    mass = (
        np.ones_like(flat)
        if weights is None
        else np.concatenate([np.asarray(w, dtype=np.float64) for w in weights])
    )
    total = mass.sum()
    if total == 0.0:
        return [np.asarray(v, dtype=np.float64) for v in values]
    mean = float((mass * flat).sum() / total)
    std = float(np.sqrt((mass * (flat - mean) ** 2).sum() / total))
    return [(np.asarray(v, dtype=np.float64) - mean) / (std + EPSILON) for v in values]


def kl_numpy(
    estimator: Estimator,
    logprobs_C: np.ndarray,
    reference_logprobs_C: np.ndarray,
    clamp: float = 0.0,
) -> np.ndarray:
    """Compute per-token KL(policy || reference), the value of `terms.kl_estimate` in float64, for
    rewards. Without `clamp` k3 is unbounded."""
    gap = np.asarray(logprobs_C, dtype=np.float64) - np.asarray(
        reference_logprobs_C, dtype=np.float64
    )
    if estimator == "k1":
        kl = gap
    elif estimator == "k2":
        kl = 0.5 * gap**2
    else:
        kl = np.expm1(-gap) + gap
    return np.clip(kl, -clamp, clamp) if clamp else kl


def rank_pairs(config: DpoConfig, rewards_G: np.ndarray) -> list[tuple[int, int]]:
    """Return pairs (chosen, rejected) of one group's samples for online DPO. Pairs best with worst,
    second best with second worst, … while the rewards differ by more than `min_reward_gap`. Ties
    are broken by index."""
    order = sorted(range(len(rewards_G)), key=lambda i: (-float(rewards_G[i]), i))
    pairs = [(order[i], order[-1 - i]) for i in range(min(config.pairs_per_group, len(order) // 2))]
    return [
        (best, worst)
        for best, worst in pairs
        if rewards_G[best] - rewards_G[worst] > config.min_reward_gap
    ]


def _by_group(samples: Sequence[Sample]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        members.setdefault(sample.group_id, []).append(i)
    return members


def _penalty(config: GrpoConfig | PpoConfig, sample: Sample) -> np.ndarray:
    """Return the KL penalty of each token's reward [C]; zeros unless it is in the reward."""
    if config.kl_in != "reward" or config.kl_coef == 0.0:
        return np.zeros(sample.num_tokens)
    assert sample.logprobs_C is not None, "KL in the reward needs the policy's log-probs"
    assert sample.reference_logprobs_C is not None, (
        "KL in the reward needs the reference's log-probs"
    )
    return config.kl_coef * kl_numpy(
        config.kl_estimator, sample.logprobs_C, sample.reference_logprobs_C, config.kl_clamp
    )


def _num_bounded(config: GrpoConfig | PpoConfig, sample: Sample) -> int:
    """Count the tokens whose KL in the reward is bounded by kl_clamp."""
    if not config.kl_clamp:
        return 0
    assert sample.logprobs_C is not None and sample.reference_logprobs_C is not None
    kl_C = kl_numpy(config.kl_estimator, sample.logprobs_C, sample.reference_logprobs_C)
    return int((np.abs(kl_C) > config.kl_clamp).sum())


def _center(config: GrpoConfig, rewards_G: np.ndarray) -> np.ndarray:
    """Subtract the baseline within a group; divide by its standard deviation when the variant does.

    group_mean: Shao et al. 2024, arXiv 2402.03300, section 4.1.2 (standard deviation with G - 1, as
    in the published implementations). leave_one_out: Ahmadian et al. 2024, arXiv 2402.14740, eq. 8.
    """
    size = len(rewards_G)
    if config.baseline == "none":
        centered = rewards_G
    elif size < 2 or np.ptp(rewards_G) == 0.0:
        return np.zeros(size)
    elif config.baseline == "group_mean":
        centered = rewards_G - rewards_G.mean()
    else:
        centered = (rewards_G - rewards_G.mean()) * (size / (size - 1))
    if config.scale != "group_std" or size < 2:
        return centered
    return centered / (rewards_G.std(ddof=1) + EPSILON)


def _without_critic(
    config: GrpoConfig,
    samples: Sequence[Sample],
    penalties: list[np.ndarray],
    members: list[list[int]],
) -> list[np.ndarray]:
    """Compute advantages without a critic.

    Group baselines use a sample's whole penalized reward. Without a baseline each token gets the KL
    still to come (REINFORCE++, Hu et al. 2025, arXiv 2501.03262: A_t = r - beta sum_{i >= t} KL_i,
    then normalized over tokens).
    """
    per_token: list[np.ndarray] = [np.empty(0)] * len(samples)
    for group in members:
        if config.baseline == "none":
            values = _center(config, np.array([samples[i].score for i in group], dtype=np.float64))
            later = [np.cumsum(penalties[i][::-1])[::-1] for i in group]
        else:
            values = _center(
                config,
                np.array([samples[i].score - penalties[i].sum() for i in group], dtype=np.float64),
            )
            later = [np.zeros(samples[i].num_tokens) for i in group]
        for i, value, kl_to_come in zip(group, values, later, strict=True):
            per_token[i] = value - kl_to_come
    return _whiten_trained(samples, per_token) if config.scale == "batch_std" else per_token


def _with_critic(
    config: PpoConfig, samples: Sequence[Sample], penalties: list[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Compute advantages with a critic. The score is the last token's reward, and each token pays
    its KL (Ouyang et al. 2022, arXiv 2203.02155, eq. 2)."""
    per_token, returns = [], []
    for sample, penalty in zip(samples, penalties, strict=True):
        assert sample.values_C is not None, "ppo needs the critic's values"
        rewards_C = -penalty
        if sample.num_tokens:
            rewards_C[-1] += sample.score
        advantages_C, returns_C = gae(
            rewards_C, sample.values_C, config.gamma, config.lam, last_value=sample.last_value
        )
        per_token.append(advantages_C)
        returns.append(returns_C)
    return (_whiten_trained(samples, per_token) if config.whiten else per_token), returns


def _whiten_trained(samples: Sequence[Sample], per_token: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Whiten by the statistics of the tokens that are trained on."""
    weights = [
        np.full(len(values), float(s.in_loss)) for s, values in zip(samples, per_token, strict=True)
    ]
    return whiten(per_token, weights)
