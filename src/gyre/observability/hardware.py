"""Hardware: this machine in a dict, without torch. In: /proc and the platform module. Out:
JSON-able facts."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path
from typing import Any

# Names in /proc/cpuinfo (x86 "flags", Arm "Features") of what decides the speed of matrix products.
FLAGS = {
    "avx2": ("avx2",),
    "avx512": ("avx512f",),
    "avx512_bf16": ("avx512_bf16",),
    "amx_bf16": ("amx_bf16",),
    "amx_int8": ("amx_int8",),
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
}


def describe_hardware(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> dict[str, Any]:
    """Return the resources of this machine that this process may use. Unknown facts are None."""
    cpu = parse_cpuinfo(_read(proc / "cpuinfo"))
    memory = parse_meminfo(_read(proc / "meminfo"))
    return {
        "cpu": cpu["model"],
        "cores": len(os.sched_getaffinity(0)),
        "cores_physical": cpu["cores_physical"],
        "cores_quota": parse_cpu_max(_read(cgroup / "cpu.max")),
        "flags": cpu["flags"],
        "onednn_isa_limit": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "memory_bytes": memory.get("MemTotal"),
        "memory_available_bytes": memory.get("MemAvailable"),
        "memory_limit_bytes": parse_limit(_read(cgroup / "memory.max")),
        "shared_memory_bytes": _filesystem_bytes(Path("/dev/shm")),
        "gpus": describe_gpus(proc),
        "os": _os_name(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
    }


def parse_cpuinfo(text: str) -> dict[str, Any]:
    """Read the model, the number of physical cores and the relevant flags."""
    blocks = [_fields(block) for block in text.strip().split("\n\n") if block.strip()]
    first = blocks[0] if blocks else {}
    names = set((first.get("flags") or first.get("Features") or "").split())
    physical = {
        (block.get("physical id"), block.get("core id")) for block in blocks if "core id" in block
    }
    return {
        "model": first.get("model name") or first.get("Model") or first.get("CPU part") or None,
        "cores_physical": len(physical) or None,
        "flags": {flag: any(name in names for name in aliases) for flag, aliases in FLAGS.items()},
    }


def parse_meminfo(text: str) -> dict[str, int]:
    """Read sizes in bytes by name."""
    return {
        name: int(value.split()[0]) * 1024
        for name, value in _fields(text).items()
        if value.endswith("kB")
    }


def parse_cpu_max(text: str) -> float | None:
    """Read the number of cores that a cgroup allows. None means no limit."""
    words = text.split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def parse_limit(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def describe_gpus(proc: Path = Path("/proc")) -> list[str]:
    """Return the models of the NVIDIA GPUs that the driver lists."""
    folders = sorted((proc / "driver" / "nvidia" / "gpus").glob("*/information"))
    return [_fields(_read(path)).get("Model", "NVIDIA GPU") for path in folders]


def count_gpus() -> int:
    """Return how many GPUs the CUDA driver shows to this process, by CUDA_VISIBLE_DEVICES; 0 where
    there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):  # 0 is success
        return 0
    return count.value


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # absent on this kernel or not ours to read: the caller reports None
        return ""


def _filesystem_bytes(path: Path) -> int | None:
    try:
        stat = os.statvfs(path)
    except OSError:  # not mounted: the caller reports None
        return None
    return stat.f_blocks * stat.f_frsize


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:  # no os-release file
        return platform.system()
