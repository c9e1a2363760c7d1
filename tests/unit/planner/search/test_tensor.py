"""Tensor ranks as a degree of the search: which are tried, what they exchange and hold, what is
chosen, and what is said of the reference's advice."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.errors import ConfigError, MemoryBudgetError
from gyre.models.layout import find_uneven
from gyre.planner.gpus import EXCHANGE_S, find_gpu
from gyre.planner.memory_model.engine import EngineDemand
from gyre.planner.memory_model.job import RankPart, TrainingJob
from gyre.planner.memory_model.states import Layout, state_bytes
from gyre.planner.model_zoo import SHAPES, find_shape, model_numbers, model_part, tensor_parts
from gyre.planner.report.advice import advice_text, largest_difference, verdict
from gyre.planner.report.describe import describe
from gyre.planner.search.advice import MATRIX, TREE
from gyre.planner.search.candidates import Fixed, GpuCluster, judge, layouts
from gyre.planner.search.exchanges import exchange_time, list_exchanges, sent_by_tensor_ranks
from gyre.planner.search.generation import decode_step, rollout_seconds
from gyre.planner.search.search import choose
from gyre.planner.search.speed import step_time
from planner_cases import make_job

GIB = 1 << 30
H200 = find_gpu("h200")


def cluster(gpus: int, gpu: str = "h200", **changes: Any) -> GpuCluster:
    return GpuCluster(gpus=gpus, gpu=find_gpu(gpu), **changes)


def with_parts(shape: str, **changes: Any) -> TrainingJob:
    parts = {n: RankPart(model=part) for n, part in tensor_parts(find_shape(shape), 8).items()}
    return make_job(shape, **{"parts": parts, **changes})


def layout_of(gpus: int, tensor_ranks: int, **changes: Any) -> Layout:
    base: dict[str, Any] = {
        "gpus": gpus, "tensor_ranks": tensor_ranks, "zero": 0, "shard_ranks": 1,
        "checkpointing": "none", "tokens_per_chunk": 8192, "offload_optimizer": "none",
        "offload_gradients": False,
    }  # fmt: skip
    return Layout(**{**base, **changes})


@given(
    shape=st.sampled_from(sorted(SHAPES)),
    gpus=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 64]),
    fixed=st.builds(Fixed, tensor_ranks=st.sampled_from([None, 1, 2, 4, 8])),
)
@settings(max_examples=40, deadline=None)
def test_ranks_that_share_layers_lie_within_a_host_and_divide_the_model(shape, gpus, fixed) -> None:
    spec, there = find_shape(shape), cluster(gpus)
    for layout in layouts(with_parts(shape), there, fixed):
        assert there.per_host % layout.tensor_ranks == 0
        assert layout.data_ranks * layout.tensor_ranks == gpus
        assert layout.data_ranks % layout.shard_ranks == 0
        assert find_uneven(spec, layout.tensor_ranks) is None
        assert fixed.tensor_ranks in (None, layout.tensor_ranks)
        assert (layout.zero == 0) or layout.data_ranks > 1


def test_the_degrees_that_are_tried() -> None:
    def degrees(shape: str, gpus: int) -> set[int]:
        return {one.tensor_ranks for one in layouts(with_parts(shape), cluster(gpus), Fixed())}

    assert degrees("qwen3-8b", 16) == {1, 2, 4, 8} and degrees("qwen3-8b", 4) == {1, 2, 4}
    assert degrees("qwen3-8b", 1) == {1} and degrees("qwen3-8b", 3) == {1}
    assert degrees("qwen3-8b", 12) == {1, 2, 4}, "12 GPUs are no groups of 8"
    assert degrees("qwen2.5-0.5b", 8) == {1, 2}, "14 heads"
    assert degrees("qwen2.5-7b", 8) == {1, 2, 4}, "28 heads"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_layer_sends_what_the_documentation_says(ranks: int) -> None:
    """10 (t - 1)/t T E b per layer; checkpointed in full, 3 more; 6 of 10 beside products."""
    spec = find_shape("qwen3-8b")
    job = make_job(model=model_part(spec, ranks), engine_model=model_numbers(spec), update=8192)
    deeper = replace(job, model=replace(job.model, num_layers=job.model.num_layers + 1))
    once = (ranks - 1) / ranks * 8192 * 4096 * 2
    for mode, times in (("none", 10), ("selective", 10), ("full", 13)):
        layout = layout_of(ranks, ranks, checkpointing=mode)
        few, many = (
            [each for each in list_exchanges(one, layout, chunks=1) if each.sent_bytes > 1e6]
            for one in (job, deeper)
        )
        difference = sum(e.sent_bytes for e in many) - sum(e.sent_bytes for e in few)
        assert difference == pytest.approx(times * once, rel=1e-3)
        assert sum(e.calls for e in many) - sum(e.calls for e in few) == times
        hidden = [sum(e.calls for e in every if e.hidden) for every in (few, many)]
        assert hidden[1] - hidden[0] == 6
    assert list_exchanges(job, layout_of(ranks, 1), chunks=1) == ()
    assert sent_by_tensor_ranks(job, layout_of(ranks, 1), chunks=1) == {}


def test_rows_behind_the_last_attention_are_targets() -> None:
    job = make_job(model=model_part(find_shape("qwen3-8b"), 2), update=8192)
    layout = layout_of(2, 2)
    half = replace(job, target_share=0.5)
    whole_bytes, half_bytes = (
        sum(sent_by_tensor_ranks(one, layout, chunks=1).values()) for one in (job, half)
    )
    row = 0.5 * 8192 * 4096 * 2
    # 7 exchanges of the last layer, the final norm's, and the log-probs' twice; two select rows
    spared = 0.5 * (7 + 1 + 2) * row + 0.5 * 12 * 8192
    assert whole_bytes - half_bytes == pytest.approx(spared - 2 * row, rel=1e-6)


def test_smaller_chunks_wait_longer_and_a_slower_link_hides_less() -> None:
    job = make_job(model=model_part(find_shape("qwen3-8b"), 2), update=65_536)
    layout = layout_of(2, 2, tokens_per_chunk=65_536)
    whole, cut = (
        exchange_time(job, layout, H200, chunks=chunks, products_s=1.0) for chunks in (1, 8)
    )
    calls = sum(each.calls for each in list_exchanges(job, layout, chunks=1)) - 1
    assert cut.all_s - whole.all_s == pytest.approx(7 * calls * EXCHANGE_S)
    assert cut.waited_s > whole.waited_s
    for gpu in (H200, find_gpu("l40s")):
        time = exchange_time(job, layout, gpu, chunks=1, products_s=0.1)
        assert time.all_s > time.waited_s >= time.all_s - 0.1
    none = exchange_time(job, layout, H200, chunks=1, products_s=0.0)
    assert none.waited_s == none.all_s


@pytest.mark.parametrize("shape", ["qwen3-8b", "llama-3-70b"])
def test_states_and_work_are_parts(shape: str) -> None:
    job = with_parts(shape)
    whole = sum(state_bytes(job.model, job.dtype, layout_of(8, 1)).values())
    times = []
    for ranks in (1, 2, 4, 8):
        layout = layout_of(8, ranks)
        own = job.of_rank(layout)
        held = sum(state_bytes(own.model, own.dtype, layout).values())
        assert held == pytest.approx(whole / ranks, rel=0.01)
        times.append(step_time(own, layout, H200, "resident"))
    for fewer, more in pairwise(times):
        assert more.compute_s == pytest.approx(fewer.compute_s, rel=0.01), "as much work in all"
        assert more.waited_s > fewer.waited_s and more.memory_s < fewer.memory_s


@settings(max_examples=8, deadline=None)
@given(
    shape=st.sampled_from(["qwen3-0.6b", "qwen3-8b"]),
    gpus=st.sampled_from([2, 8]),
    gpu=st.sampled_from(["h200", "a100-80g"]),
    tensor_ranks=st.sampled_from([None, 2]),
    generates=st.booleans(),
)
def test_the_best_is_the_fastest_that_fits(shape, gpus, gpu, tensor_ranks, generates) -> None:
    spec = find_shape(shape)
    job, there = with_parts(shape), cluster(gpus, gpu)
    fixed = Fixed(
        tensor_ranks=tensor_ranks, checkpointing="full", offload_optimizer="none",
        offload_gradients=False,
    )  # fmt: skip
    if generates:
        job = replace(job, engine=demand(spec, 1, gpus), engines={2: demand(spec, 2, gpus)})
    judged = [judge(job, there, layout) for layout in layouts(job, there, fixed)]
    served = {candidate.layout.engine_tensor_ranks for candidate in judged}
    assert served == ({1, 2} if generates else {1})
    try:
        choice = choose(job, there, fixed)
    except MemoryBudgetError:
        assert not any(candidate.fits for candidate in judged)
        return
    best = choice.best
    assert best.fits and tensor_ranks in (None, best.layout.tensor_ranks)
    assert all(best.time.seconds <= other.time.seconds for other in judged if other.fits)
    assert best.layout.words() in describe(choice, (), ())
    assert len(choice.advised) == 2
    for one in choice.advised:
        assert verdict(choice, one)


def demand(spec: Any, ranks: int, gpus: int) -> EngineDemand:
    part = model_numbers(spec) if ranks == 1 else model_part(spec, ranks)
    return EngineDemand(
        running=16 * ranks,
        sequences=128 * ranks // gpus,
        longest=4096,
        kv_bytes_per_token=4 * part.num_layers * part.kv_size,
        working_bytes=GIB,
        graph_bytes=GIB // 4,
        part=None if ranks == 1 else part,
    )


def test_an_engine_of_several_ranks_has_parts_of_the_weights_and_of_each_sequence() -> None:
    spec = find_shape("qwen3-8b")
    job = with_parts(
        "qwen3-8b",
        engine=demand(spec, 1, 8),
        engines={2: demand(spec, 2, 8)},
        longest=4096,
        mean_tokens=2560,  # 1,024 of a prompt, up to 3,072 of a completion
    )
    one, two = (
        judge(job, cluster(8), layout_of(8, 1, zero=3, shard_ranks=8, engine_tensor_ranks=ranks))
        for ranks in (1, 2)
    )
    held = [
        next(moment.parts for moment in candidate.moments if moment.name == "rollout")
        for candidate in (one, two)
    ]
    assert held[0]["engine.weights"] == 2 * job.model.num_parameters
    assert held[1]["engine.weights"] == 2 * model_part(spec, 2).num_parameters
    assert two.running == 2 * one.running and held[1]["engine.kv"] == pytest.approx(
        held[0]["engine.kv"], rel=0.01
    )
    assert "engines over 2 GPUs" in two.layout.words()
    assert 0 < two.time.rollout_s < one.time.rollout_s, "half of the weights are read each step"


def test_a_step_of_an_engine_is_its_bytes_and_its_sums() -> None:
    spec = find_shape("qwen3-32b")
    steps = [
        decode_step(
            model_part(spec, ranks), "bfloat16", H200, tensor_ranks=ranks, rows=8,
            context_tokens=1000,
        )
        for ranks in (1, 2, 4)
    ]  # fmt: skip
    assert steps[0].sums_s == steps[0].logits_s == 0.0
    assert steps[1].weights_s == pytest.approx(steps[0].weights_s / 2, rel=0.01)
    assert steps[1].kv_s == steps[0].kv_s / 2
    assert steps[1].sums_s == pytest.approx(2 * 64 * 4.6e-6, rel=0.02)
    assert steps[2].sums_s > steps[1].sums_s
    by_nccl = decode_step(
        model_part(spec, 2), "bfloat16", find_gpu("l40s"), tensor_ranks=2, rows=8,
        context_tokens=1000,
    )  # fmt: skip
    assert by_nccl.sums_s > 2 * 64 * 12e-6
    assert rollout_seconds(make_job(), H200, running=8, tensor_ranks=1) == 0.0


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tensor_ranks = 16") as caught:
        choose(with_parts("qwen3-8b"), cluster(16), Fixed(tensor_ranks=16))
    assert "1, 2, 4, 8" in caught.value.hint
    with pytest.raises(ConfigError, match=r"engine\.tensor_ranks = 2"):
        choose(with_parts("qwen3-8b"), cluster(16), Fixed(engine_tensor_ranks=2))


def test_a_refusal_names_more_tensor_ranks() -> None:
    """States of 32B, whole on each rank of data, are in eight parts less than a GPU."""
    job = with_parts("qwen3-32b", longest=8192)
    fixed = Fixed(tensor_ranks=1, offload_optimizer="none", zero=0)
    with pytest.raises(MemoryBudgetError) as caught:
        choose(job, cluster(16), fixed)
    assert "tensor_ranks = 8 instead of 1 (tensor ranks 8 × data parallel" in caught.value.hint
    assert choose(job, cluster(16), replace(fixed, tensor_ranks=8)).best.fits


def test_advice_that_is_not_taken_names_the_cost_that_made_the_difference() -> None:
    choice = choose(with_parts("qwen3-8b"), cluster(8), Fixed())
    matrix, tree = choice.advised
    assert matrix.advice is MATRIX[1] and tree.advice is TREE[1]
    assert choice.best.layout.tensor_ranks == 1 and not matrix.followed
    other = matrix.candidate
    assert other is not None and other.layout.tensor_ranks == 8
    said = verdict(choice, matrix)
    name, there, here = largest_difference(other.time, choice.best.time)
    assert name == "exchanges of tensor ranks that nothing hides" and (there, here) == (
        other.time.waited_s, 0.0
    )  # fmt: skip
    assert f"{name} {there:.3f} s, in the chosen {here:.3f} s" in said
    text = advice_text(choice)
    assert text.count("▸") == 2 and "▸ 7B-30B" in text
    for advice in (*MATRIX, *TREE):
        assert advice.says in text and advice.gpus in text
    assert "MoE (any)   Varies    Add EP matching expert count (not built)" in text


def test_advice_that_cannot_be_taken() -> None:
    one = choose(with_parts("qwen3-8b", longest=2048), cluster(1), Fixed())
    assert "not among the layouts of 1 GPU" in verdict(one, one.advised[1])
    many = choose(with_parts("qwen3-8b"), cluster(8), Fixed())
    short = replace(many.advised[0], candidate=many.discarded[0])
    assert verdict(many, short).startswith("does not fit: ZeRO-3")
    assert "too little at moment 'deepest layer'" in verdict(many, short)
    followed = choose(with_parts("qwen3-0.6b"), cluster(8), Fixed(zero=1))
    assert [each.followed for each in followed.advised] == [True, True]
    assert verdict(followed, followed.advised[0]).startswith("chosen: ")
