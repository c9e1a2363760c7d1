"""The Triton form of checksums gives the sums of the torch form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gyre.kernels.checksum import SummedRun, checksums

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
    on_gpu, here = (
        checksums([SummedRun(values_N=one, start=start)]) for one in (values_N.cuda(), values_N)
    )
    assert on_gpu.tolist() == here.tolist()


@pytest.mark.parametrize("columns", [(0, 1), (3, 700), (700, 1500)])
@pytest.mark.parametrize("start", [0, 1, 12_345])
def test_columns_sum_as_on_a_cpu(columns, start):
    whole_RC = torch.randn(100, 1500).bfloat16()
    run_N = whole_RC[:, slice(*columns)].reshape(-1)[start:].contiguous()
    place = {"start": start, "columns": columns, "num_columns": 1500}
    on_gpu, here = (checksums([SummedRun(values_N=one, **place)]) for one in (run_N.cuda(), run_N))
    assert on_gpu.tolist() == here.tolist()


def test_runs_of_any_size_are_summed_at_once():
    """Runs of columns, of all columns and of none, in words of three sizes."""
    torch.manual_seed(1)
    runs = []
    for number in range(150):
        count, kind = int(torch.randint(0, 60_000, ())), number % 5
        dtype = (torch.bfloat16, torch.float32, torch.bfloat16, torch.uint8, torch.float64)[kind]
        values_N = torch.randint(0, 200, (count,)).to(dtype)
        columns = (3, 3 + 1 + number) if number % 2 else None
        runs.append(
            SummedRun(values_N=values_N, start=7 * number, columns=columns, num_columns=300)
        )
    on_gpu = checksums([replace(run, values_N=run.values_N.cuda()) for run in runs])
    assert on_gpu.tolist() == checksums(runs).tolist()
