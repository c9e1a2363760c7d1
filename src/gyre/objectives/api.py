"""Objectives: the loss of any kind. In: an objective config and one micro-batch's tensors. Out: a
loss to be divided by one global denominator, metric sums.

The denominator is 0.0 when no sequence has a target. Skip the update then, and emit an event.
Usage, for one optimizer step over any split into micro-batches:

    whole = denominator(config, token_counts_S)          # all sequences of the update, all ranks
    for chunk in chunks:
        loss, sums = loss_sum(config, inputs(chunk))     # LossInputs
        (loss / whole).backward()
        total = add_sums(total, sums)
    report = finish_sums(total)                          # name -> mean
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from gyre.objectives.config import (
    AnyObjective,
    DpoConfig,
    GrpoConfig,
    PolicyConfig,
    PpoConfig,
    RmConfig,
    SftConfig,
)
from gyre.objectives.dpo import dpo_loss
from gyre.objectives.grpo import policy_loss
from gyre.objectives.inputs import LossInputs
from gyre.objectives.ppo import ppo_loss
from gyre.objectives.rm import rm_loss
from gyre.objectives.sft import sft_loss


def loss_sum(config: AnyObjective, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss summed over the micro-batch, metric sums). Each metric is a detached float32
    tensor [2]: (sum, count), so that sums add over micro-batches and ranks and are divided once. No
    device synchronization."""
    match config:
        case SftConfig():
            return sft_loss(config, inputs)
        case RmConfig():
            return rm_loss(config, inputs)
        case DpoConfig():
            return dpo_loss(config, inputs)
        case GrpoConfig():
            return policy_loss(config, inputs)
        case PpoConfig():
            return ppo_loss(config, inputs)


def denominator(config: AnyObjective, token_counts_S: Sequence[int] | np.ndarray) -> float:
    """Return the divisor of a whole optimizer step's summed loss.

    `token_counts_S`: number of targets of each sequence of the update, over all micro-batches and
    ranks. Pairwise objectives count two sequences as one pair. Additive over any split of the
    sequences. Fully masked sequences do not count.
    """
    counts_S = np.asarray(token_counts_S, dtype=np.int64)
    if isinstance(config, RmConfig | DpoConfig):
        assert len(counts_S) % 2 == 0, (
            f"pairs need an even number of sequences, got {len(counts_S)}"
        )
        return float(len(counts_S) // 2)
    if config.aggregation == "token":
        return float(counts_S.sum())
    num_sequences = float((counts_S > 0).sum())
    if config.aggregation == "sequence":
        return num_sequences
    assert isinstance(config, PolicyConfig)
    return num_sequences * config.fixed_length_tokens


def add_sums(total: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add one micro-batch's metric sums to a total; start from {}."""
    return {
        **total,
        **{name: total[name] + pair if name in total else pair for name, pair in sums.items()},
    }


def finish_sums(total: Mapping[str, Tensor]) -> dict[str, float]:
    """Divide once: name -> mean. Metrics with a count of 0 are omitted.

    `tis_ess` is the effective sample size as a share of the tokens, mean(w)^2 / mean(w^2) of the
    applied weights (Kish 1965; verl's rollout_is_eff_sample_size). It is 0 where all are rejected.
    """
    pairs = {name: pair.tolist() for name, pair in total.items()}
    means = {name: value / count for name, (value, count) in pairs.items() if count > 0}
    square = means.pop("tis_weight_square", None)
    if square is not None:
        means["tis_ess"] = means["tis_weight"] ** 2 / square if square else 0.0
    return means
