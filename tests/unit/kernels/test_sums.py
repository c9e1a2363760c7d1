"""Sums of what several ranks computed, on a CPU; tests/gpu/test_training_kernels_gpu.py holds the
kernel to them."""

from __future__ import annotations

import pytest
import torch

from gyre.kernels.sums import add_up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_are_added_in_float32_in_their_order(dtype, rows):
    generator = torch.Generator().manual_seed(rows)
    parts_RN = torch.randn(rows, 1001, generator=generator).to(dtype)
    out_N = torch.full((1001,), float("nan"))
    add_up(parts_RN, out_N)
    expected_N = parts_RN[0].float()
    for part_N in parts_RN[1:]:
        expected_N = expected_N + part_N.float()
    assert torch.equal(out_N, expected_N)


def test_small_numbers_are_not_lost_beside_large_ones():
    """256 + 1 is 256 in bfloat16."""
    parts_RN = torch.cat([torch.full((1, 4), 256.0), torch.ones(8, 4)]).bfloat16()
    add_up(parts_RN, out_N := torch.empty(4))
    assert out_N.tolist() == [264.0] * 4
