"""Sampler: one token per row of logits, each row by its own rules. In: logits, Rules, one uniform per row. Out: tokens,
their log-probs (plain, and after temperature and truncation), and what truncation kept. Caller: runner.

Every choice is an inverse-CDF draw in token order, so truncation that removes nothing changes nothing, and a row's
token does not depend on the rows beside it. Greedy rows (temperature 0) take the first best token with certainty, so
their processed log-prob is 0. Truncation keeps the first m tokens in descending order, ties by token id, where m is the
least of what top-k, then top-p over the rest's renormalised mass, then min-p allow. Nothing is sorted unless a row
truncates.
"""

# N rows, V vocabulary, M truncating rows, C candidates (the best C tokens of each)

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MIN_CANDIDATES = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rules:
    """How each row chooses, as tensors on the device; made once and used while the rows stay the same."""

    num_rows: int
    inverse_N: np.ndarray  # float32 on the host, 1 / temperature; 0 where greedy
    greedy_N: Tensor | None  # bool; None when no row is greedy
    all_greedy: bool
    inverse_temperature_N1: Tensor | None  # float32; None when all are 1
    truncated_M: Tensor | None  # int64 places of rows that truncate; None when none does
    truncated_places: tuple[int, ...]  # the same on the host
    top_k_M1: Tensor | None  # int64, the vocabulary size where top-k is off
    top_p_M1: Tensor | None  # float64
    min_p_M1: Tensor | None  # float64
    candidates: int  # tokens to look at first: enough for every top-k; more only if top-p or min-p keep them all

    @property
    def is_plain(self) -> bool:
        """Whether temperature is all that these rows ask for, so that `inverse_N` says everything."""
        return self.truncated_M is None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """What was chosen, still on the device."""

    tokens_N: Tensor  # int64
    logprobs_N: Tensor  # float64
    raw_logprobs_N: Tensor  # float32
    kept_MV: Tensor | None  # bool


def make_rules(
    temperature_N: np.ndarray,
    top_k_N: np.ndarray,
    top_p_N: np.ndarray,
    min_p_N: np.ndarray,
    truncated_N: np.ndarray,
    *,
    vocab_size: int,
    device: torch.device,
) -> Rules:
    """Gather the rows' sampling parameters into tensors, leaving out what no row asks for."""
    greedy_N = temperature_N == 0.0
    places = np.flatnonzero(truncated_N)
    top_k_M = np.where(top_k_N[places] > 0, np.minimum(top_k_N[places], vocab_size), vocab_size)
    inverse_N = np.ones_like(temperature_N, dtype=np.float32)
    np.divide(1.0, temperature_N, out=inverse_N, where=~greedy_N)

    def column(values: np.ndarray) -> Tensor:
        return torch.tensor(values, device=device)[:, None]

    truncating = len(places) > 0
    return Rules(
        num_rows=len(temperature_N),
        inverse_N=np.where(greedy_N, np.float32(0.0), inverse_N),
        greedy_N=torch.tensor(greedy_N, device=device) if greedy_N.any() else None,
        all_greedy=bool(greedy_N.all()),
        inverse_temperature_N1=column(inverse_N) if (inverse_N != 1.0).any() else None,
        truncated_M=torch.tensor(places, device=device) if truncating else None,
        truncated_places=tuple(places.tolist()),
        top_k_M1=column(top_k_M) if truncating else None,
        top_p_M1=column(top_p_N[places]) if truncating else None,
        min_p_M1=column(min_p_N[places]) if truncating else None,
        candidates=_first_candidates(top_k_N[places], vocab_size),
    )


def _first_candidates(top_k_M: np.ndarray, vocab_size: int) -> int:
    largest = int(top_k_M.max(initial=0))
    return min(vocab_size, largest if (top_k_M > 0).all() else max(largest, MIN_CANDIDATES))


