"""Pod metadata: what the processes of a run write at its rendezvous. In: the config's
`[cluster.rendezvous]`, a run, this process. Out: the records of the driver and of a sidecar.

No call here holds weights up. Where the rendezvous can't be reached in time, the run continues
with what its processes know from each other, and an event counts it. A newer publisher ends the
run.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from torch.distributed import PrefixStore, TCPStore

from gyre.core.errors import DeadlineError, InputError, RankError
from gyre.core.events import Emit
from gyre.core.offers import Offer
from gyre.distributed.config import RendezvousConfig
from gyre.distributed.rendezvous.contract import Rendezvous
from gyre.distributed.rendezvous.metadata_store import MetadataStore
from gyre.distributed.rendezvous.tcp_store import StoreRendezvous

PAUSE_S = 0.2  # before an operation that another process runs is tried again


def open_rendezvous(
    config: RendezvousConfig, *, run_id: str, store_host: str, store_port: int, emit: Emit
) -> Rendezvous:
    """Connect to the run's keys: at etcd, or in the driver's TCPStore. The store has none of an
    earlier attempt; etcd has."""
    if config.kind == "etcd":
        # here, since its HTTP client comes with the extra `pod`
        from gyre.distributed.rendezvous.etcd import EtcdRendezvous
        from gyre.distributed.rendezvous.etcd_gateway import EtcdGateway, TlsFiles

        tls = TlsFiles(ca=config.ca_file, cert=config.cert_file, key=config.key_file)
        gateway = EtcdGateway(config.endpoints, emit=emit, tls=tls)
        return EtcdRendezvous(gateway, prefix=f"/gyre/{run_id}/", emit=emit)
    store = TCPStore(
        store_host,
        store_port,
        is_master=False,
        timeout=timedelta(seconds=config.deadline_s),
        use_libuv=True,
    )
    return StoreRendezvous(PrefixStore(f"gyre/{run_id}/pod", store), emit=emit)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNote:
    """What a process writes, once it can."""

    what: str
    write: Callable[[], Awaitable[None]]


class PodMetadata:
    """One process's records, written in order by a task of its own."""

    def __init__(
        self, rendezvous: Rendezvous, *, name: str, role: str, config: RendezvousConfig, emit: Emit
    ) -> None:
        self._rendezvous = rendezvous
        self._role = role
        self._emit = emit
        self._store = MetadataStore(
            rendezvous,
            name=name,
            emit=emit,
            lease_s=config.lease_s,
            deadline_s=config.deadline_s,
        )
        self._deadline_s = config.deadline_s
        self._notes: asyncio.Queue[PodNote] = asyncio.Queue(maxsize=64)
        self._writer: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Become a member of the pod. DeadlineError where nothing answers."""
        await self._store.join(self._role, f"{socket.gethostname()}, pid {os.getpid()}")
        self._writer = asyncio.create_task(self._write())

    async def leave(self) -> None:
        """Write what waits, take the records away and disconnect."""
        writer, self._writer = self._writer, None
        if writer is not None:
            await self._try(asyncio.wait_for(self._notes.join(), self._deadline_s), "leave")
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await self._try(self._store.leave(), "leave")
        await self._rendezvous.close()

    # of a publisher: `loop.ports.VersionLog`

    async def offered(self, offer: Offer) -> None:
        """Record an offer, for operators and tests. Superseded where a newer attempt at the run
        publishes."""
        await self._try(self._publish(offer), f"offer of version {offer.version}")

    async def committed(self, offer: Offer) -> None:
        epoch, version = offer.manifest.epoch, offer.version
        await self._try(self._commit(epoch, version), f"commit of version {version}")

    async def _publish(self, offer: Offer) -> None:
        epoch = offer.manifest.epoch
        # each time, so that an older publisher learns of a newer one that is still at work
        await self._store.claim_epoch(epoch)
        await self._begin_update(epoch, offer.version)
        await self._store.publish_offer(offer)

    async def _begin_update(self, epoch: int, version: int) -> None:
        """Say that an update is under way. What a dead process was at ends with its lease."""
        await self._store.finish_operation()  # of an update that failed
        end_s = time.monotonic() + self._deadline_s
        while True:
            try:
                await self._store.begin_operation("update", epoch=epoch, version=version)
                return
            except InputError as error:
                if time.monotonic() > end_s:
                    raise DeadlineError(error.message, hint=error.hint) from error
            await asyncio.sleep(PAUSE_S)

    async def _commit(self, epoch: int, version: int) -> None:
        await self._store.note_committed(epoch, version)
        await self._store.finish_operation()

    # notes, written as soon as the rendezvous takes them

    def note_serving(self, epoch: int, version: int) -> None:
        """Say which version this engine serves."""
        write = partial(self._store.note_receiver, epoch, version, "committed")
        self._note(f"version {version} of a receiver", write)

    def note_joined(self, member: str, place: str) -> None:
        """Say that a member of another host is there, which has no way to the rendezvous."""
        self._note(f"{member} joined", partial(self._store.add_member, member, "member", place))

    def note_left(self, member: str) -> None:
        self._note(f"{member} left", partial(self._store.remove_member, member))

    def _note(self, what: str, write: Callable[[], Awaitable[None]]) -> None:
        try:
            self._notes.put_nowait(PodNote(what=what, write=write))
        except asyncio.QueueFull:
            self._emit("drop.rendezvous_notes", count=1)

    async def _write(self) -> None:
        while True:
            note = await self._notes.get()
            try:
                await self._try(note.write(), note.what)
            except RankError as error:  # its record is another process's now
                self._emit("rendezvous.not_told", what=note.what, reason=str(error))
            finally:
                self._notes.task_done()

    async def _try(self, call: Awaitable[None], what: str) -> None:
        try:
            await call
        except (DeadlineError, TimeoutError) as error:
            self._emit("rendezvous.not_told", what=what, reason=str(error))
