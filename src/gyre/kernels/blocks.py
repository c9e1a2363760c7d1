"""Blocks: the two halves of a decoder layer around attention, each one differentiable op with a hand-written backward.

`attention_inputs`: norm, q|k|v projection, per-head norms (where given), rotary turning.
`layer_output`: output projection, residual, norm, gated MLP, residual.
The first hands the residual stream through, so that its gradient is summed in place and not by autograd. What the
backward pass needs is kept, all else is freed. `lean` keeps only what is dear to make again: the inputs, the projection
to q, k and v, and the stream between the halves; norms, turned heads, gate, up and the activation come again.
Caller: models.decoder.
"""

# T packed tokens, E hidden size, R = (H + 2K)·D rows of qkv, H heads, K kv heads, J = H + K heads that turn,
# D head dim, A = H·D, M mlp size

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre.kernels.heads import turn_heads, turn_heads_backward
from gyre.kernels.keep import Turned
from gyre.kernels.norm import rms_norm_backward, rms_norm_forward
from gyre.kernels.silu import keeps_product, silu_mul_backward, silu_mul_forward


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
    lean: Turned | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (x_TE itself, q_THD, k_TKD, v_TKD); `heads` is (H, K). `lean` learns how to make q and k again."""
    return AttentionInputs.apply(x_TE, norm_E, qkv_RE, bias_R, q_norm_D, k_norm_D, cos_T1D, sin_T1D, heads, eps, lean)


def layer_output(
    x_TE: Tensor,
    attended_TA: Tensor,
    out_EA: Tensor,
    norm_E: Tensor,
    gate_up_2ME: Tensor,
    down_EM: Tensor,
    *,
    eps: float,
    lean: bool = False,
    again: bool = False,
) -> Tensor:
    """Return the residual stream after the layer. `again` is for a pass that is run for what it keeps alone: the result
    is not computed."""
    return LayerOutput.apply(x_TE, attended_TA, out_EA, norm_E, gate_up_2ME, down_EM, eps, lean, again)


class AttentionInputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        norm_E: Tensor,
        qkv_RE: Tensor,
        bias_R: Tensor | None,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        heads: tuple[int, int],
        eps: float,
        lean: Turned | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        normed_TE, rstd_T1 = rms_norm_forward(x_TE, norm_E, eps)
        qkv_TR = F.linear(normed_TE, qkv_RE, bias_R)
        norms_and_tables = q_norm_D, k_norm_D, cos_T1D, sin_T1D
        q_THD, k_TKD, v_TKD, rstd_TJ1 = turn_heads(qkv_TR, *norms_and_tables, heads=heads, eps=eps)
        if lean is not None:
            normed_TE = None
            lean.make = lambda: turn_heads(qkv_TR, *norms_and_tables, heads=heads, eps=eps)[:2]
        ctx.heads, ctx.eps = heads, eps
        ctx.save_for_backward(
            x_TE, norm_E, qkv_RE, bias_R, q_norm_D, k_norm_D, cos_T1D, sin_T1D, normed_TE, rstd_T1, qkv_TR, rstd_TJ1
        )
        return x_TE, q_THD, k_TKD, v_TKD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_TE, grad_q_THD, grad_k_TKD, grad_v_TKD = grads
        (
            x_TE, norm_E, qkv_RE, bias_R, q_norm_D, k_norm_D, cos_T1D, sin_T1D, normed_TE, rstd_T1, qkv_TR, rstd_TJ1
        ) = ctx.saved_tensors  # fmt: skip
        grad_qkv_TR, grad_q_norm_D, grad_k_norm_D = turn_heads_backward(
            (grad_q_THD, grad_k_TKD, grad_v_TKD), qkv_TR, rstd_TJ1, q_norm_D, k_norm_D, cos_T1D, sin_T1D,
            heads=ctx.heads,
        )  # fmt: skip
        if normed_TE is None:
            normed_TE, _ = rms_norm_forward(x_TE, norm_E, ctx.eps)
        grad_qkv_RE = grad_qkv_TR.t() @ normed_TE
        grad_bias_R = grad_qkv_TR.sum(0) if bias_R is not None else None
        grad_TE, grad_norm_E = rms_norm_backward(grad_qkv_TR @ qkv_RE, x_TE, rstd_T1, norm_E, grad_x_TE)
        return grad_TE, grad_norm_E, grad_qkv_RE, grad_bias_R, grad_q_norm_D, grad_k_norm_D, *[None] * 5


class LayerOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        attended_TA: Tensor,
        out_EA: Tensor,
        norm_E: Tensor,
        gate_up_2ME: Tensor,
        down_EM: Tensor,
        eps: float,
        lean: bool,
        again: bool,
    ) -> Tensor:
        middle_TE = torch.addmm(x_TE, attended_TA, out_EA.t())
        normed_TE, rstd_T1 = rms_norm_forward(middle_TE, norm_E, eps)
        gate_up_T2M = F.linear(normed_TE, gate_up_2ME)
        product_TM, kept = silu_mul_forward(gate_up_T2M)
        ctx.eps, ctx.lean = eps, lean
        ctx.save_for_backward(
            attended_TA, out_EA, norm_E, gate_up_2ME, down_EM, middle_TE, rstd_T1,
            *(() if lean else (normed_TE, gate_up_T2M, *kept)),
        )  # fmt: skip
        return torch.empty_like(middle_TE) if again else torch.addmm(middle_TE, product_TM, down_EM.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_TE = grads[0]
        attended_TA, out_EA, norm_E, gate_up_2ME, down_EM, middle_TE, rstd_T1, *rest = ctx.saved_tensors
        if ctx.lean:
            normed_TE, _ = rms_norm_forward(middle_TE, norm_E, ctx.eps)
            gate_up_T2M = F.linear(normed_TE, gate_up_2ME)
            kept = silu_mul_forward(gate_up_T2M)[1] if keeps_product(gate_up_T2M) else ()
        else:
            normed_TE, gate_up_T2M, *kept = rest
        grad_gate_up_T2M, product_TM = silu_mul_backward(grad_TE @ down_EM, gate_up_T2M, tuple(kept))
        grad_down_EM = grad_TE.t() @ product_TM
        del product_TM
        grad_gate_up_2ME = grad_gate_up_T2M.t() @ normed_TE
        grad_middle_TE, grad_norm_E = rms_norm_backward(
            grad_gate_up_T2M @ gate_up_2ME, middle_TE, rstd_T1, norm_E, grad_TE
        )
        grad_out_EA = grad_middle_TE.t() @ attended_TA
        grads_of_weights = grad_out_EA, grad_norm_E, grad_gate_up_2ME, grad_down_EM
        return grad_middle_TE, grad_middle_TE @ out_EA, *grads_of_weights, None, None, None
