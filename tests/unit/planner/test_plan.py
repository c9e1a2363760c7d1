"""Plans: always complete, always within the machine, the same for the same question; refusals say
what would fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.errors import ConfigError, GyreError, MemoryBudgetError, SnapshotError
from gyre.memory.phases import RING
from gyre.planner.batch_sizes import derive, largest_divisor
from gyre.planner.decide import make_plan
from gyre.planner.hardware import read_hardware
from gyre.planner.plan import Hardware, ModelNumbers, Plan, PlanInputs, Shards, Sizes
from gyre.planner.report.explain import explain, wide_table

MIB = 1 << 20

MODEL = ModelNumbers(
    num_parameters=3_300_000,
    vocab_size=512,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_size=768,
    context_tokens=1024,
    tied=True,
    qkv_bias=False,
    qk_norm=True,
)
LAPTOP = Hardware(
    device="cpu",
    device_name="a CPU",
    device_total_bytes=8 << 30,
    device_free_bytes=6 << 30,
    host_total_bytes=8 << 30,
    host_available_bytes=6 << 30,
    disk_free_bytes=20 << 30,
    cores=2,
    bf16=False,
    saving="torch_cpu",
)
GPU = replace(
    LAPTOP,
    device="cuda",
    device_name="a GPU",
    device_total_bytes=80 << 30,
    device_free_bytes=79 << 30,
    bf16=True,
    saving="triton",
)


def ask(**changes) -> PlanInputs:
    base = {
        "model": MODEL,
        "objective": "grpo",
        "online": True,
        "prompts_per_step": 32,
        "completions_per_prompt": 8,
        "max_prompt_tokens": 64,
        "max_completion_tokens": 128,
        "reference": True,
    }
    return PlanInputs(**{**base, **changes})


@st.composite
def questions(draw) -> PlanInputs:
    prompts, completions = draw(st.integers(1, 40)), draw(st.integers(1, 9))
    return ask(
        prompts_per_step=prompts,
        completions_per_prompt=completions,
        max_prompt_tokens=draw(st.integers(1, 200)),
        max_completion_tokens=draw(st.integers(1, 200)),
        sequences_per_update=draw(st.none() | st.integers(1, prompts * completions)),
        tokens_per_chunk=draw(st.none() | st.sampled_from([256, 1024, 8192])),
        epochs_per_batch=draw(st.integers(1, 3)),
        online=draw(st.booleans()),
        critic=draw(st.booleans()),
        reference=draw(st.booleans()),
        shared_weights=draw(st.booleans()),
        dtype=draw(st.sampled_from([None, "float32", "bfloat16"])),
        kv_pages=draw(st.none() | st.integers(25, 4000)),
        residency=draw(st.sampled_from([None, "resident", "spill", "phase"])),
        device_budget_bytes=draw(st.none() | st.integers(20, 2000).map(lambda mib: mib * MIB)),
        host_budget_bytes=draw(st.none() | st.integers(0, 300).map(lambda mib: mib * MIB)),
        disk_tier=draw(st.booleans()),
        leave=draw(st.sampled_from([{}, {"engine.kv": "park"}])),
    )


@settings(max_examples=80, deadline=None)
@given(inputs=questions(), hardware=st.sampled_from([LAPTOP, GPU]))
def test_a_plan_is_complete_and_fits(inputs: PlanInputs, hardware: Hardware) -> None:
    try:
        plan = make_plan(inputs, hardware)
    except GyreError as error:
        assert error.hint, error.message
        return
    assert make_plan(inputs, hardware) == plan
    assert Plan.from_json(plan.to_json()) == plan
    assert "auto" not in plan.to_json()
    for phase in plan.phases:
        assert phase.peak_device_bytes <= plan.device_budget_bytes
        assert phase.peak_host_bytes <= plan.host_budget_bytes
        assert sum(phase.disk.values()) <= plan.disk_budget_bytes
        for component in plan.components:
            assert phase.phase not in component.phases or component.name in phase.device
    asked = (
        ("dtype", plan.dtype),
        ("tokens_per_chunk", plan.sizes.tokens_per_chunk),
        ("sequences_per_update", plan.sizes.sequences_per_update),
        ("residency", plan.residency),
        ("device_budget_bytes", plan.device_budget_bytes),
        ("host_budget_bytes", plan.host_budget_bytes),
    )
    for name, got in asked:
        assert getattr(inputs, name) in (None, got), "what the user gave is kept"
        assert plan.reasons[name]
    if inputs.online:
        each = -(-plan.derived.longest_sequence_tokens // plan.page_tokens)
        assert plan.kv_pages >= (each if inputs.kv_pages is None else inputs.kv_pages)
    assert explain(plan)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_derived_numbers_add_up(data) -> None:
    prompts, completions = data.draw(st.integers(1, 64)), data.draw(st.integers(1, 16))
    sequences = prompts * completions
    update = data.draw(st.integers(1, sequences))
    inputs = ask(prompts_per_step=prompts, completions_per_prompt=completions, epochs_per_batch=2)
    chunk = data.draw(st.integers(192, 5000))
    sizes = Sizes(
        prompts_per_step=prompts,
        completions_per_prompt=completions,
        sequences_per_update=update,
        tokens_per_chunk=chunk,
    )
    derived = derive(sizes, inputs)
    updates = derived.updates_per_step // 2
    assert (updates - 1) * update + derived.sequences_in_last_update == sequences
    assert 0 < derived.sequences_in_last_update <= update
    assert derived.chunks_per_update * (chunk // 192) >= update
    assert derived.expected_tokens_per_step <= derived.most_tokens_per_step == sequences * 192
    uneven = [note for note in derived.notes if "do not divide" in note]
    assert bool(uneven) == bool(sequences % update)
    for note in uneven:
        better = int(re.findall(r"; (\d+) would divide", note)[0])
        assert sequences % better == 0 and better <= update
    assert any("cuts through" in note for note in derived.notes) == (
        completions > 1 and bool(update % completions)
    )


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 10**12), st.integers(1, 10**6))
def test_the_largest_divisor_is_found_without_trying_all(number: int, most: int) -> None:
    found = largest_divisor(number, most)
    assert number % found == 0 and found <= most
    assert not any(number % d == 0 for d in range(found + 1, min(most, found + 500) + 1))


@pytest.mark.parametrize(
    ("prompts", "size", "limits", "queue", "parts"),
    [
        (32, 8, {}, 0, 1),
        (64, 8, {}, 256, 1),
        (64, 8, {"engines": 2}, 0, 1),
        (64, 8, {"max_queued": 256}, 256, 1),
        (65, 8, {"max_queued": 256}, 256, 2),
        (10, 100, {"max_queued": 44}, 44, 4),  # whole groups: three of a hundred at once
        (2, 1000, {"max_queued": 44}, 44, 7),  # of a larger group one completion at a time
        (64, 8, {"max_queued_tokens": 640}, 0, 7),  # prompts of 64 tokens: ten at once
    ],
)
def test_the_plan_says_how_long_the_queue_gets(prompts, size, limits, queue, parts) -> None:
    inputs = ask(
        prompts_per_step=prompts,
        completions_per_prompt=size,
        max_running=256,
        max_prompt_tokens=64,
        **limits,
    )
    plan = make_plan(inputs, LAPTOP)
    assert (plan.derived.longest_queue, plan.derived.submissions) == (queue, parts)
    line = next(
        line for line in explain(plan, columns=200).splitlines() if "queue, longest" in line
    )
    assert f" {queue} " in line and (f"{parts} parts" in line) == (parts > 1)
    assert (
        plan.derived.most_sampled_per_step == prompts * size
        and "sampled_per_step" not in explain(plan)
    )
    refilled = make_plan(replace(inputs, max_refills=2, remarks=("by part 'answer'",)), LAPTOP)
    assert refilled.derived.most_sampled_per_step == 3 * prompts * size
    assert "sampled_per_step, most" in explain(refilled) and "- by part 'answer'" in explain(
        refilled
    )


def test_a_laptop_keeps_everything_where_it_is() -> None:
    plan = make_plan(ask(), LAPTOP)
    assert (plan.device, plan.dtype, plan.threads, plan.residency) == (
        "cpu",
        "float32",
        2,
        "resident",
    )
    assert [phase.phase for phase in plan.phases] == list(RING)
    assert all(phase.moved_bytes == 0 and not phase.host for phase in plan.phases)
    assert plan.kv_pages == 256 * 12
    assert plan.sizes.sequences_per_update == 256


def test_a_small_device_takes_turns() -> None:
    """All components need 260 MiB at once; the largest phase alone needs less."""
    plan = make_plan(
        ask(device_budget_bytes=230 * MIB, tokens_per_chunk=512, kv_pages=1500), LAPTOP
    )
    assert plan.residency == "spill"
    by_phase = {phase.phase: phase for phase in plan.phases}
    assert "engine.kv" in by_phase["rollout"].device
    assert "actor.optimizer" in by_phase["train"].device
    assert (
        any(phase.moved_bytes for phase in plan.phases)
        or "engine.kv" not in by_phase["train"].device
    )
    assert plan.reasons["residency"].startswith("not everything fits")


def test_kv_takes_what_is_left_and_the_plan_says_what_that_means() -> None:
    plan = make_plan(ask(device_budget_bytes=260 * MIB, tokens_per_chunk=512), LAPTOP)
    assert 12 <= plan.kv_pages < 256 * 12
    assert "what the device budget leaves" in plan.reasons["kv_pages"]
    assert any("preempted" in note for note in plan.notes)


def test_the_host_pool_for_swapped_kv_counts_on_the_host_and_nowhere_else() -> None:
    asked = ask(device_budget_bytes=260 * MIB, tokens_per_chunk=512)
    without, plan = (
        make_plan(asked, LAPTOP),
        make_plan(replace(asked, kv_host_bytes=100 * MIB), LAPTOP),
    )
    (pool,) = [component for component in plan.components if component.name == "engine.kv_host"]
    assert 99 * MIB < pool.size_bytes <= 100 * MIB
    assert plan.kv_pages == without.kv_pages
    for phase, before in zip(plan.phases, without.phases, strict=True):
        assert (
            phase.host == {**before.host, "engine.kv_host": pool.size_bytes}
            and phase.device == before.device
        )
        assert phase.peak_host_bytes == before.peak_host_bytes + pool.size_bytes
    assert re.search(r"engine\.kv_host +\S+ MiB \(host\)", explain(plan))
    assert re.search(r"engine\.kv_host .* slots × \d+ bytes", explain(plan))
    assert (
        "engine.kv_host"
        in make_plan(replace(asked, kv_host_bytes=MIB, leave={"engine": "destroy"}), LAPTOP)
        .phases[0]
        .host
    )
    with pytest.raises(
        MemoryBudgetError, match=r"no room for engine\.kv_host .* on host"
    ) as refusal:
        make_plan(replace(asked, kv_host_bytes=100 * MIB, host_budget_bytes=90 * MIB), LAPTOP)
    assert "memory.host_budget_bytes" in refusal.value.hint
    with pytest.raises(ConfigError, match=r"engine\.kv_host_bytes = 10: one KV page"):
        make_plan(ask(kv_host_bytes=10), LAPTOP)
    offline = make_plan(
        ask(objective="dpo", online=False, completions_per_prompt=2, kv_host_bytes=10), LAPTOP
    )
    assert "engine.kv_host" not in explain(offline)


def test_what_background_snapshots_are_staged_in_comes_off_the_host_budget() -> None:
    asked = ask(host_budget_bytes=900 * MIB, dtype="float32", reference=True)
    plan = make_plan(replace(asked, snapshot_background=True), LAPTOP)
    each = (12 + 4) * asked.model.num_parameters
    assert plan.host_budget_bytes == 900 * MIB - each
    assert "snapshots are staged in" in plan.reasons["host_budget_bytes"]
    shared = make_plan(
        replace(asked, snapshot_background=True, ranks=4, reference_average=True), LAPTOP
    )
    assert shared.host_budget_bytes == 900 * MIB - -(-20 * asked.model.num_parameters // 4)
    with pytest.raises(MemoryBudgetError, match="background snapshots need"):
        make_plan(replace(asked, snapshot_background=True, host_budget_bytes=each - 1), LAPTOP)


def test_chunks_shrink_before_the_plan_gives_up() -> None:
    plan = make_plan(ask(device_budget_bytes=300 * MIB), LAPTOP)
    assert 192 <= plan.sizes.tokens_per_chunk < 8192
    assert plan.reasons["tokens_per_chunk"].startswith("largest that fits")


def test_too_small_a_device_is_refused_with_the_setting_that_fits() -> None:
    with pytest.raises(MemoryBudgetError) as refusal:
        make_plan(ask(device_budget_bytes=60 * MIB), LAPTOP)
    named = re.search(r"memory\.device_budget_bytes to at least (\d+)", refusal.value.hint)
    assert named, refusal.value.hint
    assert re.search(r"actor\.|engine\.", refusal.value.message)


def test_gpu_defaults() -> None:
    plan = make_plan(ask(disk_tier=True), GPU)
    assert (plan.device, plan.dtype) == ("cuda", "bfloat16")
    assert plan.device_budget_bytes == int(0.9 * (79 << 30))
    assert "actor.master" in {component.name for component in plan.components}
    assert plan.disk_budget_bytes > 0


def test_without_bfloat16_a_gpu_takes_float16_and_a_cpu_float32() -> None:
    assert make_plan(ask(), replace(GPU, bf16=False)).dtype == "float16"
    assert make_plan(ask(), LAPTOP).dtype == "float32"
    assert make_plan(ask(), replace(LAPTOP, bf16=True)).dtype == "bfloat16"
    assert make_plan(ask(device="cpu"), GPU).dtype == "float32"


def test_8_bit_products_take_working_memory() -> None:
    same, fp8 = (
        make_plan(ask(matmul=matmul, tokens_per_chunk=8192), GPU).working["train"]
        for matmul in ("same", "fp8")
    )
    assert same < fp8 < 1.2 * same


def test_offline_objectives_generate_nothing() -> None:
    plan = make_plan(ask(objective="dpo", online=False, completions_per_prompt=2), LAPTOP)
    assert [phase.phase for phase in plan.phases] == ["score", "train", "evaluate"]
    assert plan.kv_pages == plan.max_running == 0
    assert "kv_pages" not in explain(plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_completion_tokens": 2000}, "2064 tokens of context, the model has 1024"),
        ({"tokens_per_chunk": 100}, "tokens_per_chunk = 100 cannot hold a sequence of 192 tokens"),
        ({"sequences_per_update": 257}, "a step has 256 sequences"),
        ({"prompts_per_step": 0}, "prompts_per_step = 0"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"leave": {"actor.params": "destroy"}}, r"actor\.params cannot be destroyed"),
        ({"leave": {"reference": "disk"}}, "reference has no disk tier"),
    ],
)
def test_what_cannot_work_is_a_config_error(changes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(ask(**changes), LAPTOP)


def test_notes_warn_of_slow_choices() -> None:
    plan = make_plan(ask(threads=8, dtype="bfloat16"), LAPTOP)
    assert any("8 threads on 2 cores" in note for note in plan.notes)
    assert any("no bfloat16 products" in note for note in plan.notes)


def test_explanation_names_each_number_and_owner() -> None:
    plan = make_plan(ask(), LAPTOP)
    text = explain(plan)
    for name in (
        "prompts_per_step",
        "completions_per_prompt",
        "sequences_per_update",
        "tokens_per_chunk",
        "kv_pages",
    ):
        assert name in text
    for component in plan.components:
        assert component.name in text
    assert "60% of 6.00 GiB available memory" in text
    head = next(line for line in text.splitlines() if line.split()[:2] == ["owner", "start"])
    assert head.split() == ["owner", "start", *RING]
    assert "\x1b" not in text


@pytest.mark.parametrize("columns", [72, 80, 120])
def test_tables_keep_to_the_columns(columns: int) -> None:
    plan = make_plan(ask(), LAPTOP)
    narrow, wide = explain(plan, columns), explain(plan, 400)
    assert max(map(len, narrow.splitlines())) <= columns
    said = [{word for word in text.split() if "─" not in word} for text in (narrow, wide)]
    assert said[0] == said[1], "folding drops nothing"
    phases = [line.split() for line in narrow.splitlines() if line.split()[:1] == ["owner"]]
    assert [name for head in phases for name in head[1:]] == ["start", *RING]
    assert all(head[0] == "owner" for head in phases)


def test_a_cut_table_leaves_out_empty_rows() -> None:
    rows = [("a", "1 GiB", "–"), ("b", "–", "2 GiB"), ("c", "3 GiB", "4 GiB")]
    head = ("for", "first", "second")
    assert wide_table(head, rows, 80).splitlines()[2:] == [
        "  a    1 GiB  –",
        "  b    –      2 GiB",
        "  c    3 GiB  4 GiB",
    ]
    first, second = wide_table(head, rows, 14).split("\n\n")
    assert [line.split()[0] for line in first.splitlines()[2:]] == ["a", "c"]
    assert [line.split()[0] for line in second.splitlines()[2:]] == ["b", "c"]


def test_a_plan_of_another_version_is_refused() -> None:
    plan = make_plan(ask(), LAPTOP)
    values = json.loads(plan.to_json())
    for damage in (
        {**values, "surprise": 1},
        {k: v for k, v in values.items() if k != "sizes"},
        [],
    ):
        with pytest.raises(SnapshotError, match="not a plan of this version"):
            Plan.from_json(json.dumps(damage))
    with pytest.raises(SnapshotError):
        Plan.from_json("{")


def test_this_machine_can_be_planned_for(tmp_path: Path) -> None:
    hardware = read_hardware(tmp_path / "not" / "there" / "yet")
    assert hardware.cores >= 1
    assert 0 < hardware.host_available_bytes <= hardware.host_total_bytes
    assert hardware.disk_free_bytes > 0
    plan = make_plan(ask(device="cpu", prompts_per_step=1, completions_per_prompt=2), hardware)
    assert plan.hardware == hardware


def test_a_model_that_does_not_fit_is_offered_the_least_offloading_that_does() -> None:
    """Activations are small here: what is in the way are 16 bytes per parameter, but for the first
    case, where keeping less of a layer is enough too."""
    inputs = ask(
        online=False, reference=False, prompts_per_step=1, completions_per_prompt=1, dtype="float32"
    )
    tight = replace(inputs, offload_cut_bytes=1 << 16, host_budget_bytes=1 << 30)
    train = make_plan(tight, LAPTOP).working["train"]
    offers = []
    for bytes_per_parameter in (15, 7, 3, 1):
        small = replace(
            tight, device_budget_bytes=train + bytes_per_parameter * MODEL.num_parameters + MIB
        )
        with pytest.raises(MemoryBudgetError) as caught:
            make_plan(small, LAPTOP)
        fits, _, _ = caught.value.hint.rpartition("; else ")
        offers.append(fits.removeprefix("what fits: "))
        assert not re.search(r"tokens_per_chunk|zero", offers[-1]), "one sequence, one rank"
        if not offers[-1]:
            continue
        away = ("actor",) if "parameters" in offers[-1] else ()
        gradients = "gradients" in offers[-1]
        fitting = replace(
            small, offload_optimizer="host", offload_gradients=gradients, offload_parameters=away
        )
        plan = make_plan(fitting, LAPTOP)
        (train_phase,) = [phase for phase in plan.phases if phase.phase == "train"]
        assert train_phase.host["actor.optimizer"] == 8 * MODEL.num_parameters
        assert "actor.optimizer" not in train_phase.device and "actor.staging" in train_phase.device
        assert "(host)" in explain(plan)
    assert offers == [
        'trainer.checkpointing = "selective"; or trainer.offload_optimizer = "host"',
        'trainer.offload_optimizer = "host" and trainer.offload_gradients = true',
        'trainer.offload_optimizer = "host", trainer.offload_gradients = true and '
        'trainer.offload_parameters = ["actor"]',
        "",
    ]


def test_a_stage_begins_with_one_model_after_the_other() -> None:
    """The peak of the start is the largest of what is there with what is made; what the first phase
    keeps elsewhere goes there at once. A device that cannot hold that is refused."""
    plan = make_plan(ask(critic=True, reference=True, residency="phase"), LAPTOP)
    sizes = {c.name: c.size_bytes for c in plan.components}
    actor, critic, reference = (
        sum(s for n, s in sizes.items() if n.startswith(o)) for o in ("actor", "critic", "ref")
    )
    assert plan.parked_at_start == {
        "actor.grads": "none",
        "actor.optimizer": "host",
        **{
            name: "none" if name.endswith("grads") else "host"
            for name in sizes
            if name.startswith(("critic", "ref"))
        },
    }
    engine = sum(size for name, size in sizes.items() if name.startswith("engine."))
    assert plan.start.peak_device_bytes == max(
        actor, critic, reference, sizes["actor.params"] + engine
    )
    assert plan.start.device == {name: plan.phases[0].device[name] for name in plan.start.device}
    stay = make_plan(ask(critic=True, reference=True, residency="resident"), LAPTOP)
    assert stay.parked_at_start == {} and stay.start.peak_device_bytes == sum(sizes_of(stay))


def sizes_of(plan) -> list[int]:
    return [c.size_bytes for c in plan.components if "device" in c.tiers]


def test_a_model_that_fits_in_shards_alone_is_planned_for() -> None:
    """Each rank's plan has its part of the states, and what it gathers of them to compute."""
    asked = ask(
        objective="sft",
        online=False,
        reference=False,
        prompts_per_step=4,
        completions_per_prompt=1,
        max_completion_tokens=0,
        residency="resident",
        device_budget_bytes=45_000_000,
    )
    with pytest.raises(MemoryBudgetError):
        make_plan(asked, LAPTOP)
    plans = {
        zero: make_plan(
            replace(asked, ranks=4, shards={"actor": Shards(zero=zero, ranks=4)}), LAPTOP
        )
        for zero in (1, 3)
    }
    whole = 4 * MODEL.num_parameters
    assert {c.name: c.size_bytes for c in plans[1].components} == {
        "actor.params": whole, "actor.grads": whole, "actor.optimizer": whole // 2
    }  # fmt: skip
    assert {c.name: c.size_bytes for c in plans[3].components} == {
        "actor.params": whole // 4, "actor.grads": whole // 4, "actor.optimizer": whole // 2
    }  # fmt: skip
    assert plans[3].working["train"] > plans[1].working["train"] + 4 * 4 * MODEL.layer_parameters
    assert "/ 4 ranks" in explain(plans[3])


def test_gradients_that_are_summed_once_take_working_memory_where_an_update_has_several_chunks() -> (
    None
):
    lain = {
        "ranks": 4,
        "shards": {"actor": Shards(zero=3, ranks=4), "critic": Shards(zero=1, ranks=4)},
    }
    asked = ask(critic=True, dtype="float32", sequences_per_update=16, **lain)

    def train_bytes(tokens: int, **changes) -> int:
        return make_plan(replace(asked, tokens_per_chunk=tokens, **changes), LAPTOP).working[
            "train"
        ]

    for tokens, held in ((4 * 192, 0), (3 * 192, 4 * MODEL.num_parameters)):
        assert train_bytes(tokens, sum_gradients="update") - train_bytes(tokens) == held
