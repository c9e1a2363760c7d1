"""What a stage is planned with: its own sizes, its ranks, its part of the machine; and what a plan
says of where numbers come from."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

import trainer_cases
from gyre.core.errors import ConfigError, InputError
from gyre.distributed.config import ParallelConfig
from gyre.launch.plan_command import PlanRequest, plan_stages_for
from gyre.launch.stage_plan import cut_hardware, expected_ranks, lie_over, plan_run, rate_remarks
from gyre.launch.stages import load_stage_data, plan_stages
from gyre.models.layout import local_spec, model_layout
from gyre.models.spec import hub_config_from_spec, spec_from_shape
from gyre.planner.plan import Hardware, Shards
from gyre.planner.report.explain import explain
from gyre.runconfig.run_config import parse_run_config
from gyre.runconfig.toml_tree import apply_overrides
from unit.data.test_examples import TOKENIZER
from unit.data.test_sources import Events, write_jsonl
from unit.launch.test_stages import CONTEXT_TOKENS, GRADED, SHAPE, load_online, online

WIDE = replace(trainer_cases.SPEC, num_heads=4, num_kv_heads=2)
LABELS = {
    "objective": "objective.kind='grpo'",
    "prompts_per_step": "rollout.prompts_per_step=16",
    "completions_per_prompt": "rollout.completions_per_prompt=4",
    "max_running": "engine.max_running=32",
    "page_tokens": "engine.page_tokens=16",
    "threads": "run.threads=1",
    "dtype": "run.dtype='float32'",
    "device": "run.device='cpu'",
    "tokens_per_chunk": "trainer.tokens_per_chunk=4096",
    "sequences_per_update": "trainer.sequences_per_update=4",
    "residency": "memory.residency='resident'",
    "host_budget_bytes": "memory.host_budget_bytes=1_000_000_000",
}


def test_a_run_takes_kv_pages_by_number_or_by_bytes_and_no_fraction_of_what_is_free(tmp_path):
    def plan(**engine):
        config = online(tmp_path, engine={"page_tokens": 16, **engine}, run={"device": "cpu"})
        (stage,), data, spec = plan_stages(config, "all"), load_online(config), WIDE
        return plan_run(config, stage, spec, data, dtype="float32", folder=tmp_path)

    page = 2 * WIDE.num_layers * WIDE.num_kv_heads * WIDE.head_dim * 16 * 4  # bytes
    assert plan(kv_bytes=30 * page).kv_pages == 30
    assert plan(kv_bytes=30 * page, num_pages=40, kv_fraction=0.5).kv_pages == 40
    with pytest.raises(ConfigError, match=r"engine\.kv_fraction = 0\.5 in a run") as refused:
        plan(kv_fraction=0.5)
    assert "engine.kv_bytes" in refused.value.hint


def test_each_rank_of_an_engine_is_planned_for_with_its_part_of_the_model(tmp_path):
    """Weights and KV heads are cut; the trainer's states are not. The reasons say that it is one
    rank's."""
    pod = {"kind": "pod", "num_workers": 1, "engine_workers": 1, "colocated": False}
    made = {}
    for ranks in (1, 2, 3):
        config = online(
            tmp_path, cluster=pod, engine={"tensor_ranks": ranks, "num_pages": 8},
            run={"device": "cpu"},
        )  # fmt: skip
        (stage,), data, spec = plan_stages(config, "all"), load_online(config), WIDE
        given = {"dtype": "float32", "folder": tmp_path}
        if ranks == 3:
            with pytest.raises(
                ConfigError, match=r"engine\.tensor_ranks = 3: 4 attention heads do"
            ):
                plan_run(config, stage, spec, data, **given)
            continue
        made[ranks] = {
            one.name: one for one in plan_run(config, stage, spec, data, **given).components
        }
    held = model_layout(WIDE, 2).local_shapes
    weights = 4 * sum(math.prod(shape) for shape in held.values())
    assert made[2]["engine.weights"].size_bytes == weights < 4 * WIDE.num_parameters
    assert made[1]["engine.weights"].size_bytes == 4 * WIDE.num_parameters
    assert made[2]["engine.weights"].formula.endswith("of each rank")
    assert 2 * made[2]["engine.kv"].size_bytes == made[1]["engine.kv"].size_bytes
    assert made[2]["actor.params"] == made[1]["actor.params"]


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({}, "2 devices, 1 engine of 2 ranks: device i has trainer rank i and"),
        ({"num_workers": 2}, "2 devices, 1 engine of 2 ranks: device i has trainer rank i and"),
        ({"num_workers": 4}, "4 devices, 2 engines of 2 ranks: device i has"),
        ({"num_workers": 4, "engine_workers": 1}, "From device 2 on there is a trainer rank alone"),
        ({"num_workers": 1, "engine_workers": 1}, "From device 1 on there is an engine's rank al"),
        (
            {"num_workers": 2, "engine_workers": 1, "colocated": False},
            "4 devices: 2 with a trainer rank each, then 2 with 1 engine of 2 ranks",
        ),
    ],
)
def test_a_plan_says_which_ranks_share_a_device(tmp_path, cluster, words):
    """And holds both in each phase's table: weights and KV of an engine's rank leave for the
    trainer's."""
    config = online(
        tmp_path,
        cluster={"kind": "pod", **cluster},
        engine={"tensor_ranks": 2, "num_pages": 8},
        memory={"residency": "phase"},
        run={"device": "cpu"},
    )
    (stage,), data = plan_stages(config, "all"), load_online(config)
    given = {"dtype": "float32", "folder": tmp_path, "ranks": expected_ranks(config)}
    plan = plan_run(config, stage, WIDE, data, **given)
    (told,) = [note for note in plan.notes if "devices" in note]
    assert words in told
    phases = {phase.phase: phase for phase in plan.phases}
    assert {"engine.weights", "engine.kv"} <= set(phases["rollout"].device)
    assert not any(name.startswith("engine.") for name in phases["train"].device)
    assert "engine.weights" in phases["train"].host


