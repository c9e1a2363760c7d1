"""RMSNorm. In: rows of activations, a weight. Out: rows scaled to unit root mean square, times the
weight.

`rms_norm` is differentiable; models.layers.blocks calls its forward and backward passes directly.
Statistics are float32 (float64 for float64 rows) for any row dtype.
"""

# N rows, E features of a row

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre.kernels.dispatch import kernels_for
from gyre.kernels.float8 import Amax


def rms_norm(x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    return RmsNorm.apply(x_NE, weight_E, eps)


def rms_norm_forward(
    x_NE: Tensor, weight_E: Tensor, eps: float, amax: Amax | None = None
) -> tuple[Tensor, Tensor]:
    """Return the normalized rows and rstd_N1, which the backward pass needs. Rows are the last
    axis; the weight may have leading axes too (a weight per head). Triton's kernels compute `amax`
    of the rows."""
    features = x_NE.shape[-1]
    if weight_E.dim() == 1 and (kernels := kernels_for(x_NE, features)):
        return kernels.norm(x_NE, weight_E, eps, amax)
    if x_NE.is_cuda:
        scaled_NE, rstd_N1 = torch.ops.aten._fused_rms_norm(x_NE, [features], None, eps)
        return scaled_NE.mul_(weight_E), rstd_N1
    # torch's own is many passes in float32 here. These are few, and widen nothing but the
    # statistic.
    norm_N1 = torch.linalg.vector_norm(
        x_NE, dim=-1, keepdim=True, dtype=torch.promote_types(x_NE.dtype, torch.float32)
    )
    rstd_N1 = torch.addcmul(
        norm_N1.new_full((), eps), norm_N1, norm_N1, value=1 / features
    ).rsqrt_()
    scaled_NE = torch.empty(x_NE.shape, dtype=x_NE.dtype, device=x_NE.device)
    return torch.mul(x_NE, rstd_N1, out=scaled_NE).mul_(weight_E), rstd_N1


def rms_norm_backward(
    grad_NE: Tensor,
    x_NE: Tensor,
    rstd_N1: Tensor,
    weight_E: Tensor,
    through_NE: Tensor | None = None,
    amax: Amax | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight. `through_NE`, another gradient of x, is added to
    the former; `amax` is that of the sum."""
    if kernels := kernels_for(x_NE, x_NE.shape[-1]):
        return kernels.norm_backward(grad_NE, x_NE, rstd_N1, weight_E, through_NE, amax)
    grad_x_NE, grad_weight_E = _backward_by_torch(grad_NE, x_NE, rstd_N1, weight_E)
    return grad_x_NE if through_NE is None else grad_x_NE.add_(through_NE), grad_weight_E


def _backward_by_torch(
    grad_NE: Tensor, x_NE: Tensor, rstd_N1: Tensor, weight_E: Tensor
) -> tuple[Tensor, Tensor]:
    features = list(weight_E.shape)
    rstd_N1 = rstd_N1.contiguous()  # both kernels below read it as if it were
    if grad_NE.is_cuda:
        return torch.ops.aten._fused_rms_norm_backward(
            grad_NE, x_NE, features, rstd_N1, weight_E, [True, True]
        )
    # torch has no RMSNorm backward for CPU, but a fused LayerNorm one. With mean 0 given as the
    # statistic it differs from ours only by the gradient through the mean, -(grad · weight) · rstd
    # / E, which we put back.
    statistics_weight_E = weight_E.to(rstd_N1.dtype)
    wide = grad_NE.dtype in (torch.float32, torch.float64)
    grad_x_NE, grad_weight_E, _ = torch.ops.aten.native_layer_norm_backward(
        grad_NE,
        x_NE,
        features,
        torch.zeros_like(rstd_N1),
        rstd_N1,
        statistics_weight_E,
        None,
        [True, wide, False],
    )
    if not wide:  # the fused one adds rows up in their own dtype, and loses a tenth of them
        products_NE = (grad_NE * x_NE).reshape(-1, features[-1])
        grad_weight_E = torch.mm(rstd_N1.reshape(1, -1).to(products_NE.dtype), products_NE)[0]
    through_mean_N1 = (grad_NE @ weight_E)[..., None] * (rstd_N1 / features[0])
    return grad_x_NE.add_(through_mean_N1.to(grad_x_NE.dtype)), grad_weight_E.to(weight_E.dtype)


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        y_NE, rstd_N1 = rms_norm_forward(x_NE, weight_E, eps)
        ctx.save_for_backward(x_NE, rstd_N1, weight_E)
        return y_NE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *rms_norm_backward(grads[0], *ctx.saved_tensors), None
