"""Policy loss: the clipped surrogate that GRPO, its variants and PPO share. In: log-probs,
advantages. Out: summed loss, metric sums. See `config` for the table of variants and `advantages`.

N target tokens of a chunk, S its sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gyre.objectives import terms
from gyre.objectives.config import PolicyConfig
from gyre.objectives.inputs import LossInputs

LARGE_GAP = math.log(2.0)  # nats: the probabilities differ by more than a factor of two


def policy_loss(config: PolicyConfig, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the surrogate, weighted by the engine correction, plus KL to the reference, minus the
    entropy bonus."""
    logprobs_N = inputs.logprobs_N
    index_N, counts_S = inputs.sequence_index_N, inputs.target_counts_S
    assert logprobs_N is not None, "the policy loss needs logprobs_N"
    assert inputs.advantages_N is not None, "the policy loss needs advantages_N"
    old_N = _old_logprobs(config, inputs)
    log_ratio_N = terms.log_ratio(logprobs_N, old_N)
    if config.ratio == "sequence":
        log_ratio_N = terms.sequence_log_ratio(log_ratio_N, index_N, counts_S)
    ratio_N = log_ratio_N.exp()
    surrogate_N = surrogate(config, ratio_N, logprobs_N, inputs.advantages_N)
    loss_N, correction = _corrected(config, inputs, surrogate_N)
    loss_N, extras = _regularized(config, inputs, loss_N, old_N)
    weights_N = terms.aggregation_weights(config.aggregation, index_N, counts_S, loss_N.dtype)
    loss = (weights_N * loss_N).sum()
    mass = terms.aggregation_mass(config.aggregation, counts_S, config.fixed_length_tokens)
    sums = {
        "policy_loss": torch.stack([(weights_N * surrogate_N.detach()).sum().float(), mass]),
        "loss": torch.stack([loss.detach().float(), mass]),
        **_ratio_sums(config, ratio_N, logprobs_N, old_N, inputs.advantages_N),
        **_gap_sums(inputs),
        **correction,
        **extras,
    }
    return loss, sums


def surrogate(
    config: PolicyConfig, ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor
) -> Tensor:
    """Compute the per-token loss to minimize.

    clip: -min(r A, clip(r) A); Schulman et al. 2017, arXiv 1707.06347, eq. 7, with separate bounds
    as in DAPO, arXiv 2503.14476, eq. 10. dual_clip c bounds it by c |A| for A < 0; Ye et al. 2020,
    arXiv 1912.09729, "dual-clip". cispo: -sg(clip(r)) A log p; MiniMax 2025, arXiv 2506.13585, eq.
    4 and 5. reinforce: -A log p; Williams 1992.
    """
    if config.surrogate == "reinforce":
        return -advantages_N * logprobs_N
    clipped_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    if config.surrogate == "cispo":
        return -clipped_N.detach() * advantages_N * logprobs_N
    loss_N = torch.maximum(-advantages_N * ratio_N, -advantages_N * clipped_N)
    if config.dual_clip:
        bounded_N = torch.minimum(loss_N, -advantages_N * config.dual_clip)
        loss_N = torch.where(advantages_N < 0, bounded_N, loss_N)
    return loss_N


def _old_logprobs(config: PolicyConfig, inputs: LossInputs) -> Tensor:
    """Return the log-probs in the ratio's denominator: the current ones, detached, if the policy is
    unchanged since the batch."""
    if config.ratio_base == "engine":
        assert inputs.behavior_logprobs_N is not None, (
            "ratio_base = 'engine' needs behavior_logprobs_N"
        )
        return inputs.behavior_logprobs_N
    return _trainer_logprobs(inputs)


