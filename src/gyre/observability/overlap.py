"""Overlap account: how much of the rules' time each window hid. In: intervals on one clock. Out:
seconds. Pure.

Rule rewards run in processes of their own while rollouts are still being generated and while the
reference and reward models run; only time outside both windows adds to the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
