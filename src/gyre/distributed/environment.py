"""Environment: the variables that the process of a rank needs before it starts. In: whether NVLink
multicast may be used. Out: names and values. Imports no torch: a server starts ranks without it.
"""

from __future__ import annotations


def child_environment(*, multicast: bool = False) -> dict[str, str]:
    """Return the environment that a rank's process needs before it starts. NVLink multicast can
    disable the GPUs of a shared host, so it stays off unless the user explicitly enables it."""
    if multicast:
        return {}
    return {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
