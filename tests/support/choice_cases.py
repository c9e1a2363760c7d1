"""Choices of many rows by their samplings, of whole logits or by ranks that have some columns each.
What runs in rank processes is here too (rank_pool)."""

# N rows, V vocabulary or the columns of a rank, L rows that look back

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyre.core.records import Sampling
from gyre.distributed.process_group import RankGroup
from gyre.engine.sampling.logits_processors import Past, looks_back, make_shaping
from gyre.engine.sampling.logprobs import score_targets
from gyre.engine.sampling.sampler import SamplerOutput, choose, make_rules
from gyre.engine.sampling.shard_logprobs import score_targets_on_shard
from gyre.engine.sampling.shard_sampler import choose_on_shard
from gyre.engine.sampling.vocabulary_shard import VocabularyShard

CPU = torch.device("cpu")
# sampling, prompt, chosen tokens, stop ids
Ask = tuple[Sampling, list[int], list[int], list[int]]


def column(values: Sequence[Any], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


def choose_many(
    logits_NV: np.ndarray,
    asks: Sequence[Ask],
    uniform_N: np.ndarray,
    *,
    shard: VocabularyShard | None = None,
    widened: list[int] | None = None,
    device: torch.device = CPU,
) -> SamplerOutput:
    """Choose from whole logits; with `shard`, from this rank's columns of them. `widened` gets the
    rows of a truncation that candidates were too few for."""
    of = [s for s, *_ in asks]
    places = [n for n, s in enumerate(of) if s.shapes_logits]
    own = None if shard is None else shard.ids
    shaping = None
    if places:
        asking = [(of[n], asks[n][3]) for n in places]
        shaping = make_shaping(places, asking, device=device, own=own)
    rules = make_rules(
        np.asarray([s.temperature for s in of], np.float32),
        np.asarray([s.top_k for s in of]),
        np.asarray([s.top_p for s in of]),
        np.asarray([s.min_p for s in of]),
        np.asarray([s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0) for s in of]),
        vocab_size=logits_NV.shape[1],
        device=device,
        shaping=shaping,
        num_top_N=np.asarray([s.top_logprobs for s in of]),
        rows_at_once=3,
    )
    back = [n for n in places if looks_back(of[n])]
    past = None
    if back:
        known = [asks[n][1] + asks[n][2] for n in back]
        width = max(map(len, known))
        past = Past(
            ids_LW=torch.tensor(
                [ids + [7] * (width - len(ids)) for ids in known], dtype=torch.int32
            ).to(device),
            prompt_L1=column([len(asks[n][1]) for n in back], torch.int64).to(device),
            length_L1=column([len(ids) for ids in known], torch.int64).to(device),
        )
    way = choose
    if shard is not None:
        told = [] if widened is None else widened
        way = partial(choose_on_shard, shard=shard, widened=told.append)
    return way(
        own_columns(torch.from_numpy(logits_NV), shard).to(device),
        rules,
        torch.from_numpy(uniform_N).to(device),
        chosen_N=torch.tensor([len(chosen) for _, _, chosen, _ in asks], device=device),
        past=past,
    )


def own_columns(logits_NV: Tensor, shard: VocabularyShard | None) -> Tensor:
    """A rank's columns, -inf where they are padding."""
    if shard is None:
        return logits_NV
    spare = shard.width * shard.group.size - shard.vocab_size
    padded_NV = torch.nn.functional.pad(logits_NV, (0, spare), value=-torch.inf)
    return padded_NV[:, shard.ids.start : shard.ids.stop].contiguous()


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A choice as plain arrays, which can be compared to the bit."""

    tokens: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    kept: np.ndarray | None
    best_ids: np.ndarray | None
    best_logprobs: np.ndarray | None

    @staticmethod
    def of(choice: SamplerOutput) -> Chosen:
        return Chosen(
            tokens=choice.tokens_N.cpu().numpy(),
            logprobs=choice.logprobs_N.cpu().numpy(),
            raw_logprobs=choice.raw_logprobs_N.cpu().numpy(),
            kept=None if choice.kept_MV is None else choice.kept_MV.cpu().numpy(),
            best_ids=None if choice.best is None else choice.best.ids_NK.cpu().numpy(),
            best_logprobs=None if choice.best is None else choice.best.logprobs_NK.cpu().numpy(),
        )

    def bits(self) -> list[bytes | None]:
        arrays = (
            self.tokens, self.logprobs, self.raw_logprobs, self.kept, self.best_ids,
            self.best_logprobs,
        )  # fmt: skip
        return [None if array is None else array.tobytes() for array in arrays]


def chosen_by_ranks(
    group: RankGroup, logits_NV: np.ndarray, asks: Sequence[Ask], uniform_N: np.ndarray
) -> tuple[Chosen, list[int], dict[str, int]]:
    """Return what a rank chose with the others, where its truncation was widened, and bytes
    sent."""
    shard, widened = VocabularyShard(group=group, vocab_size=logits_NV.shape[1]), []
    group.traffic.take()
    choice = choose_many(
        logits_NV, asks, uniform_N, shard=shard, widened=widened, device=group.device
    )
    return Chosen.of(choice), widened, dict(group.traffic.take().bytes_by_kind)


def scored_by_ranks(
    group: RankGroup,
    logits_NV: np.ndarray,
    targets_N: np.ndarray,
    best: int,
    *,
    whole: bool = False,
) -> np.ndarray:
    """Log-probs of targets, and the best tokens, whose hidden states are the logits themselves."""
    hidden_NE = torch.from_numpy(logits_NV).to(group.device)
    target = torch.from_numpy(targets_N).to(group.device)
    if whole:
        places = torch.arange(len(target), device=group.device)
        numbers = score_targets(hidden_NE, places, target, lambda h: h, best=best, rows_at_once=2)
        return numbers.cpu().numpy()
    shard = VocabularyShard(group=group, vocab_size=logits_NV.shape[1])
    numbers = score_targets_on_shard(
        hidden_NE, target, lambda h: own_columns(h, shard), shard, best=best, rows_at_once=2
    )
    return numbers.cpu().numpy()
