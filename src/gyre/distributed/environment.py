"""Environment: the variables that a process needs before it starts. In: whether NVLink multicast
may be used; the variables of this process. Out: names and values. Imports no torch: a server starts
processes without it.

Another environment's Python has its own torch, numpy and msgspec. Ours would take their place if
the whole of our site-packages was on its path, so it sees gyre alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# of our interpreter, and wrong for another one
OURS = ("PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def child_environment(*, multicast: bool = False) -> dict[str, str]:
    """Return the variables that a rank's process needs before it starts. NVLink multicast can
    disable the GPUs of a shared host, so it stays off unless the user explicitly enables it."""
    if multicast:
        return {}
    return {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }


def show_gyre_alone(folder: Path) -> None:
    """Put a link to the package into an empty folder."""
    (folder / "gyre").symlink_to(Path(__file__).parents[1])


def variables_for(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process of another Python, from those of this one. `folder` is
    all that it sees of ours. Pure."""
    found = {name: value for name, value in given.items() if name not in OURS}
    return {**found, "PYTHONPATH": str(folder), "PYTHONNOUSERSITE": "1"}
