"""Device memory of vLLM's processes: what they hold, and the proof of it. In: each process's own
bytes, the device's reading. Out: DeviceHoldings, a `memory` event at each phase change.

The driver's figure for a process is exact, but a container that hides process ids has none. Then a
process counts what its allocators hold, and what its start took beyond that, by the device's
reading. The sum of what this engine, its neighbors and the others held before the first start is
checked against the device's reading: what is more belongs to none of them. A build for CPUs holds
host memory, and nothing on a device.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from gyre.core.events import Emit
from gyre.core.records import DeviceHoldings, Phase
from gyre.memory.errors import refuse_unowned
from gyre.memory.probe import read_host

COMPONENT = "engine.vllm"  # weights, KV, graphs and contexts: vLLM does not part them
OTHER_PROCESS = "its figure is below the allocators': another process has this id for it"
OPEN_S = 30.0  # longest wait for NVML
POLL_S = 0.05  # between two looks at memory that is on its way back

# what is counted for a process: the driver's figure, its allocators' and what its start took
# beyond, nothing on a CPU; "none" where there is no process
ReadFrom = Literal["driver", "allocators", "host", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessBytes:
    """What one of vLLM's processes says that it has on its device."""

    device: str  # NVML's name of it; "" for a CPU
    driver_bytes: int | None  # by the driver, contexts included; None where it does not say
    allocator_bytes: int
    why_missing: str = ""  # the driver's figure


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """The device's own reading, of all processes."""

    device: str
    used_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofLimits:
    """How far the device's reading may be from the sum, and how long it may take to get there."""

    outside_tolerance_bytes: int = 1 << 30
    release_deadline_s: float = 20.0


def read_from(processes: Sequence[ProcessBytes]) -> ReadFrom:
    """Return whose word counts. The driver's must be of this process: one of another with the same
    id, in another namespace, is found by holding less than the allocators. Pure."""
    if not processes:
        return "none"
    if not any(process.device for process in processes):
        return "host"
    exact = all(
        process.driver_bytes is not None and process.driver_bytes >= process.allocator_bytes
        for process in processes
    )
    return "driver" if exact else "allocators"


def held_bytes(processes: Sequence[ProcessBytes], *, beyond_bytes: int) -> int:
    """Return what the process with most holds on its device. `beyond_bytes` are those that the
    allocators do not count, as measured. Pure."""
    if read_from(processes) == "driver":
        return max(process.driver_bytes or 0 for process in processes)
    allocated = max((process.allocator_bytes for process in processes), default=0)
    return allocated + beyond_bytes if allocated else 0


def open_nvml() -> Callable[[], DeviceUse]:
    """Return the reading of the first device that this process may see, without a context of its
    own. Raises what NVML raises where there is none."""
    nvml: Any = importlib.import_module("vllm.third_party.pynvml")
    nvml.nvmlInit()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first.isdigit():
        handle = nvml.nvmlDeviceGetHandleByIndex(int(first))
    else:
        handle = nvml.nvmlDeviceGetHandleByUUID(first.encode())
    name = nvml.nvmlDeviceGetUUID(handle)
    device = name.decode() if isinstance(name, bytes) else str(name)

    def read() -> DeviceUse:
        found = nvml.nvmlDeviceGetMemoryInfo(handle)
        return DeviceUse(device=device, used_bytes=found.used, free_bytes=found.free)

    return read


