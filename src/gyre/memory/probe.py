"""Probe: the current memory of the device and the system, and its apparent owners.

In: a device. Out: current readings.
"""

from __future__ import annotations

import gc
import resource
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """Bytes on the device. On a CPU only free and total are read here; tenants measure the rest.
    Torch's allocator does not count virtual memory either: `with_virtual` adds it, except to the
    peak."""

    free_bytes: int
    total_bytes: int
    allocated_bytes: int  # that live tensors hold
    reserved_bytes: int  # that torch's allocator and virtual memory hold, live tensors included
    peak_bytes: int  # most that was ever allocated since the last reset_peak

    @property
    def fragment_bytes(self) -> int:
        return self.reserved_bytes - self.allocated_bytes

    @property
    def outside_bytes(self) -> int:
        """Bytes used outside this process's tensors: context, kernels, NCCL, other processes."""
        return self.total_bytes - self.free_bytes - self.reserved_bytes

    def with_virtual(self, *, held_bytes: int, mapped_bytes: int) -> DeviceReading:
        """Return the reading with components in virtual memory, rounded up to whole granules."""
        return replace(
            self,
            allocated_bytes=self.allocated_bytes + held_bytes,
            reserved_bytes=self.reserved_bytes + mapped_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    total_bytes: int  # of the machine, or of the control group where that is less
    available_bytes: int
    rss_bytes: int  # resident bytes of this process
    peak_rss_bytes: int  # the most that they ever were


def read_device(device: torch.device) -> DeviceReading:
    if device.type != "cuda":
        host = read_host()
        return DeviceReading(
            free_bytes=host.available_bytes,
            total_bytes=host.total_bytes,
            allocated_bytes=0,
            reserved_bytes=0,
            peak_bytes=0,
        )
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return DeviceReading(
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        allocated_bytes=torch.cuda.memory_allocated(device),
        reserved_bytes=torch.cuda.memory_reserved(device),
        peak_bytes=torch.cuda.max_memory_allocated(device),
    )


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def give_back(device: torch.device, *, collect: bool) -> None:
    """Return unreferenced memory to the driver; with `collect` also run the garbage collector
    first."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if collect:
            gc.collect()
        torch.cuda.empty_cache()


def read_host(group: Path = Path("/sys/fs/cgroup")) -> HostReading:
    """Read the machine's memory, bounded by the control group's limit where set (containers)."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", None),
    ):
        limit = _read_number(group / limit_file)
        if limit is not None and limit < total:
            total = limit
            used = _read_number(group / (used_file or "memory/memory.usage_in_bytes")) or 0
            available = min(available, max(0, limit - used))
    return HostReading(
        total_bytes=total,
        available_bytes=available,
        rss_bytes=psutil.Process().memory_info().rss,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # in KiB on Linux
    )


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or the word "max": no limit
        return None
