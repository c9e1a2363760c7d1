"""Scoring: prompt log-probs of one step, for the prompts that ask. In: the Step with its layout and
hidden states. Out: numbers on the device, and later the Pieces that they are.
"""

# T tokens of the step, Q targets scored, C chunks, E hidden size, K best tokens

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gyre.engine.kv_cache.pool import to_device
from gyre.engine.kv_cache.prompt_logprobs import PromptLogprobStore, PromptSlice
from gyre.engine.sampling.logprobs import score_targets
from gyre.engine.sampling.shard_logprobs import score_targets_on_shard
from gyre.engine.sampling.vocabulary_shard import VocabularyShard
from gyre.engine.scheduler.slots import InputBatch
from gyre.engine.scheduler.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Which targets were scored, and their numbers on the device."""

    spans: tuple[tuple[PromptLogprobStore, int, int], ...]  # store, first target, targets
    numbers: Tensor  # float64 [Q, 1 + 2K]: own log-prob, ids of the best, their log-probs


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Prompt tokens to score in one step."""

    spans: tuple[tuple[PromptLogprobStore, int, int], ...]
    place_Q: np.ndarray  # int64, the token of the step whose hidden state each target follows
    token_Q: np.ndarray  # int64


def find_targets(rows: InputBatch, step: Step, place_C: np.ndarray) -> Targets | None:
    """Return the step's unknown prompt targets, or None when no chunk's prompt asks. place_C:
    position of each chunk's first token in the step."""
    spans, places, tokens = [], [], []
    for chunk, place in zip(step.chunks, place_C.tolist(), strict=True):
        prompt_store = rows.sequence_at(chunk.row).prompt_store
        if prompt_store is None:
            continue
        first, count = prompt_store.wanted(chunk.start, chunk.count)
        if count:
            spans.append((prompt_store, first, count))
            places.append(place + first - 1 - chunk.start + np.arange(count))
            tokens.append(rows.tokens_RW[chunk.row, first : first + count].astype(np.int64))
    if not spans:
        return None
    return Targets(
        spans=tuple(spans), place_Q=np.concatenate(places), token_Q=np.concatenate(tokens)
    )


def score(
    targets: Targets,
    hidden_QE: Tensor,
    project: Callable[[Tensor], Tensor],
    *,
    rows_at_once: int,
    shard: VocabularyShard | None = None,
) -> Scores:
    """Score targets by the hidden states that they follow, one each. `project` gives the logits of
    the whole vocabulary, or of this rank's shard."""
    device = hidden_QE.device
    best = max(prompt_store.best for prompt_store, _, _ in targets.spans)
    token_Q = to_device(targets.token_Q, device)
    if shard is not None:
        numbers = score_targets_on_shard(
            hidden_QE, token_Q, project, shard, best=best, rows_at_once=rows_at_once
        )
        return Scores(spans=targets.spans, numbers=numbers)
    numbers = score_targets(
        hidden_QE,
        torch.arange(len(targets.token_Q), device=device),
        token_Q,
        project,
        best=best,
        rows_at_once=rows_at_once,
    )
    return Scores(spans=targets.spans, numbers=numbers)


def score_prompts(
    rows: InputBatch,
    step: Step,
    place_C: np.ndarray,
    hidden_TE: Tensor,
    project: Callable[[Tensor], Tensor],
    *,
    rows_at_once: int,
    shard: VocabularyShard | None = None,
) -> Scores | None:
    """Find and score the targets of a step, given all of its hidden states."""
    targets = find_targets(rows, step, place_C)
    if targets is None:
        return None
    hidden_QE = hidden_TE.index_select(0, to_device(targets.place_Q, hidden_TE.device))
    return score(targets, hidden_QE, project, rows_at_once=rows_at_once, shard=shard)


def pieces_of(scores: Scores, numbers: np.ndarray) -> tuple[PromptSlice, ...]:
    """Cut the numbers, now on the host, into pieces for their stores."""
    best = (numbers.shape[1] - 1) // 2
    pieces, at = [], 0
    for prompt_store, first, count in scores.spans:
        part = numbers[at : at + count]
        at += count
        pieces.append(
            PromptSlice(
                prompt_store=prompt_store,
                first=first,
                logprobs=part[:, 0].astype(np.float32),
                top_ids=part[:, 1 : 1 + best].astype(np.int32),
                top_logprobs=part[:, 1 + best :].astype(np.float32),
            )
        )
    return tuple(pieces)
