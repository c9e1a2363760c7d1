"""Tiles: keep oneDNN from AMX tiles that the processor announces and does not describe. In: this
processor. Out: a limit on oneDNN's instruction set in the environment, where one is needed.

Some hypervisors pass the AMX flags on and hide CPUID leaf 1Dh, the size of a tile. oneDNN then
configures tiles of no rows, and the first product in bfloat16 ends the process with SIGILL.
"""

from __future__ import annotations

import os

from gyre.kernels.cpu import build

LIMIT = "ONEDNN_MAX_CPU_ISA"
BEST_WITHOUT_TILES = "AVX512_CORE_FP16"  # oneDNN takes the best that the processor has below it


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
