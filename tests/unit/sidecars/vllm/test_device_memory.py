"""What vLLM's processes hold on a device: whose word counts, what a start took, and what belongs to none of
them. The device is a script of readings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.errors import MemoryBudgetError
from gyre.core.events import check_event
from gyre.core.records import DeviceHoldings
from gyre.sidecars.vllm.device_memory import (
    DeviceUse,
    ProcessBytes,
    ProofLimits,
    VllmMemory,
    held_bytes,
    read_from,
)

MIB, DEVICE = 1 << 20, "GPU-1"
TOTAL = 80_000 * MIB


def process(allocated: int, driver: int | None = None, device: str = DEVICE) -> ProcessBytes:
    driver_bytes = None if driver is None else driver * MIB
    return ProcessBytes(
        device=device,
        driver_bytes=driver_bytes,
        allocator_bytes=allocated * MIB,
        why_missing="" if driver_bytes else "no process of this id",
    )


class Device:
    """A device with vLLM's processes, and what others use."""

    def __init__(self, *, others: int, tolerance: int = 100) -> None:
        self.others, self.name = others, DEVICE
        self.processes: list[ProcessBytes] = []
        self.used = 0  # by vLLM, whatever it says
        self.late = 0  # looks until freed memory is back
        self.events: list[tuple[str, dict[str, Any]]] = []
        limits = ProofLimits(outside_tolerance_bytes=tolerance * MIB, release_deadline_s=0.3)
        self.begun = 0  # MiB that a start that waits may have
        self.memory = VllmMemory(
            self.ask,
            emit=self.emit,
            begun_bytes=lambda: self.begun * MIB,
            limits=limits,
            open_device=self._open,
        )

    async def ask(self) -> list[ProcessBytes]:
        return self.processes

    def emit(self, kind: str, /, **fields: Any) -> None:
        check_event(kind, fields)
        self.events.append((kind, fields))

    def _open(self) -> Callable[[], DeviceUse]:
        return self.read

    def read(self) -> DeviceUse:
        self.late -= 1
        used = (self.others + (self.used if self.late < 0 else 900)) * MIB
        return DeviceUse(device=self.name, used_bytes=used, free_bytes=TOTAL - used)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [fields for own, fields in self.events if own == kind]

    async def start(self, used: int, *processes: ProcessBytes) -> None:
        self.used, self.processes = used, list(processes)
        await self.memory.note_start()

    async def prove(self, phase: Any, neighbor: int | None = None) -> DeviceHoldings:
        self.memory.note_neighbors(None if neighbor is None else neighbor * MIB)
        return await self.memory.prove(phase, 1, begun_s=time.monotonic())


def both(mib: int) -> DeviceHoldings:
    return DeviceHoldings(component_bytes=mib * MIB, process_bytes=mib * MIB)


def test_the_drivers_word_is_held_against_the_device_and_a_release_is_waited_for() -> None:
    device = Device(others=700)

    async def main() -> None:
        await device.memory.begin(200 * MIB)
        await device.start(900, process(400, driver=900))
        assert await device.prove("rollout") == both(900) == await device.memory.holdings()
        device.used, device.processes, device.late = 0, [], 3
        assert await device.prove("train") == both(0)

    asyncio.run(main())
    rollout, train = device.rows("memory")
    assert rollout["owners"]["engine.vllm"]["device"] == 900 * MIB
    assert (rollout["read_from"], train["read_from"]) == ("driver", "none")
    assert rollout["outside_bytes"] == train["outside_bytes"] == 0
    assert train["left"] == "rollout" and train["device_peak_bytes"] == 900 * MIB
    assert 0 < train["waited_s"] <= train["seconds"] < 0.3
    assert train["device_free_bytes"] == TOTAL - 700 * MIB
    assert not device.rows("fallback.device_reading")


def test_bytes_that_stay_belong_to_nobody_and_end_the_phase() -> None:
    device = Device(others=700)

    async def main() -> None:
        await device.memory.begin(0)
        await device.start(900, process(400, driver=900))
        device.processes, device.used = [], 500
        with pytest.raises(MemoryBudgetError, match=r"500\.00 MiB outside torch"):
            await device.prove("train")

    asyncio.run(main())
    (row,) = device.rows("memory")  # told before it is raised
    assert row["outside_bytes"] == 500 * MIB and row["waited_s"] >= 0.3


def test_what_a_neighbor_says_that_it_has_is_not_foreign() -> None:
    device = Device(others=700)

    async def main() -> None:
        await device.memory.begin(200 * MIB)
        device.others = 2500
        assert await device.prove("handover", 2000) == both(0)
        with pytest.raises(MemoryBudgetError):
            await device.prove("rollout", 200)

    asyncio.run(main())
    assert [row["outside_bytes"] for row in device.rows("memory")] == [0, 1800 * MIB]


