"""Prefix cache: which page holds the KV of which prefix. In: chained block keys. Out: pages to
share, pages to evict. Pure.

A key is a 128-bit keyed hash chained over token blocks. Its root is weight version and tenant salt,
so a block of another version or tenant never matches. A page without users stays here, idle, until
it is evicted.

Eviction is that of a segmented LRU (Karedla, Love and Wherry, 1994). Pages that no later request
has found go first, oldest first. So the ends of prompts and answers do not push out a prefix that
many share. Pages that were found may be four fifths of the idle ones. Of more, the oldest count as
not found. Tails are evicted before heads.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from gyre.engine.kv_cache.prompt_logprobs import ScoreStore

BlockKey = bytes
MOST_REUSED = 4  # idle pages that were found, for each that was not


def root_key(version: int, tenant_salt: str) -> BlockKey:
    """Return the parent of every first block."""
    salt = tenant_salt.encode()
    return hashlib.blake2b(f"{version}:{len(salt)}:".encode() + salt, digest_size=16).digest()


def extend_keys(
    keys: list[BlockKey], root: BlockKey, tokens: np.ndarray, page_tokens: int, num_blocks: int
) -> None:
    """Append keys in place until there is one for each of the first `num_blocks` full blocks of
    tokens (int32)."""
    parent = keys[-1] if keys else root
    for block in range(len(keys), num_blocks):
        data = tokens[block * page_tokens : (block + 1) * page_tokens].tobytes()
        parent = hashlib.blake2b(data, digest_size=16, key=parent).digest()
        keys.append(parent)


class PrefixCache:
    """Keys ↔ pages, and the order in which idle pages are given up."""

    def __init__(self, score_bytes: int = 0) -> None:
        # prompt log-probs of known pages; they go with their page
        self.scores = ScoreStore(score_bytes)
        self._page_of: dict[BlockKey, int] = {}
        self._entry_of: dict[int, tuple[BlockKey, int]] = {}  # page → key and weight version
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._idle_reused: OrderedDict[int, None] = OrderedDict()
        self._reused: set[int] = set()  # pages that a later request has found

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._entry_of

    @property
    def num_idle(self) -> int:
        return len(self._idle) + len(self._idle_reused)

    @property
    def idle_pages(self) -> Sequence[int]:
        """Return them in the order in which they are evicted."""
        return (*self._idle, *self._idle_reused)

    def find(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the pages of the longest cached beginning."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def knows(self, key: BlockKey) -> bool:
        return key in self._page_of

    def remember(self, key: BlockKey, page: int, version: int) -> bool:
        """Enter a page in use. False when the key has a page already (two equal prompts ran side by
        side)."""
        if key in self._page_of or page in self._entry_of:
            return False
        self._page_of[key] = page
        self._entry_of[page] = (key, version)
        return True

    def note_reuse(self, pages: Sequence[int]) -> None:
        """Note that a later request has found these pages, all of them known."""
        self._reused.update(pages)

    def rest(self, page: int) -> None:
        """Count a known page that lost its last user as idle."""
        assert page in self._entry_of and not self._is_idle(page), page
        if page not in self._reused:
            self._idle[page] = None
            return
        self._idle_reused[page] = None
        while len(self._idle_reused) > MOST_REUSED * (len(self._idle) + 1):
            oldest, _ = self._idle_reused.popitem(last=False)
            self._reused.remove(oldest)
            self._idle[oldest] = None

    def wake(self, page: int) -> None:
        """Count an idle page that got a user as used."""
        del self._segment_of(page)[page]

    def evict(self, count: int) -> list[int]:
        """Forget the first `count` of the idle pages and return them."""
        assert count <= self.num_idle, (count, self.num_idle)
        pages = []
        for _ in range(count):
            page, _ = (self._idle or self._idle_reused).popitem(last=False)
            self._forget(page)
            pages.append(page)
        return pages

    def drop(self, *, keep_version: int | None = None) -> tuple[list[int], list[int]]:
        """Forget all entries but those of `keep_version`. Return (idle pages, now free; pages still
        in use)."""
        gone = [page for page, (_, version) in self._entry_of.items() if version != keep_version]
        idle = [page for page in gone if self._is_idle(page)]
        used = [page for page in gone if not self._is_idle(page)]
        self._drop(gone)
        return idle, used

    def drop_pages(self, pages: Sequence[int]) -> None:
        """Forget these pages where known; none of them may be idle."""
        self._drop([page for page in pages if page in self._entry_of])

    def _drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._segment_of(page).pop(page, None)
            self._forget(page)

    def _is_idle(self, page: int) -> bool:
        return page in self._segment_of(page)

    def _segment_of(self, page: int) -> OrderedDict[int, None]:
        return self._idle_reused if page in self._reused else self._idle

    def _forget(self, page: int) -> None:
        self._reused.discard(page)
        key, _ = self._entry_of.pop(page)
        del self._page_of[key]
        self.scores.drop(key)
