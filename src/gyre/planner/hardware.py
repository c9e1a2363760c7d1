"""Hardware: reads what this machine offers right now, for the planner. In: the folder of the disk
tier, or None. Out: Hardware. The only file of this room that looks at the world."""

from __future__ import annotations

import importlib.util
import math
import shutil
from pathlib import Path

import torch

from gyre.kernels.cpu.build import Unavailable
from gyre.kernels.cpu.chunks import load_chunks
from gyre.kernels.dispatch import why_too_old
from gyre.memory.probe import read_device, read_host
from gyre.observability.hardware import describe_hardware
from gyre.planner.plan import Hardware, Saving


def read_hardware(disk_folder: Path | None = None) -> Hardware:
    facts = describe_hardware()
    host = read_host()
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    reading = read_device(device)
    return Hardware(
        device="cuda" if on_cuda else "cpu",
        device_name=torch.cuda.get_device_name(device) if on_cuda else facts["cpu"] or "CPU",
        device_total_bytes=reading.total_bytes,
        device_free_bytes=reading.free_bytes,
        host_total_bytes=host.total_bytes,
        host_available_bytes=host.available_bytes,
        disk_free_bytes=_disk_free(disk_folder) if disk_folder is not None else 0,
        cores=usable_cores(facts["cores"], facts["cores_quota"]),
        bf16=torch.cuda.is_bf16_supported(including_emulation=False)
        if on_cuda
        else facts["flags"]["bf16"],
        saving=saving_on_cuda(device) if on_cuda else saving_on_cpu(),
    )


def usable_cores(cores: int, quota: float | None) -> int:
    """Whole cores that a quota of CPU time leaves, at least one."""
    return cores if quota is None else min(cores, max(1, math.floor(quota)))


def saving_on_cuda(device: torch.device) -> Saving:
    """Torch for GPUs brings Triton along. A device that is too old for it keeps what products and a
    softmax keep, as a CPU without C kernels does."""
    if why_too_old(device) is not None:
        return "torch_cpu"
    return "triton" if importlib.util.find_spec("triton") is not None else "torch_cuda"


def saving_on_cpu() -> Saving:
    return "torch_cpu" if isinstance(load_chunks(torch.float32), Unavailable) else "c_cpu"


def _disk_free(folder: Path) -> int:
    """Return the free bytes of the nearest folder that exists already."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free