def choose(logits_NV: Tensor, rules: Rules, uniform_N: Tensor) -> Choice:
    """Choose one token per row. logits are float32, uniforms float64 in [0, 1)."""
    if rules.all_greedy:
        best_N = logits_NV.argmax(dim=-1)
        raw_N = _logprob(logits_NV, best_N)
        return Choice(tokens_N=best_N, logprobs_N=torch.zeros_like(raw_N).double(), raw_logprobs_N=raw_N, kept_MV=None)
    scaled_NV = logits_NV if rules.inverse_temperature_N1 is None else logits_NV * rules.inverse_temperature_N1
    weights_NV = torch.exp(scaled_NV - scaled_NV.amax(dim=-1, keepdim=True))
    kept_MV = None
    if rules.truncated_M is not None:
        kept_MV = truncate(scaled_NV[rules.truncated_M], rules)
        weights_NV[rules.truncated_M] *= kept_MV
    tokens_N, logprobs_N = _draw(weights_NV, uniform_N)
    if rules.greedy_N is not None:
        tokens_N = torch.where(rules.greedy_N, logits_NV.argmax(dim=-1), tokens_N)
        logprobs_N = logprobs_N.masked_fill(rules.greedy_N, 0.0)
    if scaled_NV is logits_NV and kept_MV is None and rules.greedy_N is None:
        raw_N = logprobs_N
    else:
        raw_N = _logprob(logits_NV, tokens_N)
    return Choice(tokens_N=tokens_N, logprobs_N=logprobs_N, raw_logprobs_N=raw_N, kept_MV=kept_MV)


def truncate(scaled_MV: Tensor, rules: Rules) -> Tensor:
    """Return kept_MV (bool): the tokens that top-k, top-p and min-p leave choosable, at least one per row."""
    assert rules.top_k_M1 is not None
    vocab_size = scaled_MV.shape[-1]
    num_candidates = rules.candidates
    while True:
        best_MC = scaled_MV.topk(num_candidates, dim=-1).values
        count_M1, enough = _count_kept(scaled_MV, best_MC, rules)
        if enough or num_candidates == vocab_size:
            break
        num_candidates = min(vocab_size, num_candidates * 8)
    threshold_M1 = best_MC.gather(-1, count_M1 - 1)
    above_MV = scaled_MV > threshold_M1
    tied_MV = scaled_MV == threshold_M1
    places_left_M1 = count_M1 - above_MV.sum(dim=-1, keepdim=True)
    return above_MV | (tied_MV & (tied_MV.cumsum(dim=-1) <= places_left_M1))


def _count_kept(scaled_MV: Tensor, best_MC: Tensor, rules: Rules) -> tuple[Tensor, bool]:
    """Return how many of the best tokens each row keeps, and whether the candidates sufficed to tell."""
    assert rules.top_k_M1 is not None and rules.top_p_M1 is not None and rules.min_p_M1 is not None
    num_candidates = best_MC.shape[-1]
    rank_C = torch.arange(num_candidates, device=best_MC.device)
    weights_MC = torch.exp((best_MC - best_MC[:, :1]).double())
    in_top_k_MC = rank_C < rules.top_k_M1
    mass_MC = (weights_MC * in_top_k_MC).cumsum(dim=-1)
    whole_M1 = torch.exp((scaled_MV - best_MC[:, :1]).double()).sum(dim=-1, keepdim=True)
    total_M1 = torch.where(rules.top_k_M1 <= num_candidates, mass_MC[:, -1:], whole_M1)
    before_MC = mass_MC - weights_MC * in_top_k_MC
    # A token stays when the tokens before it do not hold top_p of the mass yet: the smallest set with at least top_p.
    kept_MC = in_top_k_MC & (before_MC < rules.top_p_M1 * total_M1) & (weights_MC >= rules.min_p_M1)
    kept_MC |= (rules.top_p_M1 >= 1.0) & in_top_k_MC & (weights_MC >= rules.min_p_M1)
    kept_MC[:, 0] = True
    all_kept_M1 = kept_MC[:, -1:] & (rules.top_k_M1 > num_candidates)
    return kept_MC.sum(dim=-1, keepdim=True), not bool(all_kept_M1.any())


def _draw(weights_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse CDF over unnormalised weights, summed in float64. Returns tokens_N and their log-probs."""
    mass_NV = weights_NV.cumsum(dim=-1, dtype=torch.float64)
    total_N1 = mass_NV[:, -1:]
    tokens_N1 = torch.searchsorted(mass_NV, uniform_N[:, None] * total_N1, right=True)
    tokens_N1.clamp_(max=weights_NV.shape[-1] - 1)  # only reached when the logits are not finite
    logprobs_N1 = torch.log(weights_NV.gather(-1, tokens_N1) / total_N1)
    return tokens_N1[:, 0], logprobs_N1[:, 0]


def _logprob(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
    return logits_NV.gather(-1, tokens_N[:, None])[:, 0] - logits_NV.logsumexp(dim=-1)
