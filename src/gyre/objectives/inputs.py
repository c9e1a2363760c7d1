"""Loss inputs: the inputs of a loss for one packed micro-batch. In: the trainer's forward pass and
a batch's columns, gathered at the target tokens. Out: one frozen record of flat tensors.

N target tokens of the micro-batch (tokens whose loss_mask is True; masked tokens are absent), S
sequences, P preference pairs. Sequences are whole: a sequence's targets never span two
micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch. Each objective reads what `required_columns` and its kind require; the rest
    stays None."""

    num_sequences: int  # S, those without any target included
    sequence_index_N: Tensor  # int64, which of the S sequences a target belongs to
    target_counts_S: Tensor  # int64, targets of each sequence; 0 for one that is fully masked

    # sft, dpo, grpo, ppo
    # float32 with grad: the policy being trained, at the rollout's temperature
    logprobs_N: Tensor | None = None
    entropy_N: Tensor | None = None  # float32 with grad, of the policy's next-token distribution

    # grpo, ppo
    advantages_N: Tensor | None = None
    behavior_logprobs_N: Tensor | None = None  # column "logprobs": what the engine sampled with
    # column "old_logprobs"; None: the policy has not moved, old = logprobs_N
    old_logprobs_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None  # column "reference_logprobs"; dpo too

    # ppo
    values_N: Tensor | None = None  # float32 with grad, the critic being trained
    old_values_N: Tensor | None = None  # column "values": the critic before the step
    returns_N: Tensor | None = None  # column "returns"

    # rm, dpo
    # rm: float32 with grad, the scalar head at each sequence's last token
    scores_S: Tensor | None = None
    chosen_P: Tensor | None = None  # int64, index into S of each pair's preferred sequence
    rejected_P: Tensor | None = None  # int64
    margins_P: Tensor | None = None  # rm, optional: by how much the chosen one should win
