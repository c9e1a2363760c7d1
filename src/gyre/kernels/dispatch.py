"""Dispatch: selects the kernels for the work between matrix products. In: a tensor, the widths of
its rows. Out: the C kernels on a CPU, the Triton kernels on a supported CUDA device, or None: then
the caller uses torch operations, the oracle of both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gyre.kernels.cpu.build import Unavailable
from gyre.kernels.cpu.chunks import ChunkKernels, chunks_for, load_chunks

if TYPE_CHECKING:
    from gyre.kernels.gpu.training import TrainingKernels

WHOLE_HEAD = 32  # of these features each half of a head is whole vectors
CUDA_DTYPES = (torch.bfloat16, torch.float16)
# compute capability that Triton compiles for, and torch's flash attention is made for
LEAST_CAPABILITY = (8, 0)


def kernels_for(
    tensor: Tensor, *widths: int, head_dim: int = WHOLE_HEAD
) -> ChunkKernels | TrainingKernels | None:
    """Return the kernels for rows like these. On a CPU widths must be whole vectors, on a GPU a
    head a power of two."""
    if head_dim % WHOLE_HEAD:
        return None
    if tensor.device.type == "cpu":
        return chunks_for(tensor, *widths)
    if tensor.device.type != "cuda" or tensor.dtype not in CUDA_DTYPES or head_dim & (head_dim - 1):
        return None
    if why_too_old(tensor.device) is not None:
        return None
    found = load_triton()
    return None if isinstance(found, Unavailable) else found


@functools.cache
def load_triton() -> TrainingKernels | Unavailable:
    try:
        # imports Triton, which a CPU has no use for
        from gyre.kernels.gpu.training import TrainingKernels
    except ImportError as error:
        return Unavailable(reason=f"Triton cannot be imported: {error}")
    return TrainingKernels()


@functools.cache
def why_too_old(device: torch.device) -> str | None:
    """Return why no fused kernel runs on this CUDA device, or None: a V100 has capability 7.0, a T4
    7.5."""
    found = torch.cuda.get_device_capability(device)
    if found >= LEAST_CAPABILITY:
        return None
    least = ".".join(map(str, LEAST_CAPABILITY))
    return f"compute capability {found[0]}.{found[1]}: the fused kernels need {least} or more"


def has_triton(device: torch.device) -> bool:
    """Return whether Triton compiles kernels for the device."""
    return (
        device.type == "cuda"
        and why_too_old(device) is None
        and not isinstance(load_triton(), Unavailable)
    )


def load_adamw(device: torch.device) -> Callable[..., Tensor | None] | None:
    """Return AdamW's kernel on a CUDA device with Triton, or None."""
    if not has_triton(device):
        return None
    from gyre.kernels.gpu.adamw import adamw  # imports Triton

    return adamw


def why_torch(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a trainer of this dtype on this device uses torch operations alone; None when it
    has kernels."""
    if device.type == "cuda":
        if (reason := why_too_old(device)) is not None:
            return reason
        found = (
            load_triton()
            if dtype in CUDA_DTYPES
            else Unavailable(reason=f"there are none for {dtype} on CUDA")
        )
    else:
        found = load_chunks(dtype)
    return found.reason if isinstance(found, Unavailable) else None


def c_instructions(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the instruction set of a trainer's C kernels; None without them."""
    found = load_chunks(dtype) if device.type == "cpu" else None
    return found.instructions.name if isinstance(found, ChunkKernels) else None
