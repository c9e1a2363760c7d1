"""State file: the flat buffers of a rank's optimizer state in one file. In: names and items of the
buffers, a folder. Out: reads and writes of ranges by system calls, and the buffers mapped as
tensors.

The file's space is reserved at creation, so a full disk fails before training starts. Reads and
writes go through the page cache, which is coherent with the mapping. `flush` reports deferred write
errors, and must return before written data is read again. A lock marks a live owner; an unlocked
file is a leftover.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gyre.core.errors import InputError, MemoryBudgetError, SnapshotError, is_disk_full
from gyre.core.events import Emit
from gyre.core.files import try_lock
from gyre.core.rounding import round_up

SUFFIX = ".offload"
PAGE_BYTES = mmap.PAGESIZE
# longest that another rank looks whether a file is a leftover; between two tries
LOOK_S, POLL_S = 2.0, 0.01


class StateFile:
    """`<folder>/<name>.offload`, open and locked until `close`, which removes it."""

    def __init__(
        self, folder: Path, name: str, kinds: Mapping[str, tuple[int, torch.dtype]], emit: Emit
    ) -> None:
        """Create the file. `kinds`: items and dtype of each buffer. Raises MemoryBudgetError if the
        disk lacks space."""
        self.path = folder / f"{name}{SUFFIX}"
        self._starts: dict[str, int] = {}
        self._spaces = {  # at least a page: an empty buffer cannot be mapped
            key: round_up(max(1, size * dtype.itemsize), PAGE_BYTES)
            for key, (size, dtype) in kinds.items()
        }
        self.size_bytes = 0
        for key, space in self._spaces.items():
            self._starts[key] = self.size_bytes
            self.size_bytes += space
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder, emit)
            self._handle = _open_locked(self.path)
            # at the end of the process at last
            self._remove = weakref.finalize(self, _remove, self.path, self._handle)
        except OSError as error:
            raise InputError(
                f"{self.path} for offloaded optimizer state cannot be made: "
                f"{error.strerror or error}",
                hint="point memory.disk_folder at a folder that can be written",
            ) from error
        assert self.size_bytes, name
        try:
            os.posix_fallocate(self._handle, 0, self.size_bytes)
            self._pages: mmap.mmap | None = mmap.mmap(self._handle, self.size_bytes)
        except OSError as error:
            self._remove()
            raise _no_room(self.path, self.size_bytes, error) from error
        self.buffers = {key: self._map(start, *kinds[key]) for key, start in self._starts.items()}

    def bytes_of(self, name: str) -> int:
        """Return the size of one buffer in the file, including page padding; 0 for an unknown
        buffer."""
        return self._spaces.get(name, 0)

    def is_whole(self) -> bool:
        """Return whether the file exists at its full length."""
        return self.path.exists() and self.path.stat().st_size == self.size_bytes

    def check(self) -> None:
        """Raise SnapshotError unless the file has its original length: accessing mapped pages
        beyond its end would crash."""
        got = os.fstat(self._handle).st_size
        if got < self.size_bytes:
            raise self._cannot_read(f"it has {got} bytes and was made with {self.size_bytes}")

    def read(self, name: str, first: int, target_N: Tensor) -> None:
        """Read items of a buffer from `first` into contiguous host memory. SnapshotError names the
        file."""
        left, at = _raw(target_N), self._starts[name] + first * target_N.element_size()
        try:
            while left:
                count = os.preadv(self._handle, [left], at)
                if not count:
                    raise self._cannot_read(f"it ended at byte {at}, {len(left)} bytes early")
                left, at = left[count:], at + count
        except OSError as error:
            raise self._cannot_read(error.strerror or str(error)) from error

    def write(self, name: str, first: int, source_N: Tensor) -> None:
        """Write contiguous host memory to the items of a buffer from `first`. MemoryBudgetError
        names the file."""
        left, at = _raw(source_N), self._starts[name] + first * source_N.element_size()
        try:
            while left:
                count = os.pwritev(self._handle, [left], at)
                left, at = left[count:], at + count
        except OSError as error:
            raise self._cannot_write(error) from error

    def flush(self) -> None:
        """Block until the disk has all writes. MemoryBudgetError names the file."""
        try:
            os.fdatasync(self._handle)
        except OSError as error:
            raise self._cannot_write(error) from error

    def close(self) -> None:
        """Remove the file. The mapped pages are freed with the tensors."""
        self.buffers = {}
        self._pages = None
        self._remove()

    def _map(self, start: int, size: int, dtype: torch.dtype) -> Tensor:
        assert self._pages is not None
        return torch.frombuffer(self._pages, dtype=dtype, count=max(1, size), offset=start)[:size]

    def _cannot_read(self, why: str) -> SnapshotError:
        return SnapshotError(
            f"offloaded optimizer state in {self.path} cannot be read: {why}",
            hint="check the disk under memory.disk_folder, then resume the run from its last "
            "snapshot",
        )

    def _cannot_write(self, error: OSError) -> MemoryBudgetError:
        return MemoryBudgetError(
            f"offloaded optimizer state could not be written to {self.path}: "
            f"{error.strerror or error}",
            hint="check the disk under memory.disk_folder, then resume the run from its last "
            "snapshot",
        )


def remove_leftovers(folder: Path, emit: Emit) -> None:
    """Remove state files without a living owner, in the folder and in those of the other ranks
    beside it."""
    folders = folder.parent.glob("rank-*") if folder.name.startswith("rank-") else [folder]
    for path in sorted(path for one in folders for path in one.glob(f"*{SUFFIX}")):
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue  # its owner, or another rank, was faster
        try:
            if not try_lock(handle):
                continue  # in use
            size_bytes = os.fstat(handle).st_size
            path.unlink(missing_ok=True)
            emit("trainer.offload_leftover_removed", path=str(path), size_bytes=size_bytes)
        finally:
            os.close(handle)


def _remove(path: Path, handle: int) -> None:
    path.unlink(missing_ok=True)
    os.close(handle)


def _open_locked(path: Path) -> int:
    """Create an empty file, locked by this process.

    Raises InputError if another process holds the lock for longer than a rank's check for leftovers
    takes.
    """
    ends_s = time.monotonic() + LOOK_S
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if not try_lock(handle):
            os.close(handle)
            if time.monotonic() < ends_s:
                time.sleep(POLL_S)
                continue
            raise InputError(
                f"{path} is in use by another process",
                hint="give each run a memory.disk_folder of its own",
            )
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            os.ftruncate(handle, 0)
            return handle
        os.close(handle)  # taken for a leftover between the two calls: make it again


def _no_room(path: Path, size_bytes: int, error: OSError) -> MemoryBudgetError:
    return MemoryBudgetError(
        f"{size_bytes} bytes for offloaded optimizer state could not be reserved in {path}: "
        f"{error.strerror or error}",
        hint=f"free {size_bytes} bytes there, point memory.disk_folder at a larger disk, "
        'or set trainer.offload_optimizer = "host"'
        if is_disk_full(error)
        else "point memory.disk_folder at a local file system that can reserve space",
    )


def _raw(host_N: Tensor) -> memoryview:
    """Return the tensor's bytes for in-place reads and writes."""
    assert host_N.is_contiguous() and host_N.device.type == "cpu"
    size_bytes = host_N.numel() * host_N.element_size()
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(host_N.data_ptr())).cast("B")
