"""Tensors of every kind that a storage pool must keep: with a shared storage, odd sizes and none at
all."""

from __future__ import annotations

import torch


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """A Parameter, a bf16 tensor, two views of one storage, a non-contiguous one, an integer one,
    an empty one."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(64, 32, generator=generator)
    return {
        "weight": torch.nn.Parameter(torch.randn(33, 7, generator=generator)),
        "half": torch.randn(129, generator=generator).to(torch.bfloat16),
        "fused": fused,
        "rows": fused[16:32],
        "turned": fused.t(),
        "ids": torch.randint(0, 1000, (17,), generator=generator),
        "empty": torch.empty(0),
    }


DISTINCT_BYTES = 33 * 7 * 4 + 129 * 2 + 64 * 32 * 4 + 17 * 8
