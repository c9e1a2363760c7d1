"""Host buffer: exactly sized, page-aligned host memory that is returned to the system when
released.

In: a length in bytes, whether to pin it for a CUDA device. Out: a flat uint8 tensor over it.

Torch's pinned allocator rounds up to a power of two and caches freed memory, so its bytes cannot be
budgeted.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from typing import Any

import torch

from gyre.core.errors import MemoryBudgetError


def _unpin(address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostUnregister(address))


class HostBuffer:
    """Anonymous private pages, pinned when `pin`. Freed when the last reference, views included, is
    gone."""

    def __init__(self, size_bytes: int, *, pin: bool, owner: str) -> None:
        assert size_bytes > 0, owner
        self.size_bytes = size_bytes
        try:
            self._pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryBudgetError(
                f"{owner}: the system refused {size_bytes} bytes of host memory ({error})",
                hint="lower memory.host_budget_bytes or let this component leave to disk "
                "(memory.leave)",
            ) from error
        # only a hint: a kernel without huge pages faults small ones instead
        with contextlib.suppress(OSError):
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._pages, dtype=torch.uint8)
        if pin:
            self._pin(owner)

    def _pin(self, owner: str) -> None:
        # by all threads: the driver would fetch page after page from the system with one
        self.bytes.zero_()
        address = self.bytes.data_ptr()
        runtime: Any = torch.cuda.cudart()
        code = runtime.cudaHostRegister(address, self.size_bytes, 0)
        if int(code) != 0:
            raise MemoryBudgetError(
                f"{owner}: could not pin {self.size_bytes} bytes of host memory (CUDA error "
                f"{int(code)})",
                hint="raise the limit on locked memory (ulimit -l) or lower "
                "memory.host_budget_bytes",
            )
        weakref.finalize(self, _unpin, address)  # runs before the pages are unmapped

    def watch(self) -> weakref.ref:
        """Return a reference that expires only when the pages are freed, including all views."""
        return weakref.ref(self._pages)
