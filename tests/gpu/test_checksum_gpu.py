"""The Triton form of checksums gives the sums of the torch form."""

from __future__ import annotations

import pytest
import torch

from gyre.kernels.checksum import checksum

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("count", [1, 1023, 1024, 8193, 1_000_003])
@pytest.mark.parametrize("start", [0, 5, 1 << 33])
def test_runs_sum_as_on_a_cpu(dtype, count, start):
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    values_N = raw.view(dtype)
    assert checksum(values_N.cuda(), start=start).item() == checksum(values_N, start=start).item()


@pytest.mark.parametrize("columns", [(0, 1), (3, 700), (700, 1500)])
@pytest.mark.parametrize("start", [0, 1, 12_345])
def test_columns_sum_as_on_a_cpu(columns, start):
    whole_RC = torch.randn(100, 1500).bfloat16()
    run_N = whole_RC[:, slice(*columns)].reshape(-1)[start:].contiguous()
    place = {"start": start, "columns": columns, "num_columns": 1500}
    assert checksum(run_N.cuda(), **place).item() == checksum(run_N, **place).item()
