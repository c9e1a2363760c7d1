"""Raw log-probs on the device: of the plain softmax, before any rule of sampling. In: logits or
hidden states, a few rows at a time. Out: own and best log-probs. Equal log-probs are in the order
of token ids, so results depend on neither the batch nor the device."""

# T tokens, N rows, V vocabulary, E hidden size, K best tokens

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Best:
    """The K most probable tokens of each row, best first."""

    ids_NK: Tensor  # int64
    logprobs_NK: Tensor  # float32


def raw_logprob(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """Return log softmax of each row at its token."""
    return logits_NV.gather(1, tokens_N[:, None]).squeeze(1) - logits_NV.logsumexp(dim=1)


def order_key(values_NV: Tensor) -> Tensor:
    """Map float32 to int32 of the same order; -0 and 0 are one."""
    bits_NV = (values_NV + 0.0).view(torch.int32)
    return torch.where(bits_NV < 0, bits_NV ^ (2**31 - 1), bits_NV)


def find_best(logits_NV: Tensor, count: int, *, rows_at_once: int) -> Best:
    """Return the `count` best tokens of each row of float32 logits; equal ones by id."""
    parts = [_best_of(part_NV, count) for part_NV in logits_NV.split(rows_at_once)]
    return Best(
        ids_NK=torch.cat([part.ids_NK for part in parts]),
        logprobs_NK=torch.cat([part.logprobs_NK for part in parts]),
    )


def _best_of(logits_NV: Tensor, count: int) -> Best:
    ids_NK = best_ids(logits_NV, count)
    return Best(
        ids_NK=ids_NK,
        logprobs_NK=logits_NV.gather(1, ids_NK) - logits_NV.logsumexp(dim=1, keepdim=True),
    )


def best_ids(logits_NV: Tensor, count: int) -> Tensor:
    """Return ids_NK of the `count` largest of each row of float32 logits, in order."""
    vocab_size = logits_NV.shape[1]
    # Order and id in one number: no two are equal, so topk has one answer.
    order_NV = (order_key(logits_NV).long() << 32) + torch.arange(
        vocab_size - 1, -1, -1, device=logits_NV.device
    )
    packed_NK = order_NV.topk(count, dim=1).values
    return vocab_size - 1 - (packed_NK & 0xFFFFFFFF)


def score_targets(
    hidden_TE: Tensor,
    places_N: Tensor,
    targets_N: Tensor,
    project: Callable[[Tensor], Tensor],
    *,
    best: int,
    rows_at_once: int,
) -> Tensor:
    """Return float64 [N, 1 + 2·best]: the log-prob of the target that follows each place, the best
    tokens' ids, their log-probs. Logits exist for `rows_at_once` rows at a time only."""
    parts = []
    for places_part, targets_part in zip(
        places_N.split(rows_at_once), targets_N.split(rows_at_once), strict=True
    ):
        logits_NV = project(hidden_TE.index_select(0, places_part)).float()
        columns = [raw_logprob(logits_NV, targets_part)[:, None].double()]
        if best:
            found = _best_of(logits_NV, best)
            columns += [found.ids_NK.double(), found.logprobs_NK.double()]
        parts.append(torch.cat(columns, dim=1))
        del logits_NV
    return torch.cat(parts)
