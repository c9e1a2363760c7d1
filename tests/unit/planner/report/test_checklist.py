"""The reference's checklists: every line is there, and what it says follows from the plan and the
config."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Literal

import pytest
from pydantic import BaseModel

from gyre.core.errors import ConfigError, MemoryBudgetError
from gyre.launch.plan_command import PlanRequest, plan_shape
from gyre.planner.gpus import find_gpu
from gyre.planner.memory_model.engine import EngineDemand
from gyre.planner.model_zoo import find_shape, model_numbers
from gyre.planner.report.checklist import Line, Settings, inference_lines, training_lines
from gyre.planner.report.features import FEATURES, built_features
from gyre.planner.search.candidates import Fixed, GpuCluster
from gyre.planner.search.search import SearchResult, choose
from gyre.runconfig.run_config import RunConfig
from planner_cases import make_job
from reference_pages import DOCS

GIB = 1 << 30
TRAINING = [
    "Parallelism configured",
    "Memory optimization",
    "Gradient checkpointing",
    "Mixed precision",
    "Data loading",
    "Checkpointing",
    "Fault detection",
]
INFERENCE = [
    "Continuous batching",
    "PagedAttention",
    "Prefix caching",
    "Quantization",
    "Speculative decoding",
    "Tensor parallelism",
    "Health checks",
]
ENGINE = EngineDemand(
    running=32, longest=4096, kv_bytes_per_token=147_456, working_bytes=GIB, graph_bytes=GIB // 2
)
SETTINGS = Settings(
    features=dict.fromkeys(FEATURES, True),
    snapshot_every_steps=20,
    snapshot_in_background=True,
    max_running=256,
    token_budget=2048,
    page_tokens=64,
    prefix_cache=True,
    completions_per_prompt=8,
    cluster_kind="ray",
    max_restarts=2,
)


@cache
def chosen(gpus: int, gpu: str, fixed: Fixed | None, **job) -> SearchResult:
    return choose(make_job(**job), GpuCluster(gpus=gpus, gpu=find_gpu(gpu)), fixed)


def lines(
    gpus: int = 8,
    gpu: str = "h200",
    settings: Settings = SETTINGS,
    fixed: Fixed | None = None,
    **job,
):
    choice = chosen(gpus, gpu, fixed, **{"longest": 4096, **job})
    training, inference = training_lines(choice, settings), inference_lines(choice, settings)
    assert [line.name for line in training] == TRAINING
    assert [line.name for line in inference] == INFERENCE
    assert all(line.reason for line in (*training, *inference))
    return {("training", line.name): line for line in training} | {
        ("inference", line.name): line for line in inference
    }


def state(found: dict[tuple[str, str], Line], name: str, part: str = "training") -> str:
    return found[part, name].state


def test_lines_follow_the_layout() -> None:
    many, one = lines(8), lines(1, shape="qwen3-0.6b")
    assert (
        state(many, "Parallelism configured") == "on"
        and state(one, "Parallelism configured") == "off"
    )
    assert state(many, "Memory optimization") == "on" and state(one, "Memory optimization") == "off"
    assert "one GPU" in one["training", "Parallelism configured"].reason
    full = lines(8, fixed=Fixed(checkpointing="full"))
    assert (
        state(many, "Gradient checkpointing") == "off"
        and state(full, "Gradient checkpointing") == "on"
    )
    assert state(many, "Mixed precision") == "on"
    assert (
        state(lines(8, "v100-32g", shape="qwen3-0.6b", dtype="float32"), "Mixed precision") == "off"
    )
    assert state(lines(8, dtype="float32", shape="qwen3-0.6b"), "Mixed precision") == "off"


@pytest.mark.parametrize(
    ("gpu", "job", "words"),
    [
        ("h200", {}, ("BF16 compute", "FP8 off: trainer.matmul = 'same'")),
        ("h200", {"matmul": "fp8"}, ("BF16 compute", "FP8 on")),
        ("a100-80g", {}, ("BF16 compute", "FP8 off: a100-80g does not multiply")),
        (
            "v100-32g",
            {"dtype": "float16"},
            ("FP16 compute with dynamic loss scaling (v100-32g has no BF16)", "FP8 off"),
        ),
    ],
)
def test_the_precision_line_says_what_is_multiplied_and_why(
    gpu: str, job: dict, words: tuple[str, ...]
) -> None:
    line = lines(8, gpu, shape="qwen3-0.6b", **job)["training", "Mixed precision"]
    assert line.state == "on" and all(word in line.reason for word in words), line.reason
    lacking = {**SETTINGS.features, "FP8 training": False, "FP16 with loss scaling": False}
    without = lines(8, gpu, shape="qwen3-0.6b", settings=replace(SETTINGS, features=lacking), **job)
    assert (without["training", "Mixed precision"].state == "not built") == (
        job.get("dtype") == "float16"
    )


def test_8_bit_products_are_planned_for() -> None:
    """Faster, half the bytes of gathered layers; temporaries are counted; GPUs without them are
    refused."""
    layout = {"fixed": Fixed(zero=3, checkpointing="none")}
    same, fp8 = (
        choose(
            make_job(longest=8192, matmul=matmul),
            GpuCluster(gpus=8, gpu=find_gpu("h200")),
            **layout,
        ).best
        for matmul in ("same", "fp8")
    )
    assert (
        fp8.time.compute_s < 0.85 * same.time.compute_s
        and fp8.time.traffic_s < 0.9 * same.time.traffic_s
    )
    deepest = [
        next(m for m in best.moments if m.name == "deepest layer").parts for best in (same, fp8)
    ]
    assert deepest[1]["layer's gradients"] > deepest[0]["layer's gradients"]
    config = RunConfig.model_validate(
        {"model": {"path": "x"}, "objective": {"kind": "sft"}, "trainer": {"matmul": "fp8"}}
    )
    assert built_features(RunConfig)["FP8 training"] and config.trainer.matmul == "fp8"


def test_what_auto_means_for_a_gpu() -> None:
    for gpu, dtype in (("h200", "bfloat16"), ("v100-32g", "float16"), ("t4", "float16")):
        found = plan_shape(PlanRequest(gpus=8, gpu=gpu, shape="qwen3-0.6b", sequence_tokens=1024))
        assert ("FP16 compute" in found["text"]) == (dtype == "float16")


def test_the_memory_line_says_what_is_offloaded_and_why() -> None:
    many, one = lines(8), lines(1, longest=8192)
    assert "offload off: the states fit" in many["training", "Memory optimization"].reason
    found = one["training", "Memory optimization"]
    assert found.state == "on"
    assert (
        'offload on (trainer.offload_optimizer = "host"), nothing faster fits without'
        in found.reason
    )
    fixed = Fixed(offload_optimizer="disk", offload_gradients=True)
    given = lines(1, longest=8192, fixed=fixed)["training", "Memory optimization"].reason
    assert '"disk" and trainer.offload_gradients = true), as the config says' in given
    weights = lines(1, longest=8192, offload_parameters=("actor",))[
        "training", "Memory optimization"
    ].reason
    assert 'trainer.offload_parameters = ["actor"]), as the config says' in weights
    assert "of pinned host memory and 91.5" in given and "under memory.disk_folder" in given


def test_the_memory_line_says_what_8_bit_moments_do() -> None:
    """On and off, in bytes; a model that cannot have them says so; a Gyre without them, too."""
    off, on = (
        lines(1, shape="qwen3-0.6b", moments=moments)["training", "Memory optimization"]
        for moments in ("float32", "8_bit")
    )
    assert (off.state, on.state) == ("off", "on")
    assert (
        "8-bit optimizer states off: trainer.moments = '8_bit' would make 1.13 GiB of 4.44 GiB "
        "per GPU" in off.reason
    )
    assert "8-bit optimizer states on: 1.13 GiB per GPU instead of 4.44 GiB" in on.reason
    narrow = replace(
        model_numbers(find_shape("qwen3-0.6b")),
        hidden_size=896,
        num_heads=7,
        mlp_size=1000,
        head_dim=64,
    )
    cannot = lines(1, shape="qwen3-0.6b", model=narrow)["training", "Memory optimization"]
    assert (
        "8-bit optimizer states off: no matrix has rows of whole blocks of 256 numbers"
        in cannot.reason
    )
    lacking = replace(SETTINGS, features={**SETTINGS.features, "8-bit optimizer states": False})
    assert (
        "8-bit optimizer states: not built"
        in lines(1, settings=lacking)["training", "Memory optimization"].reason
    )
    assert built_features(RunConfig)["8-bit optimizer states"]
    precision = lines(1, shape="qwen3-0.6b", moments="8_bit")["training", "Mixed precision"].reason
    assert "FP32 master weights;" in precision


def test_8_bit_moments_make_room() -> None:
    """A model that needs offloading on one GPU fits without."""
    here, fixed = GpuCluster(gpus=1, gpu=find_gpu("h200")), Fixed(offload_optimizer="none")
    with pytest.raises(MemoryBudgetError):
        choose(make_job("qwen3-8b"), here, fixed)
    best = choose(make_job("qwen3-8b", moments="8_bit"), here, fixed).best
    assert (
        best.fits and best.layout.moments == "8_bit" and "moments in 8 bits" in best.layout.words()
    )


def test_lines_follow_the_engine() -> None:
    offline, online = lines(), lines(engine=ENGINE)
    for name in ("Continuous batching", "PagedAttention", "Prefix caching"):
        assert state(offline, name, "inference") == "off"
        assert state(online, name, "inference") == "on"
    assert "64 for a full sequence" in online["inference", "PagedAttention"].reason
    without = lines(engine=ENGINE, settings=replace(SETTINGS, prefix_cache=False))
    assert state(without, "Prefix caching", "inference") == "off"


@pytest.mark.parametrize(
    ("feature", "part", "name"),
    [
        ("several GPUs", "training", "Parallelism configured"),
        ("ZeRO", "training", "Memory optimization"),
        ("asynchronous snapshots", "training", "Checkpointing"),
        ("restart by itself", "training", "Fault detection"),
        ("quantized weights", "inference", "Quantization"),
        ("speculative decoding", "inference", "Speculative decoding"),
        ("tensor parallel engine", "inference", "Tensor parallelism"),
    ],
)
def test_a_line_whose_feature_is_missing_says_so(feature: str, part: str, name: str) -> None:
    lacking = replace(SETTINGS, features={**SETTINGS.features, feature: False})
    assert lines(settings=lacking)[part, name].state == "not built"
    assert lines()[part, name].state != "not built"


def test_the_line_of_health_names_what_a_server_answers() -> None:
    """A run serves nothing, and the probes are there for who serves its model."""
    health = lines()["inference", "Health checks"]
    there = set(re.findall(r"GET (\S+)", health.reason))
    assert health.state == "off" and there == {"/health/live", "/health/ready"}
    assert there <= set(re.findall(r"## GET (\S+)", (DOCS / "api.md").read_text()))


def test_a_layout_that_offloads_needs_offload() -> None:
    tight = {"gpus": 1, "shape": "qwen3-8b", "fixed": Fixed(offload_optimizer="host")}
    assert state(lines(**tight), "Memory optimization") == "on"
    lacking = replace(SETTINGS, features={**SETTINGS.features, "optimizer offload": False})
    line = lines(**tight, settings=lacking)["training", "Memory optimization"]
    assert line.state == "not built" and "optimizer offload: not built" in line.reason


def test_the_line_of_faults_follows_the_cluster() -> None:
    on = lines()["training", "Fault detection"]
    assert on.state == "on" and "up to 2 times" in on.reason
    never = lines(settings=replace(SETTINGS, max_restarts=0))["training", "Fault detection"]
    alone = lines(settings=replace(SETTINGS, cluster_kind="inline"))["training", "Fault detection"]
    assert never.state == alone.state == "off"
    assert "cluster.max_restarts = 0" in never.reason and "cluster.kind = inline" in alone.reason


def test_features_are_read_from_the_config_as_it_is() -> None:
    class Inner(BaseModel):
        dtype: Literal["float32", "float16"] = "float32"
        zero: int | None = None

    class Config(BaseModel):
        run: Inner
        parallel: Inner | None = None

    found = built_features(Config)
    assert found["FP16 with loss scaling"] and found["ZeRO"] and not found["several GPUs"]
    assert set(built_features(RunConfig)) == set(FEATURES)
    assert built_features(RunConfig)["FP16 with loss scaling"]


def test_a_shape_alone_can_be_planned_for() -> None:
    found = plan_shape(PlanRequest(gpus=8, gpu="h200", shape="qwen3-8b"))
    best = found["stages"]["qwen3-8b"]["best"]
    assert best["short_device_bytes"] == 0 and found["model"]["num_parameters"] == 8_190_735_360
    assert best["device_bytes"] <= found["stages"]["qwen3-8b"]["device_budget_bytes"]
    for line in TRAINING + INFERENCE:
        assert line in found["text"]
    with pytest.raises(MemoryBudgetError, match="bytes too little"):
        plan_shape(PlanRequest(gpus=1, gpu="l4", shape="qwen3-8b"))
    for request in (
        PlanRequest(gpus=8, gpu="h200"),
        PlanRequest(gpus=8, gpu="h200", shape="qwen3-8b", sequence_tokens=10**6),
        PlanRequest(gpus=0, gpu="h200", shape="qwen3-8b"),
    ):
        with pytest.raises(ConfigError):
            plan_shape(request)
