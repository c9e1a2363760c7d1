"""Sampler: one token per row of logits, each row by its own rules. In: logits, Rules, one uniform
per row. Out: tokens, their log-probs (raw and processed), what truncation kept, and the best
alternatives.

The order: raw log-probs and alternatives are of the plain softmax of the logits as they come. Then,
for rows that ask, shaping (no stop id before min_tokens, bias, penalties), then temperature, then
truncation (min-p, top-k, top-p). The processed log-prob is of the softmax over what is left. This
is vLLM's order, except that top-k keeps exactly k tokens when some tie. See shaping and truncation
for their definitions.

Every choice is an inverse-CDF draw in token order. Truncation that removes nothing thus changes
nothing, and a row's token does not depend on the rows beside it. Greedy rows (temperature 0) take
the first best token with certainty, so their processed log-prob is 0. A row without finite logits
gets a log-prob that is not finite; `postprocess.commit_tokens` ends it. Where each rank has a part
of the vocabulary, `shard_sampler` chooses.
"""

# N rows, V vocabulary, M truncating rows, A rows that ask for alternatives

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gyre.engine.sampling.logits_processors import Past, Shaping, shape_logits
from gyre.engine.sampling.logprobs import Best, find_best, raw_logprob
from gyre.engine.sampling.truncation import TruncationLimits, make_cut, truncate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rules:
    """How each row chooses, as tensors on the device; made once and used while the rows stay the
    same."""

    greedy_N: Tensor | None  # bool; None when no row is greedy
    all_greedy: bool
    inverse_temperature_N1: Tensor | None  # float32; None when all are 1
    truncated_M: Tensor | None  # int64 places of rows that truncate; None when none does
    truncated_places: tuple[int, ...]  # the same on the host
    cut: TruncationLimits | None  # of these rows
    shaping: Shaping | None  # None when no row asks
    top_A: Tensor | None  # int64 places of rows that ask for alternatives; None when none does
    top_places: tuple[int, ...]
    num_top: int  # alternatives of the row that asks for most
    rows_at_once: int  # rows that alternatives and penalties look at together; bounds their memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplerOutput:
    """What was chosen, still on the device."""

    tokens_N: Tensor  # int64
    logprobs_N: Tensor  # float64
    raw_logprobs_N: Tensor  # float32
    kept_MV: Tensor | None  # bool
    best: Best | None  # of the rows that ask for alternatives


def make_rules(
    temperature_N: np.ndarray,
    top_k_N: np.ndarray,
    top_p_N: np.ndarray,
    min_p_N: np.ndarray,
    truncated_N: np.ndarray,
    *,
    vocab_size: int,
    device: torch.device,
    shaping: Shaping | None = None,
    num_top_N: np.ndarray | None = None,
    rows_at_once: int = 64,
) -> Rules:
    """Gather the rows' sampling parameters into tensors, leaving out what no row asks for."""
    greedy_N = temperature_N == 0.0
    places = np.flatnonzero(truncated_N)
    top = np.flatnonzero(num_top_N) if num_top_N is not None else np.empty(0, np.int64)
    inverse_N = np.ones_like(temperature_N, dtype=np.float32)
    np.divide(1.0, temperature_N, out=inverse_N, where=~greedy_N)
    cut = None
    if len(places):
        cut = make_cut(
            top_k_N[places], top_p_N[places], min_p_N[places], vocab_size=vocab_size, device=device
        )
    return Rules(
        greedy_N=torch.tensor(greedy_N, device=device) if greedy_N.any() else None,
        all_greedy=bool(greedy_N.all()),
        inverse_temperature_N1=torch.tensor(inverse_N, device=device)[:, None]
        if (inverse_N != 1.0).any()
        else None,
        truncated_M=torch.tensor(places, device=device) if len(places) else None,
        truncated_places=tuple(places.tolist()),
        cut=cut,
        shaping=shaping,
        top_A=torch.tensor(top, device=device) if len(top) else None,
        top_places=tuple(top.tolist()),
        num_top=int(num_top_N.max(initial=0)) if num_top_N is not None else 0,
        rows_at_once=rows_at_once,
    )


