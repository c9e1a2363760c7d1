"""Ejection: what share of new requests an engine may have. In: how long its requests have stood
still, the time. Out: its standing, and a share from 0 to 1. Pure.

    active ──stands still──▶ ejected ──resumes, or restarted──▶ returning ──▶ active
                                ▲───────────stands still────────────┘

A returning engine's share grows evenly, as in Envoy's slow start. Whether it is well is not known
yet, and its cache may be empty. Each ejection soon after another doubles the time that this takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LEAST_SHARE = 0.1  # of one that has just returned; Envoy's default too
MOST_DOUBLINGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EjectionPolicy:
    """When an engine is ejected, and how slowly it returns."""

    still_s: float  # without progress of its requests
    return_s: float  # from the least share to all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is thought of one engine, across its lives."""

    state: Literal["active", "ejected", "returning"] = "active"
    since_s: float = 0.0
    ejections: int = 0  # forgotten once it was active for as long as its return took


def return_s(standing: Standing, policy: EjectionPolicy) -> float:
    """Return how long the return takes after so many ejections."""
    return policy.return_s * 2 ** min(MOST_DOUBLINGS, max(0, standing.ejections - 1))


def eject(standing: Standing, now_s: float) -> Standing:
    """Return the standing of an engine that was found to stand still, or lost."""
    if standing.state == "ejected":
        return standing
    return Standing(state="ejected", since_s=now_s, ejections=standing.ejections + 1)


def observe(
    standing: Standing, *, still_s: float, now_s: float, policy: EjectionPolicy
) -> Standing:
    """Return the standing after a look at an engine that takes work. `still_s`: how long its
    requests have made no progress; 0 where it has none."""
    if still_s >= policy.still_s:
        return eject(standing, now_s)
    if standing.state == "ejected":
        return Standing(state="returning", since_s=now_s, ejections=standing.ejections)
    has_passed = now_s - standing.since_s >= return_s(standing, policy)
    if standing.state == "returning" and has_passed:
        return Standing(state="active", since_s=now_s, ejections=standing.ejections)
    if standing.ejections and has_passed:
        return Standing(since_s=now_s)
    return standing


def find_share(standing: Standing, now_s: float, policy: EjectionPolicy) -> float:
    """Return the share of new requests that an engine may have."""
    if standing.state == "active":
        return 1.0
    if standing.state == "ejected":
        return 0.0
    passed = (now_s - standing.since_s) / max(return_s(standing, policy), 1e-9)
    return min(1.0, max(LEAST_SHARE, passed))
