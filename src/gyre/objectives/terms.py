"""Terms: the building blocks of every loss. In: flat tensors over a chunk's target tokens. Out:
flat tensors, or (sum, count) pairs for metrics.

N target tokens of a chunk, S its sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gyre.objectives.config import Estimator

# exp() of a larger log-ratio says nothing more than "far off policy", and its gradient overflows
# float32.
LOG_RATIO_BOUND = 20.0


def mean_sum(values_N: Tensor) -> Tensor:
    """Return a metric: (sum, count) as a detached float32 tensor [2]."""
    values_N = values_N.detach().float()
    return torch.stack([values_N.sum(), values_N.new_full((), float(values_N.numel()))])


def told_apart(gap_P: Tensor) -> Tensor:
    """Return 1 where the chosen one of a pair is ahead, 0 where it is behind, [P]. A tie is 0.5, as
    in evaluation (TRL: 0)."""
    return ((gap_P > 0).float() + (gap_P >= 0).float()) / 2


def sequence_sums(values_N: Tensor, sequence_index_N: Tensor, num_sequences: int) -> Tensor:
    """Sum over each sequence's targets, [S]; differentiable."""
    return values_N.new_zeros(num_sequences).index_add(0, sequence_index_N, values_N)


def sequence_means(values_N: Tensor, sequence_index_N: Tensor, target_counts_S: Tensor) -> Tensor:
    """Mean over each sequence's targets, [S]; 0 for a sequence without any."""
    sums_S = sequence_sums(values_N, sequence_index_N, len(target_counts_S))
    return sums_S / target_counts_S.clamp(min=1)


