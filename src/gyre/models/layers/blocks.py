"""Blocks: a decoder layer around attention, as differentiable ops with hand-written backwards.

`attention_inputs`: norm, q|k|v projection, per-head norms (where given), rotary embedding.
`attention_output`: output projection, residual. `layers.mlp` has the rest of a dense layer. The
first passes the residual stream through, so that its gradient is summed in place and not by
autograd. Only tensors that the backward pass reads are kept. `selective` keeps only what is
expensive to recompute: the inputs, the q|k|v projection, and the stream between the halves. Norms,
rotated heads, gate, up and the activation are recomputed. `float8` names the projections with 8-bit
operands (kernels.linear). `tensor` joins the ranks that compute the layer together; None is one
rank, where products add the residual themselves.
"""

# T packed tokens, E hidden size, R = (H + 2K)·D rows of qkv, H heads, K kv heads, J = H + K heads
# that turn, D head dim, A = H·D

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre.core.records import Projection
from gyre.kernels.float8 import Amax
from gyre.kernels.linear import OutputGradient, linear
from gyre.kernels.norm import rms_norm_backward, rms_norm_forward
from gyre.kernels.recompute import RecomputeQK
from gyre.models.layers.qk_norm_rope import turn_heads, turn_heads_backward
from gyre.models.layers.tensor_parallel import (
    TensorParallel,
    backward_to_stream,
    begin_gathered,
    gathered,
    reducer_of,
    sharer_of,
)


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
    tensor: TensorParallel | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (x_TE itself, q_THD, k_TKD, v_TKD); `heads` is (H, K). `recompute_qk` receives the
    function that recomputes q and k."""
    tensors = x_TE, norm_E, qkv_RE, bias_R, q_norm_D, k_norm_D, cos_T1D, sin_T1D
    return AttentionInputs.apply(heads, eps, recompute_qk, float8, tensor, *tensors)


def attention_output(
    x_TE: Tensor,
    attended_TA: Tensor,
    out_EA: Tensor,
    *,
    float8: frozenset[Projection] = frozenset(),
    grad_amax: Amax | None = None,
    tensor: TensorParallel | None = None,
) -> Tensor:
    """Return the residual stream after attention. `grad_amax` is that of the result's gradient, if
    the backward pass of what follows has found it by then."""
    return AttentionOutput.apply(float8, grad_amax, tensor, x_TE, attended_TA, out_EA)


class AttentionInputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        heads: tuple[int, int],
        eps: float,
        recompute_qk: RecomputeQK | None,
        float8: frozenset[Projection],
        tensor: TensorParallel | None,
        *tensors: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x_TE, norm_E, qkv_RE, bias_R, *norms_and_tables = tensors
        amax = Amax() if "qkv" in float8 else None
        normed_TE, rstd_T1 = rms_norm_forward(x_TE, norm_E, eps, amax)
        qkv_TR, amaxes = linear(
            gathered(normed_TE, tensor),
            qkv_RE,
            bias_R,
            float8="qkv" in float8,
            amax=amax,
            share=sharer_of(tensor),
        )
        turn = partial(turn_heads, qkv_TR, *norms_and_tables, heads=heads, eps=eps)
        q_THD, k_TKD, v_TKD, rstd_TJ1 = turn()
        if recompute_qk is not None:
            normed_TE = None
            recompute_qk.make = lambda: turn()[:2]
        ctx.heads, ctx.eps, ctx.tensor = heads, eps, tensor
        ctx.ahead = x_TE.grad_fn is not None  # by what made these rows
        ctx.save_for_backward(*tensors, normed_TE, rstd_T1, qkv_TR, rstd_TJ1, *amaxes)
        return x_TE, q_THD, k_TKD, v_TKD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_TE, grad_q_THD, grad_k_TKD, grad_v_TKD = grads
        saved = ctx.saved_tensors  # once: hooks make them
        x_TE, norm_E, qkv_RE, bias_R, *norms_and_tables = saved[:8]
        normed_TE, rstd_T1, qkv_TR, rstd_TJ1, *amaxes = saved[8:]
        if normed_TE is None:
            normed_TE, _ = rms_norm_forward(x_TE, norm_E, ctx.eps)
        rows_of_all = begin_gathered(normed_TE, ctx.tensor)
        amax = Amax() if amaxes[0] is not None else None
        grads_of_heads = grad_q_THD, grad_k_TKD, grad_v_TKD
        grad_qkv_TR, *grads_of_norms = turn_heads_backward(
            grads_of_heads, qkv_TR, rstd_TJ1, *norms_and_tables, heads=ctx.heads, amax=amax
        )
        through_qkv = OutputGradient(grad_qkv_TR, tuple(amaxes), amax, sharer_of(ctx.tensor))
        grad_TE, grad_norm_E, grad_qkv_RE = backward_to_stream(
            through_qkv,
            qkv_RE,
            rows_of_all,
            lambda grad_TE: rms_norm_backward(grad_TE, x_TE, rstd_T1, norm_E, grad_x_TE),
            ctx.tensor,
            ahead=ctx.ahead,
        )
        grad_bias_R = grad_qkv_TR.sum(0) if bias_R is not None else None
        grads_of_weights = grad_norm_E, grad_qkv_RE, grad_bias_R, *grads_of_norms
        return *[None] * 5, grad_TE, *grads_of_weights, None, None


class AttentionOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        float8: frozenset[Projection],
        grad_amax: Amax | None,
        tensor: TensorParallel | None,
        *tensors: Tensor,
    ) -> Tensor:
        x_TE, attended_TA, out_EA = tensors
        result_TE, amaxes = linear(
            attended_TA,
            out_EA,
            onto_TO=x_TE,
            float8="out" in float8,
            reduce=reducer_of(tensor),
            share=sharer_of(tensor),
        )
        ctx.grad_amax, ctx.tensor = grad_amax, tensor
        ctx.save_for_backward(attended_TA, out_EA, *amaxes)
        return result_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        attended_TA, out_EA, *amaxes = ctx.saved_tensors
        through_out = OutputGradient(
            gathered(grads[0], ctx.tensor), tuple(amaxes), ctx.grad_amax, sharer_of(ctx.tensor)
        )
        grad_out_EA = through_out.of_weight(attended_TA)
        return *[None] * 3, grads[0], through_out.of_input(out_EA), grad_out_EA
