"""Fixed pool: a component that always stays on one tier, host memory or disk. In: its size. Out:
what the ledger needs.

Its owner brings parts of it to the device itself (streamed optimizer state). Its bytes count once,
on its tier. The buffers on the device belong to another component of the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from gyre.core.errors import InputError
from gyre.core.records import Component, Tier, Usage


class FixedPool:
    """One component that does not move."""

    def __init__(
        self,
        name: str,
        tier: Literal["host", "disk"],
        *,
        size_bytes: int,
        held_bytes: Callable[[], int],
    ) -> None:
        """Declare the component. `held_bytes` measures the bytes actually present."""
        self.name = name
        self.size_bytes = size_bytes
        self._held_bytes = held_bytes
        self.tier: Tier = tier
        self.tiers: tuple[Tier, ...] = (tier,)

    def component(self) -> Component:
        return Component(
            name=self.name, size_bytes=self.size_bytes, tier=self.tier, tiers=self.tiers
        )

    def measure(self) -> Usage:
        held = {self.tier: self._held_bytes()}
        return Usage(device_bytes=0, host_bytes=held.get("host", 0), disk_bytes=held.get("disk", 0))

    def readable(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return its tensors, as `StoragePool.readable` does; they never move."""
        return dict(tensors)

    def move(self, tier: Tier) -> None:
        if tier != self.tier:
            raise InputError(
                f"component {self.name} stays on tier '{self.tier}' (accepted: {self.tier})"
            )

    def keep_pages(self, keep: bool) -> None:
        """Do nothing: its pages always stay."""

    def close(self) -> None:
        """Do nothing: its owner frees the bytes."""
        self.size_bytes = 0
