"""Virtual memory without a GPU: the structures have the driver's layout; the calls come in legal
order whatever fails; pools, trainer and engine keep contents, identity and addresses over every way
through the tiers, and leave nothing."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.core.chunks import collect
from gyre.core.errors import MemoryBudgetError
from gyre.core.records import Request, Sampling, Tier
from gyre.engine import memory as engine_memory
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.memory import probe
from gyre.memory.config import MemoryConfig
from gyre.memory.manager import MemoryManager
from gyre.memory.phases import default_needs
from gyre.memory.pools import vmm_import
from gyre.memory.pools.cuda_vmm import (
    AccessDesc,
    AllocationFlags,
    AllocationProp,
    Driver,
    Location,
    VirtualMemory,
    VirtualUsage,
    find_driver,
    is_present,
    memory_under,
    virtual_zeros,
)
from gyre.memory.pools.storage import PoolTenant, StoragePool
from gyre.memory.pools.vmm_import import ALIGN_BYTES, plan_slabs
from gyre.memory.probe import DeviceReading
from gyre.objectives.config import GrpoConfig
from gyre.trainer.roles import trained_model
from memory_cases import DISTINCT_BYTES, make_tensors
from trainer_cases import CPU, make_batch, make_decoder, make_trainer
from virtual_driver import GRANULE, FakeLibrary, make_driver

# -- the driver's structures


def test_structures_have_the_drivers_layout() -> None:
    """Sizes and offsets of cuda.h on 64-bit Linux."""
    assert [
        ctypes.sizeof(kind) for kind in (Location, AllocationFlags, AllocationProp, AccessDesc)
    ] == [8, 8, 32, 12]
    offsets = {name: getattr(AllocationProp, name).offset for name, _ in AllocationProp._fields_}
    assert offsets == {
        "type": 0,
        "requestedHandleTypes": 4,
        "location": 8,
        "win32HandleMetaData": 16,
        "allocFlags": 24,
    }
    flags = {name: getattr(AllocationFlags, name).offset for name, _ in AllocationFlags._fields_}
    assert flags == {"compressionType": 0, "gpuDirectRDMACapable": 1, "usage": 2, "reserved": 4}
    assert (Location.type.offset, Location.id.offset) == (0, 4)
    assert (AccessDesc.location.offset, AccessDesc.flags.offset) == (0, 8)


def test_a_cpu_has_no_driver() -> None:
    assert find_driver(CPU) is None


# -- one range


def make_memory(
    size: int = 3 * GRANULE - 5, total: int = 64 << 20
) -> tuple[VirtualMemory, FakeLibrary]:
    driver, library = make_driver(total)
    return VirtualMemory(size, driver, owner="component engine.kv"), library


def test_calls_come_in_legal_order_and_nothing_is_left() -> None:
    memory, library = make_memory()
    assert (memory.size_bytes, memory.is_mapped, library.used_bytes) == (3 * GRANULE, False, 0)
    for _ in range(3):
        memory.map()
        assert memory.is_mapped and library.used_bytes == 3 * GRANULE
        memory.unmap()
        assert not memory.is_mapped and library.used_bytes == 0
    once = [
        "give_back",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "synchronize",
        "cuMemUnmap",
        "cuMemRelease",
    ]
    assert library.calls == ["cuMemGetAllocationGranularity", "cuMemAddressReserve", *3 * once]
    memory.map()
    del memory
    gc.collect()
    assert library.calls[-4:] == ["synchronize", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]
    assert not library.ranges and not library.handles


def test_a_storage_keeps_the_range_and_the_address() -> None:
    memory, library = make_memory()
    memory.map()
    address = memory.address
    tensor = torch.empty(0).set_(memory.storage(ALIGN_BYTES, 400), 0, torch.Size([100]))  # pyright: ignore
    assert tensor.data_ptr() == address + ALIGN_BYTES
    view, whole = tensor[10:20], memory_under(tensor.untyped_storage())
    assert whole is memory and is_present(view.untyped_storage())
    memory.unmap()
    assert not is_present(view.untyped_storage()) and view.untyped_storage().nbytes() == 400
    del memory, whole, tensor
    gc.collect()
    assert list(library.ranges) == [address], "a view still lives there"
    found = memory_under(view.untyped_storage())
    assert found is not None
    found.map()
    view.fill_(2.0)
    assert view.data_ptr() == address + ALIGN_BYTES + 40
    del view, found
    gc.collect()
    assert not library.ranges and not library.handles


def test_mapping_twice_and_unmapping_twice_are_faults_of_ours() -> None:
    memory, _ = make_memory()
    with pytest.raises(AssertionError, match="unmapped twice"):
        memory.unmap()
    memory.map()
    with pytest.raises(AssertionError, match="mapped twice"):
        memory.map()


def test_too_little_memory_names_the_owner_and_changes_nothing() -> None:
    memory, library = make_memory(total=2 * GRANULE)
    with pytest.raises(
        MemoryBudgetError, match=r"component engine\.kv could not be placed on cpu: 49152 bytes"
    ):
        memory.map()
    assert not memory.is_mapped and not library.handles and len(library.ranges) == 1
    library.total_bytes = 3 * GRANULE
    memory.map()


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize(
    ("code", "word"), [(1, r"CUDA_ERROR_INVALID_VALUE \(1\)"), (777, "CUDA error 777")]
)
def test_any_call_that_fails_is_named_and_undone(function: str, code: int, word: str) -> None:
    memory, library = make_memory()
    library.fail = {function: code}
    with pytest.raises(
        MemoryBudgetError, match=rf"component engine\.kv: {function} failed on cpu with {word}"
    ):
        memory.map()
    assert not memory.is_mapped and not library.handles
    assert all(found.handle is None for found in library.ranges.values())
    memory.map()


def test_a_refused_reservation_is_named() -> None:
    driver, library = make_driver()
    library.fail = {"cuMemAddressReserve": 2}
    with pytest.raises(MemoryBudgetError, match="cuMemAddressReserve failed"):
        VirtualMemory(5, driver, owner="component x")
    assert not library.ranges


# -- slabs


@given(sizes=st.lists(st.integers(0, 3000), max_size=30), limit=st.integers(1, 4000))
def test_slabs_hold_each_storage_once_and_apart(sizes: list[int], limit: int) -> None:
    placed = plan_slabs(sizes, limit=limit)
    assert [index for slab in placed for index, _ in slab] == [
        i for i, size in enumerate(sizes) if size
    ]
    for slab in placed:
        end = 0
        for index, offset in slab:
            assert offset % ALIGN_BYTES == 0 and offset >= end
            end = offset + sizes[index]
        assert end <= limit or len(slab) == 1


# -- pools


def make_pool(
    folder: Path | None, tensors: dict[str, torch.Tensor], driver: Driver, **options
) -> StoragePool:
    return StoragePool("actor.params", tensors, folder=folder, device=CPU, driver=driver, **options)


def addresses(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@pytest.mark.slow
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    path=st.lists(st.sampled_from(["device", "host", "disk"]), max_size=8),
    limit=st.sampled_from([600, 1 << 20]),
)
def test_contents_and_addresses_survive_any_path(
    tmp_path: Path, monkeypatch, path: list[Tier], limit: int
) -> None:
    monkeypatch.setattr(vmm_import, "SLAB_BYTES", limit)
    driver, library = make_driver()
    tensors = make_tensors()
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    identities = {name: id(tensor) for name, tensor in tensors.items()}
    pool = make_pool(tmp_path, tensors, driver)
    there = addresses(tensors)
    assert len(library.ranges) == (4 if limit == 600 else 1)
    for tier in path:
        pool.move(tier)
        usage = pool.measure()
        on_device = tier == "device"
        assert isinstance(usage, VirtualUsage)
        assert (
            usage.mapped_bytes
            == library.used_bytes
            == (len(library.ranges) * GRANULE if on_device else 0)
        )
        held = {"device": usage.device_bytes, "host": usage.host_bytes, "disk": usage.disk_bytes}
        assert held == {"device": 0, "host": 0, "disk": 0, tier: DISTINCT_BYTES}
    pool.move("device")
    assert addresses(tensors) == there
    assert {name: id(tensor) for name, tensor in tensors.items()} == identities
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    tensors["fused"][20, 3] = 5.0  # the views still share one storage
    assert tensors["rows"][4, 3] == 5.0 == tensors["turned"][3, 20]
    pool.close()
    assert library.used_bytes == 0
    del tensors, pool
    gc.collect()
    assert not library.ranges


def test_destroyed_memory_comes_back_zero_at_its_address() -> None:
    driver, library = make_driver()
    pages = virtual_zeros(
        (4, 100), device=CPU, dtype=torch.bfloat16, driver=driver, owner="component engine.kv"
    )
    layer = pages[1]
    assert not pages.any()
    pool = StoragePool("engine.kv", {"kv": pages}, folder=None, device=CPU, driver=driver)
    assert pool.size_bytes == 800 and len(library.ranges) == 1, "taken over as it is"
    for _ in range(3):
        pages.fill_(3.0)
        pool.move("none")
        assert library.used_bytes == 0
        pool.move("device")
        assert not pages.any() and layer.data_ptr() == pages.data_ptr() + 200


def test_a_reload_that_does_not_fit_keeps_the_host_copy(monkeypatch) -> None:
    """Of four slabs three fit; then none is mapped, and the contents are where they were."""
    monkeypatch.setattr(vmm_import, "SLAB_BYTES", 600)
    driver, library = make_driver()
    tensors = make_tensors()
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    pool = make_pool(None, tensors, driver)
    pool.move("host")
    library.total_bytes = 3 * GRANULE
    with pytest.raises(MemoryBudgetError, match=r"component actor\.params could not be placed"):
        pool.move("device")
    assert pool.tier == "host" and library.used_bytes == 0
    assert (pool.measure().device_bytes, pool.measure().host_bytes) == (0, DISTINCT_BYTES)
    library.total_bytes = 4 * GRANULE
    pool.move("device")
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


def test_a_storage_that_someone_else_holds_is_refused_and_stays_whole() -> None:
    driver, library = make_driver()
    tensors = {"weight": torch.ones(50)}
    alias = tensors["weight"].detach()
    with pytest.raises(
        MemoryBudgetError, match=r"actor\.params: 200 bytes cannot get an address that stays"
    ):
        make_pool(None, tensors, driver)
    assert tensors["weight"].data_ptr() == alias.data_ptr()
    gc.collect()
    assert not library.ranges
    del alias
    make_pool(None, tensors, driver)
    assert torch.equal(tensors["weight"], torch.ones(50))


def test_too_little_memory_at_first_leaves_the_tensors_as_they_were() -> None:
    driver, library = make_driver(total_bytes=GRANULE // 2)
    tensors = make_tensors()
    there = addresses(tensors)
    with pytest.raises(MemoryBudgetError, match=r"component actor\.params could not be placed"):
        make_pool(None, tensors, driver)
    gc.collect()
    assert addresses(tensors) == there and not library.ranges


def test_a_second_pool_takes_over_all_or_nothing() -> None:
    """A slab belongs to one component: whoever unmaps it must own all of it."""
    driver, library = make_driver()
    tensors = {"a": torch.ones(10), "b": torch.full((10,), 2.0)}
    first = make_pool(None, tensors, driver)
    with pytest.raises(AssertionError, match="was not given"):
        StoragePool("other", {"a": tensors["a"]}, folder=None, device=CPU)
    del first
    second = StoragePool("other", tensors, folder=None, device=CPU)
    second.move("host")
    assert library.used_bytes == 0
    second.move("device")
    assert tensors["b"].tolist() == [2.0] * 10


def test_readings_count_virtual_memory() -> None:
    """100 bytes of torch in 120, and 50 mapped for 40: the rest of 1000 used is outside."""
    bare = DeviceReading(
        free_bytes=600, total_bytes=1000, allocated_bytes=100, reserved_bytes=120, peak_bytes=110
    )
    reading = bare.with_virtual(held_bytes=40, mapped_bytes=50)
    assert asdict(reading) == {**asdict(bare), "allocated_bytes": 140, "reserved_bytes": 170}
    assert (reading.fragment_bytes, reading.outside_bytes) == (30, 230)


def test_the_ledgers_proof_counts_virtual_memory(monkeypatch) -> None:
    """Torch's allocator says 0 bytes all along and the driver counts what is mapped: nothing is
    unowned, nothing is outside. Bytes that the driver does not get back are noticed."""
    driver, library = make_driver()
    total, outside = 1 << 30, 5000

    def read(device: torch.device) -> DeviceReading:
        free = total - outside - library.used_bytes
        return DeviceReading(
            free_bytes=free, total_bytes=total, allocated_bytes=0, reserved_bytes=0, peak_bytes=7
        )

    monkeypatch.setattr(probe, "read_device", read)
    monkeypatch.setattr(probe, "give_back", lambda device, *, collect: None)
    monkeypatch.setattr(probe, "reset_peak", lambda device: None)
    events: list[dict] = []
    tenant = PoolTenant([make_pool(None, make_tensors(), driver)])
    manager = MemoryManager(
        [tenant],
        MemoryConfig(
            device_budget_bytes=1 << 20,
            host_budget_bytes=1 << 30,
            disk_budget_bytes=0,
            unowned_tolerance_bytes=0,
            outside_tolerance_bytes=GRANULE - DISTINCT_BYTES,  # what whole granules cost
            release_deadline_s=0.1,
        ),
        SimpleNamespace(type="cuda"),  # pyright: ignore
        lambda kind, **fields: events.append(fields) if kind == "memory" else None,
        needs=default_needs(shared_weights=False),
    )
    for tier in ("host", "device", "host", "device"):
        manager.move({"actor.params": tier})
    assert [event["unowned_bytes"] for event in events] == [0] * 5
    assert events[0]["outside_bytes"] == 0
    there, parked = 7 + DISTINCT_BYTES, 7  # in the phase that ended
    assert [event["device_peak_bytes"] for event in events] == [there, there, parked, there, parked]
    library.handles[1] = 10 * GRANULE
    with pytest.raises(MemoryBudgetError, match="outside torch"):
        manager.move({"actor.params": "host"})


# -- trainer and engine, as built on a CUDA device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_takes_the_same_steps(monkeypatch, dtype: torch.dtype) -> None:
    """Weights move into virtual memory at the start and leave between steps: the bits are those of
    a run without."""

    def run(driver: Driver | None, moves: Sequence[Tier]) -> list[torch.Tensor]:
        monkeypatch.setattr(trained_model, "find_driver", lambda device: driver)
        decoder = make_decoder(dtype=dtype)
        trainer = make_trainer(decoder=decoder, objective=GrpoConfig(kl_coef=0.0))
        there = [parameter.data_ptr() for parameter in decoder.parameters()]
        assert all(
            (memory_under(p.untyped_storage()) is not None) == (driver is not None)
            for p in decoder.parameters()
        )
        for step in range(2):
            for tier in moves:
                trainer.move(["actor.params"], tier)
            trainer.step_now(make_batch(seed=step, step=step))
        assert not moves or [parameter.data_ptr() for parameter in decoder.parameters()] == there
        asyncio.run(trainer.close())  # its hooks on the parameters would keep them
        return [parameter.detach().clone() for parameter in decoder.parameters()]

    driver, library = make_driver()
    plain = run(None, ())
    moved = run(driver, ("host", "device"))
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
    gc.collect()
    assert not library.ranges and not library.handles


@pytest.mark.parametrize("tier", ["host", "none"])
def test_an_engine_answers_the_same_after_kv_and_weights_came_back(monkeypatch, tier: Tier) -> None:
    driver, library = make_driver()
    monkeypatch.setattr(engine_memory, "find_driver", lambda device: driver)
    decoder = make_decoder()
    requests = [
        Request(
            request_id=f"r{i}",
            tokens=np.arange(3 + i, dtype=np.int32) % decoder.spec.vocab_size,
            sampling=Sampling(temperature=1.0, max_tokens=6, ignore_eos=True),
            seed=i,
        )
        for i in range(4)
    ]

    async def answers(engine: NativeEngine) -> list[list[int]]:
        parts = await asyncio.gather(*[collect(engine.submit(request)) for request in requests])
        return [part.tokens.tolist() for (part,) in parts]

    async def main() -> None:
        with ThreadPoolExecutor(1) as compute:
            engine = NativeEngine(
                decoder,
                EngineConfig(page_tokens=4, num_pages=40, prefix_cache=False),
                compute=compute,
                emit=lambda kind, **fields: None,
                device=CPU,
                dtype=torch.float32,
                shared_weights=False,
            )
            await engine.start(dummy=False)
            tensors = [*decoder.parameters(), engine.worker.memory.provide_kv().tensor]
            there, before = [tensor.data_ptr() for tensor in tensors], await answers(engine)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(compute, lambda: engine.move(["engine.kv"], tier))
            await loop.run_in_executor(compute, lambda: engine.move(["engine.weights"], "host"))
            assert library.used_bytes == 0 and not engine.worker.weights.present
            assert not (await engine.health()).ok
            await loop.run_in_executor(
                compute, lambda: engine.move(["engine.weights", "engine.kv"], "device")
            )
            assert (await engine.health()).ok
            assert [tensor.data_ptr() for tensor in tensors] == there
            assert await answers(engine) == before
            await engine.terminate()
            assert library.used_bytes == 0

    asyncio.run(main())
