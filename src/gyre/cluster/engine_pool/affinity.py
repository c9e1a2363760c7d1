"""Affinity: what an engine likely has from earlier requests. In: token ids of prompts and answers,
session ids. Out: how many pages of a prompt an engine has cached; which one served a session.

It is a belief, from what was routed and answered: a wrong one costs time, never an answer. It is
held in bounded memory: as many pages as the engine has, dropped in the order in which the engine
drops them (engine/kv_cache/prefix_cache.py).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_SESSIONS = 65_536
SEED_BITS = 128
MOST_REUSED = 4  # pages that were found, for each that was not: as an engine's cache keeps them


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSum:
    """A hash of the tokens so far, to be extended by more of them."""

    num_tokens: int = 0
    total: int = 0


class PrefixHasher:
    """Hash every page-aligned prefix: the sum of each token times a random 64-bit weight of its
    place, modulo 2^64. The seed of the weights is secret, so no client can make prompts collide."""

    def __init__(self, seed: int) -> None:
        self._seed = seed.to_bytes(SEED_BITS // 8, "little")
        self._draws = np.random.Generator(np.random.PCG64(seed))
        self._weights = np.empty(0, np.uint64)

    def begin(self, tenant_salt: str) -> PrefixSum:
        """Return the sum before any token; tenants share nothing."""
        if not tenant_salt:
            return PrefixSum()
        data = hashlib.blake2b(tenant_salt.encode(), digest_size=8, key=self._seed).digest()
        return PrefixSum(total=int.from_bytes(data, "little"))

    def extend(
        self, start: PrefixSum, tokens: np.ndarray, page_tokens: int
    ) -> tuple[list[int], PrefixSum]:
        """Return the key of each page that ends within the tokens (int32), and the sum after the
        last one. The prefix before is part of each key."""
        if len(tokens) == 0:
            return [], start
        stop = start.num_tokens + len(tokens)
        weights = self._first_weights(stop)[start.num_tokens :]
        # 0 would add nothing, and prefixes of different lengths would be equal
        sums = np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * weights)
        sums += np.uint64(start.total)
        first = page_tokens - 1 - start.num_tokens % page_tokens
        return sums[first::page_tokens].tolist(), PrefixSum(num_tokens=stop, total=int(sums[-1]))

    def _first_weights(self, count: int) -> np.ndarray:
        if count > len(self._weights):
            more = max(count, 2 * len(self._weights)) - len(self._weights)
            drawn = self._draws.integers(0, 2**64, more, np.uint64, endpoint=False)
            self._weights = np.concatenate([self._weights, drawn])
        return self._weights[:count]


class PrefixBelief:
    """Which prefixes one engine likely has, at most `capacity_pages` of them. With a page it has
    all before it, since no page is dropped before those that follow it."""

    def __init__(self, capacity_pages: int) -> None:
        self.capacity_pages = capacity_pages
        self._pages: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._reused: OrderedDict[int, None] = OrderedDict()  # pages that were found

    def __len__(self) -> int:
        return len(self._pages) + len(self._reused)

    def count_pages(self, keys: Sequence[int]) -> int:
        """Return how many of the first pages it has, by halving."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._pages or keys[middle] in self._reused:
                low = middle + 1
            else:
                high = middle
        return low

    def remember(self, keys: Sequence[int], *, num_found: int = 0) -> None:
        """Note that the engine has these pages, and used them now. They are all of a prefix, from
        its first page; a request found the first `num_found`."""
        pages, reused = self._pages, self._reused
        kept = keys[: self.capacity_pages]
        was_found = [key in reused or place < num_found for place, key in enumerate(kept)]
        for key in kept:  # in use, so that none of them makes room for another
            pages.pop(key, None)
            reused.pop(key, None)
        while len(self) + len(kept) > self.capacity_pages:
            (pages or reused).popitem(last=False)
        for key, found in zip(reversed(kept), reversed(was_found), strict=True):
            (reused if found else pages)[key] = None
        while len(reused) > MOST_REUSED * (len(pages) + 1):
            pages[reused.popitem(last=False)[0]] = None

    def forget(self) -> None:
        """Note that the engine has dropped its cache."""
        self._pages.clear()
        self._reused.clear()


class SessionTable:
    """Which life of an engine served each session last; at most `capacity` sessions, the latest."""

    def __init__(self, capacity: int = MOST_SESSIONS) -> None:
        self._capacity = capacity
        self._lives: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lives)

    def find(self, tenant_salt: str, session_id: str) -> int | None:
        return self._lives.get(_session_key(tenant_salt, session_id))

    def note(self, tenant_salt: str, session_id: str, life: int) -> None:
        key = _session_key(tenant_salt, session_id)
        self._lives[key] = life
        self._lives.move_to_end(key)
        if len(self._lives) > self._capacity:
            self._lives.popitem(last=False)


def _session_key(tenant_salt: str, session_id: str) -> bytes:
    salt = tenant_salt.encode()
    data = len(salt).to_bytes(8, "little") + salt + session_id.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=16).digest()
