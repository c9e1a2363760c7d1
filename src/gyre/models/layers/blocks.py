"""Blocks: the two halves of a decoder layer around attention, each one differentiable op with a
hand-written backward.

`attention_inputs`: norm, q|k|v projection, per-head norms (where given), rotary embedding.
`layer_output`: output projection, residual, norm, gated MLP, residual. The first passes the
residual stream through, so that its gradient is summed in place and not by autograd. Only tensors
that the backward pass reads are kept. `selective` keeps only what is expensive to recompute: the
inputs, the q|k|v projection, and the stream between the halves. Norms, rotated heads, gate, up and
the activation are recomputed. `float8` names the projections with 8-bit operands (kernels.linear).
"""

# T packed tokens, E hidden size, R = (H + 2K)·D rows of qkv, H heads, K kv heads, J = H + K heads
# that turn, D head dim, A = H·D, M mlp size

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre.core.records import Projection
from gyre.kernels.float8 import Amax
from gyre.kernels.linear import OutputGradient, amaxes_of, linear
from gyre.kernels.norm import rms_norm_backward, rms_norm_forward
from gyre.kernels.recompute import RecomputeQK
from gyre.kernels.silu import keeps_product, silu_mul_backward, silu_mul_forward
from gyre.models.layers.qk_norm_rope import turn_heads, turn_heads_backward


