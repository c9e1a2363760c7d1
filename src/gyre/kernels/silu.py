"""Gated activation. In: gate and up side by side. Out: silu(gate) · up. Callers: blocks."""

# T tokens, M mlp size

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.kernels.cpu.chunks import kernels_for


def silu_mul_forward(gate_up_T2M: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return silu(gate) · up, and silu(gate) where the backward pass needs it."""
    if kernels := kernels_for(gate_up_T2M, gate_up_T2M.shape[1] // 2):
        return kernels.silu(gate_up_T2M), None
    gate_TM, up_TM = gate_up_T2M.chunk(2, dim=-1)
    activated_TM = F.silu(gate_TM)
    return activated_TM * up_TM, activated_TM


def silu_mul_backward(grad_TM: Tensor, gate_up_T2M: Tensor, activated_TM: Tensor | None) -> Tensor:
    """Return the gradient of gate_up. Overwrites grad_TM."""
    if kernels := kernels_for(gate_up_T2M, gate_up_T2M.shape[1] // 2):
        return kernels.silu_backward(grad_TM, gate_up_T2M)
    assert activated_TM is not None
    gate_TM, up_TM = gate_up_T2M.chunk(2, dim=-1)
    grad_gate_up_T2M = torch.empty_like(gate_up_T2M)
    grad_gate_TM, grad_up_TM = grad_gate_up_T2M.chunk(2, dim=-1)
    torch.mul(grad_TM, activated_TM, out=grad_up_TM)
    torch.ops.aten.silu_backward.grad_input(grad_TM.mul_(up_TM), gate_TM, grad_input=grad_gate_TM)
    return grad_gate_up_T2M
