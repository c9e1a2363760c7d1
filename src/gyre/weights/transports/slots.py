"""Slots: files of parts in shared memory, as their readers see them. In: a slot's name, the version
that is wanted. Out: an open and checked file; a PartReader that copies nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from gyre.core.errors import InputError
from gyre.weights.transports.contracts import LendsNothing
from gyre.weights.transports.mapped import MappedFile
from gyre.weights.transports.part_range import PartRange
from gyre.weights.transports.slot_header import (
    HEADER_BYTES,
    SlotHeader,
    find_version,
    name_parts,
    still_whole,
)

READ_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class SlotFile:
    """An open slot of this user. Its file may be replaced by another; this one stays as it is."""

    def __init__(self, folder: Path, name: str, *, writable: bool = False) -> None:
        """InputError for a file that is not there, or not ours."""
        self.name = name
        assert name_parts(name) is not None, name
        try:
            self.handle = os.open(
                folder / name, (os.O_RDWR if writable else os.O_RDONLY) | READ_FLAGS
            )
        except OSError as error:
            raise InputError(
                f"{folder / name} cannot be opened: {error.strerror}",
                hint="its publisher has ended, or has another user or /dev/shm: register again",
            ) from error
        self.status = os.fstat(self.handle)
        if not stat.S_ISREG(self.status.st_mode) or self.status.st_uid != os.geteuid():
            os.close(self.handle)
            raise InputError(
                f"{folder / name} is of user {self.status.st_uid}, or no file; files of user "
                f"{os.geteuid()} are read",
                hint="run publisher and receiver as one user",
            )

    def find(self, *, epoch: int, version: int, size_bytes: int) -> SlotHeader:
        """Return the header if the file has the version whole. InputError or SnapshotError."""
        # now: bytes past the end of a file that was cut would end this process (SIGBUS)
        room = os.fstat(self.handle).st_size - HEADER_BYTES
        return find_version(
            self.page(), self.name, epoch=epoch, version=version, size_bytes=size_bytes, room=room
        )

    def check(self, before: SlotHeader) -> None:
        """Raise SnapshotError unless nothing was written since `before` was read."""
        still_whole(self.page(), self.name, before)

    def page(self) -> bytes:
        return os.pread(self.handle, HEADER_BYTES, 0)

    def close(self) -> None:
        os.close(self.handle)


class MappedSlot:
    """A slot in this process's address space. Page-locking is slow, so it is kept over versions."""

    def __init__(self, folder: Path, name: str, *, pin: bool) -> None:
        self._folder = folder
        self._name = name
        self._users = 0
        self._is_retired = False
        self.file = SlotFile(folder, name, writable=pin)
        try:
            size_bytes = self.file.status.st_size
            if size_bytes < HEADER_BYTES:
                raise InputError(
                    f"{folder / name} has {size_bytes} bytes, fewer than a header",
                    hint="remove the file if no run is using it, and register the version again",
                )
            self._mapped = MappedFile(self.file.handle, size_bytes, writable=False, pin=pin)
        except BaseException:
            self.file.close()
            raise

    @property
    def is_current(self) -> bool:
        """Return whether the name is still this file's."""
        try:
            now = os.stat(self._folder / self._name, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(now, self.file.status)

    def view(self, start: int, stop: int) -> Tensor:
        return self._mapped.bytes_N[HEADER_BYTES + start : HEADER_BYTES + stop]

    def use(self) -> None:
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        self._close_unused()

    def retire(self) -> None:
        """Close it after its last user."""
        self._is_retired = True
        self._close_unused()

    def _close_unused(self) -> None:
        if self._is_retired and not self._users:
            self._mapped.close()
            self.file.close()


class SharedMemoryPart(LendsNothing):
    """A PartReader over the publisher's own pages."""

    def __init__(self, slot: MappedSlot, *, epoch: int, version: int, size_bytes: int) -> None:
        """InputError for a slot of another version, SnapshotError for one that is not whole."""
        self._slot = slot
        self._header = slot.file.find(epoch=epoch, version=version, size_bytes=size_bytes)
        slot.use()

    def view(self, start: int, stop: int) -> Tensor:
        return self._slot.view(start, stop)

    def read(
        self,
        stretches: Sequence[PartRange],
        out_N: Tensor,
        *,
        next_stretches: Sequence[PartRange] = (),
    ) -> None:
        for one in stretches:
            one.of_bucket(out_N).copy_(one.of_part(self.view(one.start, one.stop)))
        self.check()

    def check(self) -> None:
        self._slot.file.check(self._header)

    def close(self) -> None:
        self._slot.release()
