"""The search on few, small layouts: which are tried, what is chosen, what is passed over, what a
refusal proposes. Past 500 lines: all of it reads the same small layouts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gyre.core.errors import ConfigError, MemoryBudgetError
from gyre.memory.errors import words
from gyre.planner.gpus import GPUS, Gpu
from gyre.planner.lighter import lighter
from gyre.planner.memory_model.engine import EngineDemand
from gyre.planner.memory_model.job import TrainingJob
from gyre.planner.memory_model.peaks import device_bytes_of, host_bytes_of, phase_moments
from gyre.planner.memory_model.states import Layout
from gyre.planner.plan import PlanInputs, Shards
from gyre.planner.search.candidates import Candidate, Fixed, GpuCluster, judge, layouts
from gyre.planner.search.nearest import refusal_of
from gyre.planner.search.search import _nearest_of_each_kind, choose
from gyre.planner.ways import Way, join_ways, ways_out
from unit.planner.memory_model.test_exact_bytes import TOY, make_inputs, make_layout

MIB = 1 << 20
PLENTY = 1 << 40
ENGINE = EngineDemand(
    running=8,
    longest=10,
    kv_bytes_per_token=1000,
    working_bytes=5000,
    graph_bytes=700,
    buffer_bytes=90,
)


def make_job(**changes: Any) -> TrainingJob:
    """Sequences of 10 tokens, 40 in an update: on two GPUs chunks of 10 and 20."""
    base: dict[str, Any] = {
        "model": TOY, "dtype": "bfloat16", "saving": "triton", "longest": 10, "mean_tokens": 10,
        "tokens_per_update": 40, "most_tokens_per_update": 40,
    }  # fmt: skip
    return TrainingJob(**{**base, **changes})


def make_gpu(device_bytes: int = PLENTY, **changes: Any) -> Gpu:
    base: dict[str, Any] = {
        "name": "toy",
        "device_bytes": device_bytes,
        "bf16_flops": 1e14,
        "fp8_flops": 0,
        "fp16_flops": 1e14,
        "matmul_share": 0.8,
        "training_share": 0.5,
        "hbm_bytes_per_s": 1e12,
        "link_bytes_per_s": 1e11,
        "host_link_bytes_per_s": 1e10,
        "host_bytes": PLENTY,
        "gpus_per_host": 4,
    }
    return Gpu(**{**base, **changes})


def budgeted(budget_bytes: int, gpus: int = 2, **changes: Any) -> GpuCluster:
    """GPUs that have just so much to give."""
    sold = int(budget_bytes / 0.92)
    sold += next(more for more in range(-2, 4) if int(0.92 * (sold + more)) == budget_bytes)
    found = GpuCluster(gpus=gpus, gpu=make_gpu(sold), **changes)
    assert found.device_budget_bytes == budget_bytes
    return found


def need(job: TrainingJob, layout: Layout, residency: Any = "resident", running: int = 0) -> int:
    return max(
        device_bytes_of(moment, layout) for moment in phase_moments(job, layout, residency, running)
    )


# What there is, and what is tried.


def test_budgets_of_a_cluster() -> None:
    """92 % of a device; 60 % of a host, which the GPUs in it share."""
    gpu = make_gpu(1000, host_bytes=500)
    assert GpuCluster(gpus=2, gpu=gpu).device_budget_bytes == 920
    hosts = {gpus: GpuCluster(gpus=gpus, gpu=gpu) for gpus in (2, 8)}
    assert {gpus: (one.per_host, one.host_budget_bytes) for gpus, one in hosts.items()} == {
        2: (2, 300),
        8: (4, 300),
    }
    given = {
        gpus: GpuCluster(gpus=gpus, gpu=gpu, host_bytes=700).host_budget_bytes for gpus in (2, 8)
    }
    assert given == {2: 210, 8: 105}


def test_what_was_given_includes_noughts() -> None:
    assert Fixed().given() == {}
    assert Fixed(zero=0, offload_gradients=False).given() == {"zero": 0, "offload_gradients": False}


def test_a_candidate_fits_where_device_and_host_do() -> None:
    one = judge(
        make_job(),
        GpuCluster(gpus=1, gpu=make_gpu()),
        replace(make_layout(), gpus=1, zero=0, shard_ranks=1),
    )
    short = [
        replace(one, short_device_bytes=a, short_host_bytes=b).fits
        for a, b in ((0, 0), (1, 0), (0, 1), (1, 1))
    ]
    assert short == [True, False, False, False]


def tried(gpus: int, job: TrainingJob | None = None, **fixed: Any) -> list[Layout]:
    there = GpuCluster(gpus=gpus, gpu=make_gpu(gpus_per_host=8))
    return list(layouts(job or make_job(), there, Fixed(**fixed)))


def test_ranks_that_split_the_states() -> None:
    """All of them, or equal parts of a host, smaller first; one GPU splits nothing."""

    def splits(gpus: int, **fixed: Any) -> list[tuple[int, int]]:
        given = {
            "checkpointing": "none",
            "tokens_per_chunk": 10,
            "offload_optimizer": "none",
            **fixed,
        }
        return [(one.zero, one.shard_ranks) for one in tried(gpus, **given)]

    of_12 = (2, 3, 4, 6, 12)
    assert splits(12) == [(0, 1)] + [(zero, size) for zero in (1, 2, 3) for size in of_12]
    assert splits(16, zero=2) == [(2, 2), (2, 4), (2, 8), (2, 16)]
    assert splits(18, zero=1) == [(1, 2), (1, 3), (1, 6), (1, 18)], "nine are no part of a host"
    assert splits(12, shard_ranks=4) == [(1, 4), (2, 4), (3, 4)]
    assert splits(12, shard_ranks=1) == [(0, 1)]
    assert splits(2) == [(0, 1), (1, 2), (2, 2), (3, 2)]
    assert splits(1) == splits(1, zero=3) == splits(1, shard_ranks=1) == [(0, 1)]


def test_checkpointing_and_offloading_that_are_tried() -> None:
    """The larger state goes first: gradients alone only where the user says so."""

    def offloads(**fixed: Any) -> list[tuple[str, bool]]:
        given = {"checkpointing": "none", "tokens_per_chunk": 10, **fixed}
        return [(one.offload_optimizer, one.offload_gradients) for one in tried(1, **given)]

    assert offloads() == [
        ("none", False),
        ("host", False),
        ("host", True),
        ("disk", False),
        ("disk", True),
    ]
    assert offloads(offload_gradients=True) == [("none", True), ("host", True), ("disk", True)]
    assert offloads(offload_gradients=False) == [("none", False), ("host", False), ("disk", False)]
    assert offloads(offload_optimizer="none") == [("none", False)]
    modes = [one.checkpointing for one in tried(1, tokens_per_chunk=10, offload_optimizer="none")]
    assert modes == ["none", "selective", "full"]
    away = [
        (one.zero, one.shard_ranks)
        for one in tried(
            2,
            make_job(offload_parameters=("reference",)),
            checkpointing="none",
            tokens_per_chunk=10,
            offload_optimizer="none",
        )
    ]
    assert away == [(0, 1), (1, 2)], "weights on the host are whole"
    trained = tried(
        1, make_job(offload_parameters=("critic",)), checkpointing="none", tokens_per_chunk=10
    )
    assert {one.offload_optimizer for one in trained} == {"host", "disk"}
    assert all(
        one.offload_parameters == ("critic",) and one.moments == "float32" for one in trained
    )


def test_chunks_that_are_tried() -> None:
    """Doubled from the longest sequence to what a rank has of an update, 131,072 tokens at most."""

    def chunks(longest: int, most: int) -> list[int]:
        job = make_job(longest=longest, most_tokens_per_update=most)
        given: dict[str, Any] = {"zero": 0, "checkpointing": "none", "offload_optimizer": "none"}
        return [one.tokens_per_chunk for one in tried(8, job, **given)]

    assert chunks(10, 80) == [10]
    assert chunks(10, 8 * 79) == [10, 20, 40]
    assert chunks(10, 8 * 79 + 1) == [10, 20, 40, 80]
    assert chunks(10, 8) == [10]
    assert chunks(65_536, 1 << 30) == [65_536, 131_072]
    assert chunks(200_000, 1 << 30) == [200_000]


def test_a_layout_that_fits_to_the_byte_stays_resident() -> None:
    job, layout = make_job(), make_layout(gpus=2, zero=0, shard_ranks=1)
    wanted = need(job, layout)
    for given, short in ((wanted, 0), (wanted - 1, 1)):
        found = judge(job, budgeted(given), layout)
        assert (found.residency, found.running, found.short_device_bytes) == ("resident", 0, short)
        assert found.device_bytes == wanted and found.fits == (not short)
    away = replace(layout, offload_optimizer="host")
    pinned = host_bytes_of(job, away, "resident")
    for host, short in ((2 * pinned, 0), (pinned, pinned - int(0.6 * pinned / 2))):
        found = judge(
            job,
            GpuCluster(
                gpus=2, gpu=make_gpu(), host_bytes=-(-host * 10 // 6) if not short else host
            ),
            away,
        )
        assert (found.host_bytes, found.short_host_bytes) == (pinned, short)
    assert (
        judge(
            job, GpuCluster(gpus=2, gpu=make_gpu()), replace(layout, offload_optimizer="disk")
        ).disk_bytes
        == 12 * 16_948
    )


def test_phases_take_turns_where_they_must() -> None:
    """With as many completions as the device has pages for: 10,000 bytes each."""
    job, layout = make_job(engine=ENGINE), make_layout(gpus=2, zero=0, shard_ranks=1)
    resident, turns = need(job, layout, running=8), need(job, layout, "phase", running=8)
    least = need(job, layout, "phase", running=1)
    assert least + 7 * 10_000 > turns >= least and resident > turns
    found = judge(job, budgeted(resident), layout)
    assert (found.residency, found.running) == ("resident", 8)
    found = judge(job, budgeted(resident - 1), layout)
    assert (found.residency, found.running, found.fits) == ("phase", 8, True)
    found = judge(job, budgeted(resident - 1), layout, "resident")
    assert (found.residency, found.short_device_bytes) == ("resident", 1)
    assert judge(job, budgeted(resident), layout, "phase").residency == "phase"
    # pages decide: 10 MB a completion
    many = replace(job, engine=replace(ENGINE, kv_bytes_per_token=10**6))
    each = 10**7
    one = need(many, layout, "phase", running=1)
    for budget, running in (
        (one, 1),
        (one + 3 * each - 1, 3),
        (one + 3 * each, 4),
        (one + 50 * each, 8),
    ):
        found = judge(many, budgeted(budget), layout, "phase")
        assert (found.running, found.fits) == (running, True)
    short = judge(many, budgeted(one - 1), layout, "phase")
    assert (short.running, short.short_device_bytes) == (1, 1)
    pair = replace(
        many, engine=replace(many.engine, running=2) if many.engine is not None else None
    )
    assert judge(pair, budgeted(one + each), layout, "phase").running == 2
    single = replace(
        many, engine=replace(many.engine, running=1) if many.engine is not None else None
    )
    assert judge(single, budgeted(one), layout, "phase").running == 1
    frozen = make_job(reference=True)
    found = judge(frozen, budgeted(need(frozen, layout) - 1), layout)
    assert (found.residency, found.running) == ("phase", 0), "a reference can leave"
    reward = make_job(reward_model=TOY)
    assert judge(reward, budgeted(need(reward, layout) - 1), layout).residency == "phase"


# What is chosen.


def kind_of(one: Candidate) -> tuple[object, ...]:
    layout = one.layout
    return (
        layout.zero,
        layout.shard_ranks,
        layout.checkpointing,
        layout.offload_optimizer,
        layout.offload_gradients,
    )


def order_of(one: Candidate) -> tuple[float, int]:
    return one.time.seconds, one.device_bytes


def test_the_next_best_are_four_of_other_kinds() -> None:
    job, there = make_job(), GpuCluster(gpus=2, gpu=make_gpu())
    choice = choose(job, there)
    judged = sorted(
        (judge(job, there, layout) for layout in layouts(job, there, Fixed())), key=order_of
    )
    assert choice.best == judged[0] and choice.discarded == ()
    kinds = list(dict.fromkeys(map(kind_of, judged)))
    assert [kind_of(one) for one in choice.next_best] == kinds[1:5]
    assert all(
        one == next(c for c in judged if kind_of(c) == kind_of(one)) for one in choice.next_best
    )
    assert choice.fixed == Fixed()


def test_what_was_faster_and_does_not_fit_is_told_six_at_most() -> None:
    """Of those that differ in splits and chunks alone the one that is nearest; in order of their
    time."""
    job = make_job(
        longest=4096, mean_tokens=4096, tokens_per_update=16_384, most_tokens_per_update=16_384
    )
    plenty = GpuCluster(gpus=2, gpu=make_gpu())
    on_disk = [
        judge(job, plenty, layout)
        for layout in layouts(job, plenty, Fixed(offload_optimizer="disk"))
    ]
    least = min(on_disk, key=lambda one: (one.device_bytes, one.host_bytes))
    there = budgeted(least.device_bytes, host_bytes=int(least.host_bytes / 0.3) + 4)
    choice = choose(job, there)
    judged = [judge(job, there, layout) for layout in layouts(job, there, Fixed())]
    faster = [one for one in judged if not one.fits and one.time.seconds < choice.best.time.seconds]
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for one in faster:
        groups.setdefault(kind_of(one)[2:], []).append(one)
    nearest = [
        min(
            group, key=lambda one: (one.short_device_bytes + one.short_host_bytes, one.time.seconds)
        )
        for group in groups.values()
    ]
    assert len(nearest) > 6
    assert list(choice.discarded) == sorted(nearest, key=order_of)[:6]
    assert any(one.short_device_bytes and one.short_host_bytes for one in faster)


def test_what_is_nearest_is_short_of_the_fewest_bytes_in_all() -> None:
    found = judge(make_job(), budgeted(PLENTY), make_layout(gpus=2, zero=0, shard_ranks=1))
    both = replace(found, short_device_bytes=5, short_host_bytes=5)
    device = replace(found, short_device_bytes=6, layout=replace(found.layout, tokens_per_chunk=20))
    assert _nearest_of_each_kind([both, device]) == (device,)


def test_what_is_just_as_fast_and_does_not_fit_is_not_passed_over() -> None:
    """Where 20 tokens are expected of 40 at most, a chunk of 20 saves nothing over one of 10."""
    job, fixed = (
        make_job(tokens_per_update=20),
        Fixed(zero=0, checkpointing="none", offload_optimizer="none"),
    )
    wanted = [need(job, layout) for layout in layouts(job, budgeted(PLENTY), fixed)]
    assert len(wanted) == 2 and wanted[0] < wanted[1]
    choice = choose(job, budgeted(wanted[0]), fixed)
    assert choice.best.layout.tokens_per_chunk == 10 and choice.discarded == choice.next_best == ()
    choice = choose(job, budgeted(wanted[1]), fixed)
    assert choice.best.layout.tokens_per_chunk == 10, "of equally fast ones that which needs less"


@pytest.mark.parametrize(
    ("gpus", "fixed", "refused"),
    [
        (2, {"tokens_per_chunk": 9}, "to at least 10: a sequence is never split"),
        (2, {"tokens_per_chunk": 10}, ""),
        (12, {"shard_ranks": 5}, "choose one of 2, 3, 4, 6, 12"),
        (12, {"shard_ranks": 4}, ""),
        (1, {"shard_ranks": 2}, "choose one of 1"),
        (1, {"shard_ranks": 1, "zero": 2}, ""),
        (2, {"shard_ranks": 1, "zero": 1}, "choose one of 2"),
        (2, {"shard_ranks": 1, "zero": 0}, ""),
        (2, {"shard_ranks": 1}, ""),
        (2, {"shard_ranks": 2, "zero": 0}, "leave zero or shard_ranks open"),
    ],
)
def test_settings_that_no_layout_has(gpus: int, fixed: dict[str, Any], refused: str) -> None:
    given: dict[str, Any] = {
        "checkpointing": "none",
        "offload_optimizer": "none",
        "tokens_per_chunk": 10,
        **fixed,
    }
    there = GpuCluster(gpus=gpus, gpu=make_gpu(gpus_per_host=8))
    if not refused:
        assert choose(make_job(), there, Fixed(**given)).best.fits
        return
    with pytest.raises(ConfigError) as caught:
        choose(make_job(), there, Fixed(**given))
    assert caught.value.hint.endswith(refused)


# What a refusal says.


def refusal(job: TrainingJob, there: GpuCluster, **fixed: Any) -> MemoryBudgetError:
    with pytest.raises(MemoryBudgetError) as caught:
        choose(job, there, Fixed(**fixed))
    return caught.value


PLAIN: dict[str, Any] = {
    "zero": 0,
    "checkpointing": "none",
    "tokens_per_chunk": 10,
    "offload_optimizer": "none",
}


def test_a_refusal_says_what_is_short_and_by_how_much() -> None:
    """The layout that comes nearest, its four largest parts, the device, the host, or both."""
    job = make_job(
        longest=512, mean_tokens=512, most_tokens_per_update=4096, tokens_per_update=4096
    )
    there = budgeted(2000 * MIB, gpus=1, host_bytes=1000)
    given: dict[str, Any] = {**PLAIN, "tokens_per_chunk": 512}
    fixed = Fixed(**given)
    layout = make_layout(gpus=1, zero=0, shard_ranks=1, tokens_per_chunk=512)
    other, found = (
        judge(job, there, replace(layout, checkpointing=mode)) for mode in ("full", "none")
    )
    nearest = replace(found, short_device_bytes=7, short_host_bytes=5)
    judged = [replace(other, short_device_bytes=13), replace(other, short_host_bytes=14), nearest]
    told = refusal_of(job, there, fixed, judged).message
    largest = sorted(nearest.peak.parts, key=lambda name: -nearest.peak.parts[name])[:4]
    parts = ", ".join(f"{name} {words(nearest.peak.parts[name])}" for name in largest)
    device = (
        f"{nearest.device_bytes} bytes on each GPU at moment '{nearest.peak.name}' ({parts}), "
        f"budget {2000 * MIB}: "
        "7 bytes too little"
    )
    host = f"{nearest.host_bytes} bytes of host memory per GPU, budget 600: 5 bytes too little"
    head = (
        "the model does not fit on 1 × toy; the layout that comes nearest "
        f"({nearest.layout.words()}) needs "
    )
    assert len(nearest.peak.parts) > 4 and told == f"{head}{device} and {host}"
    assert (
        refusal_of(job, there, fixed, [replace(nearest, short_host_bytes=0)]).message
        == head + device
    )
    assert (
        refusal_of(job, there, fixed, [replace(nearest, short_device_bytes=0)]).message
        == head + host
    )
    slower = replace(
        nearest, time=replace(nearest.time, host_s=nearest.time.host_s + 1), device_bytes=1
    )
    assert refusal_of(job, there, fixed, [slower, nearest]).message == told, (
        "of equally near ones the faster"
    )


def test_a_refusal_opens_the_settings_that_were_given_and_then_looks_for_more() -> None:
    """On two GPUs that hold just what ZeRO-3 needs: without the stage, or with more of them."""
    job = make_job(model=replace(TOY, num_layers=40, num_parameters=40 * 4976 + 2020))
    split = make_layout(gpus=2, zero=3, shard_ranks=2)
    flat = replace(split, zero=0, shard_ranks=1)
    assert need(job, split) < need(job, flat)
    there = budgeted(need(job, split))
    ways = (
        refusal(job, there, **PLAIN, offload_gradients=False)
        .hint.removeprefix("what fits: ")
        .split("; or ")
    )
    assert ways == [f"zero = 3 instead of 0 ({split.words()})", f"2 × t4 ({flat.words()})"], (
        "weights that lie whole need no fewer bytes on more GPUs"
    )


def test_another_stage_may_split_states_over_other_ranks() -> None:
    job = make_job(model=replace(TOY, num_parameters=500_000_000))
    there = budgeted(need(job, make_layout(gpus=4, zero=3, shard_ranks=4)), gpus=4)
    hint = refusal(job, there, **PLAIN | {"zero": 1, "shard_ranks": 2}).hint
    assert "zero = 3 instead of 1 (ZeRO-3, checkpointing none" in hint


def test_a_refusal_proposes_the_fewest_gpus_up_to_4096() -> None:
    """Each doubling splits the states further; settings of the split are opened, the stage too
    where one GPU had none."""
    job = make_job(model=replace(TOY, num_parameters=500_000_000))
    fixed: dict[str, Any] = PLAIN | {"zero": 3}
    enough = need(job, make_layout(gpus=16, zero=3, shard_ranks=16))
    found = refusal(job, budgeted(enough, gpus=2), **fixed, shard_ranks=2).hint
    assert "16 GPUs (ZeRO-3, " in found
    found = refusal(job, budgeted(enough, gpus=1), **PLAIN | {"zero": 0}).hint
    assert "16 GPUs (ZeRO-3, " in found
    widest = need(job, make_layout(gpus=4096, zero=3, shard_ranks=4096))
    assert "4096 GPUs (ZeRO-3, " in refusal(job, budgeted(widest, gpus=2048), **fixed).hint
    assert " GPUs (" not in refusal(job, budgeted(widest - 1, gpus=2048), **fixed).hint
    assert " GPUs (" not in refusal(job, budgeted(widest - 1, gpus=4096), **fixed).hint


def test_more_gpus_share_hosts_that_have_as_much_each() -> None:
    """A host of four GPUs with so much memory; one of them alone would have had four times as
    much."""
    job = make_job(model=replace(TOY, num_parameters=50_000_000))
    fixed: dict[str, Any] = PLAIN | {"zero": 0, "offload_optimizer": "host"}
    pinned = host_bytes_of(
        job, make_layout(gpus=1, zero=0, shard_ranks=1, offload_optimizer="host"), "resident"
    )
    few = int(pinned / 0.6)
    assert (
        refusal(job, GpuCluster(gpus=2, gpu=make_gpu(), host_bytes=few), **fixed).hint.count(
            "GPUs ("
        )
        == 0
    )
    by_ranks: dict[str, Any] = PLAIN | {"zero": 1, "offload_optimizer": "host"}
    half = refusal(job, GpuCluster(gpus=2, gpu=make_gpu(), host_bytes=few // 2), **by_ranks).hint
    assert "4 GPUs (ZeRO-1" in half, "a host of four shares as much as two had, each"
    vast = refusal(job, GpuCluster(gpus=8, gpu=make_gpu(), host_bytes=few // 4), **by_ranks).hint
    assert "16 GPUs (ZeRO-1" in vast, "further hosts bring their own"


def test_a_refusal_proposes_the_smallest_of_the_larger_gpus() -> None:
    job = make_job()
    same = GpuCluster(
        gpus=1, gpu=replace(GPUS["l4"], device_bytes=GPUS["l4"].device_bytes, name="small")
    )
    # 18 bytes each: 27.6 GiB
    large = replace(job.model, num_parameters=int(0.92 * 30 * 2**30 / 18))
    hint = refusal(replace(job, model=large), same, **PLAIN).hint
    assert "1 × v100-32g (one GPU" in hint and "l4" not in hint
    # 12 bytes each are more than 60 % of 128 GiB
    host = make_job(model=replace(TOY, num_parameters=10**10))
    offloaded = PLAIN | {"offload_optimizer": "host"}
    hint = refusal(host, GpuCluster(gpus=1, gpu=GPUS["h100-pcie"]), **offloaded).hint
    assert "1 × h200 (one GPU" in hint and "h100" not in hint, "one that is as large is not larger"
    tiny = GpuCluster(gpus=1, gpu=replace(GPUS["l4"], device_bytes=MIB, name="small"))
    assert "1 × t4 (one GPU" in refusal(job, tiny, **PLAIN).hint


def test_a_refusal_says_how_long_sequences_may_be_in_steps_of_256() -> None:
    long: dict[str, Any] = {
        "mean_tokens": 1380,
        "tokens_per_update": 1380,
        "most_tokens_per_update": 1380,
    }
    job = make_job(longest=1380, **long)
    fixed: dict[str, Any] = PLAIN | {"tokens_per_chunk": None}
    one = make_layout(gpus=1, zero=0, shard_ranks=1)

    def at(tokens: int, job: TrainingJob = job) -> int:
        engine = replace(job.engine, longest=tokens) if job.engine is not None else None
        shorter = replace(job, longest=tokens, engine=engine)
        layout = replace(one, tokens_per_chunk=tokens)
        return need(shorter, layout, running=job.engine.running if job.engine is not None else 0)

    for budget, tokens in ((at(768), 768), (at(1024) - 1, 768), (at(1280), 1280), (at(256), 256)):
        hint = refusal(job, budgeted(budget, gpus=1), **fixed).hint
        assert f"sequences of at most {tokens} tokens instead of 1380" in hint
    assert "sequences of at most" not in refusal(job, budgeted(at(256) - 1, gpus=1), **fixed).hint
    paged = make_job(
        longest=1380, engine=replace(ENGINE, longest=1380, kv_bytes_per_token=10**5), **long
    )
    hint = refusal(paged, budgeted(at(512, paged), gpus=1), **fixed, residency="resident").hint
    assert "sequences of at most 512 tokens" in hint, "pages are of shorter sequences too"
    none = refusal(
        job, budgeted(1, gpus=4096, host_bytes=1), **PLAIN | {"tokens_per_chunk": 1380}
    ).hint
    assert "t4" in none


def test_no_way_out_is_said_plainly() -> None:
    there = GpuCluster(gpus=4096, gpu=replace(make_gpu(), device_bytes=1 << 50))
    job = make_job(model=replace(TOY, num_parameters=10**15))
    assert refusal(job, there, **PLAIN | {"checkpointing": None}).hint.startswith(
        "no number of these GPUs"
    )


# Ways, and the settings of a run that ask less.


def test_of_each_kind_the_first_that_fits_is_told() -> None:
    def way(size: int) -> Way[int, str]:
        return Way(asked=size, words=lambda found: f"{size} {found}")

    kinds = [[way(9), way(3), way(2)], [way(8)], [way(1), way(0)]]
    assert list(ways_out(kinds, lambda asked: "" if asked < 5 else None)) == ["3 ", "1 "]
    assert join_ways(["a", "b"]) == "what fits: a; or b"


def offers(**changes: Any) -> list[list[str]]:
    return [[way.words(None) for way in kind] for kind in lighter(make_inputs(**changes))]


OFFLINE: dict[str, Any] = {"online": False, "offload_optimizer": "host", "offload_gradients": True}


def test_less_is_kept_and_chunks_are_halved() -> None:
    """Checkpointing, chunks, shards, offloading: the cheapest first."""
    modes = [f'trainer.checkpointing = "{mode}"' for mode in ("selective", "full")]
    assert [offers(checkpointing=mode)[0] for mode in ("none", "selective", "full")] == [
        modes,
        modes[1:],
        [],
    ]
    assert offers(batch_invariant=True)[0] == []

    def chunks(tokens: int | None) -> list[str]:
        return [
            text.removeprefix("trainer.tokens_per_chunk = ")
            for text in offers(tokens_per_chunk=tokens)[1]
        ]

    assert [chunks(tokens) for tokens in (161, 100, 81, 41, 40, None)] == [
        ["80", "40"], ["50", "40"], ["40"], ["40"], [], []
    ]  # fmt: skip
    asked = [way.asked for way in list(lighter(make_inputs(tokens_per_chunk=100)))[1]]
    assert [one.tokens_per_chunk for one in asked if isinstance(one, PlanInputs)] == [50, 40]


def test_more_lies_in_shards() -> None:
    def stages(**changes: Any) -> list[tuple[str, PlanInputs]]:
        kind = list(lighter(make_inputs(**changes)))[2]
        return [(way.words(None), way.asked) for way in kind]

    assert stages() == [] and len(stages(ranks=2)) == 3
    flat = stages(ranks=4)
    assert [text for text, _ in flat] == [
        f"parallel.zero = {zero} with parallel.shard_ranks = 4" for zero in (1, 2, 3)
    ]
    for (_, asked), zero in zip(flat, (1, 2, 3), strict=True):
        assert set(asked.shards) == {"actor", "critic", "reference", "reward"}
        assert set(asked.shards.values()) == {Shards(zero=zero, ranks=4)}
        assert asked.shared_weights == (zero == 1), (
            "engines of their own where no rank has whole weights"
        )
    lain = {name: Shards(zero=1, ranks=2) for name in ("actor", "critic", "reference")}
    higher = stages(ranks=4, shards=lain, lie_apart=("critic",), shared_weights=False)
    assert [text for text, _ in higher] == ["parallel.zero = 2", "parallel.zero = 3"]
    two = Shards(zero=2, ranks=2)
    assert higher[0][1].shards == {
        "actor": two, "critic": lain["critic"], "reference": two, "reward": Shards(zero=2, ranks=1)
    }  # fmt: skip
    assert not higher[0][1].shared_weights
    assert stages(ranks=4, shards={"actor": Shards(zero=3, ranks=4)}) == []
    one = "parallel.zero = 1 with parallel.shard_ranks = 4"
    for whole in (
        {"batch_invariant": True},
        {"engines_alone": True},
        {"offload_parameters": ("reference",)},
    ):
        assert [text for text, _ in stages(ranks=4, **whole)] == [one]
    apart = {"offload_parameters": ("reference",), "lie_apart": ("reference",)}
    assert len(stages(ranks=4, **apart)) == 3
    assert [asked.shared_weights for _, asked in stages(ranks=4, shared_weights=False)] == [
        False
    ] * 3


def test_more_is_offloaded() -> None:
    """State first, then gradients, then weights of models that are not trained, then of all that
    may."""

    def texts(**changes: Any) -> list[str]:
        return [text.replace("trainer.", "") for text in offers(**changes)[3]]

    host, also = 'offload_optimizer = "host"', " and offload_gradients = true"
    disk = 'offload_optimizer = "disk"'
    assert texts() == [host, host + also]
    assert texts(disk_tier=True) == [host, host + also, disk, disk + also]
    assert texts(offload_optimizer="host") == [host + also]
    assert texts(offload_optimizer="disk", disk_tier=True) == [disk + also]
    assert texts(**OFFLINE | {"online": True}) == []
    assert set(texts(offload_gradients=True)) == {host + also}

    def weights(*names: str, place: str = "host") -> str:
        all_else = f'offload_optimizer = "{place}", offload_gradients = true and '
        return f"{all_else}offload_parameters = {json.dumps(names)}"

    def frozen(*names: str) -> str:
        return f"offload_parameters = {json.dumps(names)}"

    assert texts(**OFFLINE) == [weights("actor")]
    assert texts(online=False) == [host, host + also, weights("actor")]
    assert texts(**OFFLINE, disk_tier=True) == [
        disk + also,
        disk + also,
        weights("actor"),
        weights("actor", place="disk"),
    ]
    assert texts(**OFFLINE, reference=True) == [frozen("reference"), weights("actor", "reference")]
    assert texts(**OFFLINE, reference=True, reward_model=TOY, critic=True) == [
        frozen("reference", "reward"), weights("actor", "critic", "reference", "reward")
    ]  # fmt: skip
    assert texts(**OFFLINE | {"online": True}, reference=True) == [frozen("reference")]
    assert texts(**OFFLINE | {"online": True}, critic=True) == [weights("critic")]
    for kept in ({"reference_average": True}, {"batch_invariant": True}):
        assert texts(**OFFLINE, reference=True, **kept) == [weights("actor")]
    for zero, may in ((1, ["actor"]), (2, [])):
        lain = {"shards": {"actor": Shards(zero=zero, ranks=4)}, "ranks": 4}  # pyright: ignore
        assert texts(**OFFLINE, **lain) == [weights(*may) for _ in may]
    chosen = texts(**OFFLINE, reference=True, offload_parameters=("reference",))
    assert chosen == [weights("actor", "reference")]
    assert texts(**OFFLINE, reference=True, offload_parameters=("actor",)) == [
        frozen("actor", "reference")
    ], "what was chosen stays"
    *_, all_of_it = list(lighter(make_inputs(**OFFLINE | {"offload_gradients": False})))[3]
    asked = all_of_it.asked
    assert (asked.offload_optimizer, asked.offload_gradients, asked.offload_parameters) == (
        "host",
        True,
        ("actor",),
    )
    *_, last = list(lighter(make_inputs(online=False)))[3]
    assert (last.asked.offload_optimizer, last.asked.offload_parameters) == ("host", ("actor",))