def choose(
    logits_NV: Tensor,
    rules: Rules,
    uniform_N: Tensor,
    *,
    chosen_N: Tensor | None = None,
    past: Past | None = None,
) -> SamplerOutput:
    """Choose one token per row. logits are float32, uniforms float64 in [0, 1). Where rows ask for
    shaping, chosen_N is how many tokens each has chosen before and `past` what those that look back
    know."""
    best = None
    if rules.top_A is not None:
        best = find_best(
            logits_NV.index_select(0, rules.top_A), rules.num_top, rows_at_once=rules.rows_at_once
        )
    shaped_NV = shaped(logits_NV, rules, chosen_N, past)
    tokens_N, logprobs_N, kept_MV = _choose_shaped(shaped_NV, rules, uniform_N)
    plain = rules.inverse_temperature_N1 is None and shaped_NV is logits_NV and kept_MV is None
    raw_N = logprobs_N if plain and rules.greedy_N is None else raw_logprob(logits_NV, tokens_N)
    return SamplerOutput(
        tokens_N=tokens_N, logprobs_N=logprobs_N, raw_logprobs_N=raw_N, kept_MV=kept_MV, best=best
    )


def shaped(logits_NV: Tensor, rules: Rules, chosen_N: Tensor | None, past: Past | None) -> Tensor:
    """Return the logits with the shaping of the rows that ask; the same tensor where none does."""
    if rules.shaping is None:
        return logits_NV
    assert chosen_N is not None
    places_A = rules.shaping.places_M
    asking_AV = logits_NV.index_select(0, places_A)
    asking_AV = shape_logits(
        asking_AV, rules.shaping, chosen_N[places_A], past, rows_at_once=rules.rows_at_once
    )
    return logits_NV.index_copy(0, places_A, asking_AV)


def _choose_shaped(
    shaped_NV: Tensor, rules: Rules, uniform_N: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Temperature, truncation, draw. Returns tokens_N, their processed log-probs, and what
    truncation kept."""
    if rules.all_greedy:
        best_N = shaped_NV.argmax(dim=-1)
        return best_N, torch.zeros_like(best_N, dtype=torch.float64), None
    scaled_NV = (
        shaped_NV
        if rules.inverse_temperature_N1 is None
        else shaped_NV * rules.inverse_temperature_N1
    )
    weights_NV = torch.exp(scaled_NV - scaled_NV.amax(dim=-1, keepdim=True))
    kept_MV = None
    if rules.truncated_M is not None:
        assert rules.cut is not None
        kept_MV = truncate(scaled_NV.index_select(0, rules.truncated_M), rules.cut)
        weights_NV[rules.truncated_M] *= kept_MV
    tokens_N, logprobs_N = _draw(weights_NV, uniform_N)
    if rules.greedy_N is not None:
        tokens_N = torch.where(rules.greedy_N, shaped_NV.argmax(dim=-1), tokens_N)
        logprobs_N = logprobs_N.masked_fill(rules.greedy_N, 0.0)
    return tokens_N, logprobs_N, kept_MV


def _draw(weights_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse CDF over unnormalized weights, summed in float64. Returns tokens_N and their
    log-probs."""
    mass_NV = weights_NV.cumsum(dim=-1, dtype=torch.float64)
    total_N1 = mass_NV[:, -1:]
    tokens_N1 = torch.searchsorted(mass_NV, uniform_N[:, None] * total_N1, right=True)
    tokens_N1.clamp_(max=weights_NV.shape[-1] - 1)  # only reached when the logits are not finite
    logprobs_N1 = torch.log(weights_NV.gather(-1, tokens_N1) / total_N1)
    return tokens_N1[:, 0], logprobs_N1[:, 0]
