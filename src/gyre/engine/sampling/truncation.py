"""Truncation: which tokens min-p, top-k and top-p leave choosable. In: scaled logits of rows that
truncate, their limits. Out: kept_MV. Two ways to the same set, bit for bit: `keep_by_candidates`
looks at the best few tokens first and asks the device whether they sufficed; `keep_by_bisection`
has fixed shapes and never waits for the host, so that a CUDA graph can hold it.

The definition. Tokens stand in descending order, equal ones by id. min-p drops those below min_p ×
the best probability, and -inf is never kept; top-k keeps the first k of the rest; top-p keeps, of
these, each token with less than top_p of their mass before it. At least one token stays. Masses
are whole numbers: float64 weights scaled by a power of two. A sum thus does not depend on its
order, and both ways agree, also where each rank has a part of the vocabulary (shard_truncation).
"""

# M truncating rows, V vocabulary, C candidates (the best C tokens of each row)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gyre.engine.sampling.logprobs import order_key

MIN_CANDIDATES = 256
LOWEST_KEY = -(2**31)  # orders before every finite logit
HIGHEST_KEY = 2**31 - 1
MASS_OF_BEST = 2.0**43  # of the best token; up to 2^19 tokens of it stay within int64
ROWS_AT_ONCE = 64  # of the bisection, which bounds its memory to BYTES_EACH × rows × vocabulary
BYTES_EACH = 48


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TruncationLimits:
    """The limits of rows that truncate, on the device. A limit that no row has is None."""

    top_k_M1: Tensor | None  # int64, the vocabulary size where off
    top_p_M1: Tensor | None  # float64, 1 where off
    min_p_M1: Tensor | None  # float64, 0 where off
    # tokens to look at first: enough for every top-k; more only if top-p or min-p keep them all
    candidates: int


class Totals(Protocol):
    """What a row's limits need to know of all its tokens, where a rank may have some of them."""

    @property
    def vocab_size(self) -> int:
        """Return the vocabulary of the whole row."""
        ...

    def total(self, own_M1: Tensor) -> Tensor:
        """Return the sum of what is there of each row (int64)."""
        ...

    def largest(self, own_M1: Tensor) -> Tensor: ...

    def places_left(self, count_M1: Tensor, above_MV: Tensor, tied_MV: Tensor) -> Tensor:
        """Return how many tied tokens are among the first `count`, of those that come neither above
        nor on a rank before."""
        ...

    def least_key(self, key_MV: Tensor, mass_MV: Tensor | None, wanted_M1: Tensor) -> Tensor:
        """Return per row the least key x (int64) for which the tokens above x have less than the
        wanted mass. Without masses each token that lives counts 1."""
        ...


def make_cut(
    top_k_M: np.ndarray,
    top_p_M: np.ndarray,
    min_p_M: np.ndarray,
    *,
    vocab_size: int,
    device: torch.device,
) -> TruncationLimits:
    """Gather the limits of truncating rows. top_k 0, top_p 1 and min_p 0 are off."""

    def column(values_M: np.ndarray, on: bool) -> Tensor | None:
        return torch.tensor(values_M, device=device)[:, None] if on else None

    whole_M = np.where(top_k_M > 0, np.minimum(top_k_M, vocab_size), vocab_size)
    return TruncationLimits(
        top_k_M1=column(whole_M, bool((whole_M < vocab_size).any())),
        top_p_M1=column(top_p_M, bool((top_p_M < 1.0).any())),
        min_p_M1=column(min_p_M, bool((min_p_M > 0.0).any())),
        candidates=_first_candidates(top_k_M, vocab_size),
    )


def _first_candidates(top_k_M: np.ndarray, vocab_size: int) -> int:
    largest = int(top_k_M.max(initial=0))
    return min(vocab_size, largest if (top_k_M > 0).all() else max(largest, MIN_CANDIDATES))


def truncate(scaled_MV: Tensor, cut: TruncationLimits) -> Tensor:
    """Return kept_MV (bool), by the way that suits the device."""
    assert scaled_MV.shape[-1] <= 2**19, scaled_MV.shape
    if not scaled_MV.is_cuda:
        return keep_by_candidates(scaled_MV, cut)
    return by_parts(scaled_MV, cut, keep_by_bisection)


