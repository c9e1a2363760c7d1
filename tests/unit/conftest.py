"""Fixtures that several test files share."""

from __future__ import annotations

import pytest
import torch
from rank_pool import RankPool

from gyre.kernels.cpu.build import Unavailable
from gyre.kernels.cpu.library import load_decoder


@pytest.fixture(params=["c", "torch"])
def both_kernels(request, monkeypatch) -> str:
    """Run the test on the C kernels, and again without them."""
    library = load_decoder(torch.float32)
    if request.param == "torch":
        monkeypatch.setattr("gyre.engine.cpu_step.load_decoder", lambda dtype: Unavailable(reason="not for this test"))
    elif isinstance(library, Unavailable):
        pytest.skip(library.reason)
    return request.param


@pytest.fixture(scope="module")
def ranks():
    """Four ranks over gloo."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pair():
    """Two ranks over gloo."""
    pool = RankPool(2)
    yield pool
    pool.close()
