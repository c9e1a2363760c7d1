"""Sampler where each rank has some columns of the logits: the tokens that `sampler` chooses from
whole rows. In: this rank's logits, Rules, one uniform per row. Out: the same SamplerOutput on every
rank, to the bit.

A draw is the inverse CDF in token order, and the ranks' columns follow each other. So the ranks
exchange a few numbers per row, three times. With the best logit all compute the weights that the
whole row would have. The sums of the weights say which rank has the token. The third is the token.
Greedy rows need the first exchange only. Truncation and alternatives exchange more.

Equal to one rank to the bit: greedy tokens, what truncation keeps, the alternatives' ids and order.
A drawn token differs only where the draw is within the rounding of a float64 sum from the border
between two: 1e-11 of the row's mass at most, mostly 1e-15. Log-probs differ by the
rounding of their normalizer.
"""

# N rows, V columns of this rank, S ranks, M rows that truncate, A rows that ask for alternatives

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gyre.core.events import Emit
from gyre.engine.sampling.logits_processors import Past
from gyre.engine.sampling.sampler import Rules, SamplerOutput, shaped
from gyre.engine.sampling.shard_logprobs import find_best_on_shard, of_rank
from gyre.engine.sampling.shard_truncation import truncate_shard
from gyre.engine.sampling.vocabulary_shard import VocabularyShard


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Leading:
    """The first best token of each row after shaping, and what the raw logits are there."""

    tokens_N: Tensor  # int64
    shaped_N: Tensor  # float32, its logit after shaping
    raw_N: Tensor  # float64, its logit
    log_totals_N: Tensor  # float64, log of the sum of exponentials of the row's logits


class ShardSampler:
    """Chooses with the other ranks, and reports when truncation had to go by digits."""

    def __init__(self, shard: VocabularyShard, emit: Emit) -> None:
        self.shard = shard
        self._emit = emit
        self._widened = 0  # choices that went by digits, since the start
        self._reported = 0  # of them

    def choose(
        self,
        logits_NV: Tensor,
        rules: Rules,
        uniform_N: Tensor,
        *,
        chosen_N: Tensor | None = None,
        past: Past | None = None,
    ) -> SamplerOutput:
        """Choose one token per row, as `sampler.choose` does of whole rows."""
        return choose_on_shard(
            logits_NV,
            rules,
            uniform_N,
            self.shard,
            chosen_N=chosen_N,
            past=past,
            widened=self._note,
        )

    def _note(self, rows: int) -> None:
        """Count a choice. The event comes at the first one and at each doubling, as a flat
        distribution may need it in every step."""
        self._widened += 1
        if self._widened & (self._widened - 1) == 0:
            self._emit("engine.wide_truncation", rows=rows, count=self._widened - self._reported)
            self._reported = self._widened


def choose_on_shard(
    logits_NV: Tensor,
    rules: Rules,
    uniform_N: Tensor,
    shard: VocabularyShard,
    *,
    chosen_N: Tensor | None = None,
    past: Past | None = None,
    widened: Callable[[int], None],
) -> SamplerOutput:
    """Choose one token per row, as `sampler.choose` does. `widened` hears how many rows truncate
    where the best candidates might not suffice."""
    best = None
    if rules.top_A is not None:
        asking_AV = logits_NV.index_select(0, rules.top_A)
        best = find_best_on_shard(asking_AV, rules.num_top, shard, rows_at_once=rules.rows_at_once)
    own_past = None if past is None else shard.own_past(past)
    shaped_NV = shaped(logits_NV, rules, chosen_N, own_past)
    plain = shaped_NV is logits_NV and _is_plain(rules)
    leading = _find_leading(logits_NV, shaped_NV, shard, with_totals=not plain)
    if rules.all_greedy:
        return SamplerOutput(
            tokens_N=leading.tokens_N,
            logprobs_N=torch.zeros_like(leading.raw_N),
            raw_logprobs_N=(leading.raw_N - leading.log_totals_N).float(),
            kept_MV=None,
            best=best,
        )
    weights_NV, kept_MV = _weigh(shaped_NV, leading.shaped_N, rules, shard, widened)
    tokens_N, logprobs_N, raw_N = _draw(weights_NV, logits_NV, uniform_N, shard)
    if rules.greedy_N is not None:
        tokens_N = torch.where(rules.greedy_N, leading.tokens_N, tokens_N)
        raw_N = torch.where(rules.greedy_N, leading.raw_N, raw_N)
        logprobs_N = logprobs_N.masked_fill(rules.greedy_N, 0.0)
    return SamplerOutput(
        tokens_N=tokens_N,
        logprobs_N=logprobs_N,
        raw_logprobs_N=logprobs_N if plain else (raw_N - leading.log_totals_N).float(),
        kept_MV=kept_MV,
        best=best,
    )


