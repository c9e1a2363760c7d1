"""PPO: the clipped policy loss with a critic's value loss. In: log-probs, values. Out: summed loss,
metric sums. Advantages by GAE: `advantages.gae`.

N target tokens of a chunk, S its sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gyre.objectives import terms
from gyre.objectives.config import PpoConfig
from gyre.objectives.grpo import policy_loss
from gyre.objectives.inputs import LossInputs


def ppo_loss(config: PpoConfig, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the policy loss where there are log-probs, plus vf_coef times the value loss where
    there are values. One call serves both models, or one call each."""
    assert inputs.logprobs_N is not None or inputs.values_N is not None, (
        "ppo needs logprobs_N, values_N or both"
    )
    if inputs.logprobs_N is None:
        loss, sums = value_loss(config, inputs)
        return config.vf_coef * loss, sums
    loss, sums = policy_loss(config, inputs)
    if inputs.values_N is None:
        return loss, sums
    critic_loss, critic_sums = value_loss(config, inputs)
    return loss + config.vf_coef * critic_loss, {**sums, **critic_sums}


def value_loss(config: PpoConfig, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute max((V - R)^2, (clip(V, V_old ± value_clip) - R)^2) / 2 per token. This is the
    clipped form of PPO's released implementation; Schulman et al. 2017, arXiv 1707.06347, eq. 9,
    has the plain square."""
    assert inputs.values_N is not None, "the value loss needs values_N"
    assert inputs.returns_N is not None, "the value loss needs returns_N"
    values_N, returns_N = inputs.values_N, inputs.returns_N
    error_N = (values_N - returns_N).square()
    clipped = {}
    if config.value_clip:
        assert inputs.old_values_N is not None, "value_clip needs old_values_N"
        near_N = inputs.old_values_N + (values_N - inputs.old_values_N).clamp(
            -config.value_clip, config.value_clip
        )
        far_N = (near_N - returns_N).square()
        clipped["value_clip_fraction"] = terms.mean_sum((far_N.detach() > error_N.detach()).float())
        error_N = torch.maximum(error_N, far_N)
    loss_N = 0.5 * error_N
    weights_N = terms.aggregation_weights(
        config.aggregation, inputs.sequence_index_N, inputs.target_counts_S, loss_N.dtype
    )
    loss = (weights_N * loss_N).sum()
    mass = terms.aggregation_mass(
        config.aggregation, inputs.target_counts_S, config.fixed_length_tokens
    )
    sums = {
        "value_loss": torch.stack([loss.detach().float(), mass]),
        "value": terms.mean_sum(values_N),
        "value_error": terms.mean_sum((values_N.detach() - returns_N).abs()),
        "return": terms.mean_sum(returns_N),
        **clipped,
    }
    return loss, sums
