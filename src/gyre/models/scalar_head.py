"""ScalarHead: one number per token from the hidden state. In: hidden_NE. Out: values_N in
float32."""

# N rows, E hidden size

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScalarHead(nn.Module):
    """A [1, E] projection in float32, initially zero: a new critic or reward model returns 0."""

    def __init__(self, hidden_size: int, *, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, device=device, dtype=torch.float32))

    def forward(self, hidden_NE: Tensor) -> Tensor:
        return (hidden_NE.float() @ self.weight.t()).squeeze(-1)
