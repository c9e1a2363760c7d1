"""The manager on real tensors: the ring turns within its budgets, contents survive, residues stay
constant, and each way of not letting go ends in an error that names the owner."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.core.errors import ConfigError, InputError, MemoryBudgetError
from gyre.core.records import Component, Tier, Usage
from gyre.memory import probe
from gyre.memory.config import MemoryConfig
from gyre.memory.manager import MemoryManager
from gyre.memory.phases import RING, default_needs, leave_tiers
from gyre.memory.pools.storage import PoolTenant, StoragePool
from gyre.memory.probe import DeviceReading, read_host

CPU = torch.device("cpu")
KIB = 1024


class Events:
    """Collects what is emitted, as the event log would store it."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def __call__(self, kind: str, **fields) -> None:
        self.rows.append(json.loads(json.dumps({"kind": kind, **fields})))

    def of(self, kind: str) -> list[dict]:
        return [row for row in self.rows if row["kind"] == kind]


def pool(
    name: str, size_kib: int, folder: Path, tiers: tuple[Tier, ...] = ("device", "host", "disk")
) -> StoragePool:
    return StoragePool(
        name, {"t": torch.randn(size_kib * 256)}, tiers=tiers, folder=folder, device=CPU
    )


def trainer(folder: Path) -> PoolTenant:
    parts = {"actor.params": 8, "actor.grads": 16, "actor.optimizer": 32, "reference": 8}
    return PoolTenant([pool(name, size, folder) for name, size in parts.items()])


def engine(folder: Path) -> PoolTenant:
    return PoolTenant(
        [pool("engine.weights", 8, folder), pool("engine.kv", 24, folder, ("device", "none"))]
    )


def config(**changes) -> MemoryConfig:
    numbers = {
        "device_budget_bytes": 1 << 30,
        "host_budget_bytes": 1 << 30,
        "disk_budget_bytes": 1 << 30,
    }
    return MemoryConfig(**{**numbers, **changes})


def manage(tenants: Sequence, settings_: MemoryConfig, emit, **options) -> MemoryManager:
    needs = default_needs(shared_weights=False)
    return MemoryManager(tenants, settings_, CPU, emit, needs=needs, **options)


def contents(tenants: Sequence[PoolTenant]) -> dict[str, torch.Tensor]:
    return {
        part.name: torch.cat([segment.clone() for segment in tenant[part.name].segments()])
        for tenant in tenants
        for part in tenant.components()
        if part.name != "engine.kv"
    }


def test_on_a_laptop_nothing_moves(tmp_path: Path) -> None:
    events = Events()
    manager = manage([trainer(tmp_path), engine(tmp_path)], config(), events)
    for step in range(3):
        for phase in RING:
            assert manager.enter(phase, step=step).moves == ()
    assert events.of("memory.move") == []
    boundaries = events.of("memory")
    assert [row["phase"] for row in boundaries] == ["idle", *RING * 3]
    assert [row["left"] for row in boundaries[1:]] == ["idle", *(RING * 3)[:-1]]
    assert boundaries[-1]["owners"]["actor.params"] == {"device": 8 * KIB, "host": 0, "disk": 0}
    assert boundaries[-1]["device_free_bytes"] == (1 << 30) - 96 * KIB


def pages(tenant: PoolTenant) -> dict[str, int]:
    """Address of the host pages of what has some."""
    return {
        part.name: host.bytes.data_ptr()
        for part in tenant.components()
        if (host := tenant[part.name].host) is not None
    }


@pytest.mark.parametrize("host_kib", [63, 64, 1000])
def test_host_pages_stay_between_parks_where_the_budget_has_room_for_all(
    tmp_path: Path, host_kib: int
) -> None:
    """64 KiB of components may be parked. What is kept is in the account; contents and residues
    stay the same."""
    events, owner = Events(), trainer(tmp_path)
    before = contents([owner])
    limits = config(host_budget_bytes=host_kib * KIB, residency="phase")
    manager = manage([owner], limits, events, keep_pages=True)
    seen: list[dict[str, int]] = []
    for step in range(4):
        for phase in RING:
            manager.enter(phase, step=step)
        seen.append(pages(owner))
        row = events.of("memory")[-1]
        measured = {name: tiers["host"] for name, tiers in row["owners"].items()}
        assert sum(measured.values()) == manager.ledger.usage().host_bytes <= host_kib * KIB
        assert set(seen[-1]) == {name for name, held in measured.items() if held}
    if host_kib < 64:
        assert all(
            entry.kept_bytes == 0 and not entry.keeps_pages for entry in manager.ledger.entries
        )
    else:
        assert seen[1] == seen[2] == seen[3] and len(seen[1]) == 4, "the same pages, each time"
    manager.move(dict.fromkeys(before, "device"))
    after = contents([owner])
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_kept_pages_are_freed_when_a_newcomer_needs_the_host(tmp_path: Path) -> None:
    owner, events = trainer(tmp_path), Events()
    manager = manage(
        [owner], config(host_budget_bytes=70 * KIB, residency="phase"), events, keep_pages=True
    )
    for phase in (*RING, "train"):
        manager.enter(phase)
    assert any(entry.kept_bytes for entry in manager.ledger.entries)
    manager.add(PoolTenant([pool("engine.weights", 8, tmp_path)]))
    assert not any(entry.kept_bytes for entry in manager.ledger.entries)
    parked = {entry.name for entry in manager.ledger.entries if entry.tier == "host"}
    assert set(pages(owner)) <= parked
    for phase in RING:
        manager.enter(phase)


