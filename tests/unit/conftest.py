"""Fixtures that several test files share."""

from __future__ import annotations

import hypothesis
import pytest
import torch

from gyre.kernels.cpu.build import Unavailable
from gyre.kernels.cpu.library import load_decoder

hypothesis.settings.register_profile("gyre", deadline=None)  # a busy machine says nothing of an example
hypothesis.settings.load_profile("gyre")


@pytest.fixture(params=["c", "torch"])
def both_kernels(request, monkeypatch) -> str:
    """Run the test on the C kernels, and again without them."""
    library = load_decoder(torch.float32)
    if request.param == "torch":
        monkeypatch.setattr("gyre.engine.cpu_step.load_decoder", lambda dtype: Unavailable(reason="not for this test"))
    elif isinstance(library, Unavailable):
        pytest.skip(library.reason)
    return request.param
