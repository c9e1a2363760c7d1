"""The plan of a served model: its KV pages are those that an engine makes, and follow from what is
said to decide them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.engine.config import EngineConfig, plan_engine, plan_num_pages
from gyre.planner.gpus import GIB, GPUS
from gyre.planner.model_zoo import find_shape
from gyre.planner.plan import ModelNumbers
from gyre.planner.report.serving import describe_ranks, describe_serving
from gyre.planner.serving import (
    FULL_LENGTH,
    QUARTER,
    RankPlan,
    ServingPlan,
    fewest_ranks,
    plan_over_ranks,
    plan_serving,
)

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
PAGE_BYTES = 2 * 4 * 2 * 64 * 16 * 4  # keys and values, layers, heads, head dim, tokens, float32
ENGINES = st.builds(
    EngineConfig,
    num_pages=st.integers(0, 3),
    kv_bytes=st.integers(0, 10 * PAGE_BYTES),
    kv_fraction=st.floats(0.0, 0.9),
    max_running=st.integers(1, 64),
)


def make(config: EngineConfig | None = None, **changed: Any) -> ServingPlan:
    given: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "weights_bytes": 4 * MODEL.num_parameters,
        "free_bytes": 8 << 30,
        "replicas": 1,
        "own_kernels": True,
    } | changed
    settings = plan_engine(config or EngineConfig(), device_type=given["device"])
    return plan_serving(MODEL, settings, **given)


@given(config=ENGINES, free_bytes=st.integers(0, 1 << 34), replicas=st.integers(1, 4))
def test_pages_are_those_of_an_engine_that_has_loaded_its_weights(
    config, free_bytes, replicas
) -> None:
    plan = make(config, free_bytes=free_bytes, replicas=replicas)
    assert plan.page_bytes == PAGE_BYTES
    left = max(0, free_bytes - replicas * plan.weights_bytes)
    settings = plan_engine(config, device_type="cpu")
    expected = plan_num_pages(settings, page_bytes=PAGE_BYTES, context_tokens=1024, free_bytes=left)
    assert plan.kv_pages == expected >= 1
    assert plan.kv_pool_bytes == (expected + 1) * PAGE_BYTES
    assert plan.kv_tokens == expected * 16
    assert plan.context_tokens == min(1024, plan.kv_tokens + 1)
    assert plan.full_sequences <= plan.max_running
    assert plan.full_sequences * plan.context_tokens <= plan.kv_tokens + plan.full_sequences


@given(config=ENGINES, free=st.tuples(st.integers(0, 1 << 34), st.integers(0, 1 << 34)))
def test_pages_change_with_the_free_memory_only_where_the_plan_says_so(config, free) -> None:
    one, other = (make(config, free_bytes=free_bytes) for free_bytes in sorted(free))
    assert one.kv_pages <= other.kv_pages
    if not one.kv_follows_free_bytes:
        assert one.kv_pages == other.kv_pages


@pytest.mark.parametrize(
    ("settings", "decided_by"),
    [
        ({"num_pages": 7, "kv_bytes": 1 << 20}, "engine.num_pages"),
        ({"kv_bytes": 1 << 20, "kv_fraction": 0.5}, "engine.kv_bytes"),
        ({"kv_fraction": 0.5}, "engine.kv_fraction"),
        ({"max_running": 2}, FULL_LENGTH),
        ({"max_running": 2048}, QUARTER),
    ],
)
def test_it_says_what_decided(settings, decided_by) -> None:
    plan = make(EngineConfig(**settings), free_bytes=1 << 30)
    assert plan.kv_decided_by == decided_by
    assert decided_by in describe_serving(plan, "the C kernels")


def test_replicas_share_a_cpu_and_not_a_gpu() -> None:
    one, two = make(), make(replicas=2)
    assert two.needed_bytes == 2 * one.needed_bytes
    gpu = make(device="cuda", replicas=2)
    assert gpu.needed_bytes == make(device="cuda").needed_bytes
    assert gpu.fixed_bytes > 0 and one.fixed_bytes == 0
    assert make(device="cuda", own_kernels=False).fixed_bytes == 0


def test_torch_gathers_keys_and_values() -> None:
    assert make(own_kernels=False).working_bytes > make().working_bytes


def test_what_may_not_fit_is_said_with_a_way_out() -> None:
    plan = make(EngineConfig(kv_bytes=1 << 30), free_bytes=1 << 29)
    assert not plan.fits and make().fits
    said = describe_serving(plan, "the C kernels")
    assert "may not fit" in said and "engine.kv_bytes" in said
    assert "It fits" in describe_serving(make(), "the C kernels")


@pytest.mark.parametrize("columns", [72, 120])
def test_the_text_keeps_to_its_columns(columns) -> None:
    text = describe_serving(make(EngineConfig(kv_host_bytes=1 << 20)), "the C kernels", columns)
    tables = text.split("\n\n")[1:3]
    assert max(len(line) for table in tables for line in table.splitlines()) <= columns
    assert "KV on the host" in text


def over_ranks(shape: str, device_name: str, free_bytes: int) -> tuple[RankPlan, ...]:
    return plan_over_ranks(
        find_shape(shape),
        plan_engine(EngineConfig(), device_type="cuda"),
        dtype="bfloat16",
        free_bytes=free_bytes,
        own_kernels=True,
        device_name=device_name,
    )


def test_a_model_that_one_gpu_does_not_hold_is_served_over_several() -> None:
    """70B on GPUs of 80 GB: on two of them there are 66 GiB of weights each, and room for KV."""
    found = over_ranks("llama-3-70b", "NVIDIA A100-SXM4-80GB", GPUS["a100-80g"].device_bytes)
    assert [one.tensor_ranks for one in found] == [1, 2, 4, 8]
    assert [one.plan.fits for one in found] == [False, True, True, True]
    assert fewest_ranks(found) == 2
    weights = [one.plan.weights_bytes / GIB for one in found[:2]]
    assert weights == [pytest.approx(131.4, abs=0.1), pytest.approx(65.7, abs=0.1)]
    tokens = [one.token_s or 0.0 for one in found]
    assert all(more < fewer for fewer, more in pairwise(tokens))
    text = describe_ranks(found, num_gpus=2)
    assert "Set engine.tensor_ranks = 2." in text and "does not" not in text
    assert "Take 2 of these GPUs, here 1, and engine.tensor_ranks = 2." in describe_ranks(
        found, num_gpus=1
    )
    assert max(map(len, describe_ranks(found, num_gpus=2, columns=90).splitlines())) <= 90


def test_ranks_of_unknown_gpus_have_no_time_and_some_models_fit_on_no_host() -> None:
    found = over_ranks("llama-3-70b", "some device", 12 * GIB)
    assert {one.token_s for one in found} == {None} and fewest_ranks(found) is None
    text = describe_ranks(found, num_gpus=8)
    assert "No number of GPUs of a host holds it" in text
    assert fewest_ranks(over_ranks("qwen3-0.6b", "NVIDIA H200", 100 * GIB)) == 1