def by_parts(
    scaled_MV: Tensor, cut: TruncationLimits, keep: Callable[[Tensor, TruncationLimits], Tensor]
) -> Tensor:
    """Keep tokens of a few rows at a time."""
    kept = [
        keep(scaled_MV[at : at + ROWS_AT_ONCE], _part(cut, at, ROWS_AT_ONCE))
        for at in range(0, len(scaled_MV), ROWS_AT_ONCE)
    ]
    return kept[0] if len(kept) == 1 else torch.cat(kept)


def _part(cut: TruncationLimits, start: int, count: int) -> TruncationLimits:
    columns = (cut.top_k_M1, cut.top_p_M1, cut.min_p_M1)
    top_k, top_p, min_p = (
        None if column is None else column[start : start + count] for column in columns
    )
    return TruncationLimits(
        top_k_M1=top_k, top_p_M1=top_p, min_p_M1=min_p, candidates=cut.candidates
    )


def keep_by_candidates(scaled_MV: Tensor, cut: TruncationLimits) -> Tensor:
    """Count what is kept among the best C tokens; more tokens when they might not suffice."""
    num_candidates, totals = cut.candidates, WholeTotals(scaled_MV.shape[-1])
    while True:
        best_MC = scaled_MV.topk(num_candidates, dim=-1).values
        count_M1, enough = count_kept(scaled_MV, best_MC, cut, totals)
        if enough or num_candidates == totals.vocab_size:
            break
        num_candidates = min(totals.vocab_size, num_candidates * 8)
    return first_in_order(scaled_MV, best_MC.gather(-1, count_M1 - 1), count_M1, totals)


def count_kept(
    scaled_MV: Tensor, best_MC: Tensor, cut: TruncationLimits, totals: Totals
) -> tuple[Tensor, bool]:
    """Return how many of the best tokens each row keeps, and whether the candidates sufficed to
    tell. The best are of the whole row, the scaled ones may be a part."""
    num_candidates, best_M1 = best_MC.shape[-1], best_MC[:, :1]
    limit_M1 = (
        torch.full_like(best_M1, totals.vocab_size, dtype=torch.int64)
        if cut.top_k_M1 is None
        else cut.top_k_M1
    )
    rank_C = torch.arange(num_candidates, device=best_MC.device)
    alive_MC, mass_MC = _weigh(best_MC, best_M1, cut)
    kept_MC = alive_MC & (rank_C < limit_M1)
    if cut.top_p_M1 is not None:
        mass_MC = mass_MC * kept_MC
        upto_MC = mass_MC.cumsum(dim=-1)
        whole_M1 = totals.total(_weigh(scaled_MV, best_M1, cut)[1].sum(dim=-1, keepdim=True))
        total_M1 = torch.where(limit_M1 <= num_candidates, upto_MC[:, -1:], whole_M1)
        kept_MC &= (upto_MC - mass_MC < _mass_wanted(total_M1, cut.top_p_M1)) | (
            cut.top_p_M1 >= 1.0
        )
    unsure_M1 = kept_MC[:, -1:] & (limit_M1 > num_candidates)
    return kept_MC.sum(dim=-1, keepdim=True).clamp_(min=1), not bool(unsure_M1.any())


def keep_by_bisection(scaled_MV: Tensor, cut: TruncationLimits) -> Tensor:
    """Find each limit's threshold by halving the range of float bits 32 times; no shape depends on
    a value."""
    return keep_by_threshold(scaled_MV, cut, WholeTotals(scaled_MV.shape[-1]))


def keep_by_threshold(scaled_MV: Tensor, cut: TruncationLimits, totals: Totals) -> Tensor:
    """Keep what is above each limit's threshold, and the first ties at it."""
    best_M1 = totals.largest(scaled_MV.amax(dim=-1, keepdim=True))
    alive_MV, mass_MV = _weigh(scaled_MV, best_M1, cut)
    key_MV = torch.where(alive_MV, order_key(scaled_MV), LOWEST_KEY)
    count_M1 = totals.total(alive_MV.sum(dim=-1, keepdim=True))
    # the key of the last token kept, or anything below
    threshold_M1 = torch.full_like(count_M1, LOWEST_KEY)
    if cut.top_k_M1 is not None:
        count_M1 = torch.minimum(count_M1, cut.top_k_M1)
        threshold_M1 = totals.least_key(key_MV, None, count_M1)
    if cut.top_p_M1 is not None:
        last_M1 = threshold_M1
        count_M1, threshold_M1 = _cut_by_mass(
            key_MV, mass_MV, last_M1, count_M1, cut.top_p_M1, totals
        )
    return first_in_order(key_MV, threshold_M1.to(key_MV.dtype), count_M1.clamp(min=1), totals)