def test_on_a_cpu_no_pages_are_kept(tmp_path: Path) -> None:
    """Nothing is pinned there, so keeping them would cost memory and save nothing."""
    owner = trainer(tmp_path)
    manager = manage([owner], config(residency="phase"), Events())
    for phase in (*RING, *RING):
        manager.enter(phase)
    assert set(pages(owner)) == {
        entry.name for entry in manager.ledger.entries if entry.tier == "host"
    }


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    residency=st.sampled_from(["auto", "spill", "phase"]),
    host_kib=st.sampled_from([0, 20, 48, 500]),
    policy=st.sampled_from([{}, {"actor": "disk"}, {"reference": "disk", "engine.kv": "destroy"}]),
    phases=st.lists(st.sampled_from(RING), min_size=3, max_size=12),
)
def test_the_ring_turns_in_a_small_budget(
    tmp_path: Path, residency, host_kib: int, policy, phases: list
) -> None:
    """Device budget 60 KiB, 96 KiB of components: whatever the order of phases, contents and
    budgets hold."""
    events = Events()
    started = trainer(tmp_path)
    before = contents([started])
    started.move(["reference", "actor.grads"], "disk")
    limits = config(
        device_budget_bytes=60 * KIB,
        host_budget_bytes=host_kib * KIB,
        residency=residency,
        leave=policy,
    )
    manager = manage([started], limits, events, working={"idle": 32 * KIB})
    manager.enter("idle")  # makes room for the second
    second = engine(tmp_path)
    before |= contents([second])
    manager.add(second)
    for phase in phases:
        try:
            manager.enter(phase)
        except MemoryBudgetError as error:
            # a tight host may have no order; nothing is lost
            assert "no order of these moves" in error.message
            break
        here = {entry.name: entry.tier for entry in manager.ledger.entries}
        assert all(
            here[entry.name] == "device"
            for entry in manager.ledger.entries
            if phase in entry.phases
        )
    for row in events.of("memory"):
        held = row["owners"].values()
        assert sum(owner["device"] for owner in held) <= 60 * KIB
        assert sum(owner["host"] for owner in held) <= host_kib * KIB
        assert row["planned_peak_device_bytes"] <= 60 * KIB
        assert row["planned_peak_host_bytes"] <= host_kib * KIB
    for tenant in (started, second):
        tenant.move([component.name for component in tenant.components()], "device")
    after = contents([started, second])
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_residue_is_constant_over_many_switches(tmp_path: Path) -> None:
    events = Events()
    tenants = [trainer(tmp_path), engine(tmp_path)]
    manager = manage(tenants, config(residency="phase", leave={"reference": "disk"}), events)
    for step in range(40):
        for phase in RING:
            manager.enter(phase, step=step)
    by_phase: dict[str, set[str]] = {}
    for row in events.of("memory"):
        if row["step"] >= 1:
            by_phase.setdefault(row["phase"], set()).add(json.dumps(row["owners"], sort_keys=True))
    assert {phase: len(states) for phase, states in by_phase.items()} == dict.fromkeys(RING, 1)
    move = events.of("memory.move")[-1]
    assert set(move) == {
        "kind",
        "component",
        "source",
        "target",
        "size_bytes",
        "seconds",
        "reason",
        "step",
    }


