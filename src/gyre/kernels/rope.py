"""Rotary position embedding, hub convention: features d and d + D/2 of a head rotate together. In:
heads, tables of the positions. Out: rotated heads."""

# T tokens, H heads, D head dim, F = D/2 frequencies

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def rope_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, float] | None, device: torch.device
) -> Tensor:
    """Return inv_freq_F in float32, with Llama 3's scaling when given. It slows long waves by
    `factor`, keeps short ones and blends those between."""
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    inv_freq_F = 1.0 / (theta**exponents_F)
    if scaling is None:
        return inv_freq_F
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    turns_F = original * inv_freq_F / (2 * math.pi)  # full turns within the original context
    keep_F = ((turns_F - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep_F) * inv_freq_F / factor + keep_F * inv_freq_F


def rope_tables(
    positions_T: Tensor, inv_freq_F: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos_T1D and sin_T1D; angles in float32, then rounded to `dtype`. The first half of sin
    is negated, so that the rotation is x · cos + swap(x) · sin."""
    angles_TF = positions_T.float()[:, None] * inv_freq_F
    cos_TF, sin_TF = angles_TF.cos().to(dtype), angles_TF.sin().to(dtype)
    return torch.cat([cos_TF, cos_TF], dim=-1)[:, None], torch.cat([-sin_TF, sin_TF], dim=-1)[
        :, None
    ]


def turn(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate every head by its token's angles."""
    return torch.mul(x_THD, cos_T1D).addcmul_(swap_halves(x_THD), sin_T1D)


def turn_back(grad_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate by the opposite angles: the gradient of `turn`, which is orthogonal."""
    return torch.mul(grad_THD, cos_T1D).addcmul_(swap_halves(grad_THD), sin_T1D, value=-1)


def swap_halves(x_THD: Tensor) -> Tensor:
    first, second = x_THD.chunk(2, dim=-1)
    return torch.cat([second, first], dim=-1)
