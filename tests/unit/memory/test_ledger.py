"""Ledger decisions on a few components: which move, in which order, to the last byte; and the words
of a refusal. Under Hypothesis: test_vram_ledger_properties."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gyre.core.errors import InputError, MemoryBudgetError
from gyre.core.records import Usage
from gyre.memory.errors import words
from gyre.memory.ledger import apply_plan, keep_pages, misfits, plan_moves, plan_phase, settle
from gyre.memory.phases import RING, default_needs, match_name, next_use
from gyre.memory.records import Budgets, Entry, Ledger, MovePlan


def colocated(
    *, device_bytes: int, host_bytes: int = 10_000, shared: bool = False, **options
) -> Ledger:
    needs = default_needs(shared_weights=shared)
    sizes = {
        "actor.params": 10,
        "actor.grads": 20,
        "actor.optimizer": 40,
        "engine.kv": 30,
        "reference": 10,
    }
    if not shared:
        sizes["engine.weights"] = 10
    made = []
    for name, size in sizes.items():
        need = match_name(needs, name)
        assert need is not None
        leave = ("none",) if name in ("engine.kv", "actor.grads") else ("host",)
        made.append(
            Entry(
                name=name,
                size_bytes=size,
                tier="device" if name.startswith("actor") else leave[0],
                tiers=("device", *leave),
                phases=need.phases,
                leave=leave,
                wake=need.wake,
            )
        )
    budgets = Budgets(device_bytes=device_bytes, host_bytes=host_bytes, disk_bytes=0)
    return Ledger(entries=tuple(made), budgets=budgets, **options)


def test_on_a_laptop_nothing_moves_once_all_is_there() -> None:
    ledger = colocated(device_bytes=10_000)
    for phase in RING:
        ledger = apply_plan(ledger, plan_phase(ledger, phase))
    for phase in RING * 2:
        assert plan_phase(ledger, phase).moves == ()


def test_staged_wake_of_the_handover() -> None:
    """Weights come before KV, and only after the trainer's state is out."""
    ledger = colocated(device_bytes=75)
    ledger = apply_plan(ledger, plan_phase(ledger, "train"))
    handover = plan_phase(ledger, "handover")
    assert [(move.name, move.target) for move in handover.moves] == [
        ("actor.optimizer", "host"),
        ("engine.weights", "device"),
    ]
    rollout = plan_phase(apply_plan(ledger, handover), "rollout")
    assert [(move.name, move.target) for move in rollout.moves][-1] == ("engine.kv", "device")
    from_train = plan_phase(ledger, "rollout")
    order = [move.name for move in from_train.moves if move.target == "device"]
    assert order == ["engine.weights", "engine.kv"]
    kinds = [move.target == "device" for move in from_train.moves]
    assert kinds == sorted(kinds), "out before in"


def test_a_full_host_gives_back_before_it_takes() -> None:
    """The device has room for both, the host for one: in goes first, then out."""
    made = (
        Entry(
            name="a",
            size_bytes=10,
            tier="device",
            tiers=("device", "host"),
            phases=("train",),
            leave=("host",),
        ),
        Entry(
            name="b",
            size_bytes=10,
            tier="host",
            tiers=("device", "host"),
            phases=("rollout",),
            leave=("host",),
        ),
    )
    budgets = Budgets(device_bytes=20, host_bytes=10, disk_bytes=0)
    plan = plan_phase(Ledger(entries=made, budgets=budgets, residency="phase"), "rollout")
    assert [(move.name, move.target) for move in plan.moves] == [("b", "device"), ("a", "host")]


def test_a_full_host_spills_to_disk_and_says_so() -> None:
    both = ("device", "host", "disk")
    made = (
        Entry(
            name="a",
            size_bytes=10,
            tier="device",
            tiers=both,
            phases=("train",),
            leave=("host", "disk"),
        ),
        Entry(
            name="b",
            size_bytes=15,
            tier="none",
            tiers=("device", "none"),
            phases=("rollout",),
            leave=("none",),
        ),
    )
    plan = plan_phase(
        Ledger(entries=made, budgets=Budgets(device_bytes=20, host_bytes=5, disk_bytes=10)),
        "rollout",
    )
    assert [(move.name, move.target) for move in plan.moves] == [("a", "disk"), ("b", "device")]
    assert "no room on host" in plan.moves[0].reason


