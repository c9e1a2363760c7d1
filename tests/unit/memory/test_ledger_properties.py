"""Ledger decisions under Hypothesis: a plan that is given fits at every point, moves nothing in
vain and brings what the phase needs; a refusal is right, and the setting that it names is the
nearest one that fits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gyre.core.errors import InputError, MemoryBudgetError
from gyre.memory.ledger import apply_plan, keep_pages, plan_moves, plan_phase
from gyre.memory.phases import RING
from gyre.memory.records import Budgets, Entry, Ledger, MovePlan

PHASES = ("idle", *RING)
KEEPING = (("host", "disk"), ("disk", "host"), ("host",), ("disk",), ("none",), ())


@st.composite
def entries(draw, *, max_size: int = 7) -> tuple[Entry, ...]:
    count = draw(st.integers(1, max_size))
    made = []
    for index in range(count):
        leave = draw(st.sampled_from(KEEPING))
        tiers = ("device", *leave)
        size, tier, keeps = (
            draw(st.integers(0, 40)),
            draw(st.sampled_from(tiers)),
            draw(st.booleans()),
        )
        made.append(
            Entry(
                name=f"c{index}",
                size_bytes=size,
                tier=tier,
                keeps_pages=keeps,
                kept_bytes=size if keeps and tier == "device" and draw(st.booleans()) else 0,
                tiers=tiers,
                phases=tuple(draw(st.sets(st.sampled_from(RING), max_size=4))),
                leave=leave,
                wake=draw(st.integers(0, 3)),
            )
        )
    return tuple(made)


@st.composite
def ledgers(draw, *, tight: bool = True) -> Ledger:
    made = draw(entries())
    top = 150 if tight else 10_000
    low = 0 if tight else 10_000
    return Ledger(
        entries=made,
        budgets=Budgets(
            device_bytes=draw(st.integers(0, 200)),
            host_bytes=draw(st.integers(low, top)),
            disk_bytes=draw(st.integers(low, top)),
            staging_bytes=draw(st.integers(0, 5)) if tight else 0,
        ),
        residency=draw(st.sampled_from(["resident", "spill", "phase"])),
        working=draw(st.dictionaries(st.sampled_from(RING), st.integers(0, 60))),
    )


def starts_legal(ledger: Ledger) -> bool:
    now = ledger.usage()
    budgets = ledger.budgets
    return (
        now.device_bytes <= budgets.device_bytes
        and now.host_bytes <= budgets.host_bytes
        and now.disk_bytes <= budgets.disk_bytes
    )


def replay(ledger: Ledger, plan: MovePlan) -> list[tuple[int, int, int]]:
    """Bytes by tier in the middle and at the end of each move, counted anew and not taken from the
    plan."""
    where = {entry.name: {entry.tier} for entry in ledger.entries}
    size = {entry.name: entry.size_bytes for entry in ledger.entries}
    keeps = {entry.name for entry in ledger.entries if entry.keeps_pages}
    for entry in ledger.entries:
        if entry.kept_bytes:
            where[entry.name] = {"device", "host"}
    seen = []
    for move in plan.moves:
        assert move.source in where[move.name]
        stays = move.name in keeps and (move.source, move.target) == ("host", "device")
        after = {"device", "host"} if stays else {move.target}
        for places in (where[move.name] | {move.target}, after):
            where[move.name] = places
            totals = {
                tier: sum(size[n] for n in where if tier in where[n])
                for tier in ("device", "host", "disk")
            }
            if places != after and {move.source, move.target} == {"device", "disk"}:
                totals["host"] += min(move.size_bytes, ledger.budgets.staging_bytes)
            seen.append((totals["device"], totals["host"], totals["disk"]))
    return seen


def check_plan(ledger: Ledger, plan: MovePlan) -> None:
    budgets = ledger.budgets
    seen = replay(ledger, plan)
    assert seen == [(p.device_bytes, p.host_bytes, p.disk_bytes) for p in plan.points[1:]]
    for device, host, disk in seen:
        assert device <= budgets.device_bytes
        assert host <= budgets.host_bytes
        assert disk <= budgets.disk_bytes
    names = [move.name for move in plan.moves]
    assert len(names) == len(set(names)), "a component moves once"
    for move in plan.moves:
        entry = ledger.entry(move.name)
        assert move.source == entry.tier != move.target
        assert move.target in entry.tiers
        assert move.source != "none" or move.target == "device"


@settings(max_examples=150, deadline=None)
@given(ledger=ledgers(), phase=st.sampled_from(PHASES))
def test_a_plan_fits_at_every_point_and_moves_nothing_in_vain(ledger: Ledger, phase) -> None:
    try:
        plan = plan_phase(ledger, phase)
    except MemoryBudgetError:
        return
    check_plan(ledger, plan)
    after = apply_plan(ledger, plan)
    assert all(entry.tier == "device" for entry in after.entries if phase in entry.phases)
    used = after.usage().device_bytes + ledger.working.get(phase, 0)
    assert used <= ledger.budgets.device_bytes
    assert plan.peak_device_bytes <= ledger.budgets.device_bytes
    gone = [ledger.entry(move.name) for move in plan.moves if move.target != "device"]
    assert all(entry.tier == "device" and phase not in entry.phases for entry in gone)
    if ledger.residency == "resident":
        assert not gone
    # each that left had to: with any one of them back it would not fit
    if ledger.residency == "spill":
        assert all(used + entry.size_bytes > ledger.budgets.device_bytes for entry in gone)
    if ledger.residency == "phase":
        stays = [
            entry for entry in after.entries if entry.tier == "device" and phase not in entry.phases
        ]
        assert all(not entry.leave for entry in stays)
    assert plan_phase(after, phase).moves == (), "entering again moves nothing"


@settings(max_examples=120, deadline=None)
@given(ledger=ledgers(tight=False), phase=st.sampled_from(PHASES))
def test_with_room_elsewhere_only_a_true_shortage_is_refused(ledger: Ledger, phase) -> None:
    assume(starts_legal(ledger))
    must = sum(
        entry.size_bytes
        for entry in ledger.entries
        if phase in entry.phases
        or (entry.tier == "device" and (not entry.leave or ledger.residency == "resident"))
    )
    fits = must + ledger.working.get(phase, 0) <= ledger.budgets.device_bytes
    if fits:
        plan_phase(ledger, phase)
    else:
        with pytest.raises(MemoryBudgetError, match=f"phase {phase} does not fit"):
            plan_phase(ledger, phase)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(ledger=ledgers(), phase=st.sampled_from(PHASES))
def test_the_named_setting_is_the_nearest_that_fits(ledger: Ledger, phase) -> None:
    assume(starts_legal(ledger))
    try:
        plan_phase(ledger, phase)
        return
    except MemoryBudgetError as error:
        assert (
            any(entry.name in error.message for entry in ledger.entries)
            or "no components" in error.message
        )
        named = re.findall(
            r"memory\.(device|host|disk)_budget_bytes (?:=|to at least) (\d+)", error.hint
        )
        device_only = "does not fit on the device" in error.message
    assume(len(named) == 1)
    key, value = f"{named[0][0]}_bytes", int(named[0][1])

    def outcome(size: int) -> str:
        try:
            plan_phase(replace(ledger, budgets=replace(ledger.budgets, **{key: size})), phase)
        except MemoryBudgetError as error:
            return "device" if "does not fit on the device" in error.message else "moves"
        return "fits"

    if device_only:
        # the device is large enough; the host may still be too small
        assert outcome(value) in ("fits", "moves")
        assert outcome(value - 1) == "device"
    else:
        assert outcome(value) == "fits"
        assert outcome(value - 1) != "fits"


@settings(max_examples=80, deadline=None)
@given(ledger=ledgers(tight=False), phases=st.lists(st.sampled_from(RING), min_size=1, max_size=6))
def test_the_ring_turns_without_losing_anyone(ledger: Ledger, phases: list) -> None:
    start = ledger
    for phase in phases:
        try:
            plan = plan_phase(ledger, phase)
        except MemoryBudgetError:
            return
        check_plan(ledger, plan)
        ledger = apply_plan(ledger, plan)
    assert [(e.name, e.size_bytes) for e in ledger.entries] == [
        (e.name, e.size_bytes) for e in start.entries
    ]
    assert sum(e.size_bytes + e.kept_bytes for e in ledger.entries if e.tier != "none") == sum(
        (ledger.usage().device_bytes, ledger.usage().host_bytes, ledger.usage().disk_bytes)
    )


@settings(max_examples=120, deadline=None)
@given(ledger=ledgers(), phases=st.lists(st.sampled_from(RING), min_size=1, max_size=8))
def test_kept_pages_are_in_nobody_s_way(ledger: Ledger, phases: list) -> None:
    """With and without them the same moves are made, or the same phase is refused; and they stay in
    the host budget."""

    def run(marked: bool) -> list:
        bare = tuple(replace(entry, keeps_pages=False, kept_bytes=0) for entry in ledger.entries)
        kept = keep_pages(bare, ledger.budgets, allowed=lambda entry: marked)
        assert (
            not marked
            or all(entry.keeps_pages == ("host" in entry.leave) for entry in kept)
            or not fits(bare)
        )
        at, told = replace(ledger, entries=kept), []
        for phase in phases:
            try:
                plan = plan_phase(at, phase)
            except MemoryBudgetError:
                return [*told, "refused"]
            assert plan.peak_host_bytes <= ledger.budgets.host_bytes
            at = apply_plan(at, plan)
            assert all(entry.kept_bytes == 0 or entry.tier == "device" for entry in at.entries)
            told.append(plan.moves)
        return told

    def fits(entries: tuple[Entry, ...]) -> bool:
        parked = sum(entry.size_bytes for entry in entries if "host" in (entry.tier, *entry.leave))
        return parked + ledger.budgets.staging_bytes <= ledger.budgets.host_bytes

    assert run(True) == run(False)


@settings(max_examples=80, deadline=None)
@given(ledger=ledgers(), data=st.data())
def test_moves_by_name_are_legal_or_refused(ledger: Ledger, data) -> None:
    chosen = data.draw(st.sets(st.sampled_from([entry.name for entry in ledger.entries])))
    targets = {
        name: data.draw(st.sampled_from(["device", "host", "disk", "none"]))
        for name in sorted(chosen)
    }
    try:
        plan = plan_moves(ledger, targets)
    except MemoryBudgetError:
        return
    except InputError:
        bad = [
            ledger.entry(name) for name, tier in targets.items() if ledger.entry(name).tier != tier
        ]
        assert any(
            targets[e.name] not in e.tiers or (e.tier == "none" and targets[e.name] != "device")
            for e in bad
        )
        return
    check_plan(ledger, plan)
    after = apply_plan(ledger, plan)
    assert {entry.name: entry.tier for entry in after.entries if entry.name in targets} == targets