@pytest.mark.parametrize(
    ("cluster", "given", "residency"),
    [
        ({"kind": "pod"}, "auto", "phase"),
        ({"kind": "pod"}, "spill", "spill"),
        ({"kind": "pod", "colocated": False}, "auto", "spill"),
        ({"kind": "inline"}, "auto", "spill"),
    ],
)
def test_processes_in_turns_on_a_device_leave_it_to_each_other(tmp_path, cluster, given, residency):
    """Where not everything fits: one process's ledger cannot tell what the other wants."""
    config = online(tmp_path, cluster=cluster, run={"device": "cpu"})
    (stage,), data, spec = plan_stages(config, "all"), load_online(config), trainer_cases.SPEC
    sizes = {"dtype": "float32", "folder": tmp_path}
    plan = plan_run(config, stage, spec, data, **sizes)
    assert plan.residency == "resident"
    most = max(phase.peak_device_bytes for phase in plan.phases)
    tight = online(
        tmp_path,
        cluster=cluster,
        run={"device": "cpu"},
        engine={"num_pages": plan.kv_pages},
        trainer={"tokens_per_chunk": plan.sizes.tokens_per_chunk},
        memory={"device_budget_bytes": most - 1, "residency": given},
    )
    (stage,) = plan_stages(tight, "all")
    assert plan_run(tight, stage, spec, data, **sizes).residency == residency