def test_the_least_needed_leaves() -> None:
    """Belady: on the way to rollout the optimizer (used two phases later) goes before the reference
    (used next)."""
    both = ("device", "host")
    made = (
        Entry(
            name="reference",
            size_bytes=10,
            tier="device",
            tiers=both,
            phases=("score",),
            leave=("host",),
        ),
        Entry(
            name="actor.optimizer",
            size_bytes=10,
            tier="device",
            tiers=both,
            phases=("train",),
            leave=("host",),
        ),
        Entry(
            name="engine.kv",
            size_bytes=10,
            tier="none",
            tiers=("device", "none"),
            phases=("rollout",),
            leave=("none",),
        ),
    )
    plan = plan_phase(
        Ledger(entries=made, budgets=Budgets(device_bytes=20, host_bytes=90, disk_bytes=0)),
        "rollout",
    )
    assert [move.name for move in plan.moves] == ["actor.optimizer", "engine.kv"]


def test_next_use_goes_round_the_ring() -> None:
    assert next_use(("train",), "rollout") == 2
    assert next_use(("rollout",), "evaluate") == 1
    assert next_use(("train",), "train") == len(RING)
    assert next_use((), "train") == len(RING) + 1
    assert next_use(("rollout",), "idle") == 1


def test_refusal_names_components_budget_and_setting() -> None:
    ledger = colocated(device_bytes=70, working={"train": 5})
    with pytest.raises(MemoryBudgetError) as refusal:
        plan_phase(ledger, "train")
    assert "actor.optimizer 40 B, actor.grads 20 B, actor.params 10 B" in refusal.value.message
    assert "5 B of working memory" in refusal.value.message
    assert "the budget is 70 B, 5 B too little" in refusal.value.message
    assert "memory.device_budget_bytes to at least 75" in refusal.value.hint
    small = replace(ledger, budgets=replace(ledger.budgets, device_total_bytes=74))
    with pytest.raises(MemoryBudgetError) as refusal:
        plan_phase(small, "train")
    assert (
        "device_budget_bytes" not in refusal.value.hint
        and "which has 74 B in all" in refusal.value.hint
    )


def test_resident_that_does_not_fit_points_to_spill() -> None:
    with pytest.raises(MemoryBudgetError) as refusal:
        plan_phase(colocated(device_bytes=75, residency="resident"), "rollout")
    assert 'memory.residency = "spill", which fits' in refusal.value.hint


def test_more_than_the_budget_from_the_start_is_refused() -> None:
    with pytest.raises(MemoryBudgetError, match=r"over the budget as they are: 70 B on device"):
        plan_phase(colocated(device_bytes=60), "rollout")


def test_settle_names_the_owner_and_takes_over_small_differences() -> None:
    ledger = colocated(device_bytes=1000)
    measured = {
        entry.name: Usage(
            device_bytes=entry.size_bytes if entry.tier == "device" else 0,
            host_bytes=entry.size_bytes if entry.tier == "host" else 0,
            disk_bytes=0,
        )
        for entry in ledger.entries
    }
    assert settle(ledger, measured, tolerance_bytes=0) == ledger
    grown = {**measured, "actor.grads": Usage(device_bytes=23, host_bytes=0, disk_bytes=0)}
    assert settle(ledger, grown, tolerance_bytes=3).entry("actor.grads").size_bytes == 23
    with pytest.raises(
        MemoryBudgetError, match=r"actor\.grads still holds 23 bytes on device, the ledger says 20"
    ):
        settle(ledger, grown, tolerance_bytes=2)
    kept = {**grown, "engine.kv": Usage(device_bytes=30, host_bytes=0, disk_bytes=0)}
    assert [text.split()[0] for text in misfits(ledger, kept, tolerance_bytes=0)] == [
        "engine.kv",
        "actor.grads",
    ]
    with pytest.raises(MemoryBudgetError, match=r"actor\.params holds only 0 bytes on device"):
        settle(
            ledger, {k: v for k, v in measured.items() if k != "actor.params"}, tolerance_bytes=0
        )


