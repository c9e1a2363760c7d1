"""Ledger: which owner has how many bytes on which tier, and the ordered moves from one phase to the
next. Pure.

In: entries, budgets, the phase to enter. Out: a MovePlan whose every point fits the budgets, or
MemoryBudgetError that names the components, the budget and the nearest setting that fits.

During a move the bytes exist at both ends; the points of a plan count both. Moves out precede moves
in. A move in is taken earlier only when no move out is possible (a full host that must first free
something).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gyre.core.errors import InputError
from gyre.core.records import Phase, Tier, Usage
from gyre.memory import errors
from gyre.memory.phases import next_use
from gyre.memory.records import Budgets, Entry, Ledger, Move, MovePlan, Point


def plan_phase(ledger: Ledger, phase: Phase) -> MovePlan:
    """Plan the moves after which everything that `phase` needs is on the device. Components in
    place do not move."""
    leaving = _choose_leaving(ledger, phase)
    coming = [entry for entry in ledger.entries if phase in entry.phases and entry.tier != "device"]
    task = _Task(
        phase=phase,
        outs=tuple(
            _Out(entry=entry, tiers=entry.leave, reason=f"makes room for {phase}")
            for entry in leaving
        ),
        ins=tuple(
            _In(entry=entry, reason=f"needed by {phase}")
            for entry in sorted(coming, key=lambda e: e.wake)
        ),
        working_bytes=ledger.working.get(phase, 0),
    )
    return _order_or_refuse(ledger, task)


def plan_moves(ledger: Ledger, targets: Mapping[str, Tier]) -> MovePlan:
    """Plan explicitly requested moves, checked for legality and budget like those of a phase."""
    outs: list[_Out] = []
    ins: list[_In] = []
    for name, tier in targets.items():
        entry = ledger.entry(name)
        if tier == entry.tier:
            continue
        check_transition(entry, tier)
        if tier == "device":
            ins.append(_In(entry=entry, reason="asked for"))
        else:
            outs.append(_Out(entry=entry, tiers=(tier,), reason="asked for"))
    ins.sort(key=lambda item: item.entry.wake)
    return _order_or_refuse(
        ledger, _Task(phase=None, outs=tuple(outs), ins=tuple(ins), working_bytes=0)
    )


def check_transition(entry: Entry, tier: Tier) -> None:
    if tier not in entry.tiers:
        raise InputError(
            f"component {entry.name} may not live on tier '{tier}' (accepted: "
            f"{', '.join(entry.tiers)})"
        )
    if entry.tier == "none" and tier != "device":
        raise InputError(
            f"component {entry.name} was destroyed and has no contents to move to '{tier}'"
        )


def apply_plan(ledger: Ledger, plan: MovePlan) -> Ledger:
    """Return the ledger after the plan."""
    target: dict[str, Tier] = {move.name: move.target for move in plan.moves}
    return replace(
        ledger,
        entries=tuple(e.moved(target[e.name]) if e.name in target else e for e in ledger.entries),
    )


def keep_pages(
    entries: Sequence[Entry], budgets: Budgets, *, allowed: Callable[[Entry], bool]
) -> tuple[Entry, ...]:
    """Return which components keep their host pages while they are on the device.

    All that `allowed` names do if the host budget fits everything that may ever be parked at once;
    otherwise none. Kept pages thus never displace others.
    """
    parked = [entry for entry in entries if "host" in (entry.tier, *entry.leave)]
    keeps = _total(parked) + budgets.staging_bytes <= budgets.host_bytes
    return tuple(
        replace(entry, keeps_pages=keeps and entry in parked and allowed(entry))
        for entry in entries
    )


def misfits(ledger: Ledger, measured: Mapping[str, Usage], *, tolerance_bytes: int) -> list[str]:
    """Return components whose measured tier or size differs from the ledger, largest difference
    first."""
    wrong: list[tuple[int, str]] = []
    for entry in ledger.entries:
        usage = measured.get(entry.name, Usage(device_bytes=0, host_bytes=0, disk_bytes=0))
        found: tuple[tuple[Tier, int], ...] = (
            ("device", usage.device_bytes),
            ("host", usage.host_bytes),
            ("disk", usage.disk_bytes),
        )
        for tier, got in found:
            due = entry.bytes_on(tier)
            if abs(got - due) > tolerance_bytes:
                wrong.append((abs(got - due), errors.misfit(entry, tier, got=got, due=due)))
    return [text for _, text in sorted(wrong, key=lambda item: -item[0])]


def settle(ledger: Ledger, measured: Mapping[str, Usage], *, tolerance_bytes: int) -> Ledger:
    """Adopt the measured sizes within the tolerance. Otherwise raise MemoryBudgetError naming the
    owners."""
    if wrong := misfits(ledger, measured, tolerance_bytes=tolerance_bytes):
        errors.refuse_misfits(wrong)
    return replace(
        ledger,
        entries=tuple(
            replace(entry, size_bytes=measured[entry.name].device_bytes)
            if entry.tier == "device" and entry.name in measured
            else entry
            for entry in ledger.entries
        ),
    )


def _choose_leaving(ledger: Ledger, phase: Phase) -> list[Entry]:
    """Return entries that must leave the device: latest next use first, then larger, then by
    name."""
    on_device = [
        entry for entry in ledger.entries if entry.tier == "device" and phase not in entry.phases
    ]
    movable = (
        [entry for entry in on_device if entry.leave] if ledger.residency != "resident" else []
    )
    movable.sort(key=lambda entry: (-next_use(entry.phases, phase), -entry.size_bytes, entry.name))
    needed = [entry for entry in ledger.entries if phase in entry.phases]
    staying = [entry for entry in on_device if entry not in movable]
    room = (
        ledger.budgets.device_bytes
        - ledger.working.get(phase, 0)
        - _total(needed)
        - _total(staying)
    )
    if room < 0:
        errors.refuse_device(ledger, phase, needed=needed, staying=staying, short_bytes=-room)
    if ledger.residency == "phase":
        return movable
    kept: list[Entry] = []
    # the soonest needed gets the room first; whatever still fits beside it stays too
    for entry in reversed(movable):
        if entry.size_bytes <= room:
            room -= entry.size_bytes
            kept.append(entry)
    return [entry for entry in movable if entry not in kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Out:
    entry: Entry
    tiers: tuple[Tier, ...]  # where it may go, best first
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _In:
    entry: Entry
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A move whose position in the order is not yet known."""

    phase: Phase | None
    outs: tuple[_Out, ...]
    ins: tuple[_In, ...]  # by wake
    working_bytes: int