def test_each_rank_is_planned_for_with_its_part_of_the_states(tmp_path):
    """The engine beside shards has weights of its own; whole ones are shared with it."""
    components = {}
    for zero in (1, 3):
        config = online(tmp_path, parallel={"zero": zero}, run={"device": "cpu"})
        (stage,), data, spec = plan_stages(config, "all"), load_online(config), trainer_cases.SPEC
        plan = plan_run(config, stage, spec, data, dtype="float32", folder=tmp_path, ranks=4)
        components[zero] = {component.name: component.size_bytes for component in plan.components}
    count = trainer_cases.SPEC.num_parameters
    assert (
        components[1].get("engine.weights") is None and components[1]["actor.params"] == 4 * count
    )
    assert (
        components[3]["engine.weights"] == 4 * count
        and components[3]["actor.params"] == -(-count // 4) * 4
    )
    assert (
        components[1]["actor.optimizer"] == components[3]["actor.optimizer"] == -(-count // 4) * 8
    )
    lie = lie_over(
        ParallelConfig.model_validate({"zero": 3, "shard_ranks": 2, "critic": {"zero": 0}}), 4
    )
    assert (lie["actor"], lie["critic"]) == (Shards(zero=3, ranks=2), Shards())
    assert lie_over(ParallelConfig(zero=3), 1)["actor"] == Shards()
    told = {"kind": "ray", "num_workers": 8}
    for cluster, ranks in ((told, 8), ({"kind": "ray"}, 2), ({}, 1)):
        assert (
            expected_ranks(
                online(tmp_path, cluster=cluster, parallel={"zero": 3, "shard_ranks": 2})
            )
            == ranks
        )


def test_a_tensor_rank_is_planned_for_with_its_part_of_each_layer(tmp_path):
    """And an engine beside it with the whole model."""
    parallel = {"zero": 1, "tensor_ranks": 2}
    config = online(tmp_path, parallel=parallel, cluster={"kind": "pod"}, run={"device": "cpu"})
    (stage,), data, spec = plan_stages(config, "all"), load_online(config), trainer_cases.SPEC
    given = {"dtype": "float32", "folder": tmp_path}
    plan = plan_run(config, stage, spec, data, ranks=4, **given)
    sizes = {component.name: component.size_bytes for component in plan.components}
    part = local_spec(spec, 2).num_parameters
    assert spec.num_parameters // 2 < part < spec.num_parameters
    assert sizes["actor.params"] == 4 * part and sizes["actor.optimizer"] == -(-part // 2) * 8
    assert sizes["engine.weights"] == 4 * spec.num_parameters
    assert expected_ranks(config) == 2
    with pytest.raises(ConfigError, match="5 ranks do not divide into groups"):
        plan_run(config, stage, spec, data, ranks=5, **given)
    uneven = replace(spec, mlp_size=49)
    with pytest.raises(ConfigError, match="49 MLP columns do not divide over 2 tensor ranks"):
        plan_run(config, stage, uneven, data, ranks=4, **given)
    there = plan_stages_for(config, spec, [(stage, data)], PlanRequest(gpu="h200", gpus=4))
    layout = there["stages"]["main"]["best"]["layout"]
    assert (layout["gpus"], layout["tensor_ranks"], layout["zero"]) == (4, 2, 1)
    with pytest.raises(ConfigError, match=r"parallel\.tensor_ranks = 2: .* on 3 GPUs"):
        plan_stages_for(config, spec, [(stage, data)], PlanRequest(gpu="h200", gpus=3))


@pytest.mark.parametrize("zero", [1, 3])
def test_an_engine_of_as_many_ranks_is_planned_for_over_the_trainers_part(tmp_path, zero):
    """On Ray: its weights are the trainer's, or of the same size beside shards of them; its queue
    is that of two engines of two ranks."""
    config = online(
        tmp_path, parallel={"zero": zero, "tensor_ranks": 2}, cluster={"kind": "ray"},
        engine={"tensor_ranks": 2, "num_pages": 8}, run={"device": "cpu"},
    )  # fmt: skip
    (stage,), data = plan_stages(config, "all"), load_online(config)
    plan = plan_run(config, stage, WIDE, data, ranks=4, dtype="float32", folder=tmp_path)
    sizes = {component.name: component.size_bytes for component in plan.components}
    held = model_layout(WIDE, 2).local_shapes
    weights = 4 * sum(math.prod(shape) for shape in held.values())
    assert sizes.get("engine.weights") == (weights if zero == 3 else None)
    assert sizes["actor.params"] == (weights if zero == 1 else weights // 2)
    page_bytes = 2 * 2 * WIDE.head_dim * plan.page_tokens * 4  # keys and values of two layers
    assert sizes["engine.kv"] == 9 * page_bytes, "one of the two KV heads"


@pytest.mark.parametrize("inner", ["", "export"])
def test_a_reward_model_is_planned_for_with_its_own_size(tmp_path, inner):
    """It shares the policy's tokenizer and nothing else. On the machine that is here and on GPUs
    that are not."""
    own = replace(trainer_cases.SPEC, num_layers=5, hidden_size=256, mlp_size=512)
    folder = tmp_path / "scores"
    (folder / inner).mkdir(parents=True)
    (folder / inner / "config.json").write_text(
        json.dumps(hub_config_from_spec(own)), encoding="utf-8"
    )
    config = online(
        tmp_path, rewards={"parts": [{"kind": "model", "path": str(folder)}]}, run={"device": "cpu"}
    )
    (stage,), data, spec = plan_stages(config, "all"), load_online(config), trainer_cases.SPEC
    plan = plan_run(config, stage, spec, data, dtype="float32", folder=tmp_path)
    sizes = {component.name: component.size_bytes for component in plan.components}
    assert (
        sizes["reward"] == 4 * own.num_parameters > sizes["actor.params"] == 4 * spec.num_parameters
    )
    there = plan_stages_for(config, spec, [(stage, data)], PlanRequest(gpus=1, gpu="h200"))
    moments = there["stages"]["main"]["best"]["moments"]
    assert moments["score"]["parts"]["reward"] == 2 * own.num_parameters
    gone = online(
        tmp_path, rewards={"parts": [{"kind": "model", "path": str(tmp_path / "nowhere")}]}
    )
    with pytest.raises(InputError, match="nowhere does not exist"):
        plan_run(gone, stage, spec, data, dtype="float32", folder=tmp_path)


def test_a_pod_is_planned_with_weights_of_its_engine_and_two_versions_in_shared_memory(tmp_path):
    config = online(tmp_path, cluster={"kind": "pod"}, run={"device": "cpu"})
    (stage,), data, spec = plan_stages(config, "all"), load_online(config), trainer_cases.SPEC
    plan = plan_run(config, stage, spec, data, dtype="float32", folder=tmp_path)
    sizes = {component.name: component.size_bytes for component in plan.components}
    assert sizes["engine.weights"] == 4 * spec.num_parameters
    told = f"{2 * 4 * spec.num_parameters / 2**20:,.1f} MiB"
    assert any(note.endswith(f"/dev/shm: {told}") for note in plan.notes), plan.notes


def test_moments_in_8_bits_are_planned_for_a_model_that_can_have_them(tmp_path):
    config = online(tmp_path, trainer={"moments": "8_bit"}, run={"device": "cpu"})
    (stage,), data, given = (
        plan_stages(config, "all"),
        load_online(config),
        {"dtype": "float32", "folder": tmp_path},
    )
    with pytest.raises(ConfigError, match="no matrix of the model has rows of whole blocks"):
        plan_run(config, stage, trainer_cases.SPEC, data, **given)
    plan_run(config, stage, replace(trainer_cases.SPEC, hidden_size=256), data, **given)


def test_weights_in_host_memory_are_refused_beside_an_engine_and_in_shards(tmp_path):
    away = {"offload_parameters": ["actor"], "offload_optimizer": "host"}
    config = online(tmp_path, trainer=away)
    (stage,), data, spec = plan_stages(config, "all"), load_online(config), trainer_cases.SPEC
    with pytest.raises(ConfigError, match=r"'actor'\] in a stage with an engine") as caught:
        plan_run(config, stage, spec, data, dtype="float32", folder=tmp_path)
    assert "take 'actor' off the list" in caught.value.hint
    compares = {
        "objective": {"kind": "grpo", "kl_coef": 0.1},
        "trainer": {"offload_parameters": ["reference"]},
    }
    config = online(tmp_path, **compares, parallel={"zero": 3})
    (stage,) = plan_stages(config, "all")
    with pytest.raises(
        ConfigError, match=r"names 'reference', whose weights parallel\.zero = 3 cuts over 2 ranks"
    ):
        plan_run(config, stage, spec, data, dtype="float32", folder=tmp_path, ranks=2)
    config = online(tmp_path, **compares)
    (stage,) = plan_stages(config, "all")
    plan = plan_run(config, stage, spec, data, dtype="float32", folder=tmp_path, ranks=2)
    tiers = {component.name: component.tiers for component in plan.components}
    assert tiers["reference"] == ("host",) and tiers["reference.layer_buffers"] == (
        "device",
        "none",
    )


@pytest.mark.parametrize(("device", "whole"), [("cpu", 1), ("cuda", 2)])
def test_devices_that_share_a_machine_share_its_memory(device, whole):
    machine = Hardware(
        device=device,
        device_name="",
        device_total_bytes=64,
        device_free_bytes=32,
        host_total_bytes=80,
        host_available_bytes=40,
        disk_free_bytes=20,
        cores=8,
        bf16=True,
        saving="c_cpu",
    )
    part = cut_hardware(machine, 2)
    assert (part.device_total_bytes, part.device_free_bytes) == (32 * whole, 16 * whole), (
        "a GPU is not shared"
    )
    assert (part.host_total_bytes, part.host_available_bytes, part.disk_free_bytes, part.cores) == (
        40,
        20,
        10,
        4,
    )


@pytest.mark.parametrize(
    "key", ["trainer.learning_rate", "trainer.critic_learning_rate", "cold_start.learning_rate"]
)
def test_a_learning_rate_that_destroys_the_model_is_named(tmp_path, key):
    tree = {
        "model": {"shape": SHAPE},
        "data": {
            "source": "jsonl",
            "path": str(write_jsonl(tmp_path / "graded.jsonl", GRADED)),
            "overlong": "drop",
        },
        "rewards": {"parts": [{"kind": "answer"}]},
        "objective": {"kind": "ppo"},
        "cold_start": {},
    }

    def remarks(value: str) -> list[str]:
        config = parse_run_config(apply_overrides(tree, [f"{key}={value}"]), where="run.toml")
        return [remark for stage in plan_stages(config, "all") for remark in rate_remarks(stage)]

    for value in ("1e9", "1.5"):
        with pytest.raises(ConfigError, match=re.escape(key)) as caught:
            remarks(value)
        assert value in caught.value.message or str(float(value)) in caught.value.message
    (remark,) = remarks("0.5")
    assert remark.startswith(f"{key} = 0.5: ")
    assert remarks("3e-3") == []


@pytest.mark.parametrize("given", [[], *([name] for name in LABELS), list(LABELS)])
def test_a_plan_calls_given_what_was_given_and_nothing_else(tmp_path, given):
    tree = {
        "model": {"shape": SHAPE},
        "data": {
            "source": "jsonl",
            "path": str(write_jsonl(tmp_path / "graded.jsonl", GRADED)),
            "overlong": "drop",
        },
        "rewards": {"parts": [{"kind": "answer"}]},
        "rollout": {"max_tokens": 24},
    }
    config = parse_run_config(
        apply_overrides(tree, [LABELS[name] for name in given]), where="run.toml"
    )
    stage = plan_stages(config, "main")[0]
    data = load_stage_data(config, stage, TOKENIZER, CONTEXT_TOKENS, Events())
    assert config.model.shape is not None
    spec = spec_from_shape(
        config.model.shape, vocab_size=TOKENIZER.vocab_size, bos_id=None, eos_ids=(1,)
    )
    plan = plan_run(config, stage, spec, data, dtype="float32", folder=tmp_path)
    assert {name for name, reason in plan.reasons.items() if reason == "given"} == set(given)
    rows = [line.split() for line in explain(plan).splitlines()]
    assert {row[0] for row in rows if row and row[-1] == "given"} == set(given)
