"""Shared memory: parts in files that processes of one host map. In: a run, an owner, a folder in a
tmpfs. Out: a PartStore of two slots.

A slot is locked while its owner lives. A file has its header and its lock before it has its name.
So an unlocked slot of this user is one whose owner died. It stays readable until its run continues,
or another run begins.
"""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from gyre.core.errors import InputError, MemoryBudgetError, SnapshotError, is_disk_full
from gyre.core.events import Emit
from gyre.core.files import try_lock
from gyre.core.offers import RegisteredPart
from gyre.weights.transports.addresses import SHARED_MEMORY, SHM, TCP, PartAddress, host_id
from gyre.weights.transports.contracts import OpenSlot
from gyre.weights.transports.mapped import MappedFile
from gyre.weights.transports.slot_header import (
    AGAIN,
    HEADER_BYTES,
    RUN_ID,
    SlotHeader,
    name_parts,
    pack,
    slot_name,
    still_whole,
    unpack,
)
from gyre.weights.transports.slots import READ_FLAGS

SLOTS = 2
CONTROL_GROUP = Path("/sys/fs/cgroup")


class _OwnedSlot:
    """One file that this process owns, mapped."""

    def __init__(self, handle: int, header: SlotHeader, capacity_bytes: int, *, pin: bool) -> None:
        self.handle = handle
        self.header = header
        self._mapped = MappedFile(handle, HEADER_BYTES + capacity_bytes, writable=True, pin=pin)
        self.bytes_N = self._mapped.bytes_N[HEADER_BYTES:]
        self.is_populated = self._mapped.is_populated
        self._is_open = True

    def put(self, header: SlotHeader) -> None:
        os.pwrite(self.handle, pack(header), 0)
        self.header = header

    def check(self, name: str, whole: SlotHeader) -> None:
        """Raise SnapshotError unless the file has this header, and all its room."""
        if not self._is_open:
            raise SnapshotError(f"{name} was closed by its publisher", hint=AGAIN)
        # bytes past the end of a file that was cut would end this process (SIGBUS)
        try:
            room = os.fstat(self.handle).st_size - HEADER_BYTES
            head = os.pread(self.handle, HEADER_BYTES, 0)
        except OSError as error:
            raise SnapshotError(f"{name} cannot be read: {error}", hint=AGAIN) from error
        if room < whole.size_bytes:
            raise SnapshotError(f"{name} was cut to {room} bytes", hint=AGAIN)
        still_whole(head, name, whole)

    def close(self) -> None:
        self._is_open = False
        self.bytes_N = self.bytes_N[:0].clone()
        self._mapped.close()
        os.close(self.handle)  # and its lock


