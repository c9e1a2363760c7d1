"""Record keeper: keeps this process's records at the rendezvous. In: records. Out: the same at the
store, with a lease kept alive; written again after a lost lease, or after the store went back to
older data.

Three tasks run between `start` and `stop`. A store that is away is asked again; its implementation
emits `rendezvous.lost` and `rendezvous.back`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing, suppress

from gyre.core.errors import DeadlineError, RankError
from gyre.core.events import Emit
from gyre.distributed.rendezvous.contract import (
    CommitRefused,
    HistoryLost,
    KeyCheck,
    KeyDelete,
    KeyPut,
    Lease,
    LeaseLost,
    Rendezvous,
)
from gyre.distributed.rendezvous.pod_records import (
    EPOCH,
    PIECES,
    STATE,
    EpochRecord,
    OwnRecord,
    RewritePlan,
    Superseded,
    from_text,
    plan_rewrites,
)

RENEWALS = 3  # signs of life within a lease
MOST_DELETES = 64  # in one commit; etcd takes 128 operations
PAUSE_S = 0.2  # before records are compared again after a failure


class RecordKeeper:
    """The records of one process. `name` is the member's, for people."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        name: str,
        emit: Emit,
        lease_s: float,
        deadline_s: float,
    ) -> None:
        self.process = uuid.uuid4().hex[:12]
        self._rendezvous = rendezvous
        self._name = name
        self._emit = emit
        self._lease_s = lease_s
        self._deadline_s = deadline_s
        self._own: dict[str, OwnRecord] = {}
        self._writing: list[str] = []  # keys whose commits are under way
        self._passed_over = asyncio.Event()  # a comparison left out such a key
        self._lease: Lease | None = None
        self._alive_s = time.monotonic()
        self._renewing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._superseded: Superseded | None = None

    async def start(self) -> None:
        assert not self._tasks, f"'{self._name}' has joined already"
        self._lease = await self._rendezvous.grant(self._lease_s, deadline_s=self._deadline_s)
        self._alive_s = time.monotonic()
        listing = await self._rendezvous.list(STATE, deadline_s=self._deadline_s)
        self._tasks = [
            asyncio.create_task(self._keep_lease()),
            asyncio.create_task(self._keep_records(listing.revision)),
            asyncio.create_task(self._compare_again()),
        ]

    async def stop(self) -> None:
        """End the lease, and its records with it. A store that is away ends it by itself."""
        tasks, lease, self._tasks, self._lease = self._tasks, self._lease, [], None
        for task in tasks:
            task.cancel()
        if lease is not None:
            with suppress(DeadlineError):
                await self._rendezvous.revoke(lease, deadline_s=lease.ttl_s)
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task

    def epoch_check(self) -> KeyCheck:
        """Return what refuses a commit once a newer publisher is there. Superseded if it is known
        to be there already."""
        if self._superseded is not None:
            raise self._superseded
        return KeyCheck(key=EPOCH, value=self._own[EPOCH].value)

    async def write(self, record: OwnRecord, *, at: int | None = None) -> int:
        """Write a record over whatever is there, or only over revision `at`; return its revision.
        Superseded if a newer publisher is there."""
        self._check(record)
        before, self._own[record.key] = self._own.get(record.key), record
        self._writing.append(record.key)
        try:
            return await self._write(record, at)
        except BaseException as error:
            if before is not None:
                self._own[record.key] = before
            else:
                self.forget([record.key])
            if isinstance(error, CommitRefused):
                raise self._explain(error) from error
            raise
        finally:
            self._writing.remove(record.key)

    async def _write(self, record: OwnRecord, at: int | None) -> int:
        revision, end_s = at or 0, time.monotonic() + self._deadline_s
        while True:
            lease = self._lease
            try:
                return await self._put(record, revision, lease, end_s - time.monotonic())
            except LeaseLost:
                assert lease is not None
                await self._renew(lease)
            except CommitRefused as refused:
                if refused.check.key != record.key or at is not None:
                    raise
                revision = refused.found.revision if refused.found else 0

    async def delete(self, keys: Sequence[str], *, is_published: bool = False) -> None:
        """Delete records. Superseded if a newer publisher is there."""
        self.forget(keys)
        checks = [self.epoch_check()] if is_published else []
        for start in range(0, len(keys), MOST_DELETES):
            deletes = [KeyDelete(key=key) for key in keys[start : start + MOST_DELETES]]
            try:
                await self._rendezvous.commit(*deletes, checks=checks, deadline_s=self._deadline_s)
            except CommitRefused as refused:
                raise self._explain(refused) from refused

    def forget(self, keys: Sequence[str]) -> None:
        """Answer for records no longer."""
        for key in keys:
            self._own.pop(key, None)

    async def _put(
        self, record: OwnRecord, revision: int, lease: Lease | None, left_s: float
    ) -> int:
        checks = [KeyCheck(key=record.key, revision=revision)]
        if record.is_published and record.key != EPOCH:
            checks.append(self.epoch_check())
        assert lease is not None or not record.has_lease, "a record with a lease needs `start`"
        put = KeyPut(key=record.key, value=record.value, lease=lease if record.has_lease else None)
        return await self._rendezvous.commit(put, checks=checks, deadline_s=max(0.0, left_s))

    def _check(self, record: OwnRecord) -> None:
        """Raise what ended a task, or why this process may publish no more."""
        for task in self._tasks:
            if task.done():
                task.result()
        if record.is_published and self._superseded is not None:
            raise self._superseded

    def _explain(self, refused: CommitRefused) -> RankError:
        if refused.check.key != EPOCH or refused.found is None:
            return refused
        if self._superseded is not None:  # which the watch has seen while the commit was under way
            return self._superseded
        if EPOCH not in self._own:
            return refused
        own = from_text(self._own[EPOCH].value, EpochRecord, EPOCH)
        return Superseded(own, from_text(refused.found.value, EpochRecord, EPOCH))

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS)
            lease = self._lease
            assert lease is not None
            try:
                await self._rendezvous.keep_alive(lease, deadline_s=self._lease_s)
                self._alive_s = time.monotonic()
            except LeaseLost:
                with suppress(DeadlineError):  # the next round finds it lost again
                    await self._renew(lease)
            except DeadlineError:
                continue  # the lease may be alive still

    async def _renew(self, lost: Lease) -> None:
        """Take a new lease in place of one that has ended, and write its records again."""
        async with self._renewing:
            if self._lease is not lost:
                return
            seconds = time.monotonic() - self._alive_s
            lease = await self._rendezvous.grant(self._lease_s, deadline_s=self._deadline_s)
            self._lease, self._alive_s = lease, time.monotonic()
            self._emit("rendezvous.lease_lost", member=self._name, seconds=seconds)
        await self._compare(rewound=False, reason="the lease had ended")

    async def _keep_records(self, after: int) -> None:
        """Look whether this process's records are still there, whenever one has changed."""
        while True:
            watched = self._rendezvous.watch(STATE, after=after, deadline_s=self._deadline_s)
            try:
                async with aclosing(watched) as all_changes:
                    async for changes in all_changes:
                        after = changes.revision
                        if any(change.key in self._own for change in changes.changes):
                            await self._compare(rewound=False, reason="others changed them")
            except HistoryLost as lost:
                after = await self._come_back(lost)
            except DeadlineError:
                await asyncio.sleep(PAUSE_S)

    async def _come_back(self, lost: HistoryLost) -> int:
        while True:
            try:
                return await self._compare(rewound=lost.went_back, reason=lost.reason)
            except DeadlineError:
                await asyncio.sleep(PAUSE_S)

    async def _compare_again(self) -> None:
        """Look at what a comparison left out, once its commit has ended."""
        while True:
            await self._passed_over.wait()
            if self._writing:
                await asyncio.sleep(PAUSE_S)
                continue
            self._passed_over.clear()
            try:
                await self._compare(rewound=False, reason="others changed them")
            except DeadlineError:
                self._passed_over.set()
                await asyncio.sleep(PAUSE_S)

    async def _compare(self, *, rewound: bool, reason: str) -> int:
        """Write again what is missing or older; return a revision to watch from. Whether a record
        whose commit is under way takes its place is for that commit to say."""
        assert self._lease is not None
        listing = await self._rendezvous.list(STATE, deadline_s=self._deadline_s)
        entries = {entry.key: entry for entry in listing.entries}
        if rewound:
            pieces = await self._rendezvous.list(PIECES, deadline_s=self._deadline_s)
            entries |= {entry.key: entry for entry in pieces.entries}
        own = {key: at for key, at in self._own.items() if rewound or key.startswith(STATE)}
        for key in own.keys() & set(self._writing):
            del own[key]
            self._passed_over.set()
        plan = plan_rewrites(
            own, entries, process=self.process, lease_id=self._lease.id, rewound=rewound
        )
        self._note(plan)
        count = 0
        for record, check in plan.writes:
            count += await self._write_again(record, check)
        if count:
            self._emit("rendezvous.rewritten", count=count, reason=reason)
        return listing.revision

    async def _write_again(self, record: OwnRecord, check: KeyCheck) -> bool:
        if self._own.get(record.key) != record:
            return False  # written anew meanwhile
        assert check.revision is not None
        try:
            await self._put(record, check.revision, self._lease, self._deadline_s)
        except (CommitRefused, LeaseLost):
            return False  # changed again, which is seen; or the lease, which its task sees
        return True

    def _note(self, plan: RewritePlan) -> None:
        """Answer no longer for what others have now."""
        if plan.superseded_by is not None:
            own = from_text(self._own[EPOCH].value, EpochRecord, EPOCH)
            newer = plan.superseded_by
            self._emit("rendezvous.superseded", epoch=newer.epoch, publisher=newer.publisher)
            self.forget([key for key, record in self._own.items() if record.is_published])
            self._superseded = Superseded(own, newer)
        if plan.replaced:
            self._emit("rendezvous.replaced", member=self._name, keys=list(plan.replaced))
            self.forget(plan.replaced)
