"""The search: what it chooses fits, nothing that fits is faster, and a refusal's ways out do
fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.errors import ConfigError, MemoryBudgetError
from gyre.models.flops import forward_flops as model_flops
from gyre.planner.gpus import GPUS, find_gpu
from gyre.planner.memory_model.engine import EngineDemand
from gyre.planner.memory_model.peaks import host_bytes_of
from gyre.planner.model_zoo import SHAPES, find_shape
from gyre.planner.report.describe import as_mapping, describe, reasons
from gyre.planner.search.advice import MATRIX, TREE, strategy_for, tree_for
from gyre.planner.search.candidates import Fixed, GpuCluster, judge, layouts
from gyre.planner.search.search import choose
from gyre.planner.search.speed import chunks_per_update, sent_bytes, step_time
from gyre.planner.search.speed import forward_flops as speed_flops
from planner_cases import make_job

GIB = 1 << 30


def cluster(gpus: int, gpu: str = "h200", **changes) -> GpuCluster:
    return GpuCluster(gpus=gpus, gpu=find_gpu(gpu), **changes)


JOBS = given(
    shape=st.sampled_from(["qwen3-0.6b", "qwen3-4b", "qwen3-8b", "llama-3-70b"]),
    gpus=st.sampled_from([1, 2, 4, 8, 16]),
    gpu=st.sampled_from(sorted(GPUS)),
    longest=st.sampled_from([512, 4096, 32_768]),
    host=st.none() | st.integers(0, 2000).map(lambda gib: gib * GIB),
    fixed=st.builds(
        Fixed,
        checkpointing=st.sampled_from([None, "none", "full"]),
        offload_optimizer=st.sampled_from([None, "none"]),
        zero=st.sampled_from([None, 1, 3]),
        residency=st.sampled_from([None, "resident", "spill", "phase"]),
    ),
    rollout=st.booleans(),
)


@settings(max_examples=12, deadline=None, derandomize=True)  # the slow one draws anew
@JOBS
def test_the_best_is_the_fastest_that_fits(shape, gpus, gpu, longest, host, fixed, rollout) -> None:
    best_is_the_fastest(shape, gpus, gpu, longest, host, fixed, rollout)


@pytest.mark.slow
@settings(max_examples=24, deadline=None)
@JOBS
def test_the_best_of_many_jobs_is_the_fastest_that_fits(
    shape, gpus, gpu, longest, host, fixed, rollout
) -> None:
    best_is_the_fastest(shape, gpus, gpu, longest, host, fixed, rollout)


def best_is_the_fastest(shape, gpus, gpu, longest, host, fixed, rollout) -> None:
    engine = EngineDemand(
        running=16, longest=longest, kv_bytes_per_token=147_456, working_bytes=GIB, graph_bytes=GIB
    )
    job = make_job(shape, longest=longest, engine=engine if rollout else None, reference=rollout)
    there = cluster(gpus, gpu, host_bytes=host)
    judged = [judge(job, there, layout, fixed.residency) for layout in layouts(job, there, fixed)]
    assert fixed.residency in (None, "spill") or {candidate.residency for candidate in judged} == {
        fixed.residency
    }
    try:
        choice = choose(job, there, fixed)
    except MemoryBudgetError as refusal:
        assert not any(candidate.fits for candidate in judged)
        assert re.search(r"\d+ bytes too little", refusal.message) and refusal.hint
        return
    best = choice.best
    assert best in judged and best.fits
    assert best.device_bytes <= 0.92 * there.gpu.device_bytes
    assert best.host_bytes <= there.host_budget_bytes
    assert all(best.time.seconds <= other.time.seconds for other in judged if other.fits)
    for passed in choice.discarded:
        assert not passed.fits and passed.time.seconds < best.time.seconds
    assert (best.running >= 1) == rollout
    for name, value in replace(fixed, residency=None).given().items():
        assert getattr(best.layout, name) == (0 if name == "zero" and gpus == 1 else value)
    assert best.layout.words() in describe(choice, (), ())
    assert as_mapping(choice, (), ())["best"]["layout"]["zero"] == best.layout.zero


def refuse(job, there: GpuCluster, fixed: Fixed | None = None) -> MemoryBudgetError:
    with pytest.raises(MemoryBudgetError) as refusal:
        choose(job, there, fixed)
    return refusal.value


@pytest.mark.slow
def test_a_refusal_names_the_shortfall_and_the_fewest_gpus_that_do() -> None:
    job = make_job("llama-3-70b")
    error = refuse(job, cluster(1, "h100"))
    gpus = int(re.findall(r"(\d+) GPUs", error.hint)[0])
    assert choose(job, cluster(gpus, "h100")).best.fits
    refuse(job, cluster(gpus // 2, "h100"))
    short = int(re.findall(r"(\d+) bytes too little", error.message)[0])
    least = min(
        judge(job, cluster(1, "h100"), layout).short_device_bytes
        for layout in layouts(job, cluster(1, "h100"), Fixed())
    )
    assert short == least


def test_a_refusal_names_the_setting_that_was_in_the_way() -> None:
    job = make_job("qwen3-8b")
    there = cluster(1)
    error = refuse(job, there, Fixed(offload_optimizer="none"))
    assert "offload_optimizer = 'host' instead of 'none'" in error.hint
    assert choose(job, there, Fixed(offload_optimizer="host")).best.fits
    error = refuse(
        make_job("qwen3-8b"), cluster(8), Fixed(tokens_per_chunk=131_072, checkpointing="none")
    )
    chunk = int(re.findall(r"tokens_per_chunk = (\d+) instead of 131072", error.hint)[0])
    assert choose(job, cluster(8), Fixed(tokens_per_chunk=chunk, checkpointing="none")).best.fits
    assert "checkpointing = 'selective' instead of 'none'" in error.hint
    assert error.hint.index("checkpointing =") < error.hint.index("tokens_per_chunk ="), (
        "the cheapest first"
    )


def test_a_refusal_names_the_residency_that_was_in_the_way() -> None:
    engine = EngineDemand(
        running=256, longest=4096, kv_bytes_per_token=147_456, working_bytes=GIB, graph_bytes=GIB
    )
    job, layout = (
        make_job("qwen3-8b", engine=engine),
        Fixed(offload_optimizer="none", offload_gradients=False),
    )
    error = refuse(job, cluster(2), replace(layout, residency="resident"))
    assert "residency = 'phase' instead of 'resident'" in error.hint
    assert choose(job, cluster(2), replace(layout, residency="phase")).best.fits


def test_a_refusal_names_how_long_sequences_may_be() -> None:
    job = make_job("qwen3-0.6b", longest=32_768, update=65_536)
    there, fixed = cluster(1, "l4"), Fixed(checkpointing="none")
    tokens = int(
        re.findall(r"sequences of at most (\d+) tokens", refuse(job, there, fixed).hint)[0]
    )
    assert choose(replace(job, longest=tokens, mean_tokens=tokens), there, fixed).best.fits
    refuse(replace(job, longest=tokens + 256), there, fixed)


def test_gradients_that_are_summed_once_are_searched_with_what_they_hold() -> None:
    """They take 4 bytes per parameter on every rank, so another layout may be best; and many small
    chunks over a slow network, which is what they are for, take less time with them."""
    job = make_job("qwen3-8b")
    once = replace(job, sum_gradients="update")
    by_chunk, by_update = (
        choose(job, cluster(8), Fixed(zero=3)).best,
        choose(once, cluster(8), Fixed(zero=3)).best,
    )
    assert by_update.layout != by_chunk.layout and by_update.layout.sum_gradients == "update"
    assert "gradients summed once per update" in by_update.layout.words()
    held = by_update.moments[1].parts["gradients not yet summed"]
    assert chunks_per_update(once, by_update.layout) == 1 or held == 4 * job.model.num_parameters
    wide = replace(by_chunk.layout, gpus=16, shard_ranks=16, tokens_per_chunk=8192)
    slow, fast = (
        step_time(job, replace(wide, sum_gradients=when), find_gpu("h200"), "resident")
        for when in ("chunk", "update")
    )
    assert fast.traffic_s < slow.traffic_s and fast.seconds < slow.seconds


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_one_gpu_holds_whole_models_whatever_the_zero_stage(zero) -> None:
    """Nothing is cut for one rank: compute weights, float32 gradients and masters, both moments."""
    job = make_job("qwen3-0.6b", longest=2048, sum_gradients="update", reference=True)
    best, whole = (choose(job, cluster(1), Fixed(zero=stage)).best for stage in (zero, 0))
    assert best == whole and (best.layout.zero, best.layout.shard_ranks) == (0, 1)
    step = next(moment for moment in best.moments if moment.name == "optimizer step")
    held = sum(size for name, size in step.parts.items() if name.startswith("actor."))
    assert held == 18 * job.model.num_parameters
    assert choose(job, cluster(1), Fixed(zero=zero, shard_ranks=1)).best.layout == best.layout


def test_no_host_memory_means_no_offload() -> None:
    assert choose(make_job("qwen3-8b"), cluster(1)).best.layout.offload_optimizer == "host"
    short = cluster(1, host_bytes=8 * GIB)
    error = refuse(make_job("qwen3-8b"), short, Fixed(offload_optimizer="host"))
    assert "offload_optimizer = 'disk' instead of 'host'" in error.hint
    assert "2 GPUs" in refuse(make_job("qwen3-8b"), short, Fixed(offload_optimizer="none")).hint
    on_disk = choose(make_job("qwen3-8b"), short).best
    assert on_disk.layout.offload_optimizer == "disk" and on_disk.host_bytes < 8 * GIB * 0.6
    assert on_disk.disk_bytes == 12 * make_job("qwen3-8b").model.num_parameters


def test_known_rows() -> None:
    """An 8B shape on eight H200s needs no checkpointing; the survey's rate for it is 9.5 k tokens/s
    per GPU."""
    choice = choose(make_job("qwen3-8b"), cluster(8))
    assert choice.best.layout.checkpointing == "none" and choice.best.layout.zero >= 2
    rate = choice.job.tokens_per_update / 8 / choice.best.time.seconds
    assert 8_000 < rate < 11_000
    long = choose(make_job("qwen3-4b", longest=32_768), cluster(8, "a100-40g", host_bytes=0)).best
    assert long.layout.checkpointing != "none"
    assert any(
        "discarded" in reason for reason in reasons(choose(make_job("qwen3-8b"), cluster(8)))
    )


def test_bytes_on_the_wire_are_the_rings() -> None:
    job = make_job("qwen3-8b", update=8 * 4 * 8192)
    base = choose(job, cluster(8)).best.layout
    count = job.model.num_parameters
    flat = replace(base, zero=0, shard_ranks=1, tokens_per_chunk=8192)
    assert chunks_per_update(job, flat) == 4
    assert sent_bytes(job, flat) == {"all-reduce": int(2 * 7 / 8 * 4 * count)}
    zero1 = sent_bytes(job, replace(flat, zero=1, shard_ranks=8))
    assert zero1["reduce-scatter"] + zero1["all-gather"] == pytest.approx(
        7 / 8 * 6 * count, rel=1e-6
    )
    zero3 = sent_bytes(job, replace(flat, zero=3, shard_ranks=8))
    # is gathered once per chunk, layers twice
    root = 2 * job.model.embedding_parameters + job.model.hidden_size
    assert zero3["all-gather"] == pytest.approx(4 * 7 / 8 * 2 * (2 * count - root), rel=1e-6)
    assert zero3["reduce-scatter"] == pytest.approx(4 * 7 / 8 * 2 * count, rel=1e-6)
    once = sent_bytes(job, replace(flat, zero=3, shard_ranks=8, sum_gradients="update"))
    assert once == zero3 | {"reduce-scatter": int(7 / 8 * 4 * count)}, "a float32 sum, once"
    hybrid = sent_bytes(job, replace(flat, zero=3, shard_ranks=4))
    assert hybrid["all-gather"] < zero3["all-gather"]
    assert hybrid["all-reduce among groups"] == pytest.approx(4 * count / 4, rel=1e-6), (
        "once, in shards"
    )
    assert sent_bytes(job, replace(flat, gpus=1)) == {}
    assert step_time(job, flat, find_gpu("h200"), "resident").exposed_s > 0


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        (Fixed(tokens_per_chunk=100), "cannot hold a sequence of 8192 tokens"),
        (Fixed(shard_ranks=3), "shard_ranks = 3: 8 GPUs do not split"),
        (Fixed(zero=0, shard_ranks=8), "no layout of 8 GPUs"),
    ],
)
def test_what_cannot_be_is_a_config_error(fixed: Fixed, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(make_job(), cluster(8), fixed)


def test_names_are_found_and_near_ones_proposed() -> None:
    assert find_gpu("H200").name == "h200" and find_gpu("A100_80G").name == "a100-80g"
    assert find_shape("Qwen3-8B") is SHAPES["qwen3-8b"]
    with pytest.raises(ConfigError, match="did you mean h100"):
        find_gpu("h1000")
    with pytest.raises(ConfigError, match="did you mean qwen3-8b"):
        find_shape("qwen3-8")


def test_advice_is_the_references() -> None:
    assert [strategy_for(billions * 10**9).says for billions in (1, 8, 70, 400)] == [
        "DP only",
        "TP=8, DP=N/8",
        "TP=8, PP=2-4, DP=remaining",
        "TP=8, PP=8-16, DP=remaining",
    ]
    assert [tree_for(over).says for over in (0.5, 3, 8, 20)] == [
        "DP only, ZeRO-1",
        "ZeRO-2 + Gradient Checkpointing",
        "ZeRO-3",
        "ZeRO-3 + Offload (or add more GPUs)",
    ]
    assert [(line.case, line.gpus) for line in MATRIX] == [
        ("<7B", "1-8"),
        ("7B-30B", "8-64"),
        ("30B-100B", "64-512"),
        ("100B-500B", "512-4096"),
        ("MoE (any)", "Varies"),
    ]
    assert [line.case for line in TREE] == ["fits", "2-4x over", "4-10x over", ">10x over"]
    assert [line.case for line in MATRIX if not line.built] == ["MoE (any)"]


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-8b", "llama-3-70b"])
@pytest.mark.parametrize("length", [512, 32_768])
def test_predicted_work_is_what_mfu_counts(shape: str, length: int) -> None:
    """Norms, which the planner counts with a layer's matrices, are less than a thousandth."""
    parts = speed_flops(make_job(shape, longest=length))
    counted = model_flops(find_shape(shape), [length], num_outputs=length)
    assert length * sum(parts) == pytest.approx(counted, rel=1e-3)