def test_each_component_can_be_offloaded_saved_destroyed_and_made_again(tmp_path: Path) -> None:
    events = Events()
    tenants = [trainer(tmp_path), engine(tmp_path)]
    manager = manage(tenants, config(), events)
    for tenant in tenants:
        for component in tenant.components():
            for tier in component.tiers:
                manager.move({component.name: tier})
                assert manager.ledger.entry(component.name).tier == tier
            manager.move({component.name: "device"})
    with pytest.raises(InputError, match=r"actor\.grads may not live on tier 'none'"):
        manager.move({"actor.grads": "none"})
    with pytest.raises(InputError, match="nobody"):
        manager.move({"nobody": "host"})


class Liar(PoolTenant):
    """Says that its components moved, and keeps some of them."""

    def __init__(self, pools: Sequence[StoragePool], keeps: set[str]) -> None:
        super().__init__(pools)
        self.keeps = keeps
        self.claims: dict[str, Tier] = {}

    def move(self, names: Sequence[str], tier: Tier) -> None:
        self.claims.update(dict.fromkeys(names, tier))
        super().move([name for name in names if name not in self.keeps], tier)

    def components(self) -> Sequence[Component]:
        return [
            Component(
                name=c.name,
                size_bytes=c.size_bytes,
                tier=self.claims.get(c.name, c.tier),
                tiers=c.tiers,
            )
            for c in super().components()
        ]


def test_the_owner_that_did_not_let_go_is_named(tmp_path: Path) -> None:
    events = Events()
    liar = Liar(
        [pool("actor.params", 8, tmp_path), pool("actor.optimizer", 32, tmp_path)],
        {"actor.optimizer"},
    )
    manager = manage([liar, engine(tmp_path)], config(residency="phase"), events)
    with pytest.raises(MemoryBudgetError) as refusal:
        manager.enter("rollout")
    assert (
        "actor.optimizer still holds 32768 bytes on device, the ledger says 0"
        in refusal.value.message
    )
    assert "actor.params" not in refusal.value.message
    # told before the verdict
    assert events.of("memory")[-1]["owners"]["actor.optimizer"]["device"] == 32 * KIB


def test_a_host_copy_that_someone_keeps_is_named(tmp_path: Path) -> None:
    tenant = trainer(tmp_path)
    manager = manage([tenant], config(), Events())
    manager.move({"reference": "host"})
    kept = tenant["reference"].segments()
    with pytest.raises(MemoryBudgetError, match="reference still holds 8192 bytes on host"):
        manager.move({"reference": "device"})
    del kept
    manager.enter("score")


def test_a_failed_move_leaves_a_manager_that_goes_on(tmp_path: Path) -> None:
    """The ledger is asked anew each time, so a disk that was full once costs one error and nothing
    else."""
    folder = tmp_path / "gone"
    tenant = PoolTenant([pool("actor.params", 8, folder), pool("actor.optimizer", 32, folder)])
    manager = manage(
        [tenant], config(residency="phase", leave={"actor.optimizer": "disk"}), Events()
    )
    folder.write_text("a file where the folder should be")
    with pytest.raises(MemoryBudgetError, match=r"actor\.optimizer: could not be written"):
        manager.enter("handover")
    folder.unlink()
    manager.enter("handover")
    assert manager.ledger.entry("actor.optimizer").tier == "disk"


def test_over_the_budget_is_refused_before_anything_moves(tmp_path: Path) -> None:
    tenant = trainer(tmp_path)
    tenant.move(["actor.optimizer"], "disk")
    manager = manage([tenant], config(device_budget_bytes=50 * KIB), Events())
    before = tenant.measure()
    with pytest.raises(MemoryBudgetError, match="phase train does not fit"):
        manager.enter("train")
    assert tenant.measure() == before
    with pytest.raises(MemoryBudgetError, match="over the budget as they are") as refusal:
        manage([trainer(tmp_path)], config(device_budget_bytes=50 * KIB), Events())
    assert f"memory.device_budget_bytes to at least {64 * KIB}" in refusal.value.hint


def test_working_memory_of_a_phase_counts(tmp_path: Path) -> None:
    manager = manage(
        [trainer(tmp_path)],
        config(device_budget_bytes=66 * KIB),
        Events(),
        working={"train": 4 * KIB},
    )
    plan = manager.enter("train")
    assert [(move.name, move.target) for move in plan.moves] == [("reference", "host")]
    assert plan.peak_device_bytes == 64 * KIB


