"""Phases: when each component is needed on the device, the order in which a phase loads them, and
where they leave to. Pure.

In: a component's name, "owner.part". Out: its Need, its tiers to leave to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from gyre.core.errors import ConfigError
from gyre.core.records import Phase, Tier
from gyre.memory.config import Leave

T = TypeVar("T")

# order of one iteration
RING: tuple[Phase, ...] = ("rollout", "score", "train", "handover", "evaluate")

# staged wake: weights → sync (handover) → KV
WAKE_WEIGHTS, WAKE_STATE, WAKE_KV, WAKE_GRAPHS = 0, 1, 2, 3

# stale with new weights
DEFAULT_LEAVE: Mapping[str, Leave] = {"engine.kv": "destroy", "engine.graphs": "destroy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """When a component must be on the device."""

    phases: tuple[Phase, ...]
    wake: int = WAKE_WEIGHTS  # smaller comes back earlier within a phase change


def default_needs(*, shared_weights: bool) -> dict[str, Need]:
    """Return the needs of a colocated loop. With `shared_weights` the engine reads the trainer's
    parameters, so rollouts need them too.

    Keys are component names or owners; the longest match wins.
    """
    actor: tuple[Phase, ...] = ("score", "train", "handover")
    return {
        "engine": Need(phases=("handover", "rollout", "evaluate")),
        "engine.kv_host": Need(phases=()),  # never on the device
        "engine.kv": Need(phases=("rollout", "evaluate"), wake=WAKE_KV),
        "engine.graphs": Need(phases=("rollout", "evaluate"), wake=WAKE_GRAPHS),
        "actor": Need(phases=("train",), wake=WAKE_STATE),
        "actor.params": Need(phases=RING if shared_weights else actor),
        "actor.layer_buffers": Need(phases=("score", "train")),
        "critic": Need(phases=("train",), wake=WAKE_STATE),
        "critic.params": Need(phases=("score", "train")),
        "critic.layer_buffers": Need(phases=("score", "train")),
        "reference": Need(phases=("score",)),
        "reward": Need(phases=("score",)),
    }


def match_name(table: Mapping[str, T], name: str) -> T | None:
    """Return the row for "a.b.c", else for "a.b", else for "a"."""
    while name not in table:
        if "." not in name:
            return None
        name = name.rpartition(".")[0]
    return table[name]


def needing_phases(need: Need, tiers: tuple[Tier, ...]) -> tuple[Phase, ...]:
    """Return the phases that need a component on the device; none for one that is never there."""
    return need.phases if "device" in tiers else ()


def next_use(phases: tuple[Phase, ...], now: Phase) -> int:
    """Count the phases until one of `phases` follows `now`; len(RING) + 1 when none does."""
    start = RING.index(now) if now in RING else -1
    distances = [
        (RING.index(phase) - start - 1) % len(RING) + 1 for phase in phases if phase in RING
    ]
    return min(distances, default=len(RING) + 1)


def leave_tiers(
    name: str, tiers: tuple[Tier, ...], chosen: Mapping[str, Leave]
) -> tuple[Tier, ...]:
    """Return the tiers for a component that leaves the device, best first; empty when it may be
    nowhere else. `chosen` is the user's `memory.leave`. Other components are parked, or destroyed
    where their contents become stale anyway. What is on the device for good stays, unless it is
    named itself: graphs of an engine have its addresses."""
    if tiers == ("device",) and name not in chosen:
        return ()
    stale: Leave | None = match_name(DEFAULT_LEAVE, name) if "none" in tiers else None
    policy = match_name(chosen, name) or stale or "park"
    if policy == "destroy":
        if "none" not in tiers:
            raise ConfigError(
                f"memory.leave: {name} cannot be destroyed, its contents exist nowhere else",
                hint=f'set it to "park" or "disk" (accepted tiers: {", ".join(tiers)})',
            )
        return ("none",)
    if policy == "disk" and "disk" not in tiers and "host" in tiers:
        raise ConfigError(
            f"memory.leave: {name} has no disk tier (accepted: {', '.join(tiers)})",
            hint="set memory.disk_folder",
        )
    order: tuple[Tier, ...] = ("host", "disk") if policy == "park" else ("disk", "host")
    keeping: tuple[Tier, ...] = tuple(tier for tier in order if tier in tiers)
    return keeping or (("none",) if "none" in tiers else ())
