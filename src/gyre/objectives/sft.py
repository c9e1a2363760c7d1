"""SFT: cross-entropy on target tokens. In: log-probs. Out: summed loss, metric sums.

N target tokens of a chunk, S its sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gyre.objectives import terms
from gyre.objectives.config import SftConfig
from gyre.objectives.inputs import LossInputs


def sft_loss(config: SftConfig, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the negative log-likelihood, a mean over tokens or sequences after division by the
    denominator."""
    assert inputs.logprobs_N is not None, "sft needs logprobs_N"
    weights_N = terms.aggregation_weights(
        config.aggregation, inputs.sequence_index_N, inputs.target_counts_S, inputs.logprobs_N.dtype
    )
    loss = -(weights_N * inputs.logprobs_N).sum()
    mass = terms.aggregation_mass(config.aggregation, inputs.target_counts_S, 0)
    sums = {
        "loss": torch.stack([loss.detach().float(), mass]),
        "token_nll": terms.mean_sum(-inputs.logprobs_N),
    }
    if inputs.entropy_N is not None:
        sums["entropy"] = terms.mean_sum(inputs.entropy_N)
    return loss, sums
