"""Devices: checks that all ranks compute on the same kind of device. In: a rank's device. Out:
nothing, or a ConfigError that lists each rank's device.

Ranks wait for the slowest and hold equal parts, so one slower or smaller GPU would slow them down
or exhaust its memory. Kernels that differ by GPU type would also give replicas different bits.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gyre.core.errors import ConfigError
from gyre.distributed.process_group import RankGroup

# by which GPUs of one type may differ: firmware and error correction reserve a little
SAME_MEMORY_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """One rank's device. A CPU's memory is shared, so it is not reported."""

    host: str
    name: str  # as the driver says
    capability: str  # of a CUDA device, "9.0"
    memory_bytes: int

    def is_like(self, other: DeviceRecord) -> bool:
        near = abs(self.memory_bytes - other.memory_bytes) <= SAME_MEMORY_SHARE * max(
            self.memory_bytes, 1
        )
        return near and (self.name, self.capability) == (other.name, other.capability)


def read_device(device: torch.device) -> DeviceRecord:
    """Return the device of this process."""
    if device.type != "cuda":
        return DeviceRecord(host=platform.node(), name=device.type, capability="", memory_bytes=0)
    found = torch.cuda.get_device_properties(device)
    return DeviceRecord(
        host=platform.node(),
        name=found.name,
        capability=f"{found.major}.{found.minor}",
        memory_bytes=found.total_memory,
    )


def find_mixture(records: Sequence[DeviceRecord]) -> str:
    """Describe each rank's device when they differ; "" when they do not. Pure."""
    kinds: list[tuple[DeviceRecord, list[int]]] = []
    for rank, record in enumerate(records):
        members = next((members for kind, members in kinds if kind.is_like(record)), None)
        if members is None:
            kinds.append((record, [rank]))
        else:
            members.append(rank)
    if len(kinds) < 2:
        return ""
    return "; ".join(_words(kind, members, records) for kind, members in kinds)


def refuse_mixture(group: RankGroup, record: DeviceRecord) -> None:
    """Raise ConfigError on every rank unless all have the same kind of device. Collective."""
    told: list[Mapping] = group.share(dataclasses.asdict(record))
    mixture = find_mixture([DeviceRecord(**one) for one in told])
    if mixture:
        raise ConfigError(
            f"the ranks have different devices: {mixture}; a group needs one kind",
            hint="run on nodes of one GPU type: choose them in the scheduler, or hide the others "
            "with "
            "CUDA_VISIBLE_DEVICES",
        )


def _words(kind: DeviceRecord, ranks: Sequence[int], records: Sequence[DeviceRecord]) -> str:
    hosts = ", ".join(dict.fromkeys(records[rank].host for rank in ranks))
    memory = f" with {kind.memory_bytes / 2**30:.1f} GiB" if kind.memory_bytes else ""
    capability = f", compute capability {kind.capability}" if kind.capability else ""
    numbers = ", ".join(str(rank) for rank in ranks)
    return (
        f"rank{'s' if len(ranks) > 1 else ''} {numbers} ({hosts}): {kind.name}{memory}{capability}"
    )