def _is_plain(rules: Rules) -> bool:
    """Return whether all rows draw from the softmax of the logits as they come."""
    unscaled = rules.inverse_temperature_N1 is None and rules.greedy_N is None
    return unscaled and rules.truncated_M is None


def _find_leading(
    logits_NV: Tensor, shaped_NV: Tensor, shard: VocabularyShard, *, with_totals: bool
) -> Leading:
    """Compare the ranks' best tokens; of equal ones the first rank's is the first. Without totals
    they are 0."""
    place_N1 = shaped_NV.argmax(dim=-1, keepdim=True)
    totals_N = logits_NV.logsumexp(dim=-1) if with_totals else torch.zeros_like(logits_NV[:, 0])
    own_4N = torch.stack(
        [
            shaped_NV.gather(-1, place_N1)[:, 0].double(),
            (place_N1[:, 0] + shard.ids.start).double(),
            logits_NV.gather(-1, place_N1)[:, 0].double(),
            totals_N.double(),
        ]
    )
    whole_S4N = shard.gather(own_4N)
    first_N = whole_S4N[:, 0].argmax(dim=0)
    shaped_N, tokens_N, raw_N, _ = of_rank(whole_S4N, first_N)
    return Leading(
        tokens_N=tokens_N.long(),
        shaped_N=shaped_N.float(),
        raw_N=raw_N,
        log_totals_N=whole_S4N[:, 3].logsumexp(dim=0),
    )


def _weigh(
    shaped_NV: Tensor,
    best_N: Tensor,
    rules: Rules,
    shard: VocabularyShard,
    widened: Callable[[int], None],
) -> tuple[Tensor, Tensor | None]:
    """Temperature and truncation. Returns the weights of this rank's tokens, and what is kept of
    all."""
    scaled_NV = shaped_NV
    if rules.inverse_temperature_N1 is not None:
        scaled_NV = shaped_NV * rules.inverse_temperature_N1
        best_N = best_N * rules.inverse_temperature_N1[:, 0]
    weights_NV = torch.exp(scaled_NV - best_N[:, None])
    if rules.truncated_M is None:
        return weights_NV, None
    assert rules.cut is not None
    scaled_MV = scaled_NV.index_select(0, rules.truncated_M)
    own_MV, in_vain = truncate_shard(scaled_MV, rules.cut, shard)
    if in_vain:
        widened(len(scaled_MV))
    weights_NV[rules.truncated_M] *= own_MV
    return weights_NV, shard.joined_marks(own_MV)


def _draw(
    weights_NV: Tensor, logits_NV: Tensor, uniform_N: Tensor, shard: VocabularyShard
) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse CDF over unnormalized weights, summed in float64. Returns tokens_N, their log-probs,
    and their logits (float64)."""
    mass_NV = weights_NV.cumsum(dim=-1, dtype=torch.float64)
    upto = [torch.zeros_like(uniform_N)]
    for mass_N in shard.gather(mass_NV[:, -1]):
        upto.append(upto[-1] + mass_N)
    total_N, rank = upto[-1], shard.group.rank
    target_N = uniform_N * total_N
    last = shard.group.size - 1
    owner_N = (torch.stack(upto[1:]) <= target_N).sum(dim=0).clamp_(max=last)
    mass_NV += upto[rank][:, None]  # the owner's last one is then its `upto`, above the target
    place_N1 = torch.searchsorted(mass_NV, target_N[:, None], right=True)
    place_N1.clamp_(max=shard.width - 1)
    own_3N = torch.stack(
        [
            (place_N1[:, 0] + shard.ids.start).double(),
            weights_NV.gather(-1, place_N1)[:, 0].double(),
            logits_NV.gather(-1, place_N1)[:, 0].double(),
        ]
    )
    tokens_N, weights_N, raw_N = of_rank(shard.gather(own_3N), owner_N)
    # padding is only reached when the logits are not finite
    tokens_N = tokens_N.long().clamp_(max=shard.vocab_size - 1)
    return tokens_N, torch.log(weights_N / total_N), raw_N