def test_weights_in_host_memory_need_whole_models_and_room_for_two_layers() -> None:
    """A 70B model on one GPU that its weights alone would fill."""
    away = make_job("llama-3-70b", longest=4096, offload_parameters=("actor",))
    there = cluster(1, host_bytes=2000 * GIB)
    choice = choose(away, there, Fixed())
    layout, parts = choice.best.layout, choice.best.moments[1].parts
    assert layout.offload_optimizer == "host" and layout.offload_parameters == ("actor",)
    assert "weights of actor on the host" in layout.words()
    item, m = 2, away.model
    assert "actor.params" not in parts and parts["actor.layer_buffers"] == item * (
        2 * m.layer_parameters + m.num_parameters - m.num_layers * m.layer_parameters
    )
    bare = replace(layout, offload_parameters=())
    assert (
        host_bytes_of(away, layout, "resident") - host_bytes_of(away, bare, "resident")
        == item * m.num_parameters
    )
    assert choice.best.time.host_s > judge(away, there, bare).time.host_s
    with pytest.raises(MemoryBudgetError):
        choose(replace(away, offload_parameters=()), there, Fixed())
    assert {found.zero for found in layouts(away, cluster(8, host_bytes=8000 * GIB), Fixed())} == {
        0,
        1,
    }
    with pytest.raises(
        ConfigError, match=r"no layout of 8 GPUs .* with trainer.offload_parameters"
    ) as caught:
        choose(away, cluster(8, host_bytes=8000 * GIB), Fixed(zero=3))
    assert "0 or 1" in caught.value.hint
    frozen = replace(away, offload_parameters=("reference",), reference=True)
    kept = {
        name: size
        for moment in judge(frozen, there, layout).moments
        for name, size in moment.parts.items()
    }
    assert "reference" in kept and "reference.layer_buffers" not in kept
    away_too = judge(frozen, there, replace(layout, offload_parameters=("reference",)))
    kept = next(moment.parts for moment in away_too.moments if moment.name == "score")
    assert (
        "reference" not in kept and kept["reference.layer_buffers"] == parts["actor.layer_buffers"]
    )