def aggregation_weights(
    aggregation: str, sequence_index_N: Tensor, target_counts_S: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the weight of each token in the summed loss, [N]. With `api.denominator` it yields
    token means, means of sequence means, or sums over a fixed length, for any split into
    micro-batches."""
    if aggregation == "sequence":
        return target_counts_S.to(dtype).reciprocal()[sequence_index_N]
    return torch.ones_like(sequence_index_N, dtype=dtype)


def aggregation_mass(aggregation: str, target_counts_S: Tensor, fixed_length_tokens: int) -> Tensor:
    """Return this micro-batch's share of the denominator, as a tensor: the divisor of a loss
    metric."""
    if aggregation == "token":
        return target_counts_S.sum().float()
    num_sequences = (target_counts_S > 0).sum().float()
    return num_sequences if aggregation == "sequence" else num_sequences * fixed_length_tokens


def log_ratio(logprobs_N: Tensor, base_logprobs_N: Tensor) -> Tensor:
    """Compute log(new / base) per token, bounded so that its exponential and gradient stay
    finite."""
    return (logprobs_N - base_logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def sequence_log_ratio(
    log_ratio_N: Tensor, sequence_index_N: Tensor, target_counts_S: Tensor
) -> Tensor:
    """Compute per token the mean log-ratio of its sequence; its gradient flows to the token's own
    log-prob.

    GSPO-token, Zheng et al. 2025, arXiv 2507.18071, eq. 13 and 14: s_{i,t} = sg[s_i] pi_t /
    sg[pi_t]. With one advantage per sequence its gradient, summed with weight 1 / length, is that
    of eq. 5.
    """
    means_S = sequence_means(log_ratio_N.detach(), sequence_index_N, target_counts_S)
    return means_S[sequence_index_N] + (log_ratio_N - log_ratio_N.detach())


def kl_estimate(
    estimator: Estimator, logprobs_N: Tensor, reference_logprobs_N: Tensor, clamp: float = 0.0
) -> Tensor:
    """Estimate KL(policy || reference) per token from tokens that the policy sampled, in nats.

    Schulman 2020, "Approximating KL divergence", with r = reference / policy: k1 = -log r, k2 =
    (log r)^2 / 2, k3 = r - 1 - log r. k3 is GRPO's, Shao et al. 2024, arXiv 2402.03300, eq. 4.
    k3_plus has the value of k3 and the gradient of k2, whose expectation is the gradient of the KL
    itself.

    `clamp` bounds the size of the estimate (0: unbounded), and k3 bounds log r at LOG_RATIO_BOUND.
    This is verl's form, which bounds log r at 20 and the estimate at 10. A token past a bound
    passes no gradient. Under k3_plus it passes that of k2, as in verl: it is finite everywhere.
    `kl_bounded` counts these tokens.
    """
    gap_N = logprobs_N - reference_logprobs_N
    if estimator == "k1":
        kl_N = gap_N
    elif estimator == "k2":
        kl_N = 0.5 * gap_N.square()
    else:
        near_N = gap_N.clamp(min=-LOG_RATIO_BOUND)
        kl_N = torch.expm1(-near_N) + near_N
    if clamp:
        kl_N = kl_N.clamp(-clamp, clamp)
    if estimator != "k3_plus":
        return kl_N
    k2_N = 0.5 * gap_N.square()
    return kl_N.detach() + (k2_N - k2_N.detach())


def kl_bounded(
    estimator: Estimator, logprobs_N: Tensor, reference_logprobs_N: Tensor, clamp: float
) -> Tensor:
    """Return 1.0 where a bound replaced the token's KL estimate, else 0.0."""
    with torch.no_grad():
        gap_N = logprobs_N - reference_logprobs_N
        bounded_N = torch.zeros_like(gap_N, dtype=torch.bool)
        if estimator in ("k3", "k3_plus"):
            bounded_N = gap_N < -LOG_RATIO_BOUND
        if clamp:
            bounded_N = bounded_N | (
                kl_estimate(estimator, logprobs_N, reference_logprobs_N).abs() > clamp
            )
        return bounded_N.to(gap_N.dtype)


def ratio_weighted(kl_N: Tensor, bounded_N: Tensor, log_weight_N: Tensor) -> Tensor:
    """Multiply the KL estimate by the importance ratio, whose gradient counts. With k3 the
    expectation over the old policy's tokens is KL(policy || reference), and its gradient that of
    the KL.

    DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv 2512.02556, section 3.1; TRL's
    `use_bias_correction_kl`. The ratio is not clipped; only its logarithm is bounded at
    LOG_RATIO_BOUND. Where a bound replaced the estimate (`bounded_N`), the ratio is detached: the
    gradient of ratio · bound would push the token further away from the reference.
    """
    weight_N = log_weight_N.exp()
    return kl_N * torch.where(bounded_N > 0, weight_N.detach(), weight_N)


def importance_log_ratio(
    level: str, log_ratio_N: Tensor, sequence_index_N: Tensor, target_counts_S: Tensor
) -> Tensor:
    """Compute log(trainer / engine) that weighs or filters each token, [N], detached and bounded at
    LOG_RATIO_BOUND. It is the token's own ("token"), the sum over its sequence ("sequence"), or the
    mean over it ("sequence_mean").

    `log_ratio_N` is not bounded: verl bounds a sequence's sum and not its tokens.
    """
    with torch.no_grad():
        if level != "token":
            sums_S = sequence_sums(log_ratio_N, sequence_index_N, len(target_counts_S))
            log_ratio_S = sums_S if level == "sequence" else sums_S / target_counts_S.clamp(min=1)
            log_ratio_N = log_ratio_S[sequence_index_N]
        return log_ratio_N.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def truncated_weights(log_weight_N: Tensor, cap: float) -> Tensor:
    """Compute min(trainer / engine probability, cap) per token, detached: truncated importance
    sampling (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training")."""
    return log_weight_N.detach().exp().clamp(max=cap)


def off_policy_masked(
    behavior_logprobs_N: Tensor,
    logprobs_N: Tensor,
    advantages_N: Tensor,
    sequence_index_N: Tensor,
    target_counts_S: Tensor,
    threshold: float,
) -> Tensor:
    """Return whether a token's advantage is negative and its sequence off policy: bool [N].

    DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv 2512.02556, section 3.1, "Off-Policy Sequence Masking":
    that is, mean over the sequence of log(behavior / policy) > threshold.
    """
    with torch.no_grad():
        gap_N = behavior_logprobs_N - logprobs_N
        means_S = sequence_means(gap_N, sequence_index_N, target_counts_S)
        return (advantages_N < 0) & (means_S[sequence_index_N] > threshold)


def chi2_estimate(log_ratio_N: Tensor) -> Tensor:
    """Estimate chi^2(policy, behavior) per token from tokens of the behavior policy: (r - 1)^2,
    whose mean is that of r^2 - 1. `log_ratio_N` is bounded."""
    return torch.expm1(log_ratio_N).square()


def out_of_band(log_ratio_N: Tensor, band: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return whether each ratio is below the band, and whether above it: bool [N] each. The bounds
    belong to the band."""
    ratio_N = log_ratio_N.exp()
    return ratio_N < band[0], ratio_N > band[1]