def test_names_match_from_the_whole_to_the_owner() -> None:
    table = {"actor": 1, "actor.params": 2}
    assert match_name(table, "actor.params") == 2
    assert match_name(table, "actor.params.bias") == 2
    assert match_name(table, "actor.optimizer") == 1
    assert match_name(table, "actors") is None


def test_words_have_units() -> None:
    assert [words(size) for size in (0, 1023, 1536, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "3.00 GiB",
    ]


ALL = ("device", "host", "disk")


def on_device(name: str, size_bytes: int, *, leave=("host",), phases=("train",), **more) -> Entry:
    tiers = ("device", *leave)
    return Entry(
        name=name,
        size_bytes=size_bytes,
        tier="device",
        tiers=tiers,
        phases=phases,
        leave=leave,
        **more,
    )


def parked(name: str, size_bytes: int, *, tier="host", phases=("rollout",), **more) -> Entry:
    return Entry(
        name=name,
        size_bytes=size_bytes,
        tier=tier,
        tiers=ALL,
        phases=phases,
        leave=("host", "disk"),
        **more,
    )


def ledger_of(*made: Entry, device=0, host=0, disk=0, staging=0, **options) -> Ledger:
    budgets = Budgets(device_bytes=device, host_bytes=host, disk_bytes=disk, staging_bytes=staging)
    return Ledger(entries=made, budgets=budgets, **options)


def moves_of(plan: MovePlan) -> list[tuple[str, str]]:
    return [(move.name, move.target) for move in plan.moves]


def test_budgets_may_be_used_to_the_last_byte() -> None:
    """On each tier in turn: what fits to the byte is planned, a byte less is refused."""
    a, b = on_device("a", 10, leave=("disk",)), parked("b", 20)
    exact = {"device": 20, "host": 24, "disk": 10, "staging": 4}
    assert moves_of(plan_phase(ledger_of(a, b, **exact), "rollout")) == [
        ("a", "disk"),
        ("b", "device"),
    ]
    for tier in ("device", "host", "disk"):
        refusal = "does not fit on the device" if tier == "device" else "no order of these moves"
        with pytest.raises(MemoryBudgetError, match=refusal):
            plan_phase(ledger_of(a, b, **{**exact, tier: exact[tier] - 1}), "rollout")


def test_a_plan_says_what_is_held_at_each_point() -> None:
    """Device to disk passes through 4 bytes of the host; in the middle of a move its bytes are at
    both ends."""
    ledger = ledger_of(
        on_device("a", 10, leave=("disk",)), parked("b", 20), device=20, host=24, disk=10, staging=4
    )  # fmt: skip
    held = [
        (p.device_bytes, p.host_bytes, p.disk_bytes) for p in plan_phase(ledger, "rollout").points
    ]
    assert held == [(10, 20, 0), (10, 24, 10), (0, 20, 10), (20, 20, 10), (20, 0, 10)]


def test_the_second_choice_begins_where_the_first_moves_ended() -> None:
    made = on_device("a", 10, leave=("host", "disk")), on_device("b", 10, leave=("host", "disk"))
    coming = Entry(
        name="c", size_bytes=20, tier="none", tiers=("device", "none"), phases=("rollout",)
    )
    plan = plan_phase(ledger_of(*made, coming, device=20, host=10, disk=10), "rollout")
    assert moves_of(plan) == [("a", "host"), ("b", "disk"), ("c", "device")]
    held = [(p.device_bytes, p.host_bytes, p.disk_bytes) for p in plan.points]
    assert held == [
        (20, 0, 0),
        (20, 10, 0),
        (10, 10, 0),
        (10, 10, 10),
        (0, 10, 10),
        (20, 10, 10),
        (20, 10, 10),
    ]


def test_working_memory_is_room_that_is_taken() -> None:
    ledger = ledger_of(on_device("a", 10), parked("b", 10), device=20, host=20)
    plan = plan_phase(ledger, "rollout")
    assert moves_of(plan) == [("b", "device")] and plan.working_bytes == 0
    plan = plan_phase(replace(ledger, working={"rollout": 1, "train": 7}), "rollout")
    assert moves_of(plan) == [("a", "host"), ("b", "device")] and plan.working_bytes == 1
    assert plan_moves(ledger, {"b": "device"}).working_bytes == 0


def test_of_those_needed_equally_late_the_larger_leaves_and_then_by_name() -> None:
    small, large = on_device("a", 5), on_device("b", 10)
    ledger = ledger_of(small, large, parked("c", 10), device=20, host=30)
    assert moves_of(plan_phase(ledger, "rollout")) == [("b", "host"), ("c", "device")]
    alike = ledger_of(on_device("y", 5), on_device("x", 5), parked("c", 15), device=20, host=30)
    assert moves_of(plan_phase(alike, "rollout"))[0] == ("x", "host")
    later = ledger_of(
        on_device("a", 5),
        on_device("b", 10, phases=("score",)),
        parked("c", 15),
        device=25,
        host=30,
    )
    assert moves_of(plan_phase(later, "rollout"))[0] == ("a", "host"), "train comes after score"


def test_what_cannot_leave_takes_room_from_what_can() -> None:
    fixed = on_device("fixed", 5, leave=())
    assert (
        moves_of(plan_phase(ledger_of(fixed, on_device("a", 5), device=10, host=5), "rollout"))
        == []
    )
    tight = ledger_of(fixed, on_device("a", 5), parked("b", 1), device=10, host=6)
    assert moves_of(plan_phase(tight, "rollout")) == [("a", "host"), ("b", "device")]


def test_what_wakes_later_waits_even_where_it_alone_would_fit() -> None:
    """Bringing the KV cache first would make room on the host for what must leave; weights come
    first all the same."""
    weights, kv = parked("weights", 8), parked("kv", 4, wake=2)
    ledger = ledger_of(on_device("a", 5), weights, kv, device=12, host=13)
    with pytest.raises(MemoryBudgetError, match="no order of these moves"):
        plan_phase(ledger, "rollout")
    alike = ledger_of(on_device("a", 5), weights, replace(kv, wake=0), device=12, host=13)
    assert moves_of(plan_phase(alike, "rollout")) == [
        ("kv", "device"),
        ("a", "host"),
        ("weights", "device"),
    ]


def test_a_refused_move_says_what_waits_and_what_would_help() -> None:
    """The host has room for one byte less than must go there."""
    a = on_device("a", 10, leave=("host", "disk"))
    ledger = ledger_of(a, parked("b", 6, tier="disk"), device=10, host=9, disk=6)
    with pytest.raises(MemoryBudgetError) as refusal:
        plan_phase(ledger, "rollout")
    assert "a (10 B) device → host, b (6 B) disk → device" in refusal.value.message
    assert "set memory.host_budget_bytes = 10, or" in refusal.value.hint


def test_the_budget_that_helps_is_named_whichever_it_is() -> None:
    """No host is large enough for what may go to disk only."""
    ledger = ledger_of(
        on_device("a", 10, leave=("disk",)), parked("b", 6), device=10, host=6, disk=9
    )
    with pytest.raises(MemoryBudgetError) as refusal:
        plan_phase(ledger, "rollout")
    assert "set memory.disk_budget_bytes = 10, or" in refusal.value.hint


def test_where_one_budget_is_not_enough_all_are_named_and_together_they_fit() -> None:
    made = on_device("a", 10), on_device("b", 10, leave=("disk",)), parked("c", 20, tier="disk")
    ledger = ledger_of(*made, device=20, host=0, disk=20)
    with pytest.raises(MemoryBudgetError) as refusal:
        plan_phase(replace(ledger, residency="phase"), "rollout")
    named = dict(re.findall(r"memory\.(device|host|disk)_budget_bytes = (\d+)", refusal.value.hint))
    assert named == {"host": "40", "disk": "60", "device": "60"}, (
        "what there is, and all that moves"
    )
    raised = Budgets(**{f"{tier}_bytes": int(size) for tier, size in named.items()})
    assert len(plan_phase(replace(ledger, budgets=raised, residency="phase"), "rollout").moves) == 3


def test_pages_are_kept_where_all_that_may_be_parked_fits_beside_the_staging() -> None:
    made = on_device("a", 6), parked("b", 4), on_device("c", 100, leave=("disk",))
    for host, keeps in ((13, [True, True, False]), (12, [False] * 3)):
        budgets = Budgets(device_bytes=0, host_bytes=host, disk_bytes=0, staging_bytes=3)
        assert [
            entry.keeps_pages for entry in keep_pages(made, budgets, allowed=lambda entry: True)
        ] == keeps
    budgets = Budgets(device_bytes=0, host_bytes=13, disk_bytes=0, staging_bytes=3)
    only = keep_pages(made, budgets, allowed=lambda entry: entry.name == "b")
    assert [entry.keeps_pages for entry in only] == [False, True, False]


def test_what_was_not_measured_holds_nothing() -> None:
    ledger = ledger_of(on_device("a", 10), parked("b", 5), parked("c", 3, tier="disk"))
    assert misfits(ledger, {}, tolerance_bytes=2) == [
        "a holds only 0 bytes on device, the ledger says 10 (it is on tier device)",
        "b holds only 0 bytes on host, the ledger says 5 (it is on tier host)",
        "c holds only 0 bytes on disk, the ledger says 3 (it is on tier disk)",
    ]
    assert (
        misfits(ledger, {}, tolerance_bytes=9)[1:] == []
        and misfits(ledger, {}, tolerance_bytes=10) == []
    )


def test_a_size_is_learnt_from_the_device_alone() -> None:
    ledger = ledger_of(on_device("a", 10), on_device("b", 10), parked("c", 5))
    seen = {
        "a": Usage(device_bytes=9, host_bytes=0, disk_bytes=0),
        "c": Usage(device_bytes=1, host_bytes=5, disk_bytes=0),
    }
    settled = settle(ledger, seen, tolerance_bytes=10)
    assert [entry.size_bytes for entry in settled.entries] == [9, 10, 5]


def test_moves_by_name_leave_what_is_in_place() -> None:
    """Out before in, and in by wake, in whatever order they were asked for."""
    made = on_device("a", 10), parked("b", 5, wake=1), parked("c", 4), on_device("d", 3)
    ledger = ledger_of(*made, device=30, host=30)
    plan = plan_moves(ledger, {"d": "device", "b": "device", "c": "device", "a": "host"})
    assert moves_of(plan) == [("a", "host"), ("c", "device"), ("b", "device")]
    assert {move.reason for move in plan.moves} == {"asked for"} and plan.phase is None


def test_what_was_destroyed_comes_back_to_the_device_only() -> None:
    gone = Entry(
        name="kv", size_bytes=5, tier="none", tiers=("device", "host", "none"), phases=("rollout",)
    )
    ledger = ledger_of(gone, on_device("a", 5), device=20, host=20)
    with pytest.raises(InputError, match="kv was destroyed and has no contents to move to 'host'"):
        plan_moves(ledger, {"kv": "host"})
    with pytest.raises(
        InputError, match=r"a may not live on tier 'disk' \(accepted: device, host\)"
    ):
        plan_moves(ledger, {"a": "disk"})
    assert moves_of(plan_moves(ledger, {"kv": "device"})) == [("kv", "device")]
