"""A plan's numbers, to the last one: sizes of batches, what lies where phase by phase, what was
left open and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gyre.core.errors import ConfigError, MemoryBudgetError, SnapshotError
from gyre.memory.records import Budgets
from gyre.planner.batch_sizes import (
    check_lengths,
    completions_at_once,
    derive,
    largest_divisor,
    longest_sequence,
)
from gyre.planner.decide import make_plan
from gyre.planner.memory_model.peaks import start_moment
from gyre.planner.memory_model.phases import place_at_start, walk_ring, walk_start
from gyre.planner.plan import (
    ComponentPlan,
    DerivedSizes,
    Hardware,
    PhasePlan,
    Plan,
    PlanInputs,
    Shards,
    Sizes,
    best_dtype,
)
from unit.planner.memory_model.test_exact_bytes import FLAT, TOY, P, make_inputs
from unit.planner.search.test_exact_search import make_job

HOST = Hardware(
    device="cpu",
    device_name="a CPU",
    device_total_bytes=10**10,
    device_free_bytes=10**9,
    host_total_bytes=10**10,
    host_available_bytes=10**9,
    disk_free_bytes=10**8,
    cores=2,
    bf16=False,
    saving="torch_cpu",
)

# Sizes.

STEP = Sizes(
    prompts_per_step=3, completions_per_prompt=4, sequences_per_update=5, tokens_per_chunk=100
)


def test_lengths_that_a_model_takes() -> None:
    asked = make_inputs()
    assert longest_sequence(asked) == 40
    check_lengths(replace(asked, model=replace(TOY, context_tokens=40)))
    with pytest.raises(ConfigError, match="40 tokens of context, the model has 39") as caught:
        check_lengths(replace(asked, model=replace(TOY, context_tokens=39)))
    assert caught.value.hint.endswith("by 1")
    with pytest.raises(ConfigError) as caught:
        check_lengths(replace(asked, model=replace(TOY, context_tokens=10)))
    assert caught.value.hint.endswith("by 30")
    for name in ("prompts_per_step", "completions_per_prompt", "max_prompt_tokens"):
        check_lengths(replace(asked, **{name: 1}))
        with pytest.raises(ConfigError, match=f"{name} = 0: need at least 1"):
            check_lengths(replace(asked, **{name: 0}))


def test_numbers_that_follow_from_the_sizes() -> None:
    """12 sequences of 10 + 30 tokens in updates of 5, 5 and 2, twice; a chunk holds two."""
    found = derive(STEP, make_inputs(epochs_per_batch=2, max_refills=2))
    assert (found.sequences_per_step, found.updates_per_step, found.sequences_in_last_update) == (
        12,
        6,
        2,
    )
    assert (found.longest_sequence_tokens, found.most_tokens_per_step) == (40, 480)
    assert (found.expected_tokens_per_step, found.chunks_per_update) == (12 * (10 + 15), 3)
    assert (found.longest_queue, found.submissions, found.most_sampled_per_step) == (0, 1, 0), (
        "nothing is generated"
    )
    assert derive(STEP, make_inputs(max_completion_tokens=29)).expected_tokens_per_step == 12 * (
        10 + 14
    )
    assert derive(STEP, make_inputs(max_refills=2), max_running=2).most_sampled_per_step == 36
    for update, updates in ((1, 12), (12, 1)):
        assert (
            derive(replace(STEP, sequences_per_update=update), make_inputs()).updates_per_step
            == updates
        )
    for update in (0, 13):
        with pytest.raises(ConfigError, match="a step has 12 sequences") as caught:
            derive(replace(STEP, sequences_per_update=update), make_inputs())
        assert "1 to 12" in caught.value.hint
    assert derive(replace(STEP, tokens_per_chunk=40), make_inputs()).chunks_per_update == 5
    with pytest.raises(ConfigError, match=r"of 40 tokens \(10 prompt \+ 30 completion\)") as caught:
        derive(replace(STEP, tokens_per_chunk=39), make_inputs())
    assert "at least 40" in caught.value.hint


@pytest.mark.parametrize(
    ("limits", "max_running", "at_once", "queue", "parts"),
    [
        ({}, 2, 12, 10, 1),
        ({"engines": 2}, 2, 12, 8, 1),
        ({"engines": 7}, 2, 12, 0, 1),
        ({"max_queued": 3}, 2, 4, 2, 3),  # five, in whole groups of four
        ({"max_queued": 7}, 2, 8, 6, 2),
        ({"max_queued": 1}, 2, 3, 1, 4),  # of a larger group as many as there is room for
        ({"max_queued": 100}, 2, 12, 10, 1),
        ({"max_queued_tokens": 25}, 2, 8, 6, 2),  # two prompts of 10
        ({"max_queued_tokens": 9}, 2, 4, 2, 3),
        ({"max_queued_tokens": 25, "max_queued": 3}, 2, 4, 2, 3),
        ({"max_queued_tokens": 15, "max_queued": 100}, 2, 4, 2, 3),
    ],
)
def test_completions_that_are_submitted_and_wait(
    limits: dict[str, Any], max_running: int, at_once: int, queue: int, parts: int
) -> None:
    inputs = make_inputs(**limits)
    assert completions_at_once(STEP, inputs, max_running) == at_once
    found = derive(STEP, inputs, max_running=max_running)
    assert (found.longest_queue, found.submissions) == (queue, parts)


def test_what_is_uneven_is_noted() -> None:
    def notes(tokens_per_chunk: int = 80, **changes: int) -> list[str]:
        return list(
            derive(replace(STEP, tokens_per_chunk=tokens_per_chunk, **changes), make_inputs()).notes
        )

    assert notes(sequences_per_update=4) == notes(sequences_per_update=12) == []
    last, cuts = notes(sequences_per_update=5)
    assert (
        last.endswith("the last update of an epoch has 2; 4 would divide") and "groups of 4" in cuts
    )
    (cuts,) = notes(sequences_per_update=6)
    assert cuts.startswith("an update of 6 sequences cuts through the groups of 4")
    (pair,) = notes(sequences_per_update=3, completions_per_prompt=2)
    assert "cuts through the groups of 2" in pair
    assert notes(sequences_per_update=3, completions_per_prompt=1) == []
    for tokens, held, waste in ((100, 2, 20), (150, 3, 30)):
        (note,) = notes(tokens, sequences_per_update=4)
        assert note.startswith(f"a chunk holds {held} sequences of full length and {waste} tokens")
    assert notes(170, sequences_per_update=4) == []


def test_largest_divisors() -> None:
    wanted = {
        (36, 36): 36,
        (36, 35): 18,
        (36, 6): 6,
        (36, 5): 4,
        (36, 1): 1,
        (49, 48): 7,
        (13, 12): 1,
        (2, 2): 2,
    }
    assert {asked: largest_divisor(*asked) for asked in wanted} == wanted


# What lies where.


def part(
    name: str, size_bytes: int, tiers: Sequence[Any], *phases: Any, leave: Sequence[Any] = ()
) -> ComponentPlan:
    return ComponentPlan(
        name=name,
        size_bytes=size_bytes,
        tiers=tuple(tiers),
        phases=phases,
        leave=tuple(leave),
        formula="",
    )


BOTH = ("device", "host")
PLACE = {"working_bytes": 0, "peak_device_bytes": 0, "peak_host_bytes": 0, "moved_bytes": 0}


def test_a_stage_makes_its_models_one_after_the_other() -> None:
    """Reference, critic, actor, reward, engine: each is on the device when it is made, and leaves
    for where the first phase has it."""
    parts = [
        part("actor.params", 30, BOTH),
        part("actor.optimizer", 60, BOTH),
        part("actor.grads", 5, ("device", "none")),
        part("critic.params", 50, BOTH),
        part("reference", 100, BOTH),
        part("engine.kv", 40, ("device", "none")),
        part("engine.kv_host", 7, ("host", "none")),
    ]
    first = PhasePlan(
        phase="rollout",
        device={"actor.params": 30, "engine.kv": 40},
        host={"reference": 100, "actor.optimizer": 60, "engine.kv_host": 7},
        disk={"critic.params": 50},
        **PLACE,
    )
    assert walk_start(parts, first, 100) == PhasePlan(
        phase="idle", device=first.device, host=first.host, disk=first.disk,
        working_bytes=0, peak_device_bytes=100, peak_host_bytes=167, moved_bytes=100 + 50 + 60,
    )  # fmt: skip
    stays = replace(first, device={**first.device, "reference": 100}, host={})
    assert walk_start(parts, stays, 0).moved_bytes == 50

    def peak(parts: list[ComponentPlan], first: PhasePlan) -> int:
        return start_moment(make_job(), FLAT, parts, first.device).allocated_bytes

    assert peak(parts, first) == 100
    larger = [replace(one, size_bytes=200) if one.name == "engine.kv" else one for one in parts]
    assert peak(larger, first) == 30 + 200, "the engine comes to what stayed"
    assert peak(parts, stays) == 100 + 30 + 60 + 5
    parked = replace(first, device={}, host={}, disk={"reference": 100})
    assert peak(parts, parked) == 100


def budgets(device: int, host: int = 0, disk: int = 0, **more: Any) -> Budgets:
    return Budgets(device_bytes=device, host_bytes=host, disk_bytes=disk, **more)


def test_components_are_made_where_there_is_room() -> None:
    parts = [
        part("actor.params", 30, BOTH, "train", leave=["host"]),
        part("actor.optimizer", 60, ("device", "host", "disk"), "train", leave=["host", "disk"]),
        part("engine.kv", 40, ("device", "none"), "rollout", leave=["none"]),
        part("engine.kv_host", 7, ("host", "none"), leave=["none"]),
        part("other", 3, BOTH, leave=["host"]),
    ]

    def tiers(there: Budgets) -> list[str]:
        return [entry.tier for entry in place_at_start(parts, there)]

    assert tiers(budgets(133, 7)) == ["device", "device", "device", "host", "device"]
    assert tiers(budgets(90, 10)) == ["device", "device", "none", "host", "host"]
    assert tiers(budgets(89, 67)) == ["device", "host", "device", "host", "device"]
    assert tiers(budgets(73, 7, 60)) == ["device", "disk", "device", "host", "device"]
    placed = place_at_start(parts, budgets(133, 7))
    assert [entry.wake for entry in placed] == [0, 1, 2, 0, 0], "weights, state, pages"
    assert [entry.size_bytes for entry in placed] == [30, 60, 40, 7, 3]
    assert placed[1].phases == ("train",) and placed[1].leave == ("host", "disk")


@pytest.mark.parametrize(
    ("there", "choices", "hint"),
    [
        (
            budgets(29, 20),
            "device or host",
            "raise memory.host_budget_bytes by 10, or set memory.disk_folder",
        ),
        (
            budgets(29, 29, device_total_bytes=29),
            "device or host",
            "raise memory.host_budget_bytes by 1, or",
        ),
    ],
)
def test_no_room_at_the_start(there: Budgets, choices: str, hint: str) -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        place_at_start([part("actor.params", 30, BOTH, leave=["host"])], there)
    assert f"no room for actor.params (30 B) on {choices} beside" in caught.value.message
    assert caught.value.hint.startswith(hint)


def test_no_more_is_asked_of_a_device_than_it_has() -> None:
    stuck = [part("engine.graphs", 10, ("device",)), part("actor.layer_buffers", 30, ("device",))]
    for total, larger in ((40, True), (39, False), (None, True)):
        with pytest.raises(MemoryBudgetError) as caught:
            place_at_start(stuck, budgets(20, 5, 6, device_total_bytes=total))
        advice = "raise memory.device_budget_bytes by 20, or " if larger else ""
        assert caught.value.hint == f"{advice}set memory.disk_folder"
    assert caught.value.message.endswith("still free: device 10 B, host 5 B, disk 6 B")
    with pytest.raises(MemoryBudgetError, match=r"on host beside .* free: device 0 B, host 5 B"):
        place_at_start([part("engine.kv_host", 6, ("host", "none"))], budgets(0, 5))


def test_a_steady_iteration() -> None:
    """Two models that need the device in turns: each phase brings one and takes the other away."""
    parts = [
        part("engine.weights", 10, BOTH, "rollout", leave=["host"]),
        part("actor", 12, BOTH, "train", leave=["host"]),
        part("engine.kv", 2, ("device", "none"), "rollout", leave=["none"]),
    ]

    def walk(there: Budgets, *, keeps_pages: bool = False) -> tuple[PhasePlan, ...]:
        working: dict[Any, int] = {"rollout": 3, "train": 4}
        return walk_ring(
            parts, working, there, "spill", ("rollout", "train"), keeps_pages=keeps_pages
        )

    rollout, train = walk(budgets(20, 100))
    assert (rollout.phase, train.phase) == ("rollout", "train")
    assert rollout.device == {"engine.weights": 10, "engine.kv": 2} and rollout.host == {
        "actor": 12
    }
    assert (rollout.working_bytes, rollout.peak_device_bytes, rollout.moved_bytes) == (3, 15, 22)
    assert train.host == {"engine.weights": 10} and train.device["actor"] == 12
    assert (train.working_bytes, train.moved_bytes, train.peak_host_bytes) == (4, 22, 22), (
        "pages are made, not copied"
    )
    assert rollout.disk == {} == train.disk
    kept = walk(budgets(20, 100), keeps_pages=True)
    assert kept[1].host == {"engine.weights": 10, "actor": 12}, (
        "host pages of what comes back stay, but the engine's"
    )
    assert kept[0].host == {"actor": 12}
    roomy = walk(budgets(100, 100))
    assert [phase.moved_bytes for phase in roomy] == [0, 0]


# The record.


def test_what_is_asked_for_when_nothing_is_said() -> None:
    asked = PlanInputs(
        model=TOY,
        objective="sft",
        online=False,
        prompts_per_step=1,
        completions_per_prompt=1,
        max_prompt_tokens=1,
        max_completion_tokens=0,
    )
    numbers = {
        "offload_cut_bytes": 128 << 20,
        "epochs_per_batch": 1,
        "engines": 1,
        "engine_tokens_per_step": 2048,
        "ranks": 1,
    }
    assert {name: getattr(asked, name) for name in numbers} == numbers
    noughts = ("kv_host_bytes", "max_refills")
    assert all(getattr(asked, name) == 0 for name in noughts)
    off = (
        "offload_gradients", "critic", "reference", "engines_alone", "batch_invariant", "disk_tier",
        "snapshot_background", "reference_average",
    )  # fmt: skip
    assert all(getattr(asked, name) is False for name in off) and asked.shared_weights is True
    assert Shards() == Shards(zero=0, ranks=1)
    assert (
        TOY.layer_parameters == 4976
        and replace(TOY, tied=False, num_parameters=P + 2000).layer_parameters == 4976
    )
    assert (TOY.query_size, TOY.kv_size, TOY.embedding_parameters) == (32, 16, 2000)
    dtypes = [best_dtype(device, bf16=bf16) for device in ("cpu", "cuda") for bf16 in (False, True)]  # pyright: ignore
    assert dtypes == ["float32", "bfloat16", "float16", "bfloat16"]


def test_a_plan_is_written_and_read() -> None:
    plan = make_plan(make_inputs(), HOST)
    text = plan.to_json()
    assert text.startswith('{\n  "objective": "grpo",\n') and text.endswith("}\n")
    assert Plan.from_json(text) == plan
    values = json.loads(text)
    with pytest.raises(SnapshotError, match="Plan has no ending, surprise"):
        Plan.from_json(json.dumps({**values, "surprise": 1, "ending": 2}))
    with pytest.raises(SnapshotError, match="Sizes is a table, got int"):
        Plan.from_json(json.dumps({**values, "sizes": 3}))
    needed = {name: 1 for name in DerivedSizes.__dataclass_fields__ if name not in (
        "longest_queue", "submissions", "most_sampled_per_step", "notes"
    )}  # fmt: skip
    without_engine = DerivedSizes(**needed)  # pyright: ignore[reportArgumentType]
    found = (
        without_engine.longest_queue,
        without_engine.submissions,
        without_engine.most_sampled_per_step,
    )
    assert found == (0, 1, 0)


def test_what_is_parked_at_the_start() -> None:
    plan = make_plan(make_inputs(reference=True), HOST)
    assert plan.parked_at_start == {}
    start = replace(
        plan.start, device={"actor.params": 1}, host={"reference": 1}, disk={"actor.optimizer": 1}
    )
    parked = {"actor.grads": "none", "actor.optimizer": "disk", "reference": "host"}
    assert replace(plan, start=start).parked_at_start == parked, "but for the engine's"