def _cut_by_mass(
    key_MV: Tensor,
    mass_MV: Tensor,
    last_M1: Tensor,
    count_M1: Tensor,
    top_p_M1: Tensor,
    totals: Totals,
) -> tuple[Tensor, Tensor]:
    """Return how many of each row's first `count` tokens top-p keeps, and the new last key. `last`
    is the key of the last of them."""
    above_MV = key_MV > last_M1
    ties_M1 = count_M1 - totals.total(above_MV.sum(dim=-1, keepdim=True))
    total_M1 = totals.total((above_MV * mass_MV).sum(dim=-1, keepdim=True))
    total_M1 = total_M1 + ties_M1 * totals.largest(_mass_at(key_MV, mass_MV, last_M1))
    wanted_M1 = _mass_wanted(total_M1, top_p_M1)
    edge_M1 = totals.least_key(key_MV, mass_MV, wanted_M1)
    before_MV = key_MV > edge_M1
    each_M1 = totals.largest(_mass_at(key_MV, mass_MV, edge_M1)).clamp_(min=1)
    lacking_M1 = wanted_M1 - totals.total((before_MV * mass_MV).sum(dim=-1, keepdim=True))
    kept_M1 = totals.total(before_MV.sum(dim=-1, keepdim=True))
    kept_M1 = kept_M1 + (lacking_M1 + each_M1 - 1) // each_M1
    off_M1 = top_p_M1 >= 1.0
    return torch.where(off_M1, count_M1, kept_M1), torch.where(off_M1, last_M1, edge_M1)


@dataclass(frozen=True, slots=True)
class WholeTotals:
    """Totals where all tokens of a row are here."""

    vocab_size: int

    def total(self, own_M1: Tensor) -> Tensor:
        return own_M1

    def largest(self, own_M1: Tensor) -> Tensor:
        return own_M1

    def places_left(self, count_M1: Tensor, above_MV: Tensor, tied_MV: Tensor) -> Tensor:
        return count_M1 - above_MV.sum(dim=-1, keepdim=True)

    def least_key(self, key_MV: Tensor, mass_MV: Tensor | None, wanted_M1: Tensor) -> Tensor:
        low_M1 = torch.full_like(key_MV[:, :1], LOWEST_KEY, dtype=torch.int64)
        high_M1 = torch.full_like(low_M1, HIGHEST_KEY)
        for _ in range(32):
            middle_M1 = (low_M1 + high_M1) >> 1
            above_MV = key_MV > middle_M1
            if mass_MV is not None:
                above_MV = above_MV * mass_MV
            enough_M1 = above_MV.sum(dim=-1, keepdim=True) < wanted_M1
            high_M1 = torch.where(enough_M1, middle_M1, high_M1)
            low_M1 = torch.where(enough_M1, low_M1, middle_M1 + 1)
        return high_M1


def _weigh(scaled_MX: Tensor, best_M1: Tensor, cut: TruncationLimits) -> tuple[Tensor, Tensor]:
    """Return which tokens min-p leaves (-inf never), and all tokens' masses in whole numbers, 0
    where dropped."""
    weight_MX = torch.exp((scaled_MX - best_M1).double())
    alive_MX = scaled_MX > -torch.inf
    if cut.min_p_M1 is not None:
        alive_MX &= weight_MX >= cut.min_p_M1
    return alive_MX, (weight_MX * alive_MX * MASS_OF_BEST).round_().long()


def _mass_wanted(total_M1: Tensor, top_p_M1: Tensor) -> Tensor:
    """Return the whole-numbered mass that top-p asks for, at least 1 and at most all."""
    return torch.minimum((total_M1 * top_p_M1).ceil().long().clamp_(min=1), total_M1)


def _mass_at(key_MV: Tensor, mass_MV: Tensor, key_M1: Tensor) -> Tensor:
    """Return the mass of one token of this key; equal keys weigh the same."""
    return torch.where(key_MV == key_M1, mass_MV, 0).amax(dim=-1, keepdim=True)


def first_in_order(
    value_MV: Tensor, threshold_M1: Tensor, count_M1: Tensor, totals: Totals
) -> Tensor:
    """Mark the first `count` tokens of each row, given the value of the last of them."""
    above_MV = value_MV > threshold_M1
    tied_MV = value_MV == threshold_M1
    places_left_M1 = totals.places_left(count_M1, above_MV, tied_MV)
    return above_MV | (tied_MV & (tied_MV.cumsum(dim=-1) <= places_left_M1))
