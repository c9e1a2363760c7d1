"""Liveness: decides who makes no progress. In: marks that change while work is done, by
source, the time, a limit. Out: a decision. Pure; a shell around it looks at the sources.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLimit:
    """How long a source may show no progress, and the config key that sets it."""

    key: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`still_s`: who has passed the limit, and for how long, the longest first."""

    state: Literal["healthy", "suspect", "failed"]
    still_s: Mapping[str, float]

    @property
    def has_failed(self) -> bool:
        return self.state == "failed"

    @property
    def reason(self) -> str:
        waits = ", ".join(f"{name} for {seconds:.0f} s" for name, seconds in self.still_s.items())
        return f"no progress on {waits}" if waits else ""


class LastProgress:
    """When each source's mark last changed. A source that reports nothing makes no progress."""

    def __init__(self, names: Iterable[str], now_s: float) -> None:
        self.changed_s = dict.fromkeys(names, now_s)
        self._marks: dict[str, Hashable] = {}

    def observe(self, marks: Mapping[str, Hashable], now_s: float) -> None:
        for name, mark in marks.items():
            if name not in self._marks or mark != self._marks[name]:
                self._marks[name], self.changed_s[name] = mark, now_s


def decide(
    now_s: float, progressed_s: Mapping[str, float], limit_s: float, *, together: bool = False
) -> Verdict:
    """Judge sources by the time of their last progress. One that stands still for the limit has
    failed. With `together` they may wait for each other: it is a suspect until all stand still."""
    still_s = {name: now_s - last_s for name, last_s in progressed_s.items()}
    over_s = {
        name: seconds
        for name, seconds in sorted(still_s.items(), key=lambda item: -item[1])
        if seconds >= limit_s
    }
    if not over_s:
        return Verdict(state="healthy", still_s={})
    has_failed = not together or len(over_s) == len(still_s)
    return Verdict(state="failed" if has_failed else "suspect", still_s=over_s)