TIERS: tuple[Tier, ...] = ("device", "host", "disk")

_Step = tuple[Move, Point, Point]  # a move, its middle, its end


def _order_or_refuse(ledger: Ledger, task: _Task) -> MovePlan:
    now = ledger.usage()
    start = Point(
        label="start",
        device_bytes=now.device_bytes,
        host_bytes=now.host_bytes,
        disk_bytes=now.disk_bytes,
    )
    if not _fits(ledger.budgets, start):
        errors.refuse_start(ledger, start)
    plan = _order(ledger.budgets, start, task)
    if plan is None:
        waiting = [(item.entry, item.tiers[0]) for item in task.outs] + [
            (item.entry, "device") for item in task.ins
        ]
        errors.refuse_moves(
            ledger, task.phase, waiting, nearest=_nearest_budget(ledger.budgets, start, task)
        )
    return plan


def _order(budgets: Budgets, start: Point, task: _Task) -> MovePlan | None:
    """Order the moves so that each fits during and after it. None when no such order is found."""
    outs, ins = list(task.outs), list(task.ins)
    points, moves = [start], []
    while outs or ins:
        step = _next_out(budgets, points[-1], outs, first_choice=True)
        step = step or _next_in(budgets, points[-1], ins)
        step = step or _next_out(budgets, points[-1], outs, first_choice=False)
        if step is None:
            return None
        move, middle, end = step
        moves.append(move)
        points += [middle, end]
        outs = [item for item in outs if item.entry.name != move.name]
        ins = [item for item in ins if item.entry.name != move.name]
    return MovePlan(
        phase=task.phase, moves=tuple(moves), points=tuple(points), working_bytes=task.working_bytes
    )


def _nearest_budget(budgets: Budgets, start: Point, task: _Task) -> dict[str, int]:
    """Return the single budget to raise and its value in bytes, else all that must be raised
    together."""
    # Each component is on a tier once, or passes through the host; and what is there from the start
    # fits already.
    enough = sum(item.entry.size_bytes for item in (*task.outs, *task.ins))
    for key in ("host_bytes", "disk_bytes", "device_bytes"):
        low = getattr(budgets, key)
        high = low + enough
        if _order(replace(budgets, **{key: high}), start, task) is None:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            if _order(replace(budgets, **{key: middle}), start, task) is None:
                low = middle
            else:
                high = middle
        return {key: high}
    return {
        key: getattr(budgets, key) + enough for key in ("host_bytes", "disk_bytes", "device_bytes")
    }


def _next_out(
    budgets: Budgets, point: Point, outs: Sequence[_Out], *, first_choice: bool
) -> _Step | None:
    for item in outs:
        for tier in item.tiers[:1] if first_choice else item.tiers[1:]:
            reason = item.reason if first_choice else f"{item.reason}; no room on {item.tiers[0]}"
            if step := _try(budgets, point, item.entry, tier, reason):
                return step
    return None


def _next_in(budgets: Budgets, point: Point, ins: Sequence[_In]) -> _Step | None:
    for item in ins:
        if item.entry.wake > ins[0].entry.wake:
            return None
        if step := _try(budgets, point, item.entry, "device", item.reason):
            return step
    return None


def _try(budgets: Budgets, point: Point, entry: Entry, target: Tier, reason: str) -> _Step | None:
    """Return the move with its points during and after, if they fit."""
    move = Move(
        name=entry.name,
        source=entry.tier,
        target=target,
        size_bytes=entry.size_bytes,
        reason=reason,
    )
    after = entry.moved(target)
    grows: dict[Tier, int] = {
        tier: max(0, after.bytes_on(tier) - entry.bytes_on(tier)) for tier in TIERS
    }
    shrinks: dict[Tier, int] = {
        tier: min(0, after.bytes_on(tier) - entry.bytes_on(tier)) for tier in TIERS
    }
    middle = _shift(point, f"{entry.name}: {entry.tier} and {target}", grows)
    end = _shift(middle, f"{entry.name}: {target}", shrinks)
    if {entry.tier, target} == {"device", "disk"}:
        middle = _shift(
            middle, middle.label, {"host": min(entry.size_bytes, budgets.staging_bytes)}
        )
    # the end holds less than the middle
    return (move, middle, end) if _fits(budgets, middle) else None


def _shift(point: Point, label: str, delta: Mapping[Tier, int]) -> Point:
    return Point(
        label=label,
        device_bytes=point.device_bytes + delta.get("device", 0),
        host_bytes=point.host_bytes + delta.get("host", 0),
        disk_bytes=point.disk_bytes + delta.get("disk", 0),
    )


def _fits(budgets: Budgets, point: Point) -> bool:
    return (
        point.device_bytes <= budgets.device_bytes
        and point.host_bytes <= budgets.host_bytes
        and point.disk_bytes <= budgets.disk_bytes
    )


def _total(entries: Sequence[Entry]) -> int:
    return sum(entry.size_bytes for entry in entries)
