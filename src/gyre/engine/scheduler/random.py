"""Draws: one uniform number per sampled token, a pure function of (seed, index, position). In: keys
and positions. Out: uniforms. Vectorized, counter-based, stateless: the batch, chunking and
preemption cannot change a draw.
"""

# N rows

from __future__ import annotations

import numpy as np

from gyre.core.seeds import derive_seed

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def draw_key(seed: int, index: int) -> int:
    """Return the key of one completion's draws."""
    return derive_seed(seed, "draws", index)


def uniforms(key_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
    """Return float64 in [0, 1 - 2^-40] for each (uint64 key, position of the chosen token):
    splitmix64, 40 bits."""
    with np.errstate(over="ignore"):
        z_N = key_N + (position_N.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        z_N = (z_N ^ (z_N >> np.uint64(30))) * _MIX_1
        z_N = (z_N ^ (z_N >> np.uint64(27))) * _MIX_2
    z_N ^= z_N >> np.uint64(31)
    return (z_N >> np.uint64(24)).astype(np.float64) * 2.0**-40
