"""Process: what a process that computes on a CPU asks of the C library and of oneDNN, before its
first product. In: nothing. Out: settings of this process.

Freed memory: a training step frees and allocates the same hundred megabytes for every micro-batch.
By default most of that is unmapped and mapped again, page by page, which takes a fifth of the step.

Tiles: some hypervisors pass the AMX flags on and hide CPUID leaf 1Dh, the size of a tile. oneDNN
then configures tiles of no rows, and the first product in bfloat16 ends the process with SIGILL.
"""

from __future__ import annotations

import ctypes
import os

from gyre.kernels.cpu import build

# glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_KEPT_BYTES = 32 * 2**20  # glibc accepts no more
NEVER = 2**31 - 1
LIMIT = "ONEDNN_MAX_CPU_ISA"
BEST_WITHOUT_TILES = "AVX512_CORE_FP16"  # oneDNN takes the best that the processor has below it


def keep_freed_memory() -> bool:
    """Make the C library cache freed memory; blocks of 32 MB and more are still returned at once.
    Returns False without glibc; then everything works, slower."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(
        mallopt(M_TRIM_THRESHOLD, NEVER)
    )


def tiles_are_hidden() -> bool:
    """Return whether the processor announces AMX and hides its tiles. False without a compiler."""
    if "amx_tile" not in build.processor_properties():
        return False
    built = build.load("tiles.c", bf16=False)
    return not isinstance(built, build.Unavailable) and built.functions.gyre_tile_rows() == 0


def avoid_hidden_tiles() -> None:
    """Limit oneDNN of this process and its children to AVX-512 where tiles would crash it. A limit
    that is already in the environment stays. oneDNN reads it at its first product."""
    if LIMIT not in os.environ and tiles_are_hidden():
        os.environ[LIMIT] = BEST_WITHOUT_TILES