class SharedMemoryStore:
    """A PartStore of two files. Opening one removes what dead processes of this user have left, and
    reuses the slots of its own run."""

    def __init__(
        self,
        *,
        run_id: str,
        owner: int,
        emit: Emit,
        folder: Path = SHARED_MEMORY,
        served_at: tuple[str, ...] = (),
        pin: bool = False,
        group: Path = CONTROL_GROUP,
    ) -> None:
        """`served_at`: "host:port" of servers that give others the same bytes."""
        assert RUN_ID.fullmatch(run_id), f"a run's id is letters and digits, got {run_id!r}"
        self._run_id = run_id
        self._owner = owner
        self._folder = folder
        self._group = group
        self._written = 0  # versions
        self._served_at = served_at
        self._pin = pin
        self._emit = emit
        self._host = host_id(folder)
        self._slots: list[_OwnedSlot] = []
        remove_leftovers(folder, keep_run=run_id, emit=emit)

    @contextmanager
    def writing(self, *, epoch: int, version: int, size_bytes: int) -> Iterator[OpenSlot]:
        """Give the slot that has not the newest version; register it at the end of the block."""
        for number, slot in enumerate(self._slots):
            if not self._is_intact(number, slot):
                self._replace(number, slot)
        if not self._slots or len(self._slots[0].bytes_N) < size_bytes:
            self._take_room(size_bytes)
        number = self._oldest()
        slot = self._slots[number]
        begun = SlotHeader(
            run_id=self._run_id,
            owner=self._owner,
            sequence=(slot.header.sequence + 1) | 1,
            epoch=epoch,
            version=version,
            size_bytes=size_bytes,
        )
        slot.put(begun)
        part = RegisteredPart(addresses=self._addresses(number), size_bytes=size_bytes)
        whole = replace(begun, sequence=begun.sequence + 1)
        check = partial(slot.check, self._path(number).name, whole)
        yield OpenSlot(part=part, bytes_N=slot.bytes_N[:size_bytes], check=check)
        slot.put(whole)
        self._written += 1
        if self._written == SLOTS:
            # every rank of this attempt has registered: those of an older one are past their time
            remove_leftovers(self._folder, keep_run=None, emit=self._emit)

    def close(self) -> None:
        """Remove the files. Readers that have mapped them keep the memory."""
        for number, slot in enumerate(self._slots):
            self._remove(number, slot)
        self._slots = []

    def _remove(self, number: int, slot: _OwnedSlot) -> None:
        path = self._path(number)
        if _is_same(path, os.fstat(slot.handle)):  # an operator may have removed it
            path.unlink()
        slot.close()

    def _is_intact(self, number: int, slot: _OwnedSlot) -> bool:
        """Return whether a slot has its name and its room: writing past the end of a file that was
        cut would end this process (SIGBUS)."""
        found = os.fstat(slot.handle)
        has_room = found.st_size == HEADER_BYTES + len(slot.bytes_N)
        return has_room and _is_same(self._path(number), found)

    def _replace(self, number: int, slot: _OwnedSlot) -> None:
        """Make a slot anew; the other one keeps its version."""
        path = self._path(number)
        self._emit("weights.slot_replaced", name=path.name)
        if _is_same(path, os.fstat(slot.handle)):
            path.unlink()
        self._check_room([number], len(slot.bytes_N))
        self._slots[number] = self._take_slot(number, len(slot.bytes_N))
        slot.close()

    def _path(self, number: int) -> Path:
        return self._folder / slot_name(self._run_id, self._owner, number)

    def _oldest(self) -> int:
        def age(number: int) -> tuple[bool, int, int, int]:
            header = self._slots[number].header
            return header.is_whole, header.epoch, header.version, header.sequence

        return min(range(SLOTS), key=age)

    def _addresses(self, number: int) -> tuple[str, ...]:
        name = slot_name(self._run_id, self._owner, number)
        places = [(SHM, self._host), *((TCP, place) for place in self._served_at)]
        return tuple(
            str(PartAddress(scheme=scheme, place=place, name=name)) for scheme, place in places
        )

    def _take_room(self, size_bytes: int) -> None:
        """Take both slots: a second version that found no room would come too late. Their pages
        come side by side, since the first version waits for them."""
        self.close()
        self._check_room(range(SLOTS), size_bytes)
        device = torch.cuda.current_device() if self._pin else None

        def take(number: int) -> _OwnedSlot:
            if device is not None:
                torch.cuda.set_device(device)  # a thread begins on the first one
            return self._take_slot(number, size_bytes)

        calls: list[Future[_OwnedSlot]] = []
        try:
            with ThreadPoolExecutor(SLOTS, thread_name_prefix="take-slot") as taking:
                calls += [taking.submit(take, number) for number in range(SLOTS)]
            self._slots = [call.result() for call in calls]
        except BaseException:
            for number, call in enumerate(calls):
                if call.done() and call.exception() is None:
                    self._remove(number, call.result())
            raise
        if not all(slot.is_populated for slot in self._slots):
            self._emit("weights.populate_unsupported", kernel=platform.release())

    def _take_slot(self, number: int, size_bytes: int) -> _OwnedSlot:
        """Go on with a slot of this run whose owner died, or make one."""
        path = self._path(number)
        handle = _lock_dead(path)
        if handle is not None:
            try:
                header = _own_header(handle, path)
                if header is None:
                    raise InputError(
                        f"{path} has the name of a slot of this run, and another content",
                        hint="remove the file, or give this run an id of its own",
                    )
                if os.fstat(handle).st_size == HEADER_BYTES + size_bytes:
                    return self._take_over(handle, header, size_bytes)
                path.unlink()
            finally:
                os.close(handle)
        empty = SlotHeader(run_id=self._run_id, owner=self._owner)
        handle = os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            assert try_lock(handle), "a file without a name was locked"
            self._allocate(handle, HEADER_BYTES + size_bytes, empty)
            self._name(handle, path)
            return _OwnedSlot(handle, empty, size_bytes, pin=self._pin)
        except BaseException:
            if _is_same(path, os.fstat(handle)):
                path.unlink()
            os.close(handle)
            raise

    def _take_over(self, handle: int, header: SlotHeader, size_bytes: int) -> _OwnedSlot:
        """Go on with a dead owner's file, which may not have had all of its pages yet."""
        kept = os.dup(handle)
        try:
            self._allocate(kept, HEADER_BYTES + size_bytes, header)
            return _OwnedSlot(kept, header, size_bytes, pin=self._pin)
        except BaseException:
            os.close(kept)
            raise

    def _check_room(self, numbers: Iterable[int], size_bytes: int) -> None:
        """Raise MemoryBudgetError unless container and folder have room for these slots beside the
        pages that are there, which they replace or go on with. Other ranks may take theirs
        meanwhile."""
        needed = 0
        for number in numbers:
            path = self._path(number)
            there = path.stat(follow_symlinks=False).st_blocks * 512 if path.exists() else 0
            needed += max(0, HEADER_BYTES + size_bytes - there)
        room = group_room(self._group)
        if room is not None and room < needed:
            raise MemoryBudgetError(
                f"this container has {room} of {needed} bytes left that slots of this rank's "
                f"weights need; a rank has {SLOTS} slots, and shared memory counts as the "
                "container's",
                hint="raise the memory limit of the container that publishes",
            )
        free_bytes = _free_bytes(self._folder)
        if free_bytes is not None and free_bytes < needed:
            raise self._is_full(free_bytes, needed)

    def _allocate(self, handle: int, size_bytes: int, header: SlotHeader) -> None:
        """Take the file's pages, without which a full file system is a SIGBUS at the first byte
        that has none, and write the header. Pages of a page-locked file are taken where it is
        mapped, which is faster."""
        try:
            if self._pin:
                os.ftruncate(handle, size_bytes)
            else:
                os.posix_fallocate(handle, 0, size_bytes)
            os.pwrite(handle, pack(header), 0)
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise self._is_full(_free_bytes(self._folder) or 0, size_bytes) from error

    def _is_full(self, free_bytes: int, needed: int) -> MemoryBudgetError:
        return MemoryBudgetError(
            f"{self._folder} has {free_bytes} of {needed} bytes free that slots of this rank's "
            f"weights need; a rank has {SLOTS} slots",
            hint=f"make it larger (mount -o remount,size=… {self._folder}, docker run "
            "--shm-size, or in a pod an emptyDir of medium Memory), or remove files from it",
        )

    def _name(self, handle: int, path: Path) -> None:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # a folder's handle makes it linkat, which follows the link to the open file
            os.link(f"/proc/self/fd/{handle}", path.name, dst_dir_fd=folder, follow_symlinks=True)
        except FileExistsError as error:
            raise InputError(
                f"{path} belongs to a process that lives: another trainer publishes the same run "
                "here",
                hint="end the other one first, or give this run an id of its own",
            ) from error
        finally:
            os.close(folder)


