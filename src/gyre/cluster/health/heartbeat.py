"""Heartbeat: who makes no progress. In: counts that grow while work is done, by name, and the time.
Out: who has stood still for too long. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    count: int
    since_s: float  # when the count was first seen


class Heartbeat:
    """Counts of several workers. One that does not answer has made no progress."""

    def __init__(self, names: tuple[str, ...], now_s: float) -> None:
        self._beats = {name: Beat(count=-1, since_s=now_s) for name in names}

    def observe(self, counts: Mapping[str, int], now_s: float) -> None:
        for name, count in counts.items():
            if count != self._beats[name].count:
                self._beats[name] = Beat(count=count, since_s=now_s)

    def still_s(self, now_s: float) -> Mapping[str, float]:
        """Return for how long each has stood still, the longest first."""
        still = {name: now_s - beat.since_s for name, beat in self._beats.items()}
        return dict(sorted(still.items(), key=lambda item: -item[1]))

    def stalled(self, now_s: float, hang_s: float) -> tuple[str, ...]:
        """Return who has stood still for `hang_s` or more, the longest first."""
        return tuple(name for name, still in self.still_s(now_s).items() if still >= hang_s)
