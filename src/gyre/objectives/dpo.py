"""DPO: learn from preference pairs without a reward model. In: log-probs of both answers under
policy and reference. Out: summed loss over pairs, metric sums.

N target tokens of a chunk, S its sequences, P its pairs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gyre.objectives import terms
from gyre.objectives.config import DpoConfig
from gyre.objectives.inputs import LossInputs


def dpo_loss(config: DpoConfig, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss per pair from h, the log-ratio (policy over reference) of the chosen minus
    that of the rejected answer.

    sigmoid: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h); Rafailov et al. 2023, arXiv
    2305.18290, eq. 7, and Mitchell 2023, "A note on DPO with noisy preferences and relationship to
    IPO" (cDPO), for e = label_smoothing. ipo: (h - 1 / (2 beta))^2; Azar et al. 2023, arXiv
    2310.12036, eq. 17. sft_coef adds the chosen answer's mean negative log-likelihood; Pang et al.
    2024, arXiv 2404.19733, eq. 1.
    """
    assert inputs.logprobs_N is not None, "dpo needs logprobs_N"
    assert inputs.reference_logprobs_N is not None, "dpo needs reference_logprobs_N"
    assert inputs.chosen_P is not None, "dpo needs chosen_P"
    assert inputs.rejected_P is not None, "dpo needs rejected_P"
    index_N, counts_S = inputs.sequence_index_N, inputs.target_counts_S
    log_ratio_N = inputs.logprobs_N - inputs.reference_logprobs_N
    if config.average_logprobs:
        log_ratio_S = terms.sequence_means(log_ratio_N, index_N, counts_S)
    else:
        log_ratio_S = terms.sequence_sums(log_ratio_N, index_N, inputs.num_sequences)
    chosen_P, rejected_P = log_ratio_S[inputs.chosen_P], log_ratio_S[inputs.rejected_P]
    loss_P = pair_loss(config, chosen_P - rejected_P)
    nll_P = -terms.sequence_means(inputs.logprobs_N, index_N, counts_S)[inputs.chosen_P]
    total_P = loss_P + config.sft_coef * nll_P if config.sft_coef else loss_P
    sums = {
        "loss": terms.mean_sum(total_P),
        "preference_loss": terms.mean_sum(loss_P),
        "chosen_nll": terms.mean_sum(nll_P),
        "reward_accuracy": terms.mean_sum(terms.told_apart(chosen_P - rejected_P)),
        "reward_margin": terms.mean_sum(config.beta * (chosen_P - rejected_P)),
        "reward_chosen": terms.mean_sum(config.beta * chosen_P),
        "reward_rejected": terms.mean_sum(config.beta * rejected_P),
    }
    return total_P.sum(), sums


def pair_loss(config: DpoConfig, gap_P: Tensor) -> Tensor:
    """Compute the preference loss of each pair from the difference of its two log-ratios."""
    if config.loss == "ipo":
        return (gap_P - 1.0 / (2.0 * config.beta)).square()
    logits_P = config.beta * gap_P
    right_P = -F.logsigmoid(logits_P)
    if not config.label_smoothing:
        return right_P
    return (1.0 - config.label_smoothing) * right_P - config.label_smoothing * F.logsigmoid(
        -logits_P
    )