def _free_bytes(folder: Path) -> int | None:
    """Return the free bytes of a file system; None for a tmpfs without a limit."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def group_room(group: Path) -> int | None:
    """Return the bytes that a container may take yet; None without a limit. The system would end
    a process that takes more."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        found = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or the word "max"
        return None
    cache = int(found.get("inactive_file", 0)) + int(found.get("active_file", 0))
    return limit - used + cache


def remove_leftovers(folder: Path, *, keep_run: str | None, emit: Emit) -> None:
    """Remove slots of this user whose owners are dead, but for those of the run that continues."""
    count = size_bytes = 0
    for path in sorted(folder.glob("gyre-*")):
        named = name_parts(path.name)
        if named is None or named[0] == keep_run or (handle := _lock_dead(path)) is None:
            continue
        try:
            if _own_header(handle, path) is not None:
                count, size_bytes = count + 1, size_bytes + os.fstat(handle).st_size
                path.unlink()
        finally:
            os.close(handle)
    if count:
        emit("weights.leftovers_removed", count=count, size_bytes=size_bytes, folder=str(folder))


def _own_header(handle: int, path: Path) -> SlotHeader | None:
    """Return the header of a slot, or None for a file that has only the name of one."""
    header, named = unpack(os.pread(handle, HEADER_BYTES, 0)), name_parts(path.name)
    if header is None or named is None or (header.run_id, header.owner) != named[:2]:
        return None
    return header


def _is_same(path: Path, found: os.stat_result) -> bool:
    """Return whether the name is that file's still."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), found)
    except FileNotFoundError:
        return False


def _lock_dead(path: Path) -> int | None:
    """Return a locked handle of a regular file of this user that no process has locked, or None."""
    try:
        handle = os.open(path, os.O_RDWR | READ_FLAGS)
    except OSError:  # another user's, gone, a link
        return None
    found = os.fstat(handle)
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    if not is_ours or not try_lock(handle):
        os.close(handle)
        return None
    if _is_same(path, found):
        return handle
    os.close(handle)  # another process was faster
    return None
