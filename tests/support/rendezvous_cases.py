"""Meetings of processes at a rendezvous of each kind, for tests. In: a kind, a folder. Out: what
connects to a run's keys."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from etcd_process import EtcdProcess
from gyre.distributed.init import hold_store
from gyre.distributed.rendezvous.contract import KeyPut, Lease, LeaseLost
from gyre.distributed.rendezvous.etcd import EtcdRendezvous
from gyre.distributed.rendezvous.etcd_gateway import EtcdGateway
from gyre.distributed.rendezvous.local import LocalRendezvous
from gyre.distributed.rendezvous.tcp_store import StoreRendezvous

KINDS = ("local", "store", "etcd")
SOON_S = 20.0  # a deadline that is not met
LEASE_S = 1.0  # the shortest that etcd grants, for one that is to end
LIVE_S = 2.0  # for one that is seen to last longer than that
LASTING_S = 30.0  # for one that is to last, however busy the machine is
WHOLE_S = 60.0  # for a test
NUMBERS = itertools.count()


@dataclass
class Meeting:
    """One run's keys; `join` is what a further process does. `events` is what all have emitted."""

    connect: Callable[[Callable[..., None]], Any]
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    joined: list[Any] = field(default_factory=list)

    def join(self) -> Any:
        self.joined.append(self.connect(self.emit))
        return self.joined[-1]

    def emit(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    async def wait_event(self, kind: str) -> dict[str, Any]:
        async with asyncio.timeout(SOON_S):
            while kind not in self.kinds():
                await asyncio.sleep(0.02)
        return next(fields for found, fields in self.events if found == kind)


@contextmanager
def meetings(kind: str, folder: Path) -> Iterator[Callable[[], Meeting]]:
    """Give what makes a meeting of a run of its own, at a store that ends with the block."""
    if kind == "local":

        def meet_here() -> Meeting:
            only = LocalRendezvous()
            return Meeting(connect=lambda emit: only)

        yield meet_here
    elif kind == "store":
        held = hold_store()
        yield lambda: meet_at_store(held.port)
    else:
        etcd = EtcdProcess(folder)
        try:
            yield lambda: meet_at_etcd([etcd.url])
        finally:
            etcd.close()


def meet_at_store(port: int) -> Meeting:
    name = f"run-{next(NUMBERS)}"

    def connect(emit: Callable[..., None]) -> StoreRendezvous:
        store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=SOON_S))
        return StoreRendezvous(PrefixStore(name, store), emit=emit)

    return Meeting(connect=connect)


def meet_at_etcd(urls: list[str]) -> Meeting:
    prefix = f"/gyre/run-{next(NUMBERS)}/"

    def connect(emit: Callable[..., None]) -> EtcdRendezvous:
        return EtcdRendezvous(EtcdGateway(urls, emit=emit), prefix=prefix, emit=emit)

    return Meeting(connect=connect)


def go(meeting: Meeting, work: Callable[[Meeting], Awaitable[None]]) -> None:
    """Run a test on an event loop, and close what has joined."""

    async def main() -> None:
        try:
            async with asyncio.timeout(WHOLE_S):
                await work(meeting)
        finally:
            for one in meeting.joined:
                await one.close()

    asyncio.run(main())


async def outlive(lease_s: float, look: Callable[[], Awaitable[bool]]) -> None:
    """Look for longer than a lease, which signs of life keep. Where this machine stood still for so
    long that none could come, the lease may have ended rightly: it is looked at anew."""
    began_s = last_s = time.monotonic()
    while last_s < began_s + 1.2 * lease_s:
        await asyncio.sleep(lease_s / 10)
        is_well, now_s = await look(), time.monotonic()
        if now_s > last_s + lease_s / 2:
            began_s = now_s + lease_s  # by then it is there again
        assert is_well or now_s < began_s
        last_s = now_s


async def keep(one: Any, key: str) -> tuple[Lease, int]:
    """Return a lease that signs of life have kept for longer than its time, and the revision of its
    key; another one where this machine stood still meanwhile."""
    while True:
        lease = await one.grant(LIVE_S, deadline_s=SOON_S)
        last_s = time.monotonic()
        at = await one.commit(KeyPut(key=key, value="here", lease=lease), deadline_s=SOON_S)
        try:
            for _ in range(6):
                await asyncio.sleep(LIVE_S / 5)
                await one.keep_alive(lease, deadline_s=SOON_S)
                last_s = time.monotonic()
            return lease, at
        except LeaseLost:
            if time.monotonic() < last_s + LIVE_S / 2:
                raise
