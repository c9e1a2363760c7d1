"""Sums: the ranks' contributions to the same numbers, added in float32 in rank order. In: one row
per rank, in the dtype of transfer. Out: their sum, written to the caller's tensor."""

# R ranks, N numbers

from __future__ import annotations

from torch import Tensor

from gyre.kernels.dispatch import has_triton


def add_up(parts_RN: Tensor, out_N: Tensor) -> None:
    """Write the sum over the first dimension into `out_N`, float32, without a float32 copy of any
    row. Every device adds in the same order: the result equals that of float32 rows to the bit."""
    if has_triton(parts_RN.device):
        from gyre.kernels.gpu.sums import add_up_rows  # imports Triton

        add_up_rows(parts_RN, out_N)
        return
    out_N.copy_(parts_RN[0])
    for part_N in parts_RN[1:]:
        out_N.add_(part_N)
