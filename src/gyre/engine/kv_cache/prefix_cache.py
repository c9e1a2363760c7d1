"""Prefix cache: which page holds the KV of which prefix. In: chained block keys. Out: pages to
share, pages to evict. Pure.

A key is a 128-bit keyed hash chained over token blocks. Its root is weight version and tenant salt,
so a block of another version or tenant never matches. A page without users stays here, idle, until
it is evicted, oldest first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from gyre.engine.kv_cache.prompt_logprobs import ScoreStore

BlockKey = bytes


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

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._entry_of

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def idle_pages(self) -> Sequence[int]:
        return tuple(self._idle)

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

    def rest(self, page: int) -> None:
        """Count a known page that lost its last user as idle."""
        assert page in self._entry_of and page not in self._idle, page
        self._idle[page] = None

    def wake(self, page: int) -> None:
        """Count an idle page that got a user as used."""
        del self._idle[page]

    def evict(self, count: int) -> list[int]:
        """Forget the `count` pages that have been idle longest and return them."""
        assert count <= len(self._idle), (count, len(self._idle))
        pages = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._forget(page)
        return pages

    def drop(self, *, keep_version: int | None = None) -> tuple[list[int], list[int]]:
        """Forget all entries but those of `keep_version`. Return (idle pages, now free; pages still
        in use)."""
        gone = [page for page, (_, version) in self._entry_of.items() if version != keep_version]
        idle = [page for page in gone if page in self._idle]
        used = [page for page in gone if page not in self._idle]
        self._drop(gone)
        return idle, used

    def drop_pages(self, pages: Sequence[int]) -> None:
        """Forget these pages where known; none of them may be idle."""
        self._drop([page for page in pages if page in self._entry_of])

    def _drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._idle.pop(page, None)
            self._forget(page)

    def _forget(self, page: int) -> None:
        key, _ = self._entry_of.pop(page)
        del self._page_of[key]
        self.scores.drop(key)
