"""MLP: the second half of a dense decoder layer, as one differentiable op. In: the residual stream
after attention. Out: the residual stream after the layer.

Norm, gate and up, SiLU of the gate times up, down, residual. What is kept, `float8` and `tensor`
are as in layers.blocks. Another kind of MLP is another file with an op of the same kind.
"""

# T packed tokens, E hidden size, M mlp size

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre.core.records import Projection
from gyre.kernels.float8 import Amax
from gyre.kernels.linear import OutputGradient, amaxes_of, linear
from gyre.kernels.norm import rms_norm_backward, rms_norm_forward
from gyre.kernels.silu import keeps_product, silu_mul_backward, silu_mul_forward
from gyre.models.layers.tensor_parallel import (
    TensorParallel,
    backward_to_stream,
    begin_gathered,
    gathered,
    reducer_of,
    sharer_of,
)


def mlp(
    x_TE: Tensor,
    norm_E: Tensor,
    gate_up_2ME: Tensor,
    down_EM: Tensor,
    *,
    eps: float,
    selective: bool = False,
    recompute: bool = False,
    float8: frozenset[Projection] = frozenset(),
    grad_amax: Amax | None = None,
    tensor: TensorParallel | None = None,
) -> Tensor:
    """Return the residual stream after the layer. `recompute` marks a recomputation: only saved
    tensors matter, so the result is not computed. The backward pass finds `grad_amax` of x_TE."""
    given = eps, selective, recompute, float8, grad_amax, tensor
    return Mlp.apply(*given, x_TE, norm_E, gate_up_2ME, down_EM)


class Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        eps: float,
        selective: bool,
        recompute: bool,
        float8: frozenset[Projection],
        grad_amax: Amax | None,
        tensor: TensorParallel | None,
        *tensors: Tensor,
    ) -> Tensor:
        x_TE, norm_E, gate_up_2ME, down_EM = tensors
        share = sharer_of(tensor)
        amax = Amax() if "gate_up" in float8 else None
        normed_TE, rstd_T1 = rms_norm_forward(x_TE, norm_E, eps, amax)
        gate_up_T2M, of_gate_up = linear(
            gathered(normed_TE, tensor),
            gate_up_2ME,
            float8="gate_up" in float8,
            amax=amax,
            share=share,
        )
        amax = Amax() if "down" in float8 else None
        product_TM, kept = silu_mul_forward(gate_up_T2M, amax)
        if recompute:
            result_TE = torch.empty_like(x_TE)
            of_down = amaxes_of(
                product_TM, down_EM, float8="down" in float8, amax=amax, share=share
            )
        else:
            result_TE, of_down = linear(
                product_TM,
                down_EM,
                onto_TO=x_TE,
                float8="down" in float8,
                amax=amax,
                reduce=reducer_of(tensor),
                share=share,
            )
        ctx.eps, ctx.selective, ctx.grad_amax, ctx.tensor = eps, selective, grad_amax, tensor
        ctx.ahead = x_TE.grad_fn is not None  # by what made these rows
        kept = () if selective else (normed_TE, gate_up_T2M, *kept)
        ctx.save_for_backward(*tensors, rstd_T1, *of_gate_up, *of_down, *kept)
        return result_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, tensor, share = ctx.saved_tensors, ctx.tensor, sharer_of(ctx.tensor)
        grads_of_all = begin_gathered(grads[0], tensor)
        x_TE, norm_E, gate_up_2ME, down_EM, rstd_T1 = saved[:5]
        of_gate_up, of_down = saved[5:7], saved[7:9]
        if ctx.selective:
            normed_TE, _ = rms_norm_forward(x_TE, norm_E, ctx.eps)
            normed_TE = gathered(normed_TE, tensor)
            rows_of_all = begin_gathered(normed_TE, None)
            gate_up_T2M, _ = linear(
                normed_TE,
                gate_up_2ME,
                float8=of_gate_up[0] is not None,
                amax=Amax(of_gate_up[0]),
                share=share,
            )
            kept = silu_mul_forward(gate_up_T2M)[1] if keeps_product(gate_up_T2M) else ()
        else:
            normed_TE, gate_up_T2M, *kept = saved[9:]
            rows_of_all = begin_gathered(normed_TE, tensor)
        through_down = OutputGradient(grads_of_all(), of_down, share=share)
        amax = Amax() if of_gate_up[0] is not None else None
        grad_gate_up_T2M, product_TM = silu_mul_backward(
            through_down.of_input(down_EM), gate_up_T2M, tuple(kept), amax
        )
        grad_down_EM = through_down.of_weight(product_TM)
        del product_TM, through_down, grads_of_all
        through_gate_up = OutputGradient(grad_gate_up_T2M, of_gate_up, amax, share)
        grad_TE, grad_norm_E, grad_gate_up_2ME = backward_to_stream(
            through_gate_up,
            gate_up_2ME,
            rows_of_all,
            lambda grad_TE: rms_norm_backward(
                grad_TE, x_TE, rstd_T1, norm_E, grads[0], ctx.grad_amax
            ),
            tensor,
            ahead=ctx.ahead,
        )
        return *[None] * 6, grad_TE, grad_norm_E, grad_gate_up_2ME, grad_down_EM
