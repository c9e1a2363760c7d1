"""Weights: a named weight of a module, with a bias where the family has one. In: its shape. Out:
the parameters, uninitialized.
"""

from __future__ import annotations

import torch
from torch import nn


class Weights(nn.Module):
    """A named weight, with a bias where the family has one. A checkpoint or an initializer fills
    it."""

    bias: nn.Parameter | None

    def __init__(
        self, *shape: int, bias: bool = False, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
        bias_R = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", bias_R)
