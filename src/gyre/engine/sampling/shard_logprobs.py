"""Raw log-probs where each rank has some columns of the logits. In: this rank's logits or hidden
states, a few rows at a time. Out: own and best log-probs, the same bits on every rank. Ids and
order are those of `logprobs`, of whole rows; log-probs differ from them by the normalizer's
rounding.

Each rank sends its log of the sum, its best K tokens and, of targets, their logit.
"""

# N rows, V columns of this rank, X numbers of a row, S ranks, E hidden size, K best tokens

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gyre.engine.sampling.logprobs import Best, best_ids, order_key
from gyre.engine.sampling.vocabulary_shard import VocabularyShard

LAST_ID = 2**31 - 1  # of 32 bits beside the order


def find_best_on_shard(
    logits_NV: Tensor, count: int, shard: VocabularyShard, *, rows_at_once: int
) -> Best:
    """Return the `count` best tokens of each row of float32 logits; equal ones by id."""
    parts = []
    for part_NV in logits_NV.split(rows_at_once):
        whole_SXN = shard.gather(_own_numbers(part_NV, count, shard))
        parts.append(_joined_best(whole_SXN, whole_SXN[:, 0].logsumexp(dim=0), count))
    return Best(
        ids_NK=torch.cat([part.ids_NK for part in parts]),
        logprobs_NK=torch.cat([part.logprobs_NK for part in parts]),
    )


def _own_numbers(logits_NV: Tensor, count: int, shard: VocabularyShard) -> Tensor:
    """Return float64 [1 + 2k, N]: the log of the sum, the k best tokens' ids, their logits."""
    ids_NK = best_ids(logits_NV, min(count, shard.width))
    rows = [
        logits_NV.logsumexp(dim=1, keepdim=True).double(),
        (ids_NK + shard.ids.start).double(),
        logits_NV.gather(1, ids_NK).double(),
    ]
    return torch.cat(rows, dim=1).t()


def _joined_best(whole_SXN: Tensor, log_totals_N: Tensor, count: int) -> Best:
    """Put the ranks' best tokens into one order."""
    each = (whole_SXN.shape[1] - 1) // 2
    ids_NX = whole_SXN[:, 1 : 1 + each].flatten(0, 1).t().long()
    logits_NX = whole_SXN[:, 1 + each : 1 + 2 * each].flatten(0, 1).t()
    order_NX = (order_key(logits_NX.float()).long() << 32) + (LAST_ID - ids_NX)
    place_NK = order_NX.topk(count, dim=1).indices
    return Best(
        ids_NK=ids_NX.gather(1, place_NK),
        logprobs_NK=(logits_NX.gather(1, place_NK) - log_totals_N[:, None]).float(),
    )


def of_rank(whole_SXN: Tensor, rank_N: Tensor) -> Tensor:
    """Return numbers_XN: each row's of one rank."""
    return whole_SXN.gather(0, rank_N.expand(1, whole_SXN.shape[1], -1))[0]


def score_targets_on_shard(
    hidden_NE: Tensor,
    targets_N: Tensor,
    project: Callable[[Tensor], Tensor],
    shard: VocabularyShard,
    *,
    best: int,
    rows_at_once: int,
) -> Tensor:
    """Return what `logprobs.score_targets` does, of hidden states with one target each. `project`
    gives this rank's logits."""
    parts = []
    for hidden_part, targets_part in zip(
        hidden_NE.split(rows_at_once), targets_N.split(rows_at_once), strict=True
    ):
        logits_NV = project(hidden_part).float()
        own_N1 = (targets_part - shard.ids.start).clamp(0, shard.width - 1)[:, None]
        target_1N = logits_NV.gather(1, own_N1).double().t()
        numbers_XN = _own_numbers(logits_NV, best, shard)
        whole_SXN = shard.gather(torch.cat([target_1N, numbers_XN]))
        target_N = of_rank(whole_SXN[:, :1], targets_part // shard.width)[0]
        log_totals_N = whole_SXN[:, 1].logsumexp(dim=0)
        columns = [(target_N - log_totals_N).float()[:, None].double()]
        if best:
            found = _joined_best(whole_SXN[:, 1:], log_totals_N, best)
            columns += [found.ids_NK.double(), found.logprobs_NK.double()]
        parts.append(torch.cat(columns, dim=1))
        del logits_NV
    return torch.cat(parts)