def attention_inputs(
    x_TE: Tensor,
    norm_E: Tensor,
    qkv_RE: Tensor,
    bias_R: Tensor | None,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    cos_T1D: Tensor,
    sin_T1D: Tensor,
    *,
    heads: tuple[int, int],
    eps: float,
    recompute_qk: RecomputeQK | None = None,
    float8: frozenset[Projection] = frozenset(),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (x_TE itself, q_THD, k_TKD, v_TKD); `heads` is (H, K). `recompute_qk` receives the
    function that recomputes q and k."""
    tensors = x_TE, norm_E, qkv_RE, bias_R, q_norm_D, k_norm_D, cos_T1D, sin_T1D
    return AttentionInputs.apply(heads, eps, recompute_qk, float8, *tensors)


def layer_output(
    x_TE: Tensor,
    attended_TA: Tensor,
    out_EA: Tensor,
    norm_E: Tensor,
    gate_up_2ME: Tensor,
    down_EM: Tensor,
    *,
    eps: float,
    selective: bool = False,
    recompute: bool = False,
    float8: frozenset[Projection] = frozenset(),
) -> Tensor:
    """Return the residual stream after the layer. `recompute` marks a recomputation: only saved
    tensors matter, so the result is not computed."""
    tensors = x_TE, attended_TA, out_EA, norm_E, gate_up_2ME, down_EM
    return LayerOutput.apply(eps, selective, recompute, float8, *tensors)


class AttentionInputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        heads: tuple[int, int],
        eps: float,
        recompute_qk: RecomputeQK | None,
        float8: frozenset[Projection],
        *tensors: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x_TE, norm_E, qkv_RE, bias_R, *norms_and_tables = tensors
        amax = Amax() if "qkv" in float8 else None
        normed_TE, rstd_T1 = rms_norm_forward(x_TE, norm_E, eps, amax)
        qkv_TR, amaxes = linear(normed_TE, qkv_RE, bias_R, float8="qkv" in float8, amax=amax)
        turn = partial(turn_heads, qkv_TR, *norms_and_tables, heads=heads, eps=eps)
        q_THD, k_TKD, v_TKD, rstd_TJ1 = turn()
        if recompute_qk is not None:
            normed_TE = None
            recompute_qk.make = lambda: turn()[:2]
        ctx.heads, ctx.eps = heads, eps
        ctx.save_for_backward(*tensors, normed_TE, rstd_T1, qkv_TR, rstd_TJ1, *amaxes)
        return x_TE, q_THD, k_TKD, v_TKD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_TE, grad_q_THD, grad_k_TKD, grad_v_TKD = grads
        saved = ctx.saved_tensors  # once: hooks make them
        x_TE, norm_E, qkv_RE, bias_R, *norms_and_tables = saved[:8]
        normed_TE, rstd_T1, qkv_TR, rstd_TJ1, *amaxes = saved[8:]
        amax = Amax() if amaxes[0] is not None else None
        grads_of_heads = grad_q_THD, grad_k_TKD, grad_v_TKD
        grad_qkv_TR, *grads_of_norms = turn_heads_backward(
            grads_of_heads, qkv_TR, rstd_TJ1, *norms_and_tables, heads=ctx.heads, amax=amax
        )
        if normed_TE is None:
            normed_TE, _ = rms_norm_forward(x_TE, norm_E, ctx.eps)
        through_qkv = OutputGradient(grad_qkv_TR, tuple(amaxes), amax)
        grad_qkv_RE = through_qkv.of_weight(normed_TE)
        grad_bias_R = grad_qkv_TR.sum(0) if bias_R is not None else None
        grad_TE, grad_norm_E = rms_norm_backward(
            through_qkv.of_input(qkv_RE), x_TE, rstd_T1, norm_E, grad_x_TE
        )
        grads_of_weights = grad_norm_E, grad_qkv_RE, grad_bias_R, *grads_of_norms
        return *[None] * 4, grad_TE, *grads_of_weights, None, None


class LayerOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        eps: float,
        selective: bool,
        recompute: bool,
        float8: frozenset[Projection],
        *tensors: Tensor,
    ) -> Tensor:
        x_TE, attended_TA, out_EA, norm_E, gate_up_2ME, down_EM = tensors
        middle_TE, of_out = linear(attended_TA, out_EA, onto_TO=x_TE, float8="out" in float8)
        amax = Amax() if "gate_up" in float8 else None
        normed_TE, rstd_T1 = rms_norm_forward(middle_TE, norm_E, eps, amax)
        gate_up_T2M, of_gate_up = linear(
            normed_TE, gate_up_2ME, float8="gate_up" in float8, amax=amax
        )
        amax = Amax() if "down" in float8 else None
        product_TM, kept = silu_mul_forward(gate_up_T2M, amax)
        if recompute:
            result_TE = torch.empty_like(middle_TE)
            of_down = amaxes_of(product_TM, down_EM, float8="down" in float8, amax=amax)
        else:
            result_TE, of_down = linear(
                product_TM, down_EM, onto_TO=middle_TE, float8="down" in float8, amax=amax
            )
        ctx.eps, ctx.selective = eps, selective
        kept = () if selective else (normed_TE, gate_up_T2M, *kept)
        ctx.save_for_backward(
            *tensors[1:], middle_TE, rstd_T1, *of_out, *of_gate_up, *of_down, *kept
        )
        return result_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_TE, saved = grads[0], ctx.saved_tensors
        attended_TA, out_EA, norm_E, gate_up_2ME, down_EM, middle_TE, rstd_T1 = saved[:7]
        of_out, of_gate_up, of_down = saved[7:9], saved[9:11], saved[11:13]
        if ctx.selective:
            normed_TE, _ = rms_norm_forward(middle_TE, norm_E, ctx.eps)
            gate_up_T2M, _ = linear(
                normed_TE, gate_up_2ME, float8=of_gate_up[0] is not None, amax=Amax(of_gate_up[0])
            )
            kept = silu_mul_forward(gate_up_T2M)[1] if keeps_product(gate_up_T2M) else ()
        else:
            normed_TE, gate_up_T2M, *kept = saved[13:]
        through_down = OutputGradient(grad_TE, of_down)
        amax = Amax() if of_gate_up[0] is not None else None
        grad_gate_up_T2M, product_TM = silu_mul_backward(
            through_down.of_input(down_EM), gate_up_T2M, tuple(kept), amax
        )
        grad_down_EM = through_down.of_weight(product_TM)
        del product_TM, through_down
        through_gate_up = OutputGradient(grad_gate_up_T2M, of_gate_up, amax)
        grad_gate_up_2ME = through_gate_up.of_weight(normed_TE)
        amax = Amax() if of_out[0] is not None else None
        grad_middle_TE, grad_norm_E = rms_norm_backward(
            through_gate_up.of_input(gate_up_2ME), middle_TE, rstd_T1, norm_E, grad_TE, amax
        )
        del through_gate_up
        through_out = OutputGradient(grad_middle_TE, of_out, amax)
        grads_of_weights = (
            through_out.of_weight(attended_TA),
            grad_norm_E,
            grad_gate_up_2ME,
            grad_down_EM,
        )
        return *[None] * 4, grad_middle_TE, through_out.of_input(out_EA), *grads_of_weights
