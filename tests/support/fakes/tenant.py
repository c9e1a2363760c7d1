"""Fake components: byte buffers that really move and are really counted. In: names and sizes. Out:
a MemoryTenant. Callers: fakes.engine, fakes.trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gyre.core.errors import InputError
from gyre.core.records import Component, Tier, Usage

TIERS: tuple[Tier, ...] = ("device", "host", "none")


class FakeComponents:
    """Implements MemoryTenant. The device is pretended, the bytes are not. A component that was
    destroyed comes back as zeros."""

    def __init__(self, sizes_bytes: Mapping[str, int]) -> None:
        self._sizes = dict(sizes_bytes)
        self._tiers: dict[str, Tier] = dict.fromkeys(self._sizes, "device")
        self._buffers = {
            name: np.resize(np.arange(251, dtype=np.uint8), n) for name, n in self._sizes.items()
        }

    def components(self) -> Sequence[Component]:
        return tuple(
            Component(name=name, size_bytes=size, tier=self._tiers[name], tiers=TIERS)
            for name, size in self._sizes.items()
        )

    def move(self, names: Sequence[str], tier: Tier) -> None:
        for name in names:
            if name not in self._sizes:
                raise InputError(
                    f"no component '{name}' here (accepted: {', '.join(self._sizes)})",
                    hint="ask `components()` what there is to move",
                )
            if tier not in TIERS:
                raise InputError(
                    f"'{name}' cannot live on tier '{tier}' (accepted: {', '.join(TIERS)})",
                    hint="choose one of the component's tiers",
                )
        for name in names:
            if tier == "none":
                self._buffers.pop(name, None)
            elif name in self._buffers:
                self._buffers[name] = self._buffers[name].copy()
            else:
                self._buffers[name] = np.zeros(self._sizes[name], dtype=np.uint8)
            self._tiers[name] = tier

    def measure(self) -> Mapping[str, Usage]:
        found = {}
        for name in self._sizes:
            size = self._buffers[name].nbytes if name in self._buffers else 0
            on_device = self._tiers[name] == "device"
            found[name] = Usage(
                device_bytes=size * on_device, host_bytes=size * (not on_device), disk_bytes=0
            )
        return found

    def contents(self, name: str) -> bytes:
        """The bytes of a component; empty when it is destroyed."""
        return self._buffers[name].tobytes() if name in self._buffers else b""

    def on_device(self, name: str) -> bool:
        return self._tiers[name] == "device"
