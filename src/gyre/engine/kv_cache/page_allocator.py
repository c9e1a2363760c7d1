"""Pages: which sequences use which KV page. In: counts and page numbers. Out: page numbers. Pure.

Each page is free, in use (with a count of its users) or idle (kept by the prefix cache, no user).
Page 0 is never allocated and stays zero: padding points at it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gyre.engine.kv_cache.prefix_cache import BlockKey, PrefixCache

NULL_PAGE = 0


class Pages:
    """Allocate KV pages 1 … num_pages, with a count of users for each."""

    def __init__(self, num_pages: int, *, score_bytes: int = 0) -> None:
        self.num_pages = num_pages
        self.prefix = PrefixCache(score_bytes)
        self._users = np.zeros(num_pages + 1, dtype=np.int32)
        self.is_cached_P = np.zeros(num_pages + 1, dtype=bool)
        self._stamps = np.zeros(num_pages + 1, dtype=np.int64)  # how often each was handed out
        self._free = np.arange(num_pages, 0, -1, dtype=np.int32)  # a stack; low pages leave first
        self._num_free = num_pages

    @property
    def num_available(self) -> int:
        """Pages that `take` can hand out: free ones, then idle ones."""
        return self._num_free + self.prefix.num_idle

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_available

    def take(self, count: int) -> np.ndarray:
        """Return `count` pages with one user each, evicting idle ones when free ones run out."""
        assert count <= self.num_available, (count, self.num_available)
        if count > self._num_free:
            evicted = np.asarray(self.prefix.evict(count - self._num_free), dtype=np.int32)
            self.is_cached_P[evicted] = False
            self._push(evicted)
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._users[pages] = 1
        self._stamps[pages] += 1
        return pages

    def share(self, pages: np.ndarray, *, found: bool = False) -> None:
        """Add a user to each page, which is in use or idle. `found`: a request found them in the
        prefix cache, so they are kept longer."""
        for page in pages[self._users[pages] == 0].tolist():
            self.prefix.wake(page)
        self._users[pages] += 1
        if found:
            self.prefix.note_reuse(pages.tolist())

    def stamps(self, pages: np.ndarray) -> np.ndarray:
        """Return the allocation number of each page, for a later `still_hold`."""
        return self._stamps[pages]

    def still_hold(self, pages: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        """Return per page whether it has the content that it had at its stamp, and can be shared.
        Full pages never change."""
        return (self._stamps[pages] == stamps) & (
            (self._users[pages] > 0) | self.is_cached_P[pages]
        )

    def give(self, pages: np.ndarray) -> None:
        """Take one user from each of the distinct pages of one sequence. Tails are evicted before
        heads."""
        self._users[pages] -= 1
        assert (self._users[pages] >= 0).all(), "a page was given back twice"
        unused = pages[self._users[pages] == 0]
        cached = self.is_cached_P[unused]
        for page in unused[cached][::-1].tolist():
            self.prefix.rest(page)
        self._push(unused[~cached])

    def find(self, keys: Sequence[BlockKey]) -> np.ndarray:
        """Return the pages of the longest cached beginning, not yet shared."""
        return np.asarray(self.prefix.find(keys), dtype=np.int32)

    def num_idle_among(self, pages: np.ndarray) -> int:
        return int((self._users[pages] == 0).sum())

    def only_used_once(self, pages: np.ndarray) -> np.ndarray:
        return pages[self._users[pages] == 1]

    def remember(self, keys: Sequence[BlockKey], pages: np.ndarray, version: int) -> None:
        """Enter pages in use under their keys, where neither is known yet."""
        for key, page in zip(keys, pages.tolist(), strict=True):
            if self.prefix.remember(key, page, version):
                self.is_cached_P[page] = True

    def drop_cached(self, *, keep_version: int | None = None) -> int:
        """Forget cached pages of other versions; return how many. Those in use stay with their
        users."""
        idle, used = self.prefix.drop(keep_version=keep_version)
        self.is_cached_P[np.asarray(idle + used, dtype=np.int32)] = False
        self._push(np.asarray(idle, dtype=np.int32))
        return len(idle) + len(used)

    def disown(self, pages: np.ndarray) -> None:
        """Remove these pages from the cache while they are in use, so that no other sequence shares
        them."""
        self.prefix.drop_pages(pages.tolist())
        self.is_cached_P[pages] = False

    def check(self, owned: Iterable[np.ndarray]) -> None:
        """Assert that every page is accounted for once, given the page lists of all sequences."""
        counted = np.zeros_like(self._users)
        for pages in owned:
            assert len(np.unique(pages)) == len(pages), "a sequence holds a page twice"
            counted[pages] += 1
        assert counted[NULL_PAGE] == 0, "the null page is in use"
        assert (counted == self._users).all(), "counts of users disagree with the block tables"
        free = self._free[: self._num_free].tolist()
        idle = list(self.prefix.idle_pages)
        used = np.flatnonzero(self._users).tolist()
        assert sorted(free + idle + used) == list(range(1, self.num_pages + 1)), (
            "a page leaked or is held twice"
        )
        cached = np.flatnonzero(self.is_cached_P).tolist()
        assert len(cached) == len(self.prefix) and all(page in self.prefix for page in cached)

    def _push(self, pages: np.ndarray) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages[::-1]
        self._num_free += len(pages)
