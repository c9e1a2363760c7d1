"""Phases: what a steady iteration holds where, phase by phase, by the ledger that a run obeys;
and what a stage holds while it begins. Pure.

In: predicted components, working bytes, budgets. Out: PhasePlans, or the ledger's
MemoryBudgetError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gyre.core.errors import MemoryBudgetError
from gyre.core.records import Phase, Tier
from gyre.memory.config import Residency
from gyre.memory.errors import holds, words
from gyre.memory.ledger import apply_plan, keep_pages, plan_phase
from gyre.memory.phases import Need, default_needs, match_name
from gyre.memory.records import Budgets, Entry, Ledger, MovePlan
from gyre.planner.plan import ComponentPlan, PhasePlan


def walk_start(components: Sequence[ComponentPlan], first: PhasePlan, peak_bytes: int) -> PhasePlan:
    """Return how a stage comes to its `first` phase. Owners are made one after the other, each on
    the device, with `peak_bytes` at most; what that phase keeps elsewhere leaves as soon as its
    owner is there."""
    held: dict[Tier, dict[str, int]] = {"device": {}, "host": {}, "disk": {}, "none": {}}
    moved = 0
    for component in components:
        tier = _tier_in(first, component)
        held[tier][component.name] = component.size_bytes
        if tier in ("host", "disk") and "device" in component.tiers:
            moved += component.size_bytes
    return PhasePlan(
        phase="idle",
        device=held["device"],
        host=held["host"],
        disk=held["disk"],
        working_bytes=0,
        peak_device_bytes=peak_bytes,
        peak_host_bytes=sum(held["host"].values()),
        moved_bytes=moved,
    )


def _tier_in(phase: PhasePlan, component: ComponentPlan) -> Tier:
    places: dict[Tier, Mapping[str, int]] = {
        "device": phase.device,
        "host": phase.host,
        "disk": phase.disk,
    }
    for tier, owners in places.items():
        if component.name in owners:
            return tier
    return "none"


def walk_ring(
    components: Sequence[ComponentPlan],
    working: Mapping[Phase, int],
    budgets: Budgets,
    residency: Residency,
    order: Sequence[Phase],
    *,
    keeps_pages: bool,
) -> tuple[PhasePlan, ...]:
    """Two rounds; the second is the steady one. `keeps_pages`: as the memory manager does on a
    GPU."""
    entries = place_at_start(components, budgets)
    if keeps_pages:
        entries = keep_pages(
            entries, budgets, allowed=lambda entry: not entry.name.startswith("engine.")
        )
    ledger = Ledger(entries=entries, budgets=budgets, residency=residency, working=working)
    rounds: list[PhasePlan] = []
    for phase in (*order, *order):
        plan = plan_phase(ledger, phase)
        ledger = apply_plan(ledger, plan)
        rounds.append(_phase_plan(phase, ledger, plan))
    return tuple(rounds[len(order) :])


def place_at_start(components: Sequence[ComponentPlan], budgets: Budgets) -> tuple[Entry, ...]:
    """Components as their owners build them, one after the other: on the device while there is
    room, but for those that never live there."""
    left: dict[Tier, int] = {
        "device": budgets.device_bytes,
        "host": budgets.host_bytes,
        "disk": budgets.disk_bytes,
        "none": 1 << 62,
    }
    entries = []
    for component in components:
        on_device = "device" in component.tiers
        choices: tuple[Tier, ...] = (
            ("device", *component.leave) if on_device else component.tiers[:1]
        )
        fitting: list[Tier] = [tier for tier in choices if component.size_bytes <= left[tier]]
        if not fitting:
            short = component.size_bytes - left[choices[-1]]
            larger = f"raise memory.{choices[-1]}_budget_bytes by {short}, or "
            if choices[-1] == "device" and not holds(budgets, budgets.device_bytes + short):
                larger = ""
            free = ", ".join(
                f"{tier} {words(size)}" for tier, size in left.items() if tier != "none"
            )
            raise MemoryBudgetError(
                f"there is no room for {component.name} ({words(component.size_bytes)}) on "
                f"{' or '.join(choices)} "
                f"beside what is there already; still free: {free}",
                hint=f"{larger}set memory.disk_folder",
            )
        left[fitting[0]] -= component.size_bytes
        need = match_name(default_needs(shared_weights=False), component.name)
        entries.append(_entry(component, fitting[0], need))
    return tuple(entries)


def _entry(component: ComponentPlan, tier: Tier, need: Need | None) -> Entry:
    return Entry(
        name=component.name,
        size_bytes=component.size_bytes,
        tier=tier,
        tiers=component.tiers,
        phases=component.phases,
        leave=component.leave,
        wake=need.wake if need is not None else 0,
    )


def _phase_plan(phase: Phase, ledger: Ledger, plan: MovePlan) -> PhasePlan:
    def held(tier: Tier) -> dict[str, int]:
        there = [entry for entry in ledger.entries if entry.tier == tier or entry.bytes_on(tier)]
        return {entry.name: entry.bytes_on(tier) for entry in there}

    return PhasePlan(
        phase=phase,
        device=held("device"),
        host=held("host"),
        disk=held("disk"),
        working_bytes=plan.working_bytes,
        peak_device_bytes=plan.peak_device_bytes,
        peak_host_bytes=plan.peak_host_bytes,
        moved_bytes=sum(
            move.size_bytes for move in plan.moves if "none" not in (move.source, move.target)
        ),
    )
