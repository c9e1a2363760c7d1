"""Prompt log-probs on the host: the known ones of one prompt, and those of cached blocks. In:
pieces that steps computed. Out: what must still be computed, a PromptLogprobs once all is known.
Pure (numpy).

An entry belongs to its token as the target, so it is a function of the tokens up to and with it.
The key of a block decides all entries of its tokens; weight version and tenant are in the key. The
hidden state for a block's first entry is in the block before, so a hit may have to be shortened by
a block.
"""

# P prompt tokens, K best tokens, L tokens of a block

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gyre.core.records import PromptLogprobs

UNKNOWN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSlice:
    """Entries that one step computed for one prompt."""

    prompt_store: PromptLogprobStore
    first: int  # the first target
    logprobs: np.ndarray  # float32 [c]
    top_ids: np.ndarray  # int32 [c, at least K]
    top_logprobs: np.ndarray  # float32 [c, at least K]


class PromptLogprobStore:
    """What is known of the prompt of one completion that asks for it."""

    def __init__(self, num_tokens: int, best: int) -> None:
        self.num_tokens = num_tokens
        self.best = best
        self._logprobs_P = np.zeros(num_tokens, dtype=np.float32)
        self._versions_P = np.full(num_tokens, UNKNOWN, dtype=np.int32)
        self._top_ids_PK = np.zeros((num_tokens, best), dtype=np.int32)
        self._top_PK = np.zeros((num_tokens, best), dtype=np.float32)

    @property
    def first_unknown(self) -> int:
        """The first target without an entry; the number of tokens when there is none."""
        missing = np.flatnonzero(self._versions_P[1:] == UNKNOWN)
        return int(missing[0]) + 1 if len(missing) else self.num_tokens

    @property
    def is_whole(self) -> bool:
        return self.first_unknown == self.num_tokens

    @property
    def is_sound(self) -> bool:
        return bool(np.isfinite(self._logprobs_P).all())

    def wanted(self, start: int, count: int) -> tuple[int, int]:
        """Return the first target and the number of targets to compute when the tokens start …
        start + count - 1 are computed: from the first unknown one on."""
        first = max(start + 1, min(self.first_unknown, start + count + 1))
        return first, max(0, min(start + count + 1, self.num_tokens) - first)

    def enter(self, piece: PromptSlice, version: int) -> None:
        span = slice(piece.first, piece.first + len(piece.logprobs))
        self._logprobs_P[span], self._versions_P[span] = piece.logprobs, version
        self._top_ids_PK[span] = piece.top_ids[:, : self.best]
        self._top_PK[span] = piece.top_logprobs[:, : self.best]

    def under(self, version: int) -> PromptLogprobStore:
        """Return this store, or one without entries of other versions if it has any: their KV is
        computed again too. A copy, since siblings on the same prompt share one and may go on
        with what it says."""
        foreign_P = (self._versions_P != version) & (self._versions_P != UNKNOWN)
        if not foreign_P.any():
            return self
        made = PromptLogprobStore(self.num_tokens, self.best)
        made._logprobs_P[:] = np.where(foreign_P, 0.0, self._logprobs_P)
        made._versions_P[:] = np.where(foreign_P, UNKNOWN, self._versions_P)
        made._top_ids_PK[:], made._top_PK[:] = self._top_ids_PK, self._top_PK
        return made

    def block(self, block: int, page_tokens: int, version: int) -> BlockScores | None:
        """Return the entries of one block when all are known and of this version."""
        first, end = block * page_tokens, (block + 1) * page_tokens
        known = self._versions_P[max(first, 1) : end]
        if end > self.num_tokens or not ((known == version).all() and self.is_sound):
            return None
        span = slice(first, end)
        return BlockScores(
            logprobs=self._logprobs_P[span].copy(),
            top_ids=self._top_ids_PK[span].copy(),
            top_logprobs=self._top_PK[span].copy(),
        )

    def load(self, block: int, scores: BlockScores, version: int) -> None:
        first = block * len(scores.logprobs)
        skip = 1 if first == 0 else 0  # token 0 is never a target
        self.enter(
            PromptSlice(
                prompt_store=self,
                first=first + skip,
                logprobs=scores.logprobs[skip:],
                top_ids=scores.top_ids[skip:],
                top_logprobs=scores.top_logprobs[skip:],
            ),
            version,
        )

    def result(self) -> PromptLogprobs:
        assert self.is_whole
        return PromptLogprobs(
            logprobs=self._logprobs_P.copy(),
            versions=self._versions_P.copy(),
            top_ids=self._top_ids_PK.copy(),
            top_logprobs=self._top_PK.copy(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScores:
    """Entries of the tokens of one cached block."""

    logprobs: np.ndarray  # float32 [L]
    top_ids: np.ndarray  # int32 [L, K]
    top_logprobs: np.ndarray  # float32 [L, K]

    @property
    def num_bytes(self) -> int:
        return self.logprobs.nbytes + self.top_ids.nbytes + self.top_logprobs.nbytes


class ScoreStore:
    """Entries of cached blocks by block key, within a bound of bytes; those used longest ago go
    first. An entry goes with its page (`drop`), so it never outlives the KV that it belongs to."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.blocks: OrderedDict[bytes, BlockScores] = OrderedDict()

    def __len__(self) -> int:
        return len(self.blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self.blocks

    def find(self, key: bytes, best: int) -> BlockScores | None:
        """Return a block's entries if they tell of at least `best` tokens each."""
        scores = self.blocks.get(key)
        if scores is None or scores.top_ids.shape[1] < best:
            return None
        self.blocks.move_to_end(key)
        return scores

    def put(self, key: bytes, scores: BlockScores) -> None:
        """Keep the entries, unless as many are kept already."""
        if self.find(key, scores.top_ids.shape[1]) is not None:
            return
        self.drop(key)
        self.blocks[key] = scores
        self.num_bytes += scores.num_bytes
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self.blocks.popitem(last=False)[1].num_bytes

    def drop(self, key: bytes) -> None:
        scores = self.blocks.pop(key, None)
        if scores is not None:
            self.num_bytes -= scores.num_bytes


def load_known(
    prompt_store: PromptLogprobStore,
    keys: Sequence[bytes],
    store: ScoreStore,
    page_tokens: int,
    version: int,
) -> None:
    """Fill the prompt's store from the pages', block by block from the first that it does not
    know, until one is missing. The keys and the prompt's store are of this version."""
    for block in range(prompt_store.first_unknown // page_tokens, len(keys)):
        if (block + 1) * page_tokens > prompt_store.num_tokens:
            return
        scores = store.find(keys[block], prompt_store.best)
        if scores is None:
            return
        prompt_store.load(block, scores, version)


class KnowsPages(Protocol):
    """The prefix cache, as far as this file needs it."""

    scores: ScoreStore

    def knows(self, key: bytes) -> bool: ...


def keep_known(
    prompt_store: PromptLogprobStore,
    keys: Sequence[bytes],
    cache: KnowsPages,
    page_tokens: int,
    version: int,
) -> None:
    """Keep the prompt's entries of each whole block whose page is cached. The keys are of this
    version."""
    for block, key in enumerate(keys[: prompt_store.num_tokens // page_tokens]):
        if cache.knows(key) and cache.scores.find(key, prompt_store.best) is None:
            scores = prompt_store.block(block, page_tokens, version)
            if scores is not None:
                cache.scores.put(key, scores)


def usable_pages(prompt_store: PromptLogprobStore, num_hits: int, page_tokens: int) -> int:
    """Return how many cached pages may be shared so that every unknown target is still computed:
    computing starts at page_tokens × pages and gives the targets after that token, so all up to it
    must be known."""
    if prompt_store.is_whole:
        return num_hits
    return min(num_hits, (prompt_store.first_unknown - 1) // page_tokens)
