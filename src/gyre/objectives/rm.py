"""Reward model: learn to score the preferred answer higher. In: a scalar per sequence. Out: summed
loss over pairs, metric sums.

S sequences of a chunk, P its pairs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gyre.objectives import terms
from gyre.objectives.config import RmConfig
from gyre.objectives.inputs import LossInputs


def rm_loss(config: RmConfig, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute -log sigmoid(r_chosen - r_rejected - margin) per pair.

    Bradley–Terry as in Ouyang et al. 2022, arXiv 2203.02155, eq. 1; margin as in Touvron et al.
    2023, arXiv 2307.09288, eq. 2; centering as in Eisenstein et al. 2023, arXiv 2312.09244.
    """
    assert inputs.scores_S is not None, "rm needs scores_S"
    assert inputs.chosen_P is not None, "rm needs chosen_P"
    assert inputs.rejected_P is not None, "rm needs rejected_P"
    chosen_P, rejected_P = inputs.scores_S[inputs.chosen_P], inputs.scores_S[inputs.rejected_P]
    gap_P = chosen_P - rejected_P
    loss_P = -F.logsigmoid(gap_P if inputs.margins_P is None else gap_P - inputs.margins_P)
    if config.center_coef:
        loss_P = loss_P + config.center_coef * (chosen_P + rejected_P).square()
    sums = {
        "loss": terms.mean_sum(loss_P),
        "pair_accuracy": terms.mean_sum(terms.told_apart(gap_P)),
        "score_margin": terms.mean_sum(gap_P),
        "score_chosen": terms.mean_sum(chosen_P),
        "score_rejected": terms.mean_sum(rejected_P),
    }
    return loss_P.sum(), sums
