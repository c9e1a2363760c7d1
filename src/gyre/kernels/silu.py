"""Gated activation. In: gate and up side by side. Out: silu(gate) · up."""

# T tokens, M mlp size

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.kernels.cpu.chunks import ChunkKernels
from gyre.kernels.dispatch import kernels_for
from gyre.kernels.float8 import Amax


def keeps_product(gate_up_T2M: Tensor) -> bool:
    """Return whether the backward pass needs tensors besides gate_up. On a GPU it recomputes the
    product."""
    kernels = kernels_for(gate_up_T2M, gate_up_T2M.shape[1] // 2)
    return kernels is None or isinstance(kernels, ChunkKernels)


def silu_mul_forward(
    gate_up_T2M: Tensor, amax: Amax | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return silu(gate) · up, and what the backward pass needs besides gate_up: the product and,
    without kernels, silu(gate). Triton's kernels compute `amax` of the product."""
    if kernels := kernels_for(gate_up_T2M, gate_up_T2M.shape[1] // 2):
        product_TM = kernels.silu(gate_up_T2M, amax)
        return product_TM, (product_TM,) if keeps_product(gate_up_T2M) else ()
    gate_TM, up_TM = gate_up_T2M.chunk(2, dim=-1)
    activated_TM = F.silu(gate_TM)
    product_TM = activated_TM * up_TM
    return product_TM, (product_TM, activated_TM)


def silu_mul_backward(
    grad_TM: Tensor, gate_up_T2M: Tensor, kept: tuple[Tensor, ...], amax: Amax | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradient of gate_up with its `amax`, and the product. Overwrites grad_TM."""
    if kernels := kernels_for(gate_up_T2M, gate_up_T2M.shape[1] // 2):
        grad_gate_up_T2M, product_TM = kernels.silu_backward(grad_TM, gate_up_T2M, amax)
        return grad_gate_up_T2M, kept[0] if product_TM is None else product_TM
    product_TM, activated_TM = kept
    gate_TM, up_TM = gate_up_T2M.chunk(2, dim=-1)
    grad_gate_up_T2M = torch.empty_like(gate_up_T2M)
    grad_gate_TM, grad_up_TM = grad_gate_up_T2M.chunk(2, dim=-1)
    torch.mul(grad_TM, activated_TM, out=grad_up_TM)
    torch.ops.aten.silu_backward.grad_input(grad_TM.mul_(up_TM), gate_TM, grad_input=grad_gate_TM)
    return grad_gate_up_T2M, product_TM
