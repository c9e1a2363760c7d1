"""Virtual memory on a real CUDA device: addresses stay, the driver gets its bytes back, contents
survive, and graphs captured before a park replay after it; in pools, in the engine, and with
weights that a trainer shares."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test_engine_gpu import FUSED, make_decoder, make_requests

from gyre.core.chunks import collect
from gyre.core.errors import MemoryBudgetError
from gyre.core.records import Tier
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.memory.config import MemoryConfig
from gyre.memory.manager import MemoryManager
from gyre.memory.phases import RING, default_needs
from gyre.memory.pools import vmm_import
from gyre.memory.pools.cuda_vmm import (
    Driver,
    VirtualMemory,
    VirtualUsage,
    find_driver,
    memory_under,
    virtual_zeros,
)
from gyre.memory.pools.storage import PoolTenant, StoragePool
from gyre.memory.probe import give_back
from gyre.objectives.config import GrpoConfig
from gyre.trainer.config import TrainerConfig
from gyre.trainer.trainer import NativeTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
SLACK = 8 * MIB  # page tables of pinned memory, and what CUDA loads lazily


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture
def driver(device: torch.device) -> Driver:
    found = find_driver(device)
    assert found is not None
    return found


def free_bytes(device: torch.device) -> int:
    give_back(device, collect=True)
    return torch.cuda.mem_get_info(device)[0]


def make_tensors(device: torch.device, size_mib: int) -> dict[str, torch.Tensor]:
    """One large storage with a view, a Parameter, an odd-sized one and an empty one."""
    generator = torch.Generator(device).manual_seed(size_mib)
    large = torch.randn(size_mib * MIB // 4, device=device, generator=generator)
    small = torch.randn(2001, device=device, generator=generator).to(torch.bfloat16)
    return {
        "large": large,
        "view": large[100:200],
        "small": torch.nn.Parameter(small),
        "odd": torch.arange(777, device=device, dtype=torch.uint8),
        "empty": torch.empty(0, device=device),
    }


def addresses(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_the_driver_answers(driver: Driver) -> None:
    granularity = driver.granularity(owner="test")
    assert granularity >= 1 << 16 and granularity & (granularity - 1) == 0
    handle, prop = ctypes.c_uint64(), driver.allocation_prop()
    with pytest.raises(
        MemoryBudgetError, match=r"test: cuMemCreate failed on cuda:0 with CUDA_ERROR_INVALID_VALUE"
    ):
        driver.call(
            "cuMemCreate",
            ctypes.byref(handle),
            granularity + 1,
            ctypes.byref(prop),
            0,
            owner="test",
        )


def test_a_range_is_mapped_written_unmapped_and_freed(device, driver: Driver) -> None:
    int(
        torch.ones(MIB, dtype=torch.uint8, device=device).fill_(1).sum(dtype=torch.int64)
    )  # loads the kernels used here
    start = free_bytes(device)
    memory = VirtualMemory(100 * MIB + 1, driver, owner="test")
    granularity = driver.granularity(owner="test")
    assert memory.size_bytes == -(-(100 * MIB + 1) // granularity) * granularity
    assert abs(start - free_bytes(device)) <= SLACK, "addresses cost nothing"
    for value in range(3):
        memory.map()
        assert abs(start - free_bytes(device) - memory.size_bytes) <= SLACK
        bytes_ = torch.empty(0, dtype=torch.uint8, device=device).set_(
            memory.storage(0, memory.size_bytes)
        )
        assert bytes_.data_ptr() == memory.address and bytes_.device == device
        bytes_.fill_(value)
        assert int(bytes_.sum(dtype=torch.int64)) == value * memory.size_bytes
        held = free_bytes(device)
        memory.unmap()
        assert abs(torch.cuda.mem_get_info(device)[0] - held - memory.size_bytes) <= granularity, (
            "back at once"
        )
    del bytes_, memory
    assert abs(start - free_bytes(device)) <= SLACK


def test_forgotten_memory_is_given_back(device, driver: Driver) -> None:
    start = free_bytes(device)
    tensor = virtual_zeros(
        (64, MIB), device=device, dtype=torch.float32, driver=driver, owner="test"
    )
    view = tensor[3]
    del tensor
    assert start - free_bytes(device) >= 256 * MIB - SLACK and not view.any()
    del view
    assert abs(start - free_bytes(device)) <= SLACK


@pytest.mark.parametrize("slab_mib", [1, 1024])
@pytest.mark.parametrize("path", [("host",), ("disk",), ("host", "disk"), ("disk", "host")])
def test_addresses_and_contents_survive(
    tmp_path: Path, device, driver, monkeypatch, path: tuple, slab_mib: int
) -> None:
    monkeypatch.setattr(vmm_import, "SLAB_BYTES", slab_mib * MIB)
    tensors = make_tensors(device, 256)
    before = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    pool = StoragePool("actor.params", tensors, folder=tmp_path, device=device, driver=driver)
    assert all(torch.equal(tensors[name].detach().cpu(), before[name]) for name in tensors), (
        "moved in whole"
    )
    assert all(memory_under(t.untyped_storage()) is not None for t in tensors.values() if t.numel())
    there, start = addresses(tensors), free_bytes(device)
    usage = pool.measure()
    assert (
        isinstance(usage, VirtualUsage)
        and usage.mapped_bytes >= usage.device_bytes == pool.size_bytes
    )
    for tier in path:
        pool.move(tier)
        assert abs(free_bytes(device) - start - usage.mapped_bytes) <= SLACK
        assert pool.measure().device_bytes == 0
    pool.move("device")
    assert abs(free_bytes(device) - start) <= SLACK
    assert addresses(tensors) == there
    assert all(torch.equal(tensors[name].detach().cpu(), before[name]) for name in tensors)


def test_a_captured_graph_replays_after_parks(device, driver: Driver) -> None:
    """The graph reads one virtual tensor and writes another, and calls the matrix library."""
    tensors = {
        "weight": torch.randn(1024, 1024, device=device, dtype=torch.bfloat16),
        "state": torch.zeros(1024, 1024, device=device, dtype=torch.bfloat16),
    }
    pool = StoragePool("engine.weights", tensors, folder=None, device=device, driver=driver)
    x, out = (
        torch.randn(1024, 1024, device=device, dtype=torch.bfloat16),
        torch.zeros(1024, device=device),
    )

    def work() -> None:
        torch.mm(x, tensors["weight"], out=tensors["state"])
        torch.sum(tensors["state"].float(), dim=0, out=out)

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph.replay()
    torch.cuda.synchronize(device)
    expected, state = out.clone(), tensors["state"].clone()
    assert expected.abs().sum() > 0
    for round_number in range(3):
        pool.move("host")
        # other memory takes the physical pages
        hole = torch.full((64 * MIB,), 7, dtype=torch.uint8, device=device)
        pool.move("device")
        out.zero_()
        if round_number:
            tensors["state"].zero_()
        graph.replay()
        torch.cuda.synchronize(device)
        assert torch.equal(out, expected) and torch.equal(tensors["state"], state)
        assert int(hole[:1024].sum()) == 7 * 1024, "the graph wrote nowhere else"
        del hole
    pool.move("none")
    pool.move("device")
    graph.replay()
    torch.cuda.synchronize(device)
    assert not out.any(), "the weight came back as zeros"


def test_work_in_flight_on_another_stream_ends_before_the_memory_goes(
    device, driver: Driver
) -> None:
    tensors = {"state": torch.zeros(64 * MIB, device=device)}
    pool = StoragePool("engine.kv", tensors, folder=None, device=device, driver=driver)
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        for _ in range(200):
            tensors["state"].add_(1.0)
    pool.move("host")
    pool.move("device")
    assert torch.equal(tensors["state"][:: 1 << 16], torch.full((1024,), 200.0, device=device))


def test_too_much_is_refused_by_name_and_changes_nothing(device, driver: Driver) -> None:
    free = free_bytes(device)
    memory = VirtualMemory(free + (1 << 30), driver, owner="component engine.kv")
    with pytest.raises(
        MemoryBudgetError, match=r"component engine\.kv could not be placed on cuda:0"
    ):
        memory.map()
    assert not memory.is_mapped and abs(free_bytes(device) - free) <= SLACK
    del memory
    tensors = make_tensors(device, 512)
    before = tensors["large"].cpu()
    pool = StoragePool("actor.params", tensors, folder=None, device=device, driver=driver)
    there = addresses(tensors)
    pool.move("host")
    filler = torch.empty(free_bytes(device) - 256 * MIB, dtype=torch.uint8, device=device)
    held = free_bytes(device)
    with pytest.raises(MemoryBudgetError, match=r"component actor\.params could not be placed"):
        pool.move("device")
    assert (
        pool.tier == "host"
        and pool.measure().device_bytes == 0
        and abs(free_bytes(device) - held) <= SLACK
    )
    del filler
    pool.move("device")
    assert addresses(tensors) == there and torch.equal(tensors["large"].cpu(), before)
    assert torch.ones(4, device=device).sum() == 4, "the context is whole"


def test_memory_that_torch_only_keeps_is_there_for_mapping(device, driver: Driver) -> None:
    memory = VirtualMemory(free_bytes(device) // 2, driver, owner="test")
    cached = torch.empty(free_bytes(device) * 3 // 4, dtype=torch.uint8, device=device)
    del cached
    memory.map()
    memory.unmap()


def test_the_ledger_counts_virtual_memory(device, driver: Driver) -> None:
    """Phases go round with nothing unowned; a tensor that someone keeps is still named."""

    def pool(name: str, size_mib: int, tiers: tuple[Tier, ...] = ("device", "host")) -> StoragePool:
        tensors = make_tensors(device, size_mib)
        return StoragePool(name, tensors, tiers=tiers, folder=None, device=device, driver=driver)

    events: list[dict] = []
    manager = MemoryManager(
        [
            PoolTenant([pool("actor.params", 256)]),
            PoolTenant([pool("engine.kv", 512, ("device", "none"))]),
        ],
        MemoryConfig(
            device_budget_bytes=8 << 30,
            host_budget_bytes=8 << 30,
            disk_budget_bytes=0,
            residency="phase",
            release_deadline_s=2.0,
            outside_tolerance_bytes=32 * MIB,
            unowned_tolerance_bytes=16 * MIB,
        ),
        device,
        lambda kind, **fields: events.append(fields) if kind == "memory" else None,
        needs=default_needs(shared_weights=False),
    )
    for step in range(3):
        for phase in RING:
            manager.enter(phase, step=step)
    assert all(abs(event["unowned_bytes"]) <= MIB for event in events), [
        event["unowned_bytes"] for event in events
    ]
    assert all(abs(event["outside_bytes"]) <= 16 * MIB for event in events)
    assert max(event["device_peak_bytes"] for event in events) >= 512 * MIB
    kept = torch.empty(300 * MIB, dtype=torch.uint8, device=device)
    with pytest.raises(MemoryBudgetError, match="unowned by any component"):
        manager.enter("train")
    del kept
    manager.enter("rollout")


# -- engine


def make_engine(
    device: torch.device,
    compute: ThreadPoolExecutor,
    events: list[str],
    *,
    decoder=None,
    **settings,
) -> NativeEngine:
    config = EngineConfig(
        **{"max_running": 16, "token_budget": 1024, **FUSED, "num_pages": 4000, **settings}
    )
    return NativeEngine(
        decoder or make_decoder(device, torch.bfloat16),
        config,
        compute=compute,
        emit=lambda kind, **fields: events.append(kind),
        device=device,
        dtype=torch.bfloat16,
        shared_weights=decoder is not None,
    )


async def answers(engine: NativeEngine) -> list[list[int]]:
    parts = await asyncio.gather(*[collect(engine.submit(request)) for request in make_requests()])
    return [part.tokens.tolist() for (part,) in parts]


def run_on(compute: ThreadPoolExecutor, work: Callable[[], None]):
    return asyncio.get_running_loop().run_in_executor(compute, work)


@pytest.mark.parametrize("tier", ["host", "none"])
def test_the_engines_graphs_survive_a_park(device, tier: Tier) -> None:
    # here, since a machine without a GPU has no Triton
    from gyre.engine.runners.gpu_runner import GpuRunner

    events: list[str] = []

    async def main() -> None:
        with ThreadPoolExecutor(1) as compute:
            engine = make_engine(device, compute, events, prefix_cache=tier == "host")
            await engine.start(dummy=False)
            assert engine.core is not None
            runner = engine.core.runner
            assert isinstance(runner, GpuRunner)
            before = await answers(engine)
            assert await answers(engine) == before, "with what the prefix cache holds now"
            graphs = dict(runner.graphs)
            mapped = sum(
                usage.mapped_bytes
                for usage in engine.measure().values()
                if isinstance(usage, VirtualUsage)
            )
            start = free_bytes(device)
            for _ in range(3):
                await run_on(compute, lambda: engine.move(["engine.kv"], tier))
                await run_on(compute, lambda: engine.move(["engine.weights"], "host"))
                assert abs(free_bytes(device) - start - mapped) <= SLACK
                assert not (await engine.health()).ok
                await run_on(
                    compute, lambda: engine.move(["engine.weights", "engine.kv"], "device")
                )
                assert abs(free_bytes(device) - start) <= SLACK
                assert await answers(engine) == before
            assert graphs and runner.graphs == graphs
            await engine.terminate()

    asyncio.run(main())
    assert "engine.graphs_recaptured" not in events
    assert events.count("engine.graphs_captured") == 1


def test_shared_weights_come_back_under_the_engines_graphs(device) -> None:
    """The trainer parks the weights that the engine reads; the engine's graphs find them again."""
    events: list[str] = []

    async def main() -> None:
        with ThreadPoolExecutor(1) as compute:
            decoder = make_decoder(device, torch.bfloat16)
            trainer = NativeTrainer(
                decoder=decoder,
                objective=GrpoConfig(kl_coef=0.0),
                config=TrainerConfig(tokens_per_chunk=64),
                compute=compute,
                emit=lambda kind, **fields: None,
                seed=0,
            )
            engine = make_engine(device, compute, events, decoder=decoder)
            await engine.start(dummy=False)
            before = await answers(engine)
            for _ in range(2):
                await run_on(compute, lambda: engine.move(["engine.kv"], "none"))
                await run_on(compute, lambda: trainer.move(["actor.params"], "host"))
                assert not (await engine.health()).ok
                await run_on(compute, lambda: trainer.move(["actor.params"], "device"))
                await run_on(compute, lambda: engine.move(["engine.kv"], "device"))
                assert await answers(engine) == before
            await engine.terminate()
            await trainer.close()

    asyncio.run(main())
    assert "engine.graphs_recaptured" not in events
