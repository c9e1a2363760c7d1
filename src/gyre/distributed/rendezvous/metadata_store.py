"""Metadata store: what a pod knows of itself. In: a rendezvous, this process's name. Out: the
offered version, who is there, who has which version, what is under way.

Runs write records and read the epoch, which is the fence. What reads offers, members, receivers or
versions, and `withdraw_offer`, is for operators' scripts and tests. Engines hear of a version from
the driver.

Publishing is fenced by the run's epoch: the commit of an older attempt is refused with Superseded.
Reading is too: an offer that is older than one that this process has seen is not returned, though
the store may have gone back to it. No call holds weights up: the last version serves on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gyre.core.errors import DeadlineError, InputError
from gyre.core.events import Emit
from gyre.core.offers import Offer
from gyre.distributed.rendezvous.contract import (
    CommitRefused,
    HistoryLost,
    KeyListing,
    Rendezvous,
)
from gyre.distributed.rendezvous.pod_records import (
    EPOCH,
    MEMBERS,
    OFFERS,
    OPERATION,
    PIECES,
    RECEIVERS,
    VERSIONS,
    EpochRecord,
    MemberRecord,
    OfferRecord,
    OperationKind,
    OperationRecord,
    OwnRecord,
    ReceiverRecord,
    ReceptionState,
    Superseded,
    VersionRecord,
    VersionState,
    decode_offer,
    encode_offer,
    find_newer,
    find_old,
    from_text,
    keys_of_pieces,
    order_of,
    path_of,
    to_text,
)
from gyre.distributed.rendezvous.record_keeper import RecordKeeper

KEPT_OFFERS = 2  # the newest, and the one that receivers may still be reading
KEPT_VERSIONS = 32
PAUSE_S = 0.05  # before the pieces of an offer are read again


class MetadataStore:
    """One process's view of its pod, and its own records there. Between `join` and `leave` they are
    written again when the rendezvous has lost them."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        name: str,
        emit: Emit,
        lease_s: float = 10.0,
        deadline_s: float = 60.0,
    ) -> None:
        assert name and "/" not in name, name
        self.name = name
        self._rendezvous = rendezvous
        self._emit = emit
        self._deadline_s = deadline_s
        self._keeper = RecordKeeper(
            rendezvous, name=name, emit=emit, lease_s=lease_s, deadline_s=deadline_s
        )
        self._seen = (0, 0)  # epoch and version of the newest offer that this process knows

    async def join(self, role: str, place: str) -> None:
        """Become a member, until `leave` or until this process shows no sign of life."""
        await self._keeper.start()
        member = MemberRecord(name=self.name, role=role, place=place, process=self._keeper.process)
        await self._write_leased(MEMBERS + self.name, member)

    async def leave(self) -> None:
        """Take this process's records away."""
        await self._keeper.stop()

    async def add_member(self, name: str, role: str, place: str) -> None:
        """Say that a process is there which does not reach the rendezvous itself. It is for as long
        as this process's lease, or until `remove_member`."""
        member = MemberRecord(name=name, role=role, place=place, process=self._keeper.process)
        await self._write_leased(MEMBERS + name, member)

    async def remove_member(self, name: str) -> None:
        await self._keeper.delete([MEMBERS + name])

    async def members(self) -> dict[str, MemberRecord]:
        return read_members(await self._list(MEMBERS))

    async def watch_members(self) -> AsyncGenerator[dict[str, MemberRecord], None]:
        """Yield who is there, at once and after each change. Close it with contextlib.aclosing."""
        async with aclosing(self._follow(MEMBERS)) as listings:
            async for listing in listings:
                yield read_members(listing)

    async def claim_epoch(self, epoch: int) -> None:
        """Become the publisher of an epoch; every older one is refused from now on. Superseded if
        there is a newer one, or another of the same epoch."""
        own = EpochRecord(epoch=epoch, publisher=self.name, process=self._keeper.process)
        record = OwnRecord(key=EPOCH, value=to_text(own), is_published=True)
        end_s = time.monotonic() + self._deadline_s
        while True:
            left_s = max(0.0, end_s - time.monotonic())
            found = await self._rendezvous.get(EPOCH, deadline_s=left_s)
            if newer := find_newer(own, found):
                raise Superseded(own, newer)
            try:
                await self._keeper.write(record, at=found.revision if found else 0)
            except CommitRefused:
                continue  # another has claimed meanwhile
            return await self._delete_orphans()

    async def publish_offer(self, offer: Offer) -> None:
        """Record an offer. What it replaces is deleted, but for the last one."""
        order = (offer.manifest.epoch, offer.manifest.version)
        for key, text in encode_offer(offer).items():
            await self._keeper.write(OwnRecord(key=key, value=text, is_published=True))
        await self._note_version(*order, "registered")
        self._seen = max(self._seen, order)
        await self._delete_old(order)

    async def withdraw_offer(self, epoch: int, version: int) -> None:
        """Offer a version no longer: its owners are about to overwrite it."""
        key = path_of(OFFERS, epoch, version)
        entry = await self._rendezvous.get(key, deadline_s=self._deadline_s)
        if entry is not None:
            record = from_text(entry.value, OfferRecord, key)
            await self._keeper.delete([key, *keys_of_pieces(record)], is_published=True)

    async def note_committed(self, epoch: int, version: int) -> None:
        """Say that every receiver serves a version."""
        await self._note_version(epoch, version, "committed")

    async def versions(self) -> tuple[VersionRecord, ...]:
        """Return the last versions, the newest at the end."""
        entries = (await self._list(VERSIONS)).entries
        return tuple(from_text(at.value, VersionRecord, at.key) for at in entries)

    async def latest_offer(self) -> Offer | None:
        """Return the newest offer, or None before the first. One older than this process has seen
        is not returned (`rendezvous.stale_offer`)."""
        end_s = time.monotonic() + self._deadline_s
        while (left_s := end_s - time.monotonic()) > 0:
            listing = await self._rendezvous.list(OFFERS, deadline_s=left_s)
            if not listing.entries:
                return None
            newest = max(listing.entries, key=lambda entry: order_of(entry.key, OFFERS))
            record = from_text(newest.value, OfferRecord, newest.key)
            if record.order < self._seen:
                self._emit("rendezvous.stale_offer", epoch=record.epoch, version=record.version)
                return None
            below = path_of(PIECES, *record.order) + "/"
            pieces = (await self._rendezvous.list(below, deadline_s=left_s)).entries
            if offer := decode_offer(record, pieces):
                self._seen = record.order
                return offer
            await asyncio.sleep(PAUSE_S)  # a newer one has replaced it, or its publisher is back
        raise DeadlineError(
            f"the pieces of the newest offer were not whole within {self._deadline_s:g} s",
            hint="versions follow each other faster than they can be read",
        )

    async def wait_offer(self, *, after: tuple[int, int], deadline_s: float) -> Offer:
        """Wait for an offer newer than an epoch and version."""
        try:
            async with asyncio.timeout(deadline_s), aclosing(self._follow(OFFERS)) as listings:
                async for listing in listings:
                    orders = [order_of(entry.key, OFFERS) for entry in listing.entries]
                    if max(orders, default=(0, 0)) > after and (offer := await self.latest_offer()):
                        return offer
        except TimeoutError:
            pass
        raise DeadlineError(
            f"no version after {after[1]} of epoch {after[0]} was offered within {deadline_s:g} s",
            hint="see whether the trainer is at work; the last version serves on",
        )

    async def note_receiver(self, epoch: int, version: int, state: ReceptionState) -> None:
        """Say which version this process has, and how far it is with it."""
        record = ReceiverRecord(
            name=self.name,
            epoch=epoch,
            version=version,
            state=state,
            process=self._keeper.process,
        )
        await self._write_leased(RECEIVERS + self.name, record)
        self._seen = max(self._seen, (epoch, version))

    async def receivers(self) -> dict[str, ReceiverRecord]:
        entries = (await self._list(RECEIVERS)).entries
        found = (from_text(at.value, ReceiverRecord, at.key) for at in entries)
        return {record.name: record for record in found}

    async def begin_operation(self, kind: OperationKind, *, epoch: int, version: int) -> int:
        """Say what begins; return the revision since when. InputError names what is under way. It
        ends with `finish_operation`, or with this process's lease."""
        record = OperationRecord(
            kind=kind, by=self.name, epoch=epoch, version=version, process=self._keeper.process
        )
        own = OwnRecord(key=OPERATION, value=to_text(record), has_lease=True)
        try:
            return await self._keeper.write(own, at=0)
        except CommitRefused as refused:
            assert refused.found is not None
            other = from_text(refused.found.value, OperationRecord, OPERATION)
            raise InputError(
                f"'{kind}' cannot begin: '{other.kind}' of version {other.version} by "
                f"'{other.by}' is under way since revision {refused.found.revision}",
                hint="wait until it has ended, or end that process",
            ) from refused

    async def finish_operation(self) -> None:
        """Say that this process's operation has ended. One that its lease has ended is fine."""
        entry = await self._rendezvous.get(OPERATION, deadline_s=self._deadline_s)
        if entry is not None and self._keeper.process in entry.value:
            await self._keeper.delete([OPERATION])
        self._keeper.forget([OPERATION])

    async def operation(self) -> tuple[OperationRecord, int] | None:
        """Return what is under way, and since which revision."""
        entry = await self._rendezvous.get(OPERATION, deadline_s=self._deadline_s)
        if entry is None:
            return None
        return from_text(entry.value, OperationRecord, OPERATION), entry.revision

    async def _write_leased(self, key: str, record: MemberRecord | ReceiverRecord) -> None:
        await self._keeper.write(OwnRecord(key=key, value=to_text(record), has_lease=True))

    async def _note_version(self, epoch: int, version: int, state: VersionState) -> None:
        record = VersionRecord(epoch=epoch, version=version, state=state)
        key = path_of(VERSIONS, epoch, version)
        await self._keeper.write(OwnRecord(key=key, value=to_text(record), is_published=True))

    async def _delete_old(self, newest: tuple[int, int]) -> None:
        """Delete what receivers need no more: records before their pieces."""
        offers = {entry.key: entry for entry in (await self._list(OFFERS)).entries}
        keys = find_old(offers, OFFERS, newest, KEPT_OFFERS)
        records = (from_text(offers[key].value, OfferRecord, key) for key in keys)
        pieces = [key for record in records for key in keys_of_pieces(record)]
        versions = [entry.key for entry in (await self._list(VERSIONS)).entries]
        await self._keeper.delete(keys + pieces, is_published=True)
        await self._keeper.delete(
            find_old(versions, VERSIONS, newest, KEPT_VERSIONS), is_published=True
        )

    async def _delete_orphans(self) -> None:
        """Delete pieces of offers that a publisher did not finish."""
        offered = {order_of(entry.key, OFFERS) for entry in (await self._list(OFFERS)).entries}
        pieces = [entry.key for entry in (await self._list(PIECES)).entries]
        orphans = [key for key in pieces if order_of(key, PIECES) not in offered]
        await self._keeper.delete(orphans, is_published=True)

    async def _list(self, prefix: str) -> KeyListing:
        return await self._rendezvous.list(prefix, deadline_s=self._deadline_s)

    async def _follow(self, prefix: str) -> AsyncGenerator[KeyListing, None]:
        """Yield what is under a prefix, at once and after each change."""
        while True:
            listing = await self._list(prefix)
            yield listing
            watched = self._rendezvous.watch(
                prefix, after=listing.revision, deadline_s=self._deadline_s
            )
            try:
                async with aclosing(watched) as changes:
                    await anext(changes)
            except HistoryLost:
                continue  # what is there now is what counts


def read_members(listing: KeyListing) -> dict[str, MemberRecord]:
    found = (from_text(entry.value, MemberRecord, entry.key) for entry in listing.entries)
    return {member.name: member for member in found}