class VllmMemory:
    """The ledger of one vLLM engine, whose processes come and go."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[Sequence[ProcessBytes]]],
        *,
        emit: Emit,
        begun_bytes: Callable[[], int],
        limits: ProofLimits,
        open_device: Callable[[], Callable[[], DeviceUse]] | None,
    ) -> None:
        """`ask` returns the processes that are there now, and `begun_bytes` what a start that waits
        may have. `open_device` is None for a CPU."""
        self._ask = ask
        self._emit = emit
        self._limits = limits
        self._begun_bytes = begun_bytes
        self._open_device = open_device
        self._read: Callable[[], DeviceUse] | None = None
        self._phase: Phase = "idle"
        self._neighbor_bytes = self._others_bytes = self._beyond_bytes = self._last_bytes = 0
        self._missing: set[str] = set()  # readings whose lack has been reported

    async def begin(self, neighbor_bytes: int) -> None:
        """Take what others have on the device now as theirs."""
        self._neighbor_bytes = neighbor_bytes
        if self._open_device is None:
            return
        try:
            read = await asyncio.wait_for(asyncio.to_thread(self._open_device), OPEN_S)
            own = (await self._look()).holdings.process_bytes
            self._others_bytes = read().used_bytes - neighbor_bytes - own
            self._read = read
        except Exception as error:  # noqa: BLE001  the ranks' ledgers still look at the device
            self._do_without("device", f"{type(error).__name__}: {error}")

    def note_neighbors(self, neighbor_bytes: int | None) -> None:
        """Take what other processes of the run have on the device; None if nothing new is known."""
        if neighbor_bytes is not None:
            self._neighbor_bytes = neighbor_bytes

    async def note_start(self) -> None:
        """Measure what a start took beyond what the allocators count: contexts and graphs."""
        processes = await self._ask()
        self._beyond_bytes = 0
        counted = read_from(processes)
        if counted == "allocators":
            found = [one.why_missing for one in processes if one.driver_bytes is None]
            self._do_without("driver", found[0] if found else OTHER_PROCESS)
        use = None if self._read is None else self._read()
        if use is None:
            return
        if other := next((one.device for one in processes if one.device != use.device), ""):
            self._read = None
            self._do_without("device", f"vLLM runs on {other}, and {use.device} is read")
        elif counted == "allocators":
            known = held_bytes(processes, beyond_bytes=0) + self._neighbor_bytes
            self._beyond_bytes = max(0, use.used_bytes - self._others_bytes - known)

    async def holdings(self) -> DeviceHoldings:
        """Return what vLLM's processes say that they have."""
        return (await self._look()).holdings

    async def prove(self, phase: Phase, step: int, *, begun_s: float) -> DeviceHoldings:
        """Wait until the device has back what vLLM has given back, and report it. MemoryBudgetError
        when bytes stay that no process accounts for. `begun_s` is when the phase change began."""
        waiting_s, limits = time.monotonic(), self._limits
        while True:
            found = await self._look()
            waited_s = time.monotonic() - waiting_s
            too_much = found.outside_bytes > limits.outside_tolerance_bytes
            if not too_much or waited_s > limits.release_deadline_s:
                break
            await asyncio.sleep(POLL_S)
        self._report(phase, step, found, waited_s=waited_s, seconds=time.monotonic() - begun_s)
        self._phase, self._last_bytes = phase, found.held_bytes
        if too_much:
            refuse_unowned(unowned=0, fragments=0, outside=found.outside_bytes, waited_s=waited_s)
        return found.holdings

    async def _look(self) -> _Account:
        processes = await self._ask()
        held = held_bytes(processes, beyond_bytes=self._beyond_bytes)
        use = None if self._read is None else self._read()
        known, begun = held + self._neighbor_bytes + self._others_bytes, self._begun_bytes()
        outside = 0 if use is None else use.used_bytes - known
        return _Account(
            counted="host" if self._open_device is None else read_from(processes),
            held_bytes=held,
            begun_bytes=begun,
            # a start that waits grows from nothing to its bound
            outside_bytes=outside - max(0, min(outside, begun)),
            free_bytes=None if use is None else use.free_bytes,
        )

    def _report(
        self, phase: Phase, step: int, found: _Account, *, waited_s: float, seconds: float
    ) -> None:
        host, below_bytes = read_host(), _resident_bytes()
        free = {} if found.free_bytes is None else {"device_free_bytes": found.free_bytes}
        self._emit(
            "memory",
            phase=phase,
            left=self._phase,
            step=step,
            owners={COMPONENT: {"device": found.held_bytes, "host": below_bytes, "disk": 0}},
            read_from=found.counted,
            **free,
            device_peak_bytes=self._last_bytes,  # constant within a phase
            host_rss_bytes=host.rss_bytes + below_bytes,
            host_peak_rss_bytes=host.peak_rss_bytes,
            unowned_bytes=0,
            fragment_bytes=0,
            outside_bytes=found.outside_bytes,
            neighbor_bytes=self._neighbor_bytes,
            waited_s=waited_s,
            seconds=seconds,
        )

    def _do_without(self, what: str, reason: str) -> None:
        """Report once that a reading is missing."""
        if what not in self._missing:
            self._emit("fallback.device_reading", what=what, reason=reason)
        self._missing.add(what)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Account:
    """One look at the device."""

    counted: ReadFrom
    held_bytes: int
    begun_bytes: int  # of a start that waits, at most
    outside_bytes: int  # beyond what all processes of the run and earlier ones account for
    free_bytes: int | None  # None where the device is not read

    @property
    def holdings(self) -> DeviceHoldings:
        return DeviceHoldings(
            component_bytes=self.held_bytes, process_bytes=self.held_bytes + self.begun_bytes
        )


def _resident_bytes() -> int:
    """Return the host memory of the processes below this one."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
