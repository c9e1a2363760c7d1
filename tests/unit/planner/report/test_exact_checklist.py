"""Every line of the checklists, word for number, of plans for a small model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from gyre.memory.errors import words
from gyre.planner.report.checklist import Line, Settings, inference_lines, training_lines
from gyre.planner.report.features import FEATURES, built_features
from gyre.planner.search.advice import strategy_for, tree_for
from gyre.planner.search.candidates import Fixed, GpuCluster
from gyre.planner.search.search import SearchResult, choose
from unit.planner.memory_model.test_exact_bytes import CODED, TOY, WIDE, P
from unit.planner.search.test_exact_search import ENGINE, PLAIN, make_gpu, make_job

SETTINGS = Settings(
    features=dict.fromkeys(FEATURES, True),
    snapshot_every_steps=20,
    snapshot_in_background=True,
    max_running=256,
    token_budget=2048,
    page_tokens=4,
    prefix_cache=True,
    completions_per_prompt=8,
    cluster_kind="ray",
    max_restarts=2,
)
GPU_BYTES = 4 << 30


def chosen(
    gpus: int = 2, fixed: dict[str, Any] | None = None, gpu: Any = None, **job: Any
) -> SearchResult:
    there = GpuCluster(gpus=gpus, gpu=gpu or make_gpu(GPU_BYTES))
    given: dict[str, Any] = {**PLAIN, "offload_gradients": False, **(fixed or {})}
    return choose(make_job(**job), there, Fixed(**given))


def lines(choice: SearchResult, *lacking: str, **changes: Any) -> dict[str, tuple[str, str]]:
    features = {name: name not in lacking for name in FEATURES}
    settings = replace(SETTINGS, features=features, **changes)
    found: tuple[Line, ...] = (
        *training_lines(choice, settings),
        *inference_lines(choice, settings),
    )
    return {line.name: (line.state, line.reason) for line in found}


def line(name: str, choice: SearchResult, *lacking: str, **changes: Any) -> tuple[str, str]:
    return lines(choice, *lacking, **changes)[name]


def test_advice_by_size() -> None:
    billion = 10**9
    bounds = {7: ("DP only", "TP=8, DP=N/8"), 30: ("TP=8, DP=N/8", "TP=8, PP=2-4, DP=remaining"),
              100: ("TP=8, PP=2-4, DP=remaining", "TP=8, PP=8-16, DP=remaining")}  # fmt: skip
    for billions, (below, there) in bounds.items():
        found = strategy_for(billions * billion - 1), strategy_for(billions * billion)
        assert [advice.says for advice in found] == [below, there]
    assert [tree_for(over).says for over in (1, 1.01, 4, 4.01, 10, 10.01)] == [
        "DP only, ZeRO-1",
        "ZeRO-2 + Gradient Checkpointing",
        "ZeRO-2 + Gradient Checkpointing",
        "ZeRO-3",
        "ZeRO-3",
        "ZeRO-3 + Offload (or add more GPUs)",
    ]


def test_the_line_of_parallelism() -> None:
    name, advice = "Parallelism configured", "the reference's matrix says DP only at this size"
    assert line(name, chosen(1)) == ("off", f"one GPU; {advice}")
    assert line(name, chosen(2)) == ("on", f"data parallel over 2; {advice}")
    inside = chosen(4, {"zero": 1})
    assert line(name, inside) == (
        "on",
        f"data parallel over 4, states split over 4 inside one host; {advice}",
    )
    across = line(
        name, chosen(8, {"zero": 1, "shard_ranks": 8}), "tensor parallelism", "pipeline parallelism"
    )
    assert across == (
        "on",
        f"data parallel over 8, states split over 8 across hosts, 4 GPUs each; {advice}; "
        "tensor parallelism and pipeline parallelism: not built",
    )
    assert line(name, chosen(2), "several GPUs")[0] == "not built"


def test_the_line_of_memory() -> None:
    """States of 18 bytes per parameter on one GPU, against 92 % of it."""
    name = "Memory optimization"
    state, reason = line(name, chosen(1), "8-bit optimizer states")
    ratio = 18 * P / int(0.92 * GPU_BYTES)
    assert (state, reason) == (
        "off",
        f"states of {words(18 * P)} are {ratio:.2f} × what one GPU has to give: the reference's "
        "tree says "
        "DP only, ZeRO-1; the fastest that fits is one GPU, checkpointing none, chunks of 10 "
        "tokens, "
        f"{words(18 * P)} per GPU; 8-bit optimizer states: not built; "
        "offload off: the states fit on the devices, and copies would take time",
    )
    both = line(name, chosen(2, {"zero": 1}, critic=True))
    assert both[0] == "on" and f"states of {words(2 * 18 * P)} are" in both[1]
    assert f", {words(2 * (6 * P + 12 * P // 2))} per GPU;" in both[1]
    large = replace(TOY, num_parameters=10**9)
    twice = line(name, chosen(4, {"zero": 3}, make_gpu(12 << 30), model=large))[1]
    over = 18e9 / int(0.92 * (12 << 30))
    assert (
        f"are {over:.2f} ×" in twice
        and "tree says ZeRO-2 + Gradient Checkpointing;" in twice
        and over > 1.5
    )
    missing = line(
        name, chosen(2, {"zero": 1, "offload_optimizer": "host"}), "ZeRO", "optimizer offload"
    )
    assert missing[0] == "not built" and missing[1].endswith(
        "; ZeRO: not built; optimizer offload: not built"
    )
    assert line(name, chosen(2), "ZeRO", "optimizer offload")[0] == "off"
    assert line(name, chosen(2, {"offload_gradients": True}))[0] == "on"
    assert (
        line(name, chosen(1, {"offload_optimizer": "host"}, offload_parameters=("actor",)))[0]
        == "on"
    )
    assert line(name, chosen(1, offload_parameters=("reference",), reference=True))[0] == "on"
    assert line(name, chosen(1, {"offload_optimizer": "host"}), "ZeRO")[0] == "on", (
        "nothing is in shards"
    )
    assert line(name, chosen(2, {"zero": 1}), "optimizer offload")[0] == "on", (
        "nothing is offloaded"
    )


def test_what_8_bit_moments_would_save() -> None:
    name, count = "Memory optimization", WIDE.num_parameters
    wide, coded = words(8 * count), words(8 * (count - CODED) + 520 * CODED // 256)
    off, on = (
        line(name, chosen(1, model=WIDE, moments=moments)) for moments in ("float32", "8_bit")
    )
    assert (
        off[0] == "off"
        and f"trainer.moments = '8_bit' would make {coded} of {wide} per GPU" in off[1]
    )
    assert (
        on[0] == "on" and f"8-bit optimizer states on: {coded} per GPU instead of {wide}" in on[1]
    )
    both = line(name, chosen(1, model=WIDE, critic=True))[1]
    assert f"of {words(16 * count)} per GPU" in both
    assert "no matrix has rows of whole blocks of 256 numbers" in line(name, chosen(1))[1]


def test_what_is_offloaded_and_why() -> None:
    def told(choice: SearchResult) -> str:
        return line("Memory optimization", choice)[1].rpartition("; offload on ")[2]

    pinned = f"{words(12 * P)} of pinned host memory"
    given = chosen(1, {"offload_optimizer": "host"})
    assert told(given).startswith('(trainer.offload_optimizer = "host"), as the config says: ')
    assert told(given).endswith(f": {pinned} per GPU")
    # a device that does not hold the states, and settings that leave open where they are
    large, tight = replace(TOY, num_parameters=10**8), make_gpu(2 << 30)
    open_ = {"offload_optimizer": None, "offload_gradients": None}
    assert "nothing faster fits without: " in told(chosen(1, open_, tight, model=large))
    some = {"offload_optimizer": None, "offload_gradients": False}
    assert "as the config says: " in told(chosen(1, some, tight, model=large))
    other = {"offload_optimizer": "host", "offload_gradients": None}
    assert "as the config says: " in told(chosen(1, other, tight, model=large))
    away = chosen(1, open_, tight, model=large, reference=True, offload_parameters=("reference",))
    assert 'trainer.offload_parameters = ["reference"]), as the config says: ' in told(away)
    disk = told(
        chosen(
            1, {"offload_optimizer": "disk", "offload_gradients": True}, offload_cut_bytes=10_000
        )
    )
    assert disk.startswith(
        '(trainer.offload_optimizer = "disk" and trainer.offload_gradients = true), '
    )
    assert disk.endswith(
        f"{words(4 * P + 20_000 + 3 * 2 * 3072)} of pinned host memory and {words(12 * P)} under "
        "memory.disk_folder per GPU"
    )


def test_the_line_of_checkpointing() -> None:
    """10 tokens through 3 layers keep 696 bytes each, or their inputs alone."""
    name = "Gradient checkpointing"
    assert line(name, chosen(2)) == (
        "off",
        f"{words(10 * 3 * 696)} of activations fit, and nothing is computed twice",
    )
    full = chosen(2, {"checkpointing": "full"}, make_gpu(GPU_BYTES, bf16_flops=1e6))
    cost = (2 * 3 * 4976 + 1920) / (3 * (2 * 3 * 4976 + 1920 + 4000))
    wanted = (
        f"full: {words(10 * 3 * 40)} of activations instead of {words(10 * 3 * 696)}, for "
        f"{cost:.0%} more work"
    )
    assert line(name, full) == ("on", wanted)
    assert line(name, full, "activation checkpointing") == ("not built", wanted)


def test_the_line_of_precision() -> None:
    name = "Mixed precision"
    no_fp8 = "FP8 off: toy does not multiply 8-bit floats"
    assert line(name, chosen(1)) == (
        "on",
        f"BF16 compute, FP32 master weights and moments; {no_fp8}",
    )
    assert "FP32 master weights; " in line(name, chosen(1, model=WIDE, moments="8_bit"))[1]
    half = chosen(1, dtype="float16")
    why = (
        "FP16 compute with dynamic loss scaling (toy has BF16, which needs no scaling), FP32 "
        "master weights and moments; "
    )
    assert line(name, half) == ("on", why + no_fp8)
    assert line(name, half, "FP16 with loss scaling")[0] == "not built"
    old = make_gpu(GPU_BYTES, bf16_flops=0)
    assert "(toy has no BF16)" in line(name, chosen(1, None, old, dtype="float16"))[1]
    assert line(name, chosen(1, None, old, dtype="float32"))[1].startswith(
        "run.dtype = float32; FP16 with loss scaling w"
    )
    slow = line(name, chosen(1, dtype="float32"))
    assert slow == ("off", f"run.dtype = float32; BF16 would be faster on toy; {no_fp8}")
    new = make_gpu(GPU_BYTES, fp8_flops=1.0)
    assert line(name, chosen(1, None, new))[1].endswith(
        "where 'fp8' makes the layers' products 1.39 × as fast"
    )
    assert line(name, chosen(1, None, new), "FP8 training")[1].endswith("; FP8: not built")
    on = [line(name, chosen(2, {"zero": zero}, new, matmul="fp8"))[1] for zero in (1, 2)]
    assert ["which are gathered in 8 bits" in reason for reason in on] == [False, True]
    assert on[0].endswith(
        "FP8 on: products of the layers' matrices; embedding, head and norms stay in bfloat16"
    )


def test_the_lines_of_loading_snapshots_and_faults() -> None:
    here = chosen(1)
    assert line("Data loading", here) == (
        "on",
        "records are read and encoded before the first step, and no step waits for a file",
    )
    name, how = "Checkpointing", "each rank writes its part, checksummed and read back"
    assert line(name, here) == ("on", f"every 20 steps {how}, while training goes on")
    waits = line(name, here, snapshot_in_background=False, snapshot_every_steps=0)
    end = f"training waits for it (snapshot.background = false); at the end of each stage {how}"
    assert waits == ("off", end)
    assert line(name, here, "asynchronous snapshots", snapshot_every_steps=1)[0] == "not built"
    assert "every 1 steps" in line(name, here, snapshot_every_steps=1)[1]
    name, by_hand = "Fault detection", "go on by hand with gyre train --resume"
    assert line(name, here, "restart by itself") == ("not built", by_hand)
    alone = line(name, here, cluster_kind="inline")
    assert alone == ("off", f"cluster.kind = inline: nobody watches one process; {by_hand}")
    assert (
        line(name, here, max_restarts=0)[0] == "off" and line(name, here, max_restarts=1)[0] == "on"
    )
    assert line(name, here)[1].endswith("from its newest snapshot, up to 2 times")


def test_the_lines_of_the_engine() -> None:
    online = lines(chosen(1, engine=ENGINE))
    assert online["Continuous batching"] == (
        "on",
        "each step takes up to 2048 tokens of up to 256 completions",
    )
    assert online["PagedAttention"] == (
        "on",
        "pages of 4 tokens, 3 for a full sequence; room per GPU for 8 of 8 completions at full "
        "length",
    )
    assert online["Prefix caching"] == ("on", "8 completions of a prompt share its pages")
    assert line("Prefix caching", chosen(1, engine=ENGINE), prefix_cache=False) == (
        "off",
        "engine.prefix_cache = false",
    )
    offline = lines(chosen(1))
    for name in ("Continuous batching", "PagedAttention", "Prefix caching"):
        assert offline[name] == ("off", "nothing is generated in this stage")


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("Quantization", "quantized weights"),
        ("Speculative decoding", "speculative decoding"),
        ("Tensor parallelism", "tensor parallel engine"),
    ],
)
def test_lines_that_no_setting_turns_on(name: str, feature: str) -> None:
    assert line(name, chosen(1))[0] == "off" and line(name, chosen(1), feature)[0] == "not built"


def test_weights_that_are_larger_than_a_gpu_need_several() -> None:
    """Two bytes per parameter, against what one has to give."""
    one = chosen(1)
    budget = one.cluster.device_budget_bytes
    for count, fits in ((budget // 2, False), (budget // 2 - 1, True)):
        asked = replace(one, job=replace(one.job, model=replace(TOY, num_parameters=count)))
        need = "fit on one toy: not needed" if fits else "are more than one toy: needed"
        assert (
            budget % 2 == 0
            and line("Tensor parallelism", asked)[1] == f"weights of {words(2 * count)} {need}"
        )


def test_features_by_their_keys() -> None:
    class Inner(BaseModel):
        dtype: Literal["float32", "float16"] | None = "float32"
        moments: int | None = None
        zero: int | None = None

    class Config(BaseModel):
        run: Inner | None = None
        parallel: tuple[Inner, ...] = ()
        trainer: Inner
        data: int = 0

    on = {name for name, built in built_features(Config).items() if built}
    assert on == {"FP16 with loss scaling", "ZeRO"}
    assert len(FEATURES) == 14
