"""Records of the ledger: who holds how many bytes where, and a plan of moves with every
intermediate point.

In: nothing. Out: frozen records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gyre.core.errors import InputError
from gyre.core.records import Phase, Tier, Usage
from gyre.memory.config import Residency

STAGING_BYTES = 64 << 20  # host memory that a copy between a GPU and disk passes through, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One component in the ledger."""

    name: str
    size_bytes: int  # when on the device; the same on host and disk
    tier: Tier  # where it is now
    tiers: tuple[Tier, ...]  # where it may live
    phases: tuple[Phase, ...]  # that need it on the device
    # where it goes when it must leave, best first; empty: it cannot leave
    leave: tuple[Tier, ...] = ()
    wake: int = 0  # smaller comes back earlier
    # its host pages stay when it comes back from them, so that parking it again pins nothing
    keeps_pages: bool = False
    kept_bytes: int = 0  # of host pages that it holds so, while it is on the device

    def moved(self, target: Tier) -> Entry:
        """Return the entry after a move. Pages are kept only between the host and the device."""
        keeps = self.keeps_pages and self.tier == "host" and target == "device"
        return replace(self, tier=target, kept_bytes=self.size_bytes if keeps else 0)

    def bytes_on(self, tier: Tier) -> int:
        kept = self.kept_bytes if tier == "host" else 0
        return self.size_bytes if tier == self.tier else kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    staging_bytes: int = 0  # STAGING_BYTES on a GPU; a CPU needs none
    device_total_bytes: int | None = None  # beyond which no budget makes sense; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    entries: tuple[Entry, ...]
    budgets: Budgets
    residency: Residency = "spill"
    # device bytes a phase needs beside its components
    working: Mapping[Phase, int] = field(default_factory=dict)

    def entry(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        accepted = ", ".join(entry.name for entry in self.entries)
        raise InputError(f"no component '{name}' (accepted: {accepted})")

    def usage(self) -> Usage:
        def total(tier: Tier) -> int:
            return sum(entry.bytes_on(tier) for entry in self.entries)

        return Usage(
            device_bytes=total("device"), host_bytes=total("host"), disk_bytes=total("disk")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    name: str
    source: Tier
    target: Tier
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Bytes that exist at one moment of a plan."""

    label: str
    device_bytes: int
    host_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    phase: Phase | None  # None: moves that were asked for by name
    moves: tuple[Move, ...]
    points: tuple[Point, ...]  # the start, then the middle and the end of each move
    # device bytes that the phase needs beside its components, after the last point
    working_bytes: int = 0

    @property
    def peak_device_bytes(self) -> int:
        return max(
            *(point.device_bytes for point in self.points),
            self.points[-1].device_bytes + self.working_bytes,
        )

    @property
    def peak_host_bytes(self) -> int:
        return max(point.host_bytes for point in self.points)