def _corrected(
    config: PolicyConfig, inputs: LossInputs, loss_N: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weigh each token by trainer over engine probability, with weight 0 for those outside the
    band. Applies no weights when the ratio itself starts from the engine: the band then tests the
    current log-probs."""
    weighs = config.tis_cap > 0.0 and config.ratio_base == "trainer"
    rejects = config.rejection_level != "none"
    if config.off_policy_mask_threshold:
        loss_N, masked = _without_off_policy(config, inputs, loss_N)
    else:
        masked = {}
    if not weighs and not rejects:
        return loss_N, masked
    assert inputs.behavior_logprobs_N is not None, (
        "engine corrections need behavior_logprobs_N; set correction = 'none' to go without"
    )
    log_ratio_N = _trainer_logprobs(inputs) - inputs.behavior_logprobs_N
    spread = log_ratio_N, inputs.sequence_index_N, inputs.target_counts_S
    weights_N, sums = torch.ones_like(loss_N), dict(masked)
    if weighs:
        log_weight_N = terms.importance_log_ratio(config.importance_level, *spread)
        weights_N = terms.truncated_weights(log_weight_N, config.tis_cap)
        sums["tis_truncated_fraction"] = terms.mean_sum(
            (log_weight_N.exp() >= config.tis_cap).float()
        )
    if rejects:
        judged_N = terms.importance_log_ratio(config.rejection_level, *spread)
        low_N, high_N = terms.out_of_band(judged_N, config.rejection_band)
        weights_N = torch.where(low_N | high_N, torch.zeros_like(weights_N), weights_N)
        # A loss that is not finite is what such a token may have; 0 times it is not 0.
        loss_N = torch.where(low_N | high_N, torch.zeros_like(loss_N), loss_N)
        sums["rejected_fraction"] = terms.mean_sum((low_N | high_N).float())
        sums["rejected_low_fraction"] = terms.mean_sum(low_N.float())
        sums["rejected_high_fraction"] = terms.mean_sum(high_N.float())
    sums["tis_weight"] = terms.mean_sum(weights_N)
    sums["tis_weight_square"] = terms.mean_sum(weights_N.square())
    return weights_N * loss_N, sums


def _without_off_policy(
    config: PolicyConfig, inputs: LossInputs, loss_N: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Remove the loss of bad answers that the current policy would hardly give. As in TRL and
    slime, their tokens still count in the loss's mean."""
    assert inputs.behavior_logprobs_N is not None, (
        "off_policy_mask_threshold needs behavior_logprobs_N"
    )
    assert inputs.logprobs_N is not None and inputs.advantages_N is not None
    masked_N = terms.off_policy_masked(
        inputs.behavior_logprobs_N,
        inputs.logprobs_N,
        inputs.advantages_N,
        inputs.sequence_index_N,
        inputs.target_counts_S,
        config.off_policy_mask_threshold,
    )
    sums = {"off_policy_masked_fraction": terms.mean_sum(masked_N.float())}
    return torch.where(masked_N, torch.zeros_like(loss_N), loss_N), sums


def _trainer_logprobs(inputs: LossInputs) -> Tensor:
    """Return the trainer's log-probs to compare with the engine's: those before the update where
    available."""
    assert inputs.logprobs_N is not None
    return inputs.logprobs_N.detach() if inputs.old_logprobs_N is None else inputs.old_logprobs_N


def _regularized(
    config: PolicyConfig, inputs: LossInputs, loss_N: Tensor, old_N: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Add the KL to the reference, the chi^2 to the engine and the entropy bonus, and measure them.
    The engine correction applies to none."""
    sums: dict[str, Tensor] = {}
    if config.chi2_coef:
        assert inputs.logprobs_N is not None and inputs.behavior_logprobs_N is not None, (
            "chi2_coef needs behavior_logprobs_N"
        )
        log_ratio_N = terms.log_ratio(inputs.logprobs_N, inputs.behavior_logprobs_N)
        chi2_N = terms.chi2_estimate(log_ratio_N)
        loss_N = loss_N + config.chi2_coef * chi2_N
        sums["chi2_penalty"] = terms.mean_sum(chi2_N)
    if config.kl_coef and config.kl_in == "loss":
        kl_N, bounded_N = _kl_in_loss(config, inputs, old_N)
        loss_N = loss_N + config.kl_coef * kl_N
        sums["kl_reference"] = terms.mean_sum(kl_N)
        sums["kl_bounded_fraction"] = terms.mean_sum(bounded_N)
    if inputs.entropy_N is not None:
        sums["entropy"] = terms.mean_sum(inputs.entropy_N)
    if config.entropy_coef:
        assert inputs.entropy_N is not None, "entropy_coef needs entropy_N"
        assert inputs.entropy_N.requires_grad or loss_N.grad_fn is None, (
            "entropy_coef needs the entropy's gradient"
        )
        loss_N = loss_N - config.entropy_coef * inputs.entropy_N
    return loss_N, sums


def _kl_in_loss(config: PolicyConfig, inputs: LossInputs, old_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's KL to the reference, and 1.0 where it is bounded."""
    assert inputs.logprobs_N is not None
    assert inputs.reference_logprobs_N is not None, "kl_coef needs reference_logprobs_N"
    given = config.kl_estimator, inputs.logprobs_N, inputs.reference_logprobs_N, config.kl_clamp
    kl_N, bounded_N = terms.kl_estimate(*given), terms.kl_bounded(*given)
    if not config.kl_ratio_weighted:
        return kl_N, bounded_N
    log_weight_N = terms.log_ratio(inputs.logprobs_N, old_N)
    if config.ratio == "sequence":  # as TRL: its gradient goes to all tokens of the sequence
        index_N = inputs.sequence_index_N
        log_weight_N = terms.sequence_means(log_weight_N, index_N, inputs.target_counts_S)[index_N]
    return terms.ratio_weighted(kl_N, bounded_N, log_weight_N), bounded_N


def _ratio_sums(
    config: PolicyConfig, ratio_N: Tensor, logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor
) -> dict[str, Tensor]:
    """Measure how far the policy has moved within this batch, and where clipping removed the
    gradient."""
    with torch.no_grad():
        low_N = (ratio_N < 1.0 - config.clip_low).float()
        high_N = (ratio_N > 1.0 + config.clip_high).float()
        if config.surrogate == "clip":
            low_N, high_N = low_N * (advantages_N < 0), high_N * (advantages_N > 0)
        bound_N = ((logprobs_N - old_N).abs() >= terms.LOG_RATIO_BOUND).float()
        return {
            "ratio": terms.mean_sum(ratio_N),
            "kl_old": terms.mean_sum(terms.kl_estimate("k3", old_N, logprobs_N)),
            "clip_fraction": terms.mean_sum(low_N + high_N),
            "clip_low_fraction": terms.mean_sum(low_N),
            "clip_high_fraction": terms.mean_sum(high_N),
            "ratio_bounded_fraction": terms.mean_sum(bound_N),
        }


def _gap_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """Measure the gap between the trainer's and the engine's log-probs at equal weights: 0 and 1
    when both agree. `logprob_gap_mult` is the mean of exp |difference|, the form of published
    thresholds. The part where the trainer is above, and the share of large gaps, indicate the cause
    (`observability.mismatch`). chi2 is the mean of ratio^2 - 1, over tokens or over sequences with
    the product of their ratios (verl: chi2_token, chi2_seq): the variance of importance weights."""
    if inputs.behavior_logprobs_N is None:
        return {}
    index_N, counts_S = inputs.sequence_index_N, inputs.target_counts_S
    with torch.no_grad():
        trainer_N = _trainer_logprobs(inputs)
        unbounded_N = trainer_N - inputs.behavior_logprobs_N
        squares = {
            level: terms.importance_log_ratio(level, unbounded_N, index_N, counts_S).mul(2).exp()
            for level in ("token", "sequence")
        }
        signed_N = terms.log_ratio(trainer_N, inputs.behavior_logprobs_N)
        gap_N = signed_N.abs()
        return {
            "logprob_gap": terms.mean_sum(gap_N),
            "logprob_gap_mult": terms.mean_sum(gap_N.exp()),
            "logprob_gap_above": terms.mean_sum(signed_N.clamp(min=0.0)),
            "logprob_gap_large_fraction": terms.mean_sum((gap_N > LARGE_GAP).float()),
            "chi2_token": terms.mean_sum(squares["token"] - 1.0),
            "chi2_sequence": _mean_over_sequences(squares["sequence"] - 1.0, index_N, counts_S),
            "engine_kl": terms.mean_sum(
                terms.kl_estimate("k3", inputs.behavior_logprobs_N, trainer_N)
            ),
        }


def _mean_over_sequences(values_N: Tensor, index_N: Tensor, counts_S: Tensor) -> Tensor:
    """Return a metric of values that all tokens of a sequence share: (sum, count) over the
    sequences."""
    values_S = terms.sequence_means(values_N, index_N, counts_S)
    return torch.stack([values_S.float().sum(), (counts_S > 0).sum().float()])