def test_without_the_drivers_word_the_start_is_measured_beyond_the_allocators() -> None:
    """A driver's figure below the allocators' is another process's, of the same id elsewhere."""
    device = Device(others=100)

    async def main() -> None:
        await device.memory.begin(0)
        await device.start(1000, process(600, driver=20))
        assert await device.prove("rollout") == both(1000)
        # parked: the allocators gave 500 back, and the context stays
        device.used, device.processes = 500, [process(100)]
        assert await device.prove("train") == both(500)
        await device.start(990, process(600))
        assert await device.memory.holdings() == both(990)

    asyncio.run(main())
    assert [row["read_from"] for row in device.rows("memory")] == ["allocators"] * 2
    (missing,) = device.rows("fallback.device_reading")
    assert missing["what"] == "driver" and "another process has this id" in missing["reason"]


def test_the_driver_says_why_it_has_no_figure() -> None:
    device = Device(others=100)

    async def main() -> None:
        await device.memory.begin(0)
        await device.start(1000, process(600))

    asyncio.run(main())
    (missing,) = device.rows("fallback.device_reading")
    assert missing == {"what": "driver", "reason": "no process of this id"}


def test_a_device_that_cannot_be_read_is_named_once_and_proves_nothing() -> None:
    device = Device(others=100)
    device.memory = VllmMemory(
        device.ask,
        emit=device.emit,
        begun_bytes=lambda: 0,
        limits=ProofLimits(),
        open_device=_broken,
    )

    async def main() -> None:
        await device.memory.begin(0)
        await device.memory.begin(0)
        await device.start(5000, process(400, driver=900))
        assert await device.prove("rollout") == both(900)

    asyncio.run(main())
    (missing,) = device.rows("fallback.device_reading")
    assert missing == {"what": "device", "reason": "OSError: no NVML here"}
    (row,) = device.rows("memory")
    assert "device_free_bytes" not in row and row["outside_bytes"] == 0


@pytest.mark.parametrize(("used", "is_fine"), [(0, True), (800, True), (1000, False)])
def test_a_start_that_waits_may_have_its_bound(used: int, is_fine: bool) -> None:
    """Its neighbors make room for the bound from the beginning, and not for more."""
    device = Device(others=100)

    async def main() -> None:
        await device.memory.begin(0)
        device.begun, device.used, device.late = 800, used, 0
        if is_fine:
            assert await device.prove("train") == DeviceHoldings(process_bytes=800 * MIB)
        else:
            with pytest.raises(MemoryBudgetError):
                await device.prove("train")

    asyncio.run(main())
    assert device.rows("memory")[0]["outside_bytes"] == max(0, used - 800) * MIB


def _broken() -> Callable[[], DeviceUse]:
    raise OSError("no NVML here")


def test_a_start_that_waits_is_reserved_for_and_what_is_there_at_a_beginning_is_known() -> None:
    device, reserved = Device(others=700), [0]
    device.memory = VllmMemory(
        device.ask,
        emit=device.emit,
        limits=ProofLimits(outside_tolerance_bytes=0, release_deadline_s=0.1),
        open_device=lambda: device.read,
        begun_bytes=lambda: reserved[0] * MIB,
    )

    async def main() -> None:
        device.used, device.processes = 900, [process(400, driver=900)]
        await device.memory.begin(0)
        assert await device.prove("rollout") == both(900)
        device.used, device.processes, reserved[0] = 300, [], 1024
        held = await device.prove("train")
        assert (held.component_bytes, held.process_bytes) == (0, 1024 * MIB)

    asyncio.run(main())
    outside = [row["outside_bytes"] // MIB for row in device.rows("memory")]
    assert outside == [0, 0]


def test_another_device_than_vllms_is_not_read() -> None:
    device = Device(others=100)

    async def main() -> None:
        await device.memory.begin(0)
        await device.start(900, process(400, driver=900, device="GPU-2"))
        await device.prove("rollout")

    asyncio.run(main())
    (missing,) = device.rows("fallback.device_reading")
    assert missing["reason"] == "vLLM runs on GPU-2, and GPU-1 is read"


def test_a_build_for_cpus_has_nothing_on_a_device() -> None:
    rows: list[dict[str, Any]] = []

    async def ask() -> list[ProcessBytes]:
        return [process(0, device="")]

    memory = VllmMemory(
        ask,
        emit=lambda kind, /, **fields: rows.append(fields),
        begun_bytes=lambda: 0,
        limits=ProofLimits(),
        open_device=None,
    )

    async def main() -> None:
        await memory.begin(0)
        await memory.note_start()
        assert await memory.prove("rollout", 1, begun_s=time.monotonic()) == DeviceHoldings()

    asyncio.run(main())
    (row,) = rows
    assert row["read_from"] == "host" and row["owners"]["engine.vllm"]["device"] == 0


some_processes = st.lists(
    st.builds(process, st.integers(0, 50), st.none() | st.integers(0, 99)), max_size=3
)


@given(some_processes, st.integers(0, 1000))
def test_no_process_is_counted_below_its_allocators(
    processes: list[ProcessBytes], beyond: int
) -> None:
    held = held_bytes(processes, beyond_bytes=beyond)
    most = max((one.allocator_bytes for one in processes), default=0)
    assert held >= most
    if read_from(processes) == "driver":
        assert held == max(one.driver_bytes or 0 for one in processes)
    elif most == 0:
        assert held == 0
