"""Store rendezvous: the contract over a torch TCPStore, which has neither revisions, leases nor
watches. In: the store of `hold_store`. Out: the contract, weaker in four ways.

Commits are entries of one shared log: `compare_set` gives each slot to one writer. Every process
applies the log to a table of its own, so all agree on what was refused. A lease is a counter that
its holder raises; a process that sees it still for long enough appends its end. Every 1,000 entries
the one who wrote the last leaves a snapshot, and the log before the snapshot before is given up.

Weaker than etcd: the store is as mortal as the process that holds it, and calls fail for good when
that is gone. News come by polling. A lease ends only while another process looks, and late where it
looks slowly. A holder that stops without ending keeps calls of a thread until it ends.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from torch.distributed import Store

from gyre.core.codec import decode_json
from gyre.core.errors import DeadlineError
from gyre.core.events import Emit
from gyre.core.liveness import decide
from gyre.distributed.rendezvous.contract import (
    KeyAction,
    KeyChanges,
    KeyCheck,
    KeyDelete,
    KeyEntry,
    KeyListing,
    KeyPut,
    Lease,
    LeaseLost,
)
from gyre.distributed.rendezvous.table import CommitResult, KeyTable, TableSnapshot, revision_of

POLL_S = 0.05  # between two looks for news
CLOSE_S = 5.0  # for the task that follows the store
OBSERVE_S = 0.2  # between two looks at the leases
TRIM_EVERY = 1_000  # entries of the log
HOLDER = "the process that holds the rendezvous"
NEWEST = "snapshot"  # key of the slot that the newest snapshot is followed by

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One entry of the shared log: a commit, the grant of a lease, or its end."""

    writer: str  # unique, so that a writer knows its own
    puts: tuple[KeyPut, ...] = ()
    deletes: tuple[KeyDelete, ...] = ()
    checks: tuple[KeyCheck, ...] = ()
    grant_s: float = 0.0
    end: int = 0
    is_trimmed: bool = False  # the entry was given up: a snapshot has what it led to


class StillLeases:
    """Decides which leases have shown no sign of life. Time in which this process did not look does
    not count: it may have been stopped, or its clock may have jumped."""

    def __init__(self, *, most_step_s: float) -> None:
        self._most_step_s = most_step_s
        self._seen: dict[int, int] = {}
        self._still_s: dict[int, float] = {}
        self._looked_s: float | None = None

    def observe(
        self, ttl_s: Mapping[int, float], counters: Mapping[int, int], now_s: float
    ) -> list[int]:
        """Return the leases that are over, given all that are alive and their counters."""
        gap_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        step_s = min(max(gap_s, 0.0), self._most_step_s)
        self._looked_s = now_s
        still_s = {
            lease: self._still_s.get(lease, 0.0) + step_s
            if self._seen.get(lease) == counters[lease]
            else 0.0
            for lease in ttl_s
        }
        self._seen, self._still_s = {lease: counters[lease] for lease in ttl_s}, still_s
        return [
            lease
            for lease, limit_s in ttl_s.items()
            if decide(still_s[lease], {f"{lease}": 0.0}, limit_s).has_failed
        ]


