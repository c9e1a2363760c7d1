"""Truncation where each rank has some columns of the logits: the set that `truncation` keeps of the
whole rows, bit for bit. In: this rank's scaled logits, limits. Out: which of its tokens are kept.

Masses are whole numbers, so the ranks' sums do not depend on their order. By candidates: each rank
sends its best C logits, and all count what is kept of the best C of these. By digits, with fixed
sizes and no wait for the host: the threshold's key is found 8 bits at a time, by sums of 256
numbers. A CPU looks at candidates first. Where these might not suffice, all ranks see so in the
same numbers, and go by digits.
"""

# M truncating rows, V columns of this rank, C candidates, S ranks

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gyre.engine.sampling.truncation import (
    LOWEST_KEY,
    TruncationLimits,
    by_parts,
    count_kept,
    first_in_order,
    keep_by_threshold,
)
from gyre.engine.sampling.vocabulary_shard import VocabularyShard

DIGIT_BITS = 8  # of 32: four sums, each of 256 numbers


def truncate_shard(
    scaled_MV: Tensor, cut: TruncationLimits, shard: VocabularyShard
) -> tuple[Tensor, bool]:
    """Return kept_MV of this rank's tokens, and whether candidates were looked at in vain."""
    kept_MV, looked = None, not scaled_MV.is_cuda
    if looked:
        kept_MV = keep_by_shared_candidates(scaled_MV, cut, shard)
    if kept_MV is not None:
        return kept_MV, False
    return by_parts(scaled_MV, cut, partial(keep_by_digits, shard=shard)), looked


def keep_by_shared_candidates(
    scaled_MV: Tensor, cut: TruncationLimits, shard: VocabularyShard
) -> Tensor | None:
    """Count what is kept among the best C tokens of all ranks; None when they might not suffice."""
    totals, rows = ShardTotals(shard), len(scaled_MV)
    own_MC = scaled_MV.topk(min(cut.candidates, shard.width), dim=-1).values
    found_MC = shard.gather(own_MC).transpose(0, 1).reshape(rows, -1)
    best_MC = found_MC.topk(min(cut.candidates, found_MC.shape[1]), dim=-1).values
    count_M1, enough = count_kept(scaled_MV, best_MC, cut, totals)
    if not enough and cut.candidates < shard.vocab_size:
        return None
    return first_in_order(scaled_MV, best_MC.gather(-1, count_M1 - 1), count_M1, totals)


def keep_by_digits(scaled_MV: Tensor, cut: TruncationLimits, shard: VocabularyShard) -> Tensor:
    """Find each limit's threshold digit by digit; no shape depends on a value."""
    return keep_by_threshold(scaled_MV, cut, ShardTotals(shard))


@dataclass(frozen=True, slots=True)
class ShardTotals:
    """Totals of rows of which each rank has some tokens."""

    shard: VocabularyShard

    @property
    def vocab_size(self) -> int:
        return self.shard.vocab_size

    def total(self, own_M1: Tensor) -> Tensor:
        return self.shard.gather(own_M1).sum(dim=0)

    def largest(self, own_M1: Tensor) -> Tensor:
        return self.shard.gather(own_M1).amax(dim=0)

    def places_left(self, count_M1: Tensor, above_MV: Tensor, tied_MV: Tensor) -> Tensor:
        own_2M = torch.stack([above_MV.sum(dim=-1), tied_MV.sum(dim=-1)])
        above_SM, tied_SM = self.shard.gather(own_2M).unbind(1)
        before_M = tied_SM[: self.shard.group.rank].sum(dim=0)
        return count_M1 - (above_SM.sum(dim=0) + before_M)[:, None]

    def least_key(self, key_MV: Tensor, mass_MV: Tensor | None, wanted_M1: Tensor) -> Tensor:
        if mass_MV is None:
            mass_MV = (key_MV > LOWEST_KEY).long()
        code_MV = key_MV.long() - LOWEST_KEY
        code_M1 = torch.zeros_like(wanted_M1)  # digits found so far
        above_M1 = torch.zeros_like(wanted_M1)  # mass of the tokens above all that begin like this
        for shift in range(32 - DIGIT_BITS, -1, -DIGIT_BITS):
            alike_MV = code_MV >> (shift + DIGIT_BITS) == code_M1
            digit_MV = (code_MV >> shift) & (2**DIGIT_BITS - 1)
            mass_MD = mass_MV.new_zeros(len(key_MV), 2**DIGIT_BITS)
            mass_MD.scatter_add_(1, digit_MV, mass_MV * alike_MV)
            self.shard.add_up(mass_MD)
            higher_MD = mass_MD.sum(dim=1, keepdim=True) - mass_MD.cumsum(dim=1)
            # what is above falls with the digit, so those that do not do come first
            digit_M1 = (above_M1 + higher_MD >= wanted_M1).sum(dim=1, keepdim=True)
            digit_M1 = digit_M1.clamp_(max=2**DIGIT_BITS - 1)
            above_M1 = above_M1 + higher_MD.gather(1, digit_M1)
            code_M1 = (code_M1 << DIGIT_BITS) | digit_M1
        return code_M1 + LOWEST_KEY
