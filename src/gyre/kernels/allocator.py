"""Allocator: asks the C library to keep freed memory for the next step instead of giving it back to
the kernel.

A training step on CPU frees and takes the same hundred megabytes for every chunk; by default most
of that is unmapped and mapped again, page by page, at a fifth of the step's time. In: nothing. Out:
whether it worked. Blocks of 32 MB and more are still given back at once.
"""

from __future__ import annotations

import ctypes

# glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_KEPT_BYTES = 32 * 2**20  # glibc accepts no more
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Return False where the C library has no such switch (not glibc); then everything works,
    slower on CPU."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(
        mallopt(M_TRIM_THRESHOLD, NEVER)
    )
