"""Faults as they strike: signals to processes, bytes in shared memory, an etcd that goes and comes
back. In: where a run is, a fault. Out: the fault as it struck; what is to be undone, and when."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from chaos_plan import KIND_BY_NAME, PlannedFault, StruckFault
from slow_link import SlowLink

from etcd_process import EtcdProcess
from gyre.distributed.rendezvous.etcd import EtcdRendezvous
from gyre.distributed.rendezvous.etcd_gateway import EtcdGateway
from gyre.distributed.rendezvous.metadata_store import MetadataStore
from gyre.distributed.rendezvous.pod_records import Superseded
from gyre.launch.placement.worker_placement import name_run
from gyre.weights.transports.addresses import SHARED_MEMORY
from gyre.weights.transports.slot_header import HEADER_BYTES, SlotHeader, name_parts, pack, unpack

HOUR_S = 3600.0
SLOWEST_S = 0.4  # that a link waits before each piece
GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)


@dataclass
class Targets:
    """What can be struck in a round."""

    run: Path  # its folder
    points: Path
    etcd: EtcdProcess | None = None
    link: SlowLink | None = None
    pids: dict[str, int] = field(default_factory=dict)  # by worker; "driver" is the command


class ChaosFaults:
    """Strikes the targets of one round, and undoes what it has done when its time is over."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._fill: Path | None = None
        self._stopped: list[int] = []

    def strike(self, fault: PlannedFault, *, row: int, at_pid: int = 0) -> StruckFault | None:
        """Return the fault as it struck, or None while its victim is not there. `at_pid` waits at
        the fault's point."""
        kind = KIND_BY_NAME[fault.kind]
        pid = self._find_pid(fault, at_pid)
        if kind.victim in ("engine", "trainer", "member", "driver") and not pid:
            return None
        if kind.victim == "slot" and self._find_slot(fault.victim) is None:
            return None
        if kind.victim == "etcd" and self._undo:  # it is away, or its link is slow
            return None
        struck = StruckFault(fault=fault, row=row, pid=pid)
        return getattr(self, f"_{kind.action}")(struck) or struck

    def look(self) -> None:
        """Undo what has lasted long enough."""
        for due_s, undo in list(self._undo):
            if time.monotonic() >= due_s:
                self._undo.remove((due_s, undo))
                undo()
        if self._fill is not None:
            take_room(self._fill)

    def note_end(self) -> None:
        """A command has ended. What it could not end since it was stopped ends by itself, once it
        goes on."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped = []
        if self._fill is not None:
            self._fill.unlink()
            self._fill = None

    def undo_all(self) -> None:
        self.note_end()
        for _, undo in self._undo:
            undo()
        self._undo = []

    def _later(self, fault: PlannedFault, undo: Callable[[], None]) -> None:
        self._undo.append((time.monotonic() + fault.lasts_s, undo))

    def _find_pid(self, fault: PlannedFault, at_pid: int) -> int:
        """Return the process to strike, or 0 where it is not there."""
        pids, number = self._targets.pids, fault.victim
        match KIND_BY_NAME[fault.kind].victim:
            case "engine":
                pid = at_pid or pids.get(f"engine-{number}", 0)
            case "trainer":
                pid = (fault.moment == "writing" and at_pid) or pids.get(f"worker-{number}", 0)
            case "member":
                members = [name for name in pids if name.startswith("member-")]
                pid = pids[members[-1]] if members else 0
            case "driver":
                pid = pids.get("driver", 0)
            case _:
                return 0
        with contextlib.suppress(psutil.NoSuchProcess):
            if pid and psutil.Process(pid).status() not in GONE:
                return pid
        return 0

    # processes

    def _kill(self, struck: StruckFault) -> None:
        os.kill(struck.pid, signal.SIGKILL)

    def _stop(self, struck: StruckFault) -> None:
        os.kill(struck.pid, signal.SIGSTOP)
        self._stopped.append(struck.pid)

    # shared memory

    def _find_slot(self, owner: int) -> tuple[Path, SlotHeader] | None:
        """Return the newest slot of a rank."""
        found = []
        for path in SHARED_MEMORY.glob(f"gyre-{name_run(self._targets.run)}-*"):
            with contextlib.suppress(FileNotFoundError):
                named, header = name_parts(path.name), unpack(path.read_bytes()[:HEADER_BYTES])
                if named is not None and named[1] == owner and header is not None:
                    found.append((header.epoch, header.version, path, header))
        if not found:
            return None
        _, _, path, header = max(found, key=lambda item: item[:2])
        return (path, header) if header.version >= 0 else None

    def _tear(self, struck: StruckFault) -> StruckFault:
        return self._rewrite(struck, lambda header: replace(header, sequence=header.sequence + 1))

    def _replace(self, struck: StruckFault) -> StruckFault:
        return self._rewrite(struck, lambda header: replace(header, run_id="0" * 16))

    def _rewrite(
        self, struck: StruckFault, change: Callable[[SlotHeader], SlotHeader]
    ) -> StruckFault:
        path, header = self._slot(struck)
        write_at(path, 0, pack(change(header)))
        return replace(struck, note=path.name)

    def _flip(self, struck: StruckFault) -> StruckFault:
        """Change a byte in the last tenth, which no reader has come to."""
        path, header = self._slot(struck)
        place = HEADER_BYTES + int(header.size_bytes * (0.9 + struck.fault.draw / 10))
        with path.open("rb") as file:
            file.seek(place)
            (byte,) = file.read(1)
        write_at(path, place, bytes([byte ^ 0x40]))
        return replace(struck, note=f"{path.name}, byte {place}")

    def _truncate(self, struck: StruckFault) -> StruckFault:
        path, header = self._slot(struck)
        os.truncate(path, HEADER_BYTES + int(header.size_bytes * struck.fault.draw))
        return replace(struck, note=path.name)

    def _slot(self, struck: StruckFault) -> tuple[Path, SlotHeader]:
        found = self._find_slot(struck.fault.victim)
        assert found is not None
        return found

    def _fill_memory(self, struck: StruckFault) -> StruckFault:
        """Take all room, also what a restart sets free, and let the ranks start again."""
        self._fill = SHARED_MEMORY / "chaos-fill"
        take_room(self._fill)
        pid = self._targets.pids["worker-0"]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return replace(struck, note=f"pid {pid} killed, so that slots are taken again")

    # the rendezvous, the network, the clock

    def _kill_etcd(self, struck: StruckFault) -> None:
        assert self._targets.etcd is not None
        self._targets.etcd.kill()
        self._later(struck.fault, self._targets.etcd.start)

    def _stop_etcd(self, struck: StruckFault) -> None:
        assert self._targets.etcd is not None
        self._targets.etcd.stop()
        self._later(struck.fault, self._targets.etcd.go_on)

    def _age_etcd(self, struck: StruckFault) -> None:
        """Let it come back with the data that it had at the round's begin."""
        etcd = self._targets.etcd
        assert etcd is not None
        etcd.kill()
        etcd.take_data(etcd.folder / "older")
        self._later(struck.fault, etcd.start)

    def _slow(self, struck: StruckFault) -> StruckFault:
        link = self._targets.link
        assert link is not None
        link.delay_s = SLOWEST_S * struck.fault.draw

        def quicken() -> None:
            link.delay_s = 0.0

        self._later(struck.fault, quicken)
        return replace(struck, note=f"{link.delay_s:.3f} s a piece")

    def _publish_older(self, struck: StruckFault) -> StruckFault:
        """Try to become the publisher of an older epoch, as a process of an attempt that is over."""
        assert self._targets.etcd is not None
        try:
            asyncio.run(claim(self._targets.etcd.url, name_run(self._targets.run), epoch=0))
        except Superseded as error:
            return replace(struck, told_here="refused", note=error.message)
        return replace(struck, note="it was not refused")

    def _jump(self, struck: StruckFault) -> StruckFault:
        """Move the wall clock of the run's Python, up to an hour there or back."""
        clock, jump_s = self._targets.points / "clock", HOUR_S * (2 * struck.fault.draw - 1)
        clock.write_text(str(jump_s))
        self._later(struck.fault, clock.unlink)
        return replace(struck, note=f"{jump_s:.0f} s")


def write_at(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


def take_room(path: Path) -> None:
    """Let a file take what is free beside it."""
    room = os.statvfs(path.parent)
    free = room.f_bavail * room.f_frsize
    with path.open("ab") as file, contextlib.suppress(OSError):  # another was faster
        if free:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size + free)


async def claim(url: str, run_id: str, *, epoch: int) -> None:
    quiet: Any = lambda kind, **fields: None  # noqa: E731
    rendezvous = EtcdRendezvous(
        EtcdGateway([url], emit=quiet), prefix=f"/gyre/{run_id}/", emit=quiet
    )
    try:
        store = MetadataStore(rendezvous, name="older", emit=quiet, deadline_s=10.0)
        await store.claim_epoch(epoch)
    finally:
        await rendezvous.close()
