"""The cases of an engine in service, on the CPU: the same that tests/gpu/test_served_gpu.py runs on
a GPU."""

from __future__ import annotations

import asyncio

import pytest
import torch

from gyre.kernels.cpu.build import Unavailable
from gyre.kernels.cpu.library import load_decoder
from served_cases import Place, new_weights, parks_in_flight, restarts, soak

CPU = Place(device=torch.device("cpu"), dtype=torch.float32, page_tokens=16)
pytestmark = pytest.mark.skipif(
    isinstance(load_decoder(torch.float32), Unavailable),
    reason="batch-invariant mode needs the C kernels",
)


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_soak_under_random_aborts(way) -> None:
    asyncio.run(soak(CPU, way, num_requests=40))


@pytest.mark.parametrize(
    ("policy", "way"), [("drain", "swap"), ("keep_prefix", "recompute"), ("continue", "swap")]
)
def test_new_weights_in_flight(policy, way) -> None:
    asyncio.run(new_weights(CPU, policy, way))


@pytest.mark.parametrize("tier", ["host", "none"])
def test_parks_in_flight(tier) -> None:
    asyncio.run(parks_in_flight(CPU, tier))


def test_restarts() -> None:
    asyncio.run(restarts(CPU))
