"""Memory manager: moves the components between phases, and verifies after each change where their
bytes are.

In: tenants, resolved budgets, the phase to enter. Out: a MovePlan that was carried out and
measured, or MemoryBudgetError naming the owner that did not free its bytes. Runs on the compute
thread.

Events: `memory.move` for each move (component, source, target, size_bytes, seconds, reason),
`memory` at each boundary (phase, step, owners: bytes by component and tier, device_free_bytes, …;
device_peak_bytes is of the phase before, seconds are those of the whole change).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from gyre.core.contracts import MemoryTenant
from gyre.core.events import Emit
from gyre.core.records import Component, DeviceHoldings, Phase, Tier, Usage
from gyre.memory import errors, probe
from gyre.memory.config import MemoryConfig
from gyre.memory.ledger import apply_plan, keep_pages, misfits, plan_moves, plan_phase, settle
from gyre.memory.phases import Need, leave_tiers, match_name, needing_phases
from gyre.memory.pools.cuda_vmm import VirtualUsage
from gyre.memory.records import STAGING_BYTES, Budgets, Entry, Ledger, MovePlan

POLL_S = 0.05  # between two looks at memory that is being returned


@runtime_checkable
class KeepsPages(Protocol):
    """A MemoryTenant that can keep a component's host pages while it is on the device."""

    def keep_pages(self, keep: bool) -> None: ...