def test_policies_of_leaving() -> None:
    every: tuple[Tier, ...] = ("device", "host", "disk", "none")
    kv: tuple[Tier, ...] = ("device", "none")
    assert leave_tiers("a", every, {}) == ("host", "disk")
    assert leave_tiers("a.b", every, {"a": "disk"}) == ("disk", "host")
    assert leave_tiers("a", every, {"a": "destroy"}) == ("none",)
    assert leave_tiers("engine.kv", every, {}) == ("none",)
    assert leave_tiers("engine.kv", every, {"engine.kv": "park"}) == ("host", "disk")
    assert leave_tiers("engine.kv", kv, {"engine": "disk"}) == ("none",)
    assert leave_tiers("actor.grads", kv, {}) == ("none",)
    assert leave_tiers("a", ("device",), {}) == ()
    assert leave_tiers("engine.peers", ("device",), {"engine": "destroy"}) == ()
    with pytest.raises(ConfigError, match="a cannot be destroyed"):
        leave_tiers("a", ("device", "host"), {"a": "destroy"})
    with pytest.raises(ConfigError, match="a has no disk tier") as refusal:
        leave_tiers("a", ("device", "host"), {"a": "disk"})
    assert refusal.value.hint == "set memory.disk_folder"


class Device:
    """A stand-in for the driver's numbers (there is no GPU here): what is free follows a script of
    readings."""

    def __init__(self, monkeypatch, readings: list[tuple[int, int, int]]) -> None:
        self.readings = readings
        self.given_back: list[bool] = []  # whether garbage was collected, each time
        monkeypatch.setattr(probe, "give_back", self.give_back)
        monkeypatch.setattr(probe, "read_device", self.read)
        monkeypatch.setattr(probe, "reset_peak", lambda device: None)

    def give_back(self, device: torch.device, *, collect: bool) -> None:
        self.given_back.append(collect)
        if len(self.readings) > 1:
            self.readings.pop(0)

    def read(self, device: torch.device) -> DeviceReading:
        allocated, reserved, outside = self.readings[0]
        return DeviceReading(
            free_bytes=10_000 - reserved - outside,
            total_bytes=10_000,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            peak_bytes=allocated,
        )


class Remote:
    """A tenant that only counts, as a sidecar's would: it needs no device here."""

    def __init__(self) -> None:
        self.tier: Tier = "device"

    def components(self) -> Sequence[Component]:
        return [
            Component(name="actor.params", size_bytes=100, tier=self.tier, tiers=("device", "host"))
        ]

    def move(self, names: Sequence[str], tier: Tier) -> None:
        self.tier = tier

    def measure(self) -> Mapping[str, Usage]:
        on = self.tier == "device"
        return {
            "actor.params": Usage(device_bytes=100 * on, host_bytes=100 * (not on), disk_bytes=0)
        }


@pytest.mark.parametrize(
    ("stuck", "owner"),
    [
        ((180, 200, 500), "unowned by any component"),
        ((100, 200, 900), "outside torch"),
        ((100, 700, 500), "fragments"),
    ],
)
def test_memory_that_does_not_come_back_is_waited_for_and_then_named(
    monkeypatch, stuck, owner: str
) -> None:
    """150 bytes are there beside the component at the start, 50 of them unowned tensors, 500
    outside torch."""
    start, slow, good = (150, 200, 500), (150, 200, 500), (50, 100, 500)
    limits = config(
        unowned_tolerance_bytes=60,
        outside_tolerance_bytes=300,
        release_deadline_s=0.2,
        host_budget_bytes=1000,
    )
    cuda = SimpleNamespace(type="cuda")
    device = Device(monkeypatch, [start, start])
    needs = default_needs(shared_weights=False)
    events = Events()
    manager = MemoryManager([Remote()], limits, cuda, events, needs=needs)  # pyright: ignore
    device.readings[:] = [start, slow, slow, good]  # the driver answers late
    device.given_back.clear()
    manager.move({"actor.params": "host"})
    assert device.given_back == [False, True, True], (
        "garbage is collected once the memory is seen to be missing"
    )
    assert manager.ledger.entry("actor.params").tier == "host"
    device.readings[:] = [stuck]
    with pytest.raises(MemoryBudgetError, match=owner):
        manager.move({})
    row = events.of("memory")[-1]
    assert row["waited_s"] >= 0.2


def test_host_reading_respects_the_control_group(tmp_path: Path) -> None:
    plain = read_host(tmp_path)
    assert 0 < plain.rss_bytes < plain.total_bytes
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    limited = read_host(tmp_path)
    assert (limited.total_bytes, limited.available_bytes) == (1_000_000, 600_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert read_host(tmp_path).total_bytes == plain.total_bytes


def test_config_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="did you mean 'residency'"):
        MemoryConfig(residencys="auto")  # pyright: ignore
    with pytest.raises(ValueError, match="device_budget_bytes"):
        MemoryConfig(device_budget_bytes=0)
