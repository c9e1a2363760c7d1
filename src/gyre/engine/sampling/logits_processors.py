"""Logits processors: what changes logits before temperature, for the rows that ask. In: raw logits,
the rows' Sampling, their history. Out: shaped logits.

The order, which is vLLM's: no stop id before min_tokens, logit bias, repetition penalty (over
prompt and chosen tokens: positive logits ÷ it, negative × it), frequency penalty, presence penalty
(both over chosen tokens). Temperature, min-p, top-k and top-p follow in sampler. Counts over the
vocabulary exist for a few rows at a time and only within a call.
"""

# N rows, M rows that ask, L of them that look back, V vocabulary, W tokens looked back at, B pairs
# of row and token

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gyre.core.records import Sampling


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitEntries:
    """Places in [M, V], each once, and a number for each."""

    rows_B: Tensor  # int64
    ids_B: Tensor  # int64
    numbers_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shaping:
    """What the asking rows ask; made once and used while the rows stay the same."""

    places_M: Tensor  # int64, which of the N rows
    bans: LogitEntries | None  # stop ids, and the number of tokens before which each is banned
    bias: LogitEntries | None
    back_places: tuple[int, ...]  # which of the N rows look back
    back_L: Tensor | None  # int64, which of the M rows they are
    repetition_L1: Tensor | None  # float32, of those rows
    presence_L1: Tensor | None
    frequency_L1: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Past:
    """What rows that look back know: prompt, then chosen tokens, then anything."""

    ids_LW: Tensor  # int32
    prompt_L1: Tensor  # int64, prompt tokens
    length_L1: Tensor  # int64, known tokens


def looks_back(s: Sampling) -> bool:
    return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0


def make_shaping(
    places: Sequence[int],
    asks: Sequence[tuple[Sampling, Sequence[int]]],
    *,
    device: torch.device,
    own: range | None = None,
) -> Shaping:
    """Gather what the rows at `places` ask: their sampling and their stop ids. `own`: the token ids
    of the logits' columns, where these are a part of the vocabulary."""
    back = tuple(m for m, (s, _) in enumerate(asks) if looks_back(s))
    bans = [
        (m, token, s.min_tokens)
        for m, (s, stops) in enumerate(asks)
        if s.min_tokens
        for token in stops
    ]
    bias = [(m, token, value) for m, (s, _) in enumerate(asks) for token, value in s.logit_bias]

    def pairs(found: Sequence[tuple[int, int, float]], dtype: torch.dtype) -> LogitEntries | None:
        if own is not None:
            found = [(m, token - own.start, number) for m, token, number in found if token in own]
        if not found:
            return None
        rows, ids, numbers = zip(*found, strict=True)
        made = torch.tensor([rows, ids], device=device)
        return LogitEntries(
            rows_B=made[0],
            ids_B=made[1],
            numbers_B=torch.tensor(numbers, dtype=dtype, device=device),
        )

    def column(name: str) -> Tensor | None:
        values = [getattr(asks[m][0], name) for m in back]
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None] if back else None

    return Shaping(
        places_M=torch.tensor(places, dtype=torch.int64, device=device),
        bans=pairs(bans, torch.int64),
        bias=pairs(bias, torch.float32),
        back_places=tuple(places[m] for m in back),
        back_L=torch.tensor(back, device=device) if back else None,
        repetition_L1=column("repetition_penalty"),
        presence_L1=column("presence_penalty"),
        frequency_L1=column("frequency_penalty"),
    )


def shape_logits(
    logits_MV: Tensor, shaping: Shaping, chosen_M: Tensor, past: Past | None, *, rows_at_once: int
) -> Tensor:
    """Return the shaped logits of the asking rows. chosen_M: how many tokens each has chosen."""
    shaped_MV = logits_MV.clone()
    if shaping.bans is not None:
        at = (shaping.bans.rows_B, shaping.bans.ids_B)
        early_B = chosen_M[shaping.bans.rows_B] < shaping.bans.numbers_B
        shaped_MV[at] = shaped_MV[at].masked_fill(early_B, -torch.inf)
    if shaping.bias is not None:
        at = (shaping.bias.rows_B, shaping.bias.ids_B)
        shaped_MV[at] = shaped_MV[at] + shaping.bias.numbers_B
    if past is not None:
        _penalize(shaped_MV, shaping, past, rows_at_once)
    return shaped_MV


def _penalize(shaped_MV: Tensor, shaping: Shaping, past: Past, rows_at_once: int) -> None:
    """Penalize in place, a few rows at a time."""
    assert shaping.back_L is not None and shaping.repetition_L1 is not None
    assert shaping.frequency_L1 is not None and shaping.presence_L1 is not None
    for first in range(0, len(shaping.back_L), rows_at_once):
        part = slice(first, first + rows_at_once)
        shaped_MV[shaping.back_L[part]] = penalize(
            shaped_MV[shaping.back_L[part]],
            Past(
                ids_LW=past.ids_LW[part],
                prompt_L1=past.prompt_L1[part],
                length_L1=past.length_L1[part],
            ),
            repetition_L1=shaping.repetition_L1[part],
            frequency_L1=shaping.frequency_L1[part],
            presence_L1=shaping.presence_L1[part],
        )


def penalize(
    logits_LV: Tensor,
    past: Past,
    *,
    repetition_L1: Tensor,
    frequency_L1: Tensor,
    presence_L1: Tensor,
) -> Tensor:
    """Return logits less the penalties, in the order repetition, frequency, presence."""
    count, vocab_size = logits_LV.shape
    at_W = torch.arange(past.ids_LW.shape[1], device=logits_LV.device)
    known_LW = at_W < past.length_L1
    chosen_LW = known_LW & (at_W >= past.prompt_L1)
    ids_LW = past.ids_LW.long()
    nowhere = vocab_size  # a column that is cut off again
    seen_LV = torch.zeros((count, vocab_size + 1), dtype=torch.bool, device=logits_LV.device)
    seen_LV.scatter_(1, torch.where(known_LW, ids_LW, nowhere), True)
    times_LV = torch.zeros((count, vocab_size + 1), dtype=torch.float32, device=logits_LV.device)
    times_LV.scatter_add_(
        1, torch.where(chosen_LW, ids_LW, nowhere), torch.ones_like(ids_LW, dtype=torch.float32)
    )
    seen_LV, times_LV = seen_LV[:, :-1], times_LV[:, :-1]
    repeated_LV = torch.where(logits_LV > 0, logits_LV / repetition_L1, logits_LV * repetition_L1)
    penalized_LV = torch.where(seen_LV, repeated_LV, logits_LV)
    return penalized_LV - times_LV * frequency_L1 - (times_LV > 0) * presence_L1