class MemoryManager:
    """Manager of one device. The budgets of `config` are resolved: none is "auto"."""

    def __init__(
        self,
        tenants: Sequence[MemoryTenant],
        config: MemoryConfig,
        device: torch.device,
        emit: Emit,
        *,
        needs: Mapping[str, Need],
        working: Mapping[Phase, int] | None = None,
        keep_pages: bool | None = None,
        neighbor_bytes: int = 0,
    ) -> None:
        """Bind the device and its budgets. `neighbor_bytes` are what other processes of the run say
        that they have on the device now.

        `keep_pages`: host pages are kept while a component is on the device, if the host budget
        fits all of them. None enables it on a GPU, where pinning pages again costs more than the
        copy.
        """
        self._keep_pages = device.type == "cuda" if keep_pages is None else keep_pages
        self._tenants = list(tenants)
        self._config = config
        self._device = device
        self._emit = emit
        self._needs = dict(needs)
        self._working = dict(working or {})
        self._budgets = _budgets(config, device)
        self._home: dict[str, MemoryTenant] = {}
        self._phase: Phase = "idle"
        self._neighbor_bytes = neighbor_bytes
        self._virtual_before = 0  # bytes of components in virtual memory at the last boundary
        self._start_from_here()

    def add(self, tenant: MemoryTenant) -> None:
        """Register an owner whose components already exist. Raises MemoryBudgetError if they leave
        no legal state."""
        self._tenants.append(tenant)
        self._start_from_here()

    def enter(self, phase: Phase, *, step: int = 0, neighbor_bytes: int | None = None) -> MovePlan:
        """Bring what `phase` needs to the device, move out what must leave, and verify the result.
        `neighbor_bytes`: what other processes of the run have there meanwhile, by their own word;
        None if nothing new is known."""
        if neighbor_bytes is not None:
            self._neighbor_bytes = neighbor_bytes
        return self._change(lambda ledger: plan_phase(ledger, phase), phase, step)

    def move(self, targets: Mapping[str, Tier]) -> MovePlan:
        """Move components by name: offload, save to disk, destroy, reload, reallocate."""
        return self._change(lambda ledger: plan_moves(ledger, targets), self._phase, step=0)

    def _start_from_here(self) -> None:
        """Record the device memory outside the components as the allowance at each boundary."""
        self.ledger = self._ask()
        probe.give_back(self._device, collect=True)
        measured = self._measure()
        reading, self._virtual_before = self._read(measured), _virtual_bytes(measured)
        self._unowned_at_start = reading.allocated_bytes - self.ledger.usage().device_bytes
        self._outside_at_start = (
            reading.outside_bytes + reading.fragment_bytes - self._neighbor_bytes
        )
        self.move({})

    def _change(self, plan_for: Callable[[Ledger], MovePlan], phase: Phase, step: int) -> MovePlan:
        begun_s = time.perf_counter()
        peak_bytes = self._peak_bytes()
        self.ledger = self._ask()
        plan = plan_for(self.ledger)
        for move in plan.moves:
            started = time.perf_counter()
            self._home[move.name].move([move.name], move.target)
            self._emit(
                "memory.move",
                component=move.name,
                source=move.source,
                target=move.target,
                size_bytes=move.size_bytes,
                seconds=time.perf_counter() - started,
                reason=move.reason,
                step=step,
            )
        due = apply_plan(self.ledger, plan)
        self._prove(due, plan, phase, step, peak_bytes=peak_bytes, begun_s=begun_s)
        self._phase = phase
        return plan

    def _ask(self) -> Ledger:
        """Refresh the ledger from the tenants: sizes and tiers may have changed."""
        self._home = {}
        entries = []
        for tenant in self._tenants:
            for component in tenant.components():
                assert component.name not in self._home, f"two owners of {component.name}"
                self._home[component.name] = tenant
                entries.append(self._entry(component))
        if self._keep_pages:
            entries = self._with_kept_pages(entries)
        residency = "spill" if self._config.residency == "auto" else self._config.residency
        return Ledger(
            entries=tuple(entries),
            budgets=self._budgets,
            residency=residency,
            working=self._working,
        )

    def _with_kept_pages(self, entries: Sequence[Entry]) -> list[Entry]:
        """Decide which owners keep host pages, notify them, and count those pages."""
        able = [tenant for tenant in self._tenants if isinstance(tenant, KeepsPages)]
        marked = keep_pages(
            entries, self._budgets, allowed=lambda entry: self._home[entry.name] in able
        )
        for tenant in able:
            tenant.keep_pages(
                any(entry.keeps_pages for entry in marked if self._home[entry.name] is tenant)
            )
        held = self._measure()
        return [
            replace(entry, kept_bytes=min(entry.size_bytes, held[entry.name].host_bytes))
            if entry.keeps_pages and entry.tier == "device"
            else entry
            for entry in marked
        ]

    def _entry(self, component: Component) -> Entry:
        need = match_name(self._needs, component.name)
        assert need is not None, f"no phase is known for component {component.name}"
        return Entry(
            name=component.name,
            size_bytes=component.size_bytes,
            tier=component.tier,
            tiers=component.tiers,
            phases=needing_phases(need, component.tiers),
            leave=leave_tiers(component.name, component.tiers, self._config.leave),
            wake=need.wake,
        )

    def _prove(
        self,
        due: Ledger,
        plan: MovePlan,
        phase: Phase,
        step: int,
        *,
        peak_bytes: int,
        begun_s: float,
    ) -> None:
        """Measure where the bytes are. Emits the event before raising, so that a failure can be
        diagnosed; `peak_bytes` are those of the previous phase."""
        measured, excess = self._wait_for_device(due)
        reading = self._read(measured)
        held_bytes = sum(usage.device_bytes for usage in measured.values())
        on_cuda, host = self._device.type == "cuda", probe.read_host()
        self._emit(
            "memory",
            phase=phase,
            left=self._phase,
            step=step,
            owners={
                name: {
                    "device": usage.device_bytes,
                    "host": usage.host_bytes,
                    "disk": usage.disk_bytes,
                }
                for name, usage in measured.items()
            },
            device_free_bytes=reading.free_bytes
            if on_cuda
            else self._budgets.device_bytes - held_bytes,
            device_peak_bytes=peak_bytes if on_cuda else held_bytes,
            host_rss_bytes=host.rss_bytes,
            host_peak_rss_bytes=host.peak_rss_bytes,
            unowned_bytes=excess.unowned_bytes,
            fragment_bytes=excess.fragment_bytes,
            outside_bytes=excess.outside_bytes,
            neighbor_bytes=self._neighbor_bytes,
            planned_working_bytes=plan.working_bytes,
            planned_peak_device_bytes=plan.peak_device_bytes,
            planned_peak_host_bytes=plan.peak_host_bytes,
            budget_device_bytes=self._budgets.device_bytes,
            budget_host_bytes=self._budgets.host_bytes,
            waited_s=excess.waited_s,
            seconds=time.perf_counter() - begun_s,
        )
        self.ledger = settle(due, measured, tolerance_bytes=self._config.component_tolerance_bytes)
        if self._too_much(excess):
            errors.refuse_unowned(
                unowned=excess.unowned_bytes,
                fragments=excess.fragment_bytes,
                outside=excess.outside_bytes,
                waited_s=excess.waited_s,
            )
        probe.reset_peak(self._device)
        self._virtual_before = _virtual_bytes(measured)

    @property
    def holdings(self) -> DeviceHoldings:
        """Return what this process has on the device, for others that share it."""
        measured = self._measure()
        return DeviceHoldings(
            component_bytes=sum(usage.device_bytes for usage in measured.values()),
            process_bytes=self._read(measured).reserved_bytes,
        )

    def _peak_bytes(self) -> int:
        """Return the peak of allocated bytes since the last boundary. Virtual memory is constant
        within a phase. Moves at its end are not counted: one component leaves before the next
        arrives."""
        return probe.read_device(self._device).peak_bytes + self._virtual_before

    def _read(self, measured: Mapping[str, Usage]) -> probe.DeviceReading:
        """Read the device, including the components' virtual memory."""
        return probe.read_device(self._device).with_virtual(
            held_bytes=_virtual_bytes(measured),
            mapped_bytes=sum(
                usage.mapped_bytes for usage in measured.values() if isinstance(usage, VirtualUsage)
            ),
        )

    def _measure(self) -> dict[str, Usage]:
        measured: dict[str, Usage] = {}
        for tenant in self._tenants:
            measured.update(tenant.measure())
        return measured

    def _wait_for_device(self, due: Ledger) -> tuple[dict[str, Usage], _Excess]:
        """Measure until every component has freed its bytes and the device has them back, or until
        the deadline.

        Garbage is collected only if the first measurement fails: a collection takes a quarter of a
        second. On a CPU one measurement of the tenants is final.
        """
        if self._device.type != "cuda":
            return self._measure(), _Excess()
        tolerance = self._config.component_tolerance_bytes
        started, tries = time.monotonic(), 0
        while True:
            probe.give_back(self._device, collect=tries > 0)
            measured = self._measure()
            reading = self._read(measured)
            held_bytes = sum(usage.device_bytes for usage in measured.values())
            others = reading.outside_bytes + reading.fragment_bytes - self._neighbor_bytes
            grown = others - self._outside_at_start
            fragments = max(0, min(reading.fragment_bytes, grown))
            excess = _Excess(
                unowned_bytes=reading.allocated_bytes - held_bytes - self._unowned_at_start,
                fragment_bytes=fragments,
                outside_bytes=grown - fragments,
                waited_s=time.monotonic() - started,
            )
            done = not misfits(due, measured, tolerance_bytes=tolerance) and not self._too_much(
                excess
            )
            if done or excess.waited_s > self._config.release_deadline_s:
                return measured, excess
            if tries:
                time.sleep(POLL_S)
            tries += 1

    def _too_much(self, excess: _Excess) -> bool:
        return (
            excess.unowned_bytes > self._config.unowned_tolerance_bytes
            or excess.fragment_bytes + excess.outside_bytes > self._config.outside_tolerance_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Excess:
    """Device bytes beyond the components and the initial allowance."""

    unowned_bytes: int = 0  # of live tensors
    fragment_bytes: int = 0  # that torch's allocator cannot give back
    outside_bytes: int = 0  # that are not torch's
    waited_s: float = 0.0


def _virtual_bytes(measured: Mapping[str, Usage]) -> int:
    return sum(usage.device_bytes for usage in measured.values() if isinstance(usage, VirtualUsage))


def _budgets(config: MemoryConfig, device: torch.device) -> Budgets:
    numbers = (config.device_budget_bytes, config.host_budget_bytes, config.disk_budget_bytes)
    assert "auto" not in numbers, "the planner resolves budgets before anything is built"
    device_bytes, host_bytes, disk_bytes = (int(number) for number in numbers)
    staging_bytes = STAGING_BYTES if device.type == "cuda" else 0
    return Budgets(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        staging_bytes=staging_bytes,
    )
