"""Overlap accounts: how much of the rules' time each window hid, and how long two tasks waited. In:
intervals, or waits, on one clock. Out: seconds.

Rule rewards run in processes of their own while rollouts are still being generated and while the
reference and reward models run; only time outside both windows adds to the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

Interval = tuple[float, float]  # start, end in seconds; empty when end <= start


def overlap_account(
    rules: Iterable[Interval], *, rollout: Iterable[Interval], reference: Iterable[Interval]
) -> dict[str, float]:
    """Return the fields of a `reward.window` event, in seconds.

    rule_s: at least one rule was running. rollout_s: the part of it while rollouts were generated.
    reference_s: the part of the rest while reference or reward passes ran. hidden_s: the sum of
    both, never more than rule_s.
    """
    busy, during_rollout = union(rules), union(rollout)
    both = union([*during_rollout, *reference])
    rollout_s = length(intersect(busy, during_rollout))
    hidden_s = length(intersect(busy, both))
    return {
        "rule_s": length(busy),
        "rollout_s": rollout_s,
        "reference_s": hidden_s - rollout_s,
        "hidden_s": hidden_s,
    }


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint ordered intervals that cover the same points."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two lists of disjoint ordered intervals."""
    shared: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            shared.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def roles_account(
    *, seconds: float, collector_idle_s: float, learner_idle_s: float
) -> dict[str, float]:
    """Return the fields of a `step.roles` event. synchronous_s is what the same work takes where
    one of the two waits while the other works."""
    busy_s = 2.0 * seconds - collector_idle_s - learner_idle_s
    return {
        "seconds": round(seconds, 4),
        "collector_idle_s": round(collector_idle_s, 4),
        "learner_idle_s": round(learner_idle_s, 4),
        "synchronous_s": round(busy_s, 4),
    }


class IdleTime:
    """Seconds that one task has waited."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._past_s = 0.0
        self._since_s: float | None = None  # while it waits

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in this block; not nested."""
        assert self._since_s is None, "one task waits for one thing"
        self._since_s = self._clock()
        try:
            yield
        finally:
            self._past_s += self._clock() - self._since_s
            self._since_s = None

    def take_seconds(self) -> float:
        """Return the seconds since the last call, those of a wait under way included."""
        seconds, self._past_s = self._past_s, 0.0
        if self._since_s is not None:
            now_s = self._clock()
            seconds, self._since_s = seconds + now_s - self._since_s, now_s
        return seconds
