"""Sums: what ranks computed of the same numbers, added up in float32 in the order of the ranks. In:
a row of each rank, in the dtype that it was sent in. Out: their sum, written where the caller says.
"""

# R ranks, N numbers

from __future__ import annotations

from torch import Tensor

from gyre.kernels.dispatch import has_triton


def add_up(parts_RN: Tensor, out_N: Tensor) -> None:
    """Write the sum over the first dimension into `out_N`, float32, without a copy of any row in
    float32. The same additions in the same order on every device: to the bit what float32 rows
    would give."""
    if has_triton(parts_RN.device):
        from gyre.kernels.gpu.sums import add_up_rows  # imports Triton

        add_up_rows(parts_RN, out_N)
        return
    out_N.copy_(parts_RN[0])
    for part_N in parts_RN[1:]:
        out_N.add_(part_N)
