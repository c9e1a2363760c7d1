"""Allocator: makes the C library cache freed memory instead of returning it to the kernel.

A training step on CPU frees and allocates the same hundred megabytes for every micro-batch. By
default most of that is unmapped and mapped again, page by page, which takes a fifth of the step.
In: nothing. Out: whether it worked. Blocks of 32 MB and more are still returned at once.
"""

from __future__ import annotations

import ctypes

# glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_KEPT_BYTES = 32 * 2**20  # glibc accepts no more
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Enable caching. Returns False without glibc; then everything works, slower on CPU."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(
        mallopt(M_TRIM_THRESHOLD, NEVER)
    )
