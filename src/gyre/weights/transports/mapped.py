"""Mapped memory: bytes of an open file, page-locked for a CUDA device on request; host memory in
huge pages. In: a file handle; a size. Out: flat uint8 tensors, over pages that live as long.

CUDA faults in the pages of memory that it registers one by one, on one thread. Several threads
fault them in before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyre.core.errors import MemoryBudgetError

POPULATE_THREADS = 4  # more wait for each other; measured with one file and with two at once
POPULATE_BYTES = 64 << 20  # at a time
MADV_POPULATE_WRITE = 23  # from Linux 5.14 on; Python has no name for it


def huge_pages(size_bytes: int) -> Tensor:
    """Return room that is filled once: small pages would each be fetched from the system. The
    bytes come from the system only when they are written."""
    pages = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # only a hint: a kernel without huge pages gives small ones
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:size_bytes]


class MappedFile:
    """The first bytes of a file, shared with all who map it."""

    def __init__(self, handle: int, size_bytes: int, *, writable: bool, pin: bool) -> None:
        """`pin`: register the pages with CUDA, so that copies to the device run at the speed of the
        link. MemoryBudgetError where that is refused."""
        # CUDA registers writable pages only
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable or pin else 0)
        pages = mmap.mmap(handle, size_bytes, flags=mmap.MAP_SHARED, prot=access)
        address = np.frombuffer(pages, dtype=np.uint8).ctypes.data
        held: Any = (ctypes.c_ubyte * size_bytes).from_address(address)
        held.pages = pages  # tensors hold the buffer, which holds the mapping
        self.bytes_N: Tensor = torch.frombuffer(held, dtype=torch.uint8)
        self._unlock: weakref.finalize | None = None
        self.is_populated = not pin or populate(address, size_bytes)
        if pin:
            self._register(address, pages)

    def close(self) -> None:
        """Unlock the pages. The mapping ends with the last tensor over it."""
        if self._unlock is not None:
            self._unlock()
        self.bytes_N = self.bytes_N[:0].clone()

    def _register(self, address: int, pages: mmap.mmap) -> None:
        runtime: Any = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(address, len(pages), 0))
        if code != 0:
            raise MemoryBudgetError(
                f"could not page-lock {len(pages)} bytes of shared memory (CUDA error {code})",
                hint="raise the limit on locked memory (ulimit -l)",
            )
        # before the pages are unmapped: it holds them
        self._unlock = weakref.finalize(self, _unregister, address, pages)


def populate(address: int, size_bytes: int) -> bool:
    """Map pages of shared memory, and take those that are new. MemoryBudgetError where the system
    has none left. False from a kernel that cannot: CUDA then takes them, or refuses instead."""
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def map_from(start: int) -> int:
        count = min(POPULATE_BYTES, size_bytes - start)
        refused = library.madvise(address + start, count, MADV_POPULATE_WRITE)
        return ctypes.get_errno() if refused else 0

    with ThreadPoolExecutor(POPULATE_THREADS, thread_name_prefix="populate") as mapping:
        found = set(mapping.map(map_from, range(0, size_bytes, POPULATE_BYTES))) - {0}
    if found - {errno.EINVAL}:
        # EFAULT: a process that wrote there would have been ended by SIGBUS
        names = ", ".join(errno.errorcode.get(one, str(one)) for one in sorted(found))
        raise MemoryBudgetError(
            f"no room for {size_bytes} bytes of shared memory ({names})",
            hint="make /dev/shm larger, or give the container more memory",
        )
    return not found


def _unregister(address: int, pages: mmap.mmap) -> None:
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostUnregister(address))
