"""Local rendezvous: the one of a single process. In: calls on one event loop. Out: the contract, at
memory's speed. A lease is judged on the monotonic clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from gyre.distributed.rendezvous.contract import (
    KeyAction,
    KeyChanges,
    KeyCheck,
    KeyEntry,
    KeyListing,
    Lease,
    LeaseLost,
)
from gyre.distributed.rendezvous.table import KeyTable, revision_of


class LocalRendezvous:
    """Entries in memory. Nothing can be lost, so no call meets its deadline."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = KeyTable()
        self._clock = clock
        self._alive_until_s: dict[int, float] = {}
        self._next_lease = 1
        self._changed = asyncio.Event()  # replaced at each change, so that every watcher sees it

    async def get(self, key: str, *, deadline_s: float) -> KeyEntry | None:
        self._expire()
        return self._table.entries.get(key)

    async def list(self, prefix: str, *, deadline_s: float) -> KeyListing:
        self._expire()
        return self._table.list(prefix)

    async def commit(
        self, *actions: KeyAction, checks: Sequence[KeyCheck] = (), deadline_s: float
    ) -> int:
        self._expire()
        revision = revision_of(self._table.commit(actions, checks))
        self._wake()
        return revision

    async def grant(self, ttl_s: float, *, deadline_s: float) -> Lease:
        lease = Lease(id=self._next_lease, ttl_s=ttl_s)
        self._next_lease += 1
        self._table.grant(lease)
        self._alive_until_s[lease.id] = self._clock() + ttl_s
        return lease

    async def keep_alive(self, lease: Lease, *, deadline_s: float) -> None:
        self._expire()
        if lease.id not in self._alive_until_s:
            raise LeaseLost(lease)
        self._alive_until_s[lease.id] = self._clock() + lease.ttl_s

    async def revoke(self, lease: Lease, *, deadline_s: float) -> None:
        self._alive_until_s.pop(lease.id, None)
        if self._table.end(lease.id):
            self._wake()

    async def watch(
        self, prefix: str, *, after: int, deadline_s: float
    ) -> AsyncGenerator[KeyChanges, None]:
        while True:
            changed = self._changed
            self._expire()
            found, after = [*self._table.changes(prefix, after)], self._table.revision
            for changes in found:  # the table may change meanwhile
                yield changes
            until_s = min(self._alive_until_s.values(), default=self._clock() + deadline_s)
            try:
                async with asyncio.timeout(max(0.0, until_s - self._clock())):
                    await changed.wait()
            except TimeoutError:
                continue  # the first lease is over

    async def close(self) -> None:
        pass

    def _expire(self) -> None:
        over = [id for id, until_s in self._alive_until_s.items() if until_s <= self._clock()]
        for lease_id in over:
            del self._alive_until_s[lease_id]
            self._table.end(lease_id)
        if over:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