class StoreRendezvous:
    """One process's end. One thread makes all calls of the store, and alone touches the table."""

    def __init__(
        self, store: Store, *, emit: Emit, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take a store under the run's own prefix (PrefixStore), on a connection of its own."""
        self._store = store
        self._emit = emit
        self._clock = clock
        self._lost_s: float | None = None  # since when the store has not answered
        self._table = KeyTable()
        self._next = 0
        self._leases = StillLeases(most_step_s=2 * OBSERVE_S)
        self._observed_s = clock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rendezvous")
        self._changed = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None

    async def get(self, key: str, *, deadline_s: float) -> KeyEntry | None:
        def look() -> KeyEntry | None:
            self._catch_up()
            return self._table.entries.get(key)

        return await self._run(look, deadline_s)

    async def list(self, prefix: str, *, deadline_s: float) -> KeyListing:
        def look() -> KeyListing:
            self._catch_up()
            return self._table.list(prefix)

        return await self._run(look, deadline_s)

    async def commit(
        self, *actions: KeyAction, checks: Sequence[KeyCheck] = (), deadline_s: float
    ) -> int:
        entry = LogEntry(
            writer=uuid.uuid4().hex,
            puts=tuple(action for action in actions if isinstance(action, KeyPut)),
            deletes=tuple(action for action in actions if isinstance(action, KeyDelete)),
            checks=tuple(checks),
        )
        return revision_of(await self._run(lambda: self._append(entry)[1], deadline_s))

    async def grant(self, ttl_s: float, *, deadline_s: float) -> Lease:
        entry = LogEntry(writer=uuid.uuid4().hex, grant_s=ttl_s)
        slot, _ = await self._run(lambda: self._append(entry), deadline_s)
        return Lease(id=slot + 1, ttl_s=ttl_s)

    async def keep_alive(self, lease: Lease, *, deadline_s: float) -> None:
        def show() -> bool:
            self._store.add(f"lease/{lease.id}", 1)
            self._catch_up()
            return lease.id in self._table.leases

        if not await self._run(show, deadline_s):
            raise LeaseLost(lease)

    async def revoke(self, lease: Lease, *, deadline_s: float) -> None:
        entry = LogEntry(writer=uuid.uuid4().hex, end=lease.id)
        await self._run(lambda: self._append(entry), deadline_s)

    async def watch(
        self, prefix: str, *, after: int, deadline_s: float
    ) -> AsyncGenerator[KeyChanges, None]:
        def look() -> tuple[list[KeyChanges], int]:
            self._catch_up()
            return [*self._table.changes(prefix, after)], self._table.revision

        while True:
            changed = self._changed
            found, after = await self._run(look, deadline_s)
            for changes in found:
                yield changes
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await changed.wait()

    async def close(self) -> None:
        self._thread.shutdown(wait=False)
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait([self._follower], timeout=CLOSE_S)

    async def _run(self, work: Callable[[], T], deadline_s: float) -> T:
        """Do work on the store's thread. DeadlineError when it is late, or the store is gone."""
        if self._follower is None:
            self._follower = asyncio.create_task(self._follow())
        elif self._follower.done():
            self._follower.result()
        try:
            async with asyncio.timeout(deadline_s):
                result = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except TimeoutError as error:
            raise self._note_lost(f"did not answer within {deadline_s:g} s") from error
        except RuntimeError as error:
            raise self._note_lost(f"is gone ({str(error).splitlines()[0][:120]})") from error
        if self._lost_s is not None:
            seconds, self._lost_s = time.monotonic() - self._lost_s, None
            self._emit("rendezvous.back", endpoint=HOLDER, seconds=seconds)
        return result

    def _note_lost(self, what: str) -> DeadlineError:
        if self._lost_s is None:
            self._lost_s = time.monotonic()
            self._emit("rendezvous.lost", reason=f"{HOLDER} {what}")
        return DeadlineError(
            f"{HOLDER} {what}",
            hint="start the processes of the run again; engines serve the version that they have",
        )

    async def _follow(self) -> None:
        """Look for news and at the leases, until `close` or the store's end."""

        def look() -> int:
            self._catch_up()
            if self._clock() - self._observed_s >= OBSERVE_S or self._clock() < self._observed_s:
                self._observed_s = self._clock()
                self._end_still_leases()
            return self._table.revision

        seen = 0
        while True:
            try:
                revision = await asyncio.get_running_loop().run_in_executor(self._thread, look)
            except RuntimeError:  # also at `close`: the thread takes no more work
                self._wake()  # watchers ask themselves, and get the error
                return
            if revision != seen:
                seen = revision
                self._wake()
            await asyncio.sleep(POLL_S)

    def _end_still_leases(self) -> None:
        counters = {lease: self._store.add(f"lease/{lease}", 0) for lease in self._table.leases}
        for lease in self._leases.observe(dict(self._table.leases), counters, self._clock()):
            if self._store.add(f"lease/{lease}", 0) == counters[lease]:
                self._append(LogEntry(writer=uuid.uuid4().hex, end=lease))

    def _append(self, entry: LogEntry) -> tuple[int, CommitResult]:
        """Write an entry into the first free slot; return the slot and what came of it."""
        text = msgspec.json.encode(entry).decode()
        while True:
            self._catch_up()
            slot = self._next
            taken = self._store.compare_set(f"log/{slot}", "", text)
            result = self._apply(taken)
            if taken.decode() == text:
                if self._next % TRIM_EVERY == 0:
                    self._trim(self._next)
                return slot, result

    def _trim(self, slot: int) -> None:
        """Leave a snapshot of all before a slot. Readers of the last entries are still served by
        the log, those of older ones by a snapshot; so two snapshots stay."""
        text = msgspec.json.encode(self._table.snapshot()).decode()
        self._store.set(f"{NEWEST}/{slot}", text)
        newest = int(self._store.compare_set(NEWEST, "", f"{slot}"))
        while newest < slot:
            newest = int(self._store.compare_set(NEWEST, f"{newest}", f"{slot}"))
        trimmed = msgspec.json.encode(LogEntry(writer="", is_trimmed=True)).decode()
        for old in range(max(0, slot - 2 * TRIM_EVERY), slot - TRIM_EVERY):
            self._store.set(f"log/{old}", trimmed)
        self._store.delete_key(f"{NEWEST}/{slot - 2 * TRIM_EVERY}")

    def _catch_up(self) -> None:
        while self._store.check([f"log/{self._next}"]):
            self._apply(self._store.get(f"log/{self._next}"))

    def _apply(self, text: bytes) -> CommitResult:
        entry = decode_json(text, LogEntry)
        if entry.is_trimmed:
            self._next = int(self._store.get(NEWEST))
            taken = self._store.get(f"{NEWEST}/{self._next}")
            self._table.load(decode_json(taken, TableSnapshot))
            return CommitResult()
        self._next += 1
        if entry.grant_s:
            self._table.grant(Lease(id=self._next, ttl_s=entry.grant_s))
        elif entry.end:
            self._table.end(entry.end)
        else:
            return self._table.commit((*entry.puts, *entry.deletes), entry.checks)
        return CommitResult(revision=self._table.revision)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
