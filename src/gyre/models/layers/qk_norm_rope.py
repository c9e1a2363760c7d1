"""QK norm and RoPE: q and k between projection and attention: per-head norm (where the family has
one), rotary embedding. In: projected q|k|v rows. Out: q, k, v by heads; and the gradients."""

# T tokens, R = (H + 2K)·D rows of qkv, H heads, K kv heads, J = H + K heads that turn, D head dim

from __future__ import annotations

import torch
from torch import Tensor

from gyre.kernels.dispatch import kernels_for
from gyre.kernels.float8 import Amax
from gyre.kernels.norm import rms_norm_backward, rms_norm_forward
from gyre.kernels.rope import turn, turn_back


def turn_heads(
    qkv_TR: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    cos_T1D: Tensor,
    sin_T1D: Tensor,
    *,
    heads: tuple[int, int],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q_THD, k_TKD, v_TKD, and rstd_TJ1 of the norms."""
    num_heads, num_kv_heads = heads
    heads_TRD = qkv_TR.view(len(qkv_TR), num_heads + 2 * num_kv_heads, cos_T1D.shape[-1])
    qk_TJD, v_TKD = heads_TRD.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if kernels := kernels_for(qkv_TR, head_dim=cos_T1D.shape[-1]):
        q_THD, k_TKD, rstd_TJ1 = kernels.heads(
            qkv_TR, q_norm_D, k_norm_D, cos_T1D, sin_T1D, heads, eps
        )
        return q_THD, k_TKD, v_TKD, rstd_TJ1
    rstd_TJ1 = None
    if q_norm_D is not None and k_norm_D is not None:
        weight_JD = torch.cat([q_norm_D.expand(num_heads, -1), k_norm_D.expand(num_kv_heads, -1)])
        qk_TJD, rstd_TJ1 = rms_norm_forward(qk_TJD, weight_JD, eps)
    q_THD, k_TKD = turn(qk_TJD, cos_T1D, sin_T1D).split([num_heads, num_kv_heads], dim=1)
    return q_THD, k_TKD, v_TKD, rstd_TJ1


def turn_heads_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv_TR: Tensor,
    rstd_TJ1: Tensor | None,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    cos_T1D: Tensor,
    sin_T1D: Tensor,
    *,
    heads: tuple[int, int],
    amax: Amax | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of qkv_TR, q_norm_D and k_norm_D from those of q, k and v. Triton's
    kernels also compute `amax` of the first."""
    if kernels := kernels_for(qkv_TR, head_dim=cos_T1D.shape[-1]):
        return kernels.heads_backward(
            grads, qkv_TR, rstd_TJ1, q_norm_D, k_norm_D, cos_T1D, sin_T1D, heads, amax
        )
    grad_q_THD, grad_k_TKD = (turn_back(grad, cos_T1D, sin_T1D) for grad in grads[:2])
    grad_q_norm_D = grad_k_norm_D = None
    if rstd_TJ1 is not None and q_norm_D is not None and k_norm_D is not None:
        raw_q, raw_k, _ = qkv_TR.view(len(qkv_TR), sum(heads) + heads[1], cos_T1D.shape[-1]).split(
            [*heads, heads[1]], dim=1
        )
        rstd_q, rstd_k = rstd_TJ1.split(heads, dim=1)
        grad_q_THD, grad_q_norm_D = rms_norm_backward(grad_q_THD, raw_q, rstd_q, q_norm_D)
        grad_k_TKD, grad_k_norm_D = rms_norm_backward(grad_k_TKD, raw_k, rstd_k, k_norm_D)
    return (
        torch.cat([grad_q_THD, grad_k_TKD, grads[2]], dim=1).flatten(1),
        grad_q_norm_D,
        grad_k_norm_D,
    )
