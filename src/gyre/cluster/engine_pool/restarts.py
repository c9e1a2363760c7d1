"""Restarts: whether a lost engine is started again, and after which wait. In: when it was started
again before, a policy. Out: seconds to wait, or None. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often an engine is started again. A run that lasts hours counts all its restarts; a
    server that lasts months counts those of the last while."""

    max_restarts: int = 0  # of each engine within `window_s`
    window_s: float = math.inf
    first_wait_s: float = 0.0  # before the second within the window; it doubles with each


def restart_wait_s(began_s: Sequence[float], now_s: float, policy: RestartPolicy) -> float | None:
    """Return how long to wait before the next restart, or None where no more is allowed.
    `began_s`: when earlier ones began."""
    recent = sum(now_s - one_s < policy.window_s for one_s in began_s)
    if recent >= policy.max_restarts:
        return None
    # bounded before it doubles: no float is that large
    doublings = min(recent - 1, 32)
    return min(LONGEST_WAIT_S, policy.first_wait_s * 2.0**doublings) if recent else 0.0
