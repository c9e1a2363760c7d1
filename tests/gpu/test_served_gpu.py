"""The fused engine in service on a CUDA device: the cases of tests/support/served_cases.py (aborts,
swaps, recompute, new weights in flight, parks, restarts), its graphs over parks, and that nothing
is compiled amid traffic."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from served_cases import Place, new_weights, parks_in_flight, restarts, served, soak, some_requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = Place(device=torch.device("cuda"), dtype=torch.bfloat16, page_tokens=16)


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_soak_under_random_aborts(way) -> None:
    asyncio.run(soak(GPU, way, num_requests=300))


@pytest.mark.parametrize("way", ["swap", "recompute"])
@pytest.mark.parametrize("policy", ["drain", "keep_prefix", "continue"])
def test_new_weights_in_flight(policy, way) -> None:
    asyncio.run(new_weights(GPU, policy, way))


@pytest.mark.parametrize("tier", ["host", "none"])
def test_parks_in_flight_leave_the_graphs_valid(tier) -> None:
    kinds = asyncio.run(parks_in_flight(GPU, tier))
    assert kinds.count("engine.graphs_captured") == 1 and "engine.graphs_recaptured" not in kinds


def test_restarts() -> None:
    asyncio.run(restarts(GPU))


@pytest.mark.parametrize("invariant", [False, True])
def test_nothing_is_compiled_amid_traffic(invariant: bool, compiled: list[str]) -> None:
    """Prompts and batches of many sizes, shared beginnings, preemption."""

    async def main() -> None:
        settings = {"batch_invariant": invariant, "token_budget": 600}
        async with served(GPU, **GPU.tight("recompute"), **settings) as bench:
            compiled.clear()
            requests = some_requests(12, max_tokens=33)
            for count in (1, 2, 5, 12):
                await bench.ask(requests[:count])
            assert (await bench.engine.stats()).preemptions > 0

    asyncio.run(main())
    assert not compiled, compiled


def test_all_graphs_of_all_starts_are_captured_on_one_stream() -> None:
    async def main() -> None:
        streams = set()
        async with served(GPU, **GPU.roomy) as bench:
            for _ in range(2):
                streams.add(bench.engine.worker.memory.provide_capture())
                assert bench.engine.core.runner.capture_stream in streams
                await bench.engine.terminate()
                await bench.engine.start(dummy=True)
        assert len(streams) == 1

    asyncio.run(main())
