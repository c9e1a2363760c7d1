"""The search's memory and time against what was measured on H200s: every row of a training step on
1, 2 and 4 GPUs, with and without tensor ranks, and of an engine over two; of an engine on one GPU,
the rows of its default settings. Memory within 10 %, time within 25 %."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gyre.engine.config import EngineConfig, plan_engine
from gyre.models.spec import ModelSpec
from gyre.planner.gpus import find_gpu
from gyre.planner.memory_model.job import TrainingJob
from gyre.planner.memory_model.peaks import train_moments
from gyre.planner.memory_model.states import Layout
from gyre.planner.model_zoo import find_shape, model_numbers, model_part
from gyre.planner.search.exchanges import list_exchanges
from gyre.planner.search.generation import RolloutLoad, decode_step, generation_seconds
from gyre.planner.search.speed import step_time
from gyre.planner.serving import plan_serving

RECORDS = Path(__file__).parents[4] / "bench" / "records"
H200 = find_gpu("h200")
MEMORY, TIME = 0.10, 0.25
TRAINED = sorted(path.stem for path in RECORDS.glob("train_[0-9]x_*.json"))
TENSOR = "train_2x_8b_8192_none_same_sft_zero0_tensor2"
# pages of another size, shared prefixes and batch-invariant mode have no formula of their own
ENGINES = [
    "engine_0_6b",
    "engine_8b",
    *sorted(path.stem for path in RECORDS.glob("engine_*_tp_2*.json")),
]
SHAPES = {"70b": "llama-3-70b"}  # the others are Qwen3's
STREAMED = ["engine_8b_streams", *(name for name in ENGINES if "_streams" in name)]


def read(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))


def training(record: dict[str, Any]) -> tuple[TrainingJob, Layout]:
    """What bench/train_ranks.py measured."""
    row = record["settings"]
    gpus, tensor, tokens = row["gpus"], row.get("tensor") or 1, row["tokens"]
    ranks, chunks = gpus // tensor, row.get("chunks") or 1
    spec = replace(find_shape(f"qwen3-{row['shape']}"), num_layers=row["layers"])
    length = row["sequence"] or tokens
    prompts = length // 64 if row["objective"] == "grpo" else 1
    job = TrainingJob(
        model=model_part(spec, tensor),
        engine_model=model_numbers(spec),
        dtype="bfloat16",
        saving="triton",
        longest=length,
        mean_tokens=length,
        tokens_per_update=tokens * chunks * ranks,
        most_tokens_per_update=tokens * chunks * ranks,
        target_share=1 - prompts / length,
        matmul=row["matmul"],
    )
    zero = row["zero"] if ranks > 1 else 0
    layout = Layout(
        gpus=gpus,
        tensor_ranks=tensor,
        zero=zero,
        shard_ranks=ranks if zero else 1,
        checkpointing=row["checkpointing"],
        tokens_per_chunk=tokens,
        offload_optimizer="none",
        offload_gradients=False,
        sum_gradients=row.get("sum") or "chunk",
    )
    return job, layout


def error(predicted: float, measured: float) -> float:
    return predicted / measured - 1


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step(name: str) -> None:
    record = read(name)
    job, layout = training(record)
    predicted = max(moment.allocated_bytes for moment in train_moments(job, layout)) / 2**30
    assert abs(error(predicted, max(record["detail"]["peak_gib"]))) < MEMORY
    times = sorted(record["detail"]["step_ms"])
    seconds = step_time(job, layout, H200, "resident").seconds
    assert abs(error(1e3 * seconds, times[len(times) // 2])) < TIME


def test_what_tensor_ranks_wait_for() -> None:
    """All exchanges of a step, and the part of them that nothing hid."""
    record = read(TENSOR)
    job, layout = training(record)
    traced = record["detail"]["traced_ms"]
    time = step_time(job, layout, H200, "resident")
    assert abs(error(1e3 * time.exchange_s, traced["communication"])) < 0.05
    assert abs(error(1e3 * time.waited_s, traced["exposed"])) < 0.05
    assert time.exposed_s == 0.0, "there is one rank of data"
    large = [each for each in list_exchanges(job, layout, chunks=1) if each.sent_bytes > 1e7]
    assert sum(each.calls for each in large) == 366, "one of them sends twice as much"


def workload() -> RolloutLoad:
    """That of bench/engine.py: 256 requests of 100 to 1,024 tokens, in and out."""
    draw = random.Random(0)
    prompts = []
    for _ in range(256):
        length = draw.randint(100, 1024)
        prompts.append(length)
        for _ in range(length):
            draw.randint(0, 10_000)
    outputs = [draw.randint(100, 1024) for _ in range(256)]
    return RolloutLoad(
        sequences=256,
        at_once=256,
        prompt_tokens=sum(prompts) / 256,
        mean_tokens=sum(outputs) / 256,
        most_tokens=max(outputs),
    )


def engine(name: str) -> tuple[dict[str, Any], ModelSpec, int]:
    record = read(name)
    (size,) = re.findall(r"engine_((?:0_)?\d+b)", name)
    size = size.replace("_", ".")
    spec = replace(find_shape(SHAPES.get(size, f"qwen3-{size}")), context_tokens=4096)
    return record, spec, record["settings"].get("tensor_ranks") or 1


@pytest.mark.parametrize("name", ENGINES)
def test_generation(name: str) -> None:
    record, spec, ranks = engine(name)
    load, part, peers = workload(), model_part(spec, ranks), "nccl" not in name
    seconds = generation_seconds(part, "bfloat16", H200, load, tensor_ranks=ranks, by_peers=peers)
    measured = load.sequences * load.mean_tokens / record["ours"]
    assert abs(error(seconds, measured)) < TIME


@pytest.mark.parametrize("name", STREAMED)
def test_one_stream(name: str) -> None:
    """1,024 tokens in and out."""
    record, spec, ranks = engine(name)
    step = decode_step(
        model_part(spec, ranks),
        "bfloat16",
        H200,
        tensor_ranks=ranks,
        rows=1,
        context_tokens=1536,
        by_peers="nccl" not in name,
    )
    measured = record["detail"]["streams_ms"]["1"]["itl_p50"]
    assert abs(error(1e3 * step.seconds, measured)) < TIME


@pytest.mark.parametrize("name", ENGINES)
def test_memory_of_an_engine(name: str) -> None:
    """With as many pages as it had; beside it only CUDA's context and NCCL's buffers."""
    record, spec, ranks = engine(name)
    part, pages = model_part(spec, ranks), record["detail"]["stats"]["pages_total"]
    config = EngineConfig(num_pages=pages, token_budget=16_384, max_running=256)
    plan = plan_serving(
        replace(part, vocab_size=spec.vocab_size),
        plan_engine(config, device_type="cuda"),
        device="cuda",
        dtype="bfloat16",
        weights_bytes=2 * part.num_parameters,
        free_bytes=H200.device_bytes,
        replicas=1,
        own_kernels=True,
    )
    assert plan.fits
    assert abs(error(plan.needed_bytes, record["detail"]["device_bytes"])) < MEMORY
