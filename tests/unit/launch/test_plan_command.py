"""A plan for GPUs that are not here tries the tensor ranks that a run of the config takes, and keeps
those that it sets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainer_cases
from gyre.core.errors import ConfigError
from gyre.launch.plan_command import (
    PlanRequest,
    engines_for,
    fixed_by,
    parts_for,
    plan_shape,
    plan_stages_for,
)
from gyre.launch.stage_plan import read_inputs
from gyre.launch.stages import plan_stages
from gyre.planner.gpus import find_gpu
from gyre.planner.model_zoo import model_numbers
from gyre.planner.search.candidates import GpuCluster
from gyre.runconfig.run_config import RunConfig
from unit.launch.test_stages import load_online, online
from zero_cases import BLOCKS_PARTED

WIDE = replace(trainer_cases.SPEC, num_heads=4, num_kv_heads=2)
EIGHT = GpuCluster(gpus=8, gpu=find_gpu("h200"))
APART = {"kind": "pod", "num_workers": 1, "engine_workers": 1, "colocated": False}


def degrees(config: RunConfig) -> tuple[list[int], list[int]]:
    """The trainer's, and an engine's, beside one."""
    (stage,), spec = plan_stages(config, "all"), WIDE
    inputs = read_inputs(config, stage, model_numbers(spec), load_online(config), dtype="bfloat16")
    parts = parts_for(config, stage, spec, EIGHT)
    engines = engines_for(config, inputs, spec, "bfloat16", EIGHT)
    for ranks, engine in engines.items():
        assert engine.part is not None and engine.part.num_heads == 4 // ranks
    for ranks, part in parts.items():
        assert part.model.num_heads == 4 // ranks and part.model.row_ranks == ranks
    return [*parts], [*engines]


def accepted(tmp_path: Path, section: str, **tables: Any) -> list[int]:
    """The ranks of a section's key that the config takes, as `gyre train` would read it."""
    found = []
    for ranks in (2, 4):
        given = {**tables, section: {**tables.get(section, {}), "tensor_ranks": ranks}}
        try:
            online(tmp_path, **given)
        except ConfigError:
            continue
        found.append(ranks)
    return found


@pytest.mark.parametrize(
    "tables",
    [{}, {"trainer": {"matmul": "fp8"}}, {"engine": {"batch_invariant": True}}],
    ids=["plain", "fp8", "invariant"],
)
def test_the_trainer_is_tried_with_ranks_that_a_run_takes(tmp_path, tables) -> None:
    ray = {"cluster": {"kind": "ray"}}
    expected = accepted(tmp_path, "parallel", **ray, **tables)
    assert degrees(online(tmp_path, **tables))[0] == expected, "inline, which means Ray here"
    assert tables or expected == [2, 4]


def test_8_bit_moments_are_tried_with_ranks_that_have_whole_blocks(tmp_path) -> None:
    config = online(tmp_path, trainer={"moments": "8_bit"})
    (stage,) = plan_stages(config, "all")
    assert [*parts_for(config, stage, BLOCKS_PARTED, EIGHT)] == [2]
    wide = online(tmp_path)
    (stage,) = plan_stages(wide, "all")
    assert [*parts_for(wide, stage, BLOCKS_PARTED, EIGHT)] == [2, 4]


@pytest.mark.parametrize(
    "cluster", [{"kind": "ray"}, {"kind": "pod"}, APART], ids=["ray", "pod", "apart"]
)
def test_engines_are_tried_with_ranks_that_a_run_takes(tmp_path, cluster) -> None:
    expected = accepted(tmp_path, "engine", cluster=cluster)
    assert degrees(online(tmp_path, cluster=cluster))[1] == expected
    assert expected == [2, 4] or cluster != APART


def test_what_the_config_sets_is_kept(tmp_path) -> None:
    request = PlanRequest(gpus=4, gpu="h200")
    assert fixed_by(online(tmp_path), request).given() == {}
    config = online(
        tmp_path, parallel={"tensor_ranks": 2}, engine={"tensor_ranks": 1}, cluster={"kind": "pod"}
    )
    assert fixed_by(config, request).given() == {"tensor_ranks": 2, "engine_tensor_ranks": 1}
    before = replace(request, tensor_ranks=4)
    assert fixed_by(config, before).given()["tensor_ranks"] == 4


def test_a_ring_counts_its_rollouts_over_the_ranks_of_an_engine(tmp_path) -> None:
    config = online(tmp_path, cluster=APART, engine={"tensor_ranks": 2})
    (stage,), data = plan_stages(config, "all"), load_online(config)
    found = plan_stages_for(config, WIDE, [(stage, data)], PlanRequest(gpus=4, gpu="h200"))
    best = found["stages"]["main"]["best"]
    assert best["layout"]["engine_tensor_ranks"] == 2 and best["time_s"]["rollout_s"] > 0
    assert "engines over 2 GPUs" in found["text"] and "rollouts" in found["text"]
    assert [line["source"] for line in found["stages"]["main"]["advice"]] == [
        "strategy matrix",
        "decision tree",
    ]


def test_a_shape_is_planned_with_the_ranks_that_are_asked_for() -> None:
    request = PlanRequest(gpus=8, gpu="h200", shape="qwen3-0.6b", tensor_ranks=4)
    layout = plan_shape(request)["stages"]["qwen3-0.6b"]["best"]["layout"]
    assert layout["tensor_ranks"] == 4
    with pytest.raises(ConfigError, match=r"parallel\.tensor_ranks = 3"):
        plan_shape(replace(request, tensor_ranks=3))
