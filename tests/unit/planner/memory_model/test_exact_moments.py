"""Moments of a step, to the byte, and its predicted seconds by cause: each worked out by hand for a
small model. Past 500 lines: all of it reads the same few models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gyre.planner.memory_model.engine import EngineDemand
from gyre.planner.memory_model.job import TrainingJob
from gyre.planner.memory_model.peaks import (
    PeakInstant,
    device_bytes_of,
    disk_bytes_of,
    host_bytes_of,
    phase_moments,
    train_moments,
)
from gyre.planner.memory_model.states import Layout
from gyre.planner.search.candidates import GpuCluster
from gyre.planner.search.speed import (
    StepTime,
    chunks_per_update,
    forward_flops,
    sent_bytes,
    step_time,
)
from unit.planner.memory_model.test_exact_bytes import FLAT, ONE, TOY, UNTIED, P, make_layout
from unit.planner.search.test_exact_search import ENGINE, make_gpu, make_job

MIB = 1 << 20
# a chunk of 10 on each of eight ranks, 9 targets
JOB = make_job(tokens_per_update=80, most_tokens_per_update=80)
KEPT = 3 * 10 * 696 - 284 + 9 * (64 + 8) + 10 * 40 + 9 * 304
# the head's gradient, the rows' in float32, two blocks of logits
LOSS = 2 * 2000 + 9 * 20 * 10 + 4 * 9 * 100
LAYER = 2 * (10 * (2 * 20 + 2 * 50 + 32) + 3 * 20 * 50 + 20 * 32)
GROUP3, GROUP2 = 10 * 4976, 6 * 4976
SHARD = 2119
SHARDS = {"actor.params": 4 * SHARD, "actor.grads": 4 * SHARD, "actor.optimizer": 8 * SHARD}
WHOLE = {
    "actor.params": 2 * P,
    "actor.grads": 4 * P,
    "actor.optimizer": 8 * P,
    "actor.master": 4 * P,
}


def parts_of(job: TrainingJob, layout: Layout) -> dict[str, dict[str, int]]:
    return {moment.name: dict(moment.parts) for moment in train_moments(job, layout)}


def test_chunks_of_a_job() -> None:
    def tokens(most: int, room: int) -> int:
        return replace(JOB, most_tokens_per_update=most).chunk_tokens(
            make_layout(tokens_per_chunk=room)
        )

    assert [tokens(80, 10), tokens(800, 40), tokens(801, 200), tokens(8, 40)] == [10, 40, 101, 10]
    assert replace(JOB, most_tokens_per_update=161).most_chunks(make_layout()) == 3
    assert (JOB.copies, replace(JOB, critic=True).copies) == (1, 2)
    assert JOB.offload_cut_bytes == 128 * MIB and JOB.target_share == JOB.updates_per_step == 1
    assert not (JOB.critic or JOB.reference or JOB.snapshot_background or JOB.reference_average)


def test_a_training_step_of_flat_buffers() -> None:
    """Embedding and head are one: its gradient by the head waits for that by the embedding."""
    assert parts_of(JOB, FLAT) == {
        "loss": WHOLE | {"kept activations": KEPT, "log-probs": LOSS},
        "deepest layer": WHOLE
        | {"kept activations": KEPT, "layer's gradients": LAYER, "head's gradient": 4000},
        "end of backward": WHOLE | {"embedding's and head's gradients": 8000},
        "optimizer step": WHOLE,
    }
    apart = parts_of(replace(JOB, model=UNTIED), FLAT)
    assert "head's gradient" not in apart["deepest layer"], "it is in the flat buffer"
    assert apart["end of backward"]["embedding's and head's gradients"] == 4000
    zero1 = parts_of(replace(JOB, model=UNTIED), make_layout(zero=1))
    assert "head's gradient" not in zero1["deepest layer"]
    assert zero1["end of backward"]["embedding's and head's gradients"] == 4000
    full = parts_of(JOB, replace(FLAT, checkpointing="full"))["deepest layer"]
    assert full["computed again"] == 10 * 656
    some = {0.5: 5, 0.01: 1, 1.0: 9}
    for share, targets in some.items():
        found = parts_of(replace(JOB, target_share=share), FLAT)["loss"]
        assert found["log-probs"] == 4000 + targets * 20 * 10 + 4 * targets * 100


def test_a_training_step_in_shards() -> None:
    """Embedding and norm stay whole; a layer and the next one come whole, and its gradients
    twice."""
    around = {"gathered weights": 2 * 2020}
    assert parts_of(JOB, make_layout()) == {
        "loss": SHARDS | around | {"kept activations": KEPT, "log-probs": LOSS},
        "deepest layer": SHARDS | around | {
            "kept activations": KEPT, "layer's gradients": LAYER + GROUP3, "head's gradient": 4000
        },
        "end of backward": SHARDS | {"embedding's and head's gradients": 6 * 2020},
        "optimizer step": SHARDS,
    }  # fmt: skip
    fp8 = parts_of(replace(JOB, matmul="fp8"), make_layout())["deepest layer"]["layer's gradients"]
    assert fp8 == LAYER + 10 * 220 + 2000 + 8 * 4976
    apart = parts_of(replace(JOB, model=UNTIED), make_layout())
    assert apart["loss"]["gathered weights"] == 2 * 4020
    assert apart["deepest layer"]["gathered weights"] == 2 * 2020, "a head of its own is let go"
    assert apart["deepest layer"]["head's gradient"] == 4 * 2000, "and summed in float32"
    stage2 = parts_of(replace(JOB, model=UNTIED), make_layout(zero=2))["deepest layer"]
    assert (stage2["gathered weights"], stage2["head's gradient"]) == (2 * (P + 2000), 4 * 2000)
    large = replace(TOY, vocab_size=300, num_parameters=P + 4000)
    end = parts_of(replace(JOB, model=large), make_layout())["end of backward"]
    assert end["embedding's and head's gradients"] == 6 * 6020 > 2 * (2 * 6000)


def test_what_stays_from_one_chunk_to_the_next() -> None:
    """Weights of ZeRO-2; where gradients are summed once, all of them in float32 from the second
    chunk on."""
    two = replace(JOB, most_tokens_per_update=160)
    every = {"gathered weights": 2 * P}
    zero2 = make_layout(zero=2)
    assert parts_of(JOB, zero2)["end of backward"] == SHARDS | {
        "embedding's and head's gradients": 6 * 2020
    }
    found = parts_of(two, zero2)
    assert found["end of backward"] == SHARDS | every | {
        "embedding's and head's gradients": 6 * 2020
    }
    assert found["deepest layer"] == SHARDS | every | {
        "kept activations": KEPT, "layer's gradients": LAYER + GROUP2, "head's gradient": 4000
    }  # fmt: skip
    assert "gathered weights" not in parts_of(two, make_layout())["end of backward"]
    waits = {"gradients not yet summed": 4 * P}
    once = parts_of(two, replace(zero2, sum_gradients="update"))
    assert (
        once["loss"] == found["loss"] | waits
        and once["deepest layer"] == found["deepest layer"] | waits
    )
    assert once["end of backward"] == SHARDS | every | waits | {
        "embedding's and head's gradients": 8000
    }
    assert parts_of(JOB, replace(zero2, sum_gradients="update")) == parts_of(JOB, zero2)
    both = parts_of(replace(two, critic=True), replace(zero2, sum_gradients="update"))
    assert both["loss"]["gradients not yet summed"] == 8 * P
    wide = replace(UNTIED, vocab_size=20_000, num_parameters=2 * 400_000 + 20 + 3 * 4976)
    deepest = parts_of(replace(two, model=wide), make_layout(sum_gradients="update"))[
        "deepest layer"
    ]
    assert deepest["layer's gradients"] == 4 * 400_000, (
        "what is reduced leaves its place for a layer's"
    )
    assert "head's gradient" not in deepest


def test_offloaded_state_leaves_places_behind() -> None:
    job = replace(JOB, offload_cut_bytes=10_000)
    away = replace(
        FLAT, offload_optimizer="host", offload_gradients=True, offload_parameters=("actor",)
    )
    base = {"actor.staging": 3 * 2 * 4096, "actor.layer_buffers": 2 * (2020 + 2 * 4976)}
    assert parts_of(job, away)["optimizer step"] == base
    kept = parts_of(replace(job, critic=True), replace(away, offload_parameters=("critic",)))[
        "optimizer step"
    ]
    assert kept == {
        "actor.params": 2 * P, "actor.staging": 3 * 2 * 4096, "critic.staging": 3 * 2 * 4096,
        "critic.layer_buffers": 2 * (2020 + 2 * 4976),
    }  # fmt: skip
    assert host_bytes_of(job, away, "resident") == 18 * P + 2 * 10_000
    assert (
        host_bytes_of(job, replace(away, offload_optimizer="disk"), "resident")
        == 6 * P + 20_000 + 3 * 2 * 3072
    )
    assert disk_bytes_of(job, replace(away, offload_optimizer="disk")) == 12 * P
    assert (
        disk_bytes_of(replace(job, critic=True), replace(away, offload_optimizer="disk")) == 24 * P
    )
    asks = replace(job, reference=True)
    frozen = replace(FLAT, offload_parameters=("reference",))
    assert host_bytes_of(asks, frozen, "resident") == 2 * P
    assert host_bytes_of(asks, frozen, "phase") == (8 + 4 + 2) * P, (
        "its places on the device are no copy; the actor's state leaves when it is asked"
    )


PAGES = {"engine.kv": 8 * 10_000 + 1000, "engine.graphs": 700, "engine.buffers": 90}
FIXED = {"engine.graphs": 700, "engine.buffers": 90}
FORWARD = 10 * 696 + 4 * 10 * 100


def phases_of(
    job: TrainingJob, layout: Layout, residency: Any, running: int = 8
) -> dict[str, dict[str, int]]:
    return {
        moment.name: dict(moment.parts) for moment in phase_moments(job, layout, residency, running)
    }


def test_phases_of_whole_models() -> None:
    """The engine reads the trainer's weights."""
    job = replace(JOB, engine=ENGINE, reference=True)
    asks = {"reference": 2 * P}
    stay, turn = phases_of(job, FLAT, "resident"), phases_of(job, FLAT, "phase")
    assert stay["start"] == WHOLE | asks | PAGES
    assert stay["optimizer step"] == WHOLE | asks | PAGES
    assert stay["score"] == WHOLE | asks | PAGES | {"forward pass": FORWARD}
    assert stay["rollout"] == WHOLE | asks | PAGES | {"engine's step": 5000}
    assert turn["start"] == WHOLE, "the reference is parked when it is made"
    assert turn["optimizer step"] == WHOLE | FIXED
    weights = {"actor.params": 2 * P}
    assert turn["score"] == weights | asks | FIXED | {"forward pass": FORWARD}
    assert turn["rollout"] == weights | PAGES | {"engine's step": 5000}
    assert phases_of(job, FLAT, "phase", 3)["rollout"]["engine.kv"] == 31_000, "a page is spare"
    assert (ENGINE.page_bytes, ENGINE.pages_per_sequence) == (1000, 10)
    assert list(phases_of(JOB, FLAT, "resident", 0)) == [
        "start", "loss", "deepest layer", "end of backward", "optimizer step", "evaluate"
    ]  # fmt: skip
    alone = phases_of(JOB, FLAT, "resident", 0)
    assert alone["evaluate"] == WHOLE | {"forward pass": FORWARD}
    offline = phases_of(replace(JOB, reference=True), FLAT, "phase", 0)
    assert offline["start"] == WHOLE | asks, "the first phase is a score"
    assert (
        offline["score"] == weights | asks | {"forward pass": FORWARD} and "rollout" not in offline
    )
    bare = EngineDemand(running=1, longest=10, kv_bytes_per_token=1, working_bytes=1, graph_bytes=0)
    assert bare.buffer_bytes == 0


def test_phases_of_models_in_shards() -> None:
    """The engine has weights of its own; a run of the largest tensor is rounded as the stage
    begins."""
    job, layout = replace(JOB, engine=ENGINE, reference=True), make_layout()
    asks, own = {"reference": 2 * SHARD}, {"engine.weights": 2 * P}
    run = {"run being read": 2 * 250}  # of 2,000 numbers, a part on each of 8 ranks
    stay, turn = phases_of(job, layout, "resident"), phases_of(job, layout, "phase")
    assert stay["start"] == SHARDS | asks | own | PAGES, "the engine comes last"
    alone = replace(job, engine=None)
    assert phases_of(alone, layout, "resident", 0)["start"] == SHARDS | asks | run
    around = {"gathered weights": 2 * 2020 + 2 * 2 * 4976, "forward pass": FORWARD}
    assert stay["score"] == SHARDS | asks | own | PAGES | around
    assert stay["rollout"] == SHARDS | asks | own | PAGES | {"engine's step": 5000}
    for zero, whole in ((1, True), (2, False)):
        for residency in ("resident", "phase"):
            rollout = phases_of(job, make_layout(zero=zero), residency)["rollout"]
            assert rollout.get("engine.weights", 0) == (0 if whole else 2 * P)
            if residency == "phase":
                assert rollout.get("actor.params", 0) == (2 * P if whole else 0)
    assert turn["start"] == own | PAGES, "more than a rank's shards"
    assert phases_of(alone, layout, "phase", 0)["start"] == SHARDS | asks | run
    assert stay["handover"] == SHARDS | asks | own | PAGES | {"weights on their way": 6 * P}
    assert turn["handover"] == own | FIXED | {
        "actor.params": 4 * SHARD,
        "weights on their way": 6 * P,
    }
    assert turn["rollout"] == own | PAGES | {"engine's step": 5000}

    def run_of(layout: Layout, **changes: Any) -> int:
        return phases_of(replace(JOB, **changes), layout, "resident", 0)["start"].get(
            "run being read", 0
        )

    assert run_of(layout) == 500 and run_of(make_layout(zero=2)) == 500
    assert run_of(make_layout(zero=1)) == run_of(layout, dtype="float32") == 0
    assert run_of(layout, model=replace(TOY, vocab_size=151)) == 2 * 378  # 3,020 / 8 is 377.5
    assert run_of(layout, reward_model=replace(TOY, mlp_size=80)) == 2 * 400
    large = replace(TOY, num_parameters=100 * P)
    parked = phases_of(replace(job, reward_model=large), layout, "phase")["start"]
    assert parked == {"reward": 2 * -(-100 * P // 8), **run}, (
        "what is asked is larger than what is trained, which has left"
    )


def test_a_start_with_weights_on_the_host() -> None:
    """Of the actor two layers and what is around them; the reward model after it is larger."""
    away = replace(
        FLAT, offload_optimizer="host", offload_gradients=True, offload_parameters=("actor",)
    )
    job = replace(
        JOB,
        engine=ENGINE,
        reward_model=replace(TOY, num_parameters=100 * P),
        offload_cut_bytes=10_000,
    )
    assert phases_of(job, away, "phase")["start"] == {"reward": 2 * 100 * P}


def test_a_score_is_of_the_model_that_takes_most() -> None:
    larger = replace(TOY, mlp_size=60)
    assert (
        phases_of(replace(JOB, reward_model=larger), FLAT, "phase", 0)["score"]["forward pass"]
        == FORWARD + 10 * 40
    )
    smaller = replace(TOY, mlp_size=40)
    assert (
        phases_of(replace(JOB, reward_model=smaller), FLAT, "phase", 0)["score"]["forward pass"]
        == FORWARD
    )


def test_host_memory_of_phases_that_take_turns() -> None:
    """What leaves and is not destroyed: gradients are; whole weights that the engine reads stay."""
    job = replace(JOB, engine=ENGINE, reference=True)
    assert host_bytes_of(job, FLAT, "resident") == 0
    assert host_bytes_of(job, FLAT, "phase") == (8 + 4 + 2) * P
    assert host_bytes_of(replace(job, critic=True), FLAT, "phase") == (8 + 4 + 2 + 2 + 8 + 4) * P
    for zero in (2, 3):
        in_shards = host_bytes_of(job, make_layout(zero=zero), "phase")
        assert in_shards == (4 + 8 + 2) * SHARD + 2 * P, "the engine's own weights leave too"
    assert host_bytes_of(job, make_layout(zero=1), "phase") == (8 + 4) * SHARD + 2 * P
    assert host_bytes_of(replace(job, reference_average=True), FLAT, "phase") == (8 + 4 + 2 + 4) * P
    disk = replace(FLAT, offload_optimizer="disk")
    between = host_bytes_of(job, disk, "resident")
    assert host_bytes_of(job, disk, "phase") == between + 2 * P
    assert host_bytes_of(replace(job, engine=None), FLAT, "phase") == (8 + 4 + 2) * P, (
        "the reference makes the actor's state leave"
    )
    staged = replace(JOB, snapshot_background=True, reference=True, critic=True)
    assert host_bytes_of(staged, FLAT, "resident") == -(-(24 + 2) * P // 8)


def test_device_memory_that_a_moment_needs() -> None:
    """What comes and goes leaves a tenth in fragments; 608 MiB are outside, and another GiB among
    several GPUs."""
    whole = {"actor.a": 1000, "critic.a": 200, "engine.a": 30, "reference": 4, "reward": 5}
    moment = PeakInstant(name="loss", parts=whole | {"kept activations": 105})
    assert moment.allocated_bytes == 1239 + 105
    assert device_bytes_of(moment, ONE) == 1239 + 115 + 608 * MIB
    assert device_bytes_of(moment, FLAT) == device_bytes_of(moment, TWO) == 1239 + 115 + 1632 * MIB
    assert GpuCluster(gpus=1, gpu=make_gpu(1000)).device_budget_bytes == 920


# Seconds. GPUs of 5·10¹³ FLOP/s in training, 10¹² B/s of memory, 10¹⁰ B/s to the host, four in a
# host, which share.

TWO = make_layout(gpus=2, zero=0, shard_ranks=1)
PAIR = make_job()  # 20 tokens on each of two ranks, in two chunks
PRODUCTS, ATTENTION, HEAD = 2 * 3 * 4976, 4 * 3 * 32 * 10 / 2, 2 * 2000
LINK, SLOW_LINK = 1e11 * 342 / 450, 50e9
SHARED = 1 - 27.9 / 55.0
SLOW = make_gpu(bf16_flops=1e6, fp16_flops=2e6)


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-9)


def test_work_of_a_token() -> None:
    assert forward_flops(PAIR) == (PRODUCTS, ATTENTION, HEAD)
    assert [
        chunks_per_update(replace(PAIR, tokens_per_update=n), TWO) for n in (0, 20, 40, 41)
    ] == [1, 1, 2, 3]
    assert StepTime(
        compute_s=1, again_s=2, traffic_s=100, exposed_s=4, memory_s=8, host_s=16, switch_s=32
    ).seconds == 63, "of the traffic what is exposed"  # fmt: skip


def test_seconds_of_computing() -> None:
    def times(gpu: Any = SLOW, layout: Layout = TWO, **changes: Any) -> tuple[float, float]:
        found = step_time(replace(PAIR, **changes), layout, gpu, "resident")
        return found.compute_s, found.again_s

    token = 20 / 5e5
    work = 3 * (PRODUCTS + ATTENTION + HEAD) * token
    assert times() == (near(work), 0.0)
    assert times(critic=True)[0] == near(2 * work)
    assert times(dtype="float32")[0] == near(15 * work)
    assert times(matmul="fp8")[0] == near(work - 3 * PRODUCTS * token * (1 - 1 / 1.39))
    assert times(make_gpu(bf16_flops=0, fp16_flops=2e6))[0] == near(work / 2)
    assert times(make_gpu())[0] == near(2 * 3 * 0.6e-3), "small chunks wait for their kernels"
    full = times(layout=replace(TWO, checkpointing="full"))[1]
    assert full == near((PRODUCTS + ATTENTION) * token)
    selective = times(layout=replace(TWO, checkpointing="selective"))[1]
    assert selective == near(PRODUCTS * token * 2 * 20 * 50 / 4976)

    def logits_again(saving: Any, tokens: int, vocab: int, **changes: Any) -> bool:
        model = replace(TOY, vocab_size=vocab, num_parameters=P + 20 * (vocab - 100))
        layout = replace(TWO, tokens_per_chunk=tokens, **changes)
        again = times(layout=layout, model=model, saving=saving)[1] / token
        layers = PRODUCTS + ATTENTION if layout.checkpointing == "full" else 0.0
        assert again in (near(layers), near(layers + 2 * vocab * 20))
        return again != near(layers)

    assert logits_again("torch_cuda", 16_384, 1025) and not logits_again("torch_cuda", 16_384, 1024)
    assert not logits_again("triton", 131_072, 1025), "logits are kept"
    assert logits_again("triton", 131_072, 1025, checkpointing="full")
    assert not logits_again("triton", 16_384, 1025, checkpointing="full")


def test_bytes_that_a_rank_sends() -> None:
    """Eight ranks; a chunk of 10 tokens each, of 240 in all: three chunks."""
    job = replace(JOB, tokens_per_update=240)
    layers = P - 2020
    assert sent_bytes(job, ONE) == {}
    assert sent_bytes(job, FLAT) == {"all-reduce": int(2 * 7 / 8 * 4 * P)}
    assert sent_bytes(replace(job, critic=True), FLAT) == {"all-reduce": 2 * int(2 * 7 / 8 * 4 * P)}
    whole = {"reduce-scatter": int(7 / 8 * 4 * P), "all-gather": int(7 / 8 * 2 * P)}
    assert sent_bytes(job, make_layout(zero=1)) == whole
    assert sent_bytes(replace(job, matmul="fp8"), make_layout(zero=1)) == whole
    zero2 = {"reduce-scatter": int(7 / 8 * 3 * 2 * P), "all-gather": int(7 / 8 * 2 * P)}
    assert sent_bytes(job, make_layout(zero=2)) == zero2
    in_8_bits = zero2 | {"all-gather": int(7 / 8 * (2 * 2020 + layers))}
    assert sent_bytes(replace(job, matmul="fp8"), make_layout(zero=2)) == in_8_bits
    zero3 = zero2 | {"all-gather": int(7 / 8 * 3 * (2 * 2020 + 2 * 2 * layers))}
    assert sent_bytes(job, make_layout()) == zero3
    assert sent_bytes(job, make_layout(sum_gradients="update")) == zero3 | {
        "reduce-scatter": int(7 / 8 * 4 * P)
    }
    both = {
        name: size / 2
        for name, size in sent_bytes(replace(job, critic=True), make_layout()).items()
    }
    assert both == pytest.approx(zero3, abs=1)
    untied = sent_bytes(replace(job, model=UNTIED), make_layout())["all-gather"]
    assert untied == int(7 / 8 * 3 * (2 * 4020 + 2 * 2 * layers))
    assert sent_bytes(job, make_layout(zero=1, shard_ranks=2)) == {
        "reduce-scatter": int(1 / 2 * 4 * P), "all-gather": int(1 / 2 * 2 * P),
        "all-reduce among groups": int(2 * 3 / 4 * 4 * P / 2),
    }  # fmt: skip


def test_seconds_on_the_wire() -> None:
    """Four GPUs in a host; a group that crosses hosts takes the network. Each collective takes 40
    µs to start."""
    job = replace(JOB, tokens_per_update=160)

    def traffic(layout: Layout, **changes: Any) -> float:
        return step_time(replace(job, **changes), layout, make_gpu(), "resident").traffic_s

    def bytes_of(layout: Layout) -> list[int]:
        return list(sent_bytes(job, layout).values())

    assert traffic(FLAT) == near(bytes_of(FLAT)[0] / SLOW_LINK)
    four = replace(FLAT, gpus=4)
    assert traffic(four) == near(bytes_of(four)[0] / LINK)
    zero2, zero3 = make_layout(zero=2, shard_ranks=4), make_layout(shard_ranks=4)
    inside, among = bytes_of(zero2)[:2], bytes_of(zero2)[2]
    assert traffic(zero2) == near(sum(inside) / LINK + among / SLOW_LINK + 40e-6 * 3 * (1 + 2))
    inside, among = bytes_of(zero3)[:2], bytes_of(zero3)[2]
    assert traffic(zero3) == near(sum(inside) / LINK + among / SLOW_LINK + 40e-6 * 3 * (4 + 2))
    assert traffic(zero3, critic=True) == pytest.approx(2 * traffic(zero3), rel=1e-6)
    once = replace(zero3, sum_gradients="update")
    inside, among = bytes_of(once)[:2], bytes_of(once)[2]
    assert traffic(once) == near(sum(inside) / LINK + among / SLOW_LINK + 40e-6 * 3 * (4 + 1))
    zero1 = make_layout(zero=1)
    assert traffic(zero1) == near(sum(bytes_of(zero1)) / SLOW_LINK), "flat buffers go in one piece"


def test_seconds_on_the_wire_that_computing_does_not_hide() -> None:
    job = replace(JOB, tokens_per_update=160)

    def times(layout: Layout, gpu: Any, **changes: Any) -> StepTime:
        return step_time(replace(job, **changes), layout, gpu, "resident")

    flat = times(FLAT, make_gpu())
    assert flat.exposed_s == flat.traffic_s > 0
    slow_link = make_gpu(link_bytes_per_s=1e6, gpus_per_host=8)
    link = 1e6 * 342 / 450
    compute = 2 * 3 * 0.6e-3
    zero3 = times(make_layout(), slow_link)
    assert zero3.compute_s == near(compute) and zero3.exposed_s == near(
        zero3.traffic_s - 0.8 * compute
    )
    assert times(make_layout(), make_gpu(bf16_flops=1e6)).exposed_s == 0.0
    once = make_layout(sum_gradients="update")
    scatter = int(7 / 8 * 4 * P) / link
    fast = times(once, make_gpu(link_bytes_per_s=1e8, gpus_per_host=8))
    assert fast.exposed_s == near(
        max(0.0, fast.traffic_s - 0.8 * compute, scatter / 100 - 0.8 * compute / 2)
    )
    flat_in_shards = times(make_layout(zero=1), make_gpu(bf16_flops=1e6))
    assert flat_in_shards.exposed_s == flat_in_shards.traffic_s, (
        "flat buffers are not sent beside computing"
    )


def test_a_sum_at_the_end_hides_under_one_chunk() -> None:
    """Three chunks of 1.8 ms of kernels, 80 % of which could hide all traffic if it were spread
    over them."""
    job, hides = replace(JOB, tokens_per_update=240), 0.8 * 3 * 1.8e-3
    sums = 2 / 3 * hides  # of 4 bytes per parameter; weights, of 2, take half of that
    gpu = make_gpu(link_bytes_per_s=link_for(scatter_s=sums), gpus_per_host=8)
    once, by_chunk = (
        step_time(job, make_layout(zero=2, sum_gradients=when), gpu, "resident")
        for when in ("update", "chunk")
    )
    assert once.exposed_s == near(sums - hides / 3)
    # 6 bytes, and 2: 2/3 of it
    spread = make_gpu(link_bytes_per_s=link_for(scatter_s=hides / 3), gpus_per_host=8)
    assert step_time(job, make_layout(zero=2), spread, "resident").exposed_s == 0.0
    assert by_chunk.exposed_s == near(by_chunk.traffic_s - hides)


def link_for(*, scatter_s: float) -> float:
    """A data-sheet rate at which the sum of TOY's gradients over eight ranks takes so long."""
    return int(7 / 8 * 4 * P) / scatter_s * 450 / 342


def test_seconds_of_device_memory() -> None:
    """Per parameter 60 bytes of AdamW in its shard, 10 per chunk's sum, 4 per gathering, 8 to hand
    over a sum."""
    job = replace(JOB, tokens_per_update=160)

    def per_parameter(layout: Layout, **changes: Any) -> float:
        return (
            step_time(replace(job, **changes), layout, make_gpu(), "resident").memory_s * 1e12 / P
        )

    assert per_parameter(FLAT) == near(60 + 2 * 10)
    assert per_parameter(FLAT, critic=True) == near(2 * (60 + 2 * 10))
    assert per_parameter(make_layout(zero=1)) == near(60 / 8 + 2 * 10)
    assert per_parameter(make_layout(zero=2)) == near(60 / 8 + 2 * 10 + 4)
    assert per_parameter(make_layout()) == near(60 / 8 + 2 * 10 + 4 * 4)
    once = make_layout(zero=2, sum_gradients="update")
    assert per_parameter(once) == near(60 / 8 + 2 * 10 + 4 + 8)
    assert per_parameter(once, tokens_per_update=80) == near(60 / 8 + 10 + 4)


def test_rate_to_the_host() -> None:
    """A GPU alone has all of its link; eight at once have 27.9 of 55 GB/s each, and no more of them
    less."""
    eight, four, many = (make_gpu(gpus_per_host=count) for count in (8, 4, 16))
    assert [eight.host_copy_bytes_per_s(gpus) for gpus in (1, 2, 8, 64)] == [
        near(1e10), near(1e10 * (1 - SHARED / 7)), near(1e10 * 27.9 / 55), near(1e10 * 27.9 / 55)
    ]  # fmt: skip
    assert four.host_copy_bytes_per_s(8) == near(1e10 * (1 - 3 * SHARED / 7))
    assert many.host_copy_bytes_per_s(16) == near(1e10 * 27.9 / 55)


def host_seconds(
    layout: Layout, gpu: Any = None, residency: Any = "resident", **changes: Any
) -> float:
    job = replace(JOB, tokens_per_update=20 * layout.gpus, **changes)  # two chunks on each rank
    return step_time(job, layout, gpu or make_gpu(), residency).host_s


def test_seconds_of_offloaded_state() -> None:
    """There and back at once; a file is read and written one after the other, by all GPUs of a
    host."""
    rates = {gpus: make_gpu().host_copy_bytes_per_s(gpus) for gpus in (1, 2, 8)}
    assert host_seconds(ONE) == host_seconds(FLAT) == 0.0
    assert host_seconds(replace(ONE, offload_optimizer="host")) == near(12 * P / 1e10)
    assert host_seconds(replace(ONE, offload_optimizer="host"), critic=True) == near(
        2 * 12 * P / 1e10
    )
    assert host_seconds(replace(FLAT, offload_optimizer="host")) == near(12 * P / rates[8])
    assert host_seconds(replace(ONE, offload_optimizer="disk")) == near(2 * 12 * P / 12e9)
    assert host_seconds(replace(FLAT, offload_optimizer="disk")) == near(2 * 12 * P * 4 / 12e9)
    slow = make_gpu(host_link_bytes_per_s=1e9)
    assert host_seconds(replace(ONE, offload_optimizer="disk"), slow) == near(12 * P / 1e9), (
        "the link is slower"
    )

    def passes(layout: Layout, shard: int = P, **changes: Any) -> float:
        offloaded = replace(layout, offload_gradients=True)
        return host_seconds(offloaded, **changes) / (4 * shard / rates[layout.gpus])

    assert passes(ONE) == near(2 * 2 / 4 + 1), (
        "each chunk's gradient in bfloat16, and once for the update"
    )
    assert passes(ONE, dtype="float32") == near(2 + 1)
    assert passes(make_layout(gpus=2, zero=0, shard_ranks=1)) == near(1 + 2 + 1)
    assert passes(FLAT) == near(1 + 2 + 1), "there and back to be summed over ranks"
    assert passes(make_layout(zero=1)) == near(1 + 2 + 1)
    assert passes(make_layout(gpus=2, zero=2, shard_ranks=2), 8474) == near(2 + 1)
    assert passes(make_layout(), SHARD) == near(2 + 1)
    assert passes(make_layout(shard_ranks=4), 4237) == near(2 + 2 + 1)
    assert passes(make_layout(sum_gradients="update"), SHARD) == near(1 + 1)


def test_seconds_of_weights_on_the_host() -> None:
    """What is outside the layers once; a third layer, for which there is no place, twice per chunk,
    beside computing."""
    slow, rate = make_gpu(host_link_bytes_per_s=1e4), 1e4
    away = replace(ONE, offload_optimizer="host", offload_parameters=("actor",))
    for layers, turns in ((1, 0), (2, 0), (3, 1), (5, 3)):
        for tied, around in ((True, 2020), (False, 4020)):
            count = layers * 4976 + around
            model = replace(TOY, num_layers=layers, num_parameters=count, tied=tied)
            state = (12 + 2) * count / rate  # new weights leave with it
            twice = max(0.0, turns * 2 * 4976 / rate * 2 * 2 - 2 * layers * 0.6e-3)
            assert host_seconds(away, slow, model=model) == near(state + 2 * around / rate + twice)
    both = replace(away, offload_parameters=("actor", "critic"))
    trained = host_seconds(both, slow, critic=True)
    assert trained == near(2 * (14 * P + 2 * 2020 + 2 * 4976 * 4) / rate - 2 * 3 * 0.6e-3)
    unasked = host_seconds(both, slow)
    assert unasked == near(host_seconds(away, slow)), "there is no critic"


def test_seconds_of_switching() -> None:
    """What phases park goes there and back, shared out over the updates of a step."""
    job = replace(JOB, engine=ENGINE, reference=True)
    moved = (8 + 4 + 2) * P

    def switch(job: TrainingJob, residency: Any, layout: Layout = FLAT) -> float:
        return step_time(job, layout, make_gpu(), residency).switch_s

    rate = make_gpu().host_copy_bytes_per_s(8)
    assert switch(job, "phase") == near(2 * moved / rate)
    assert switch(replace(job, updates_per_step=3), "phase") == near(2 * moved / rate / 3)
    assert switch(job, "resident") == switch(replace(job, engine=None), "phase") == 0.0
    away = replace(FLAT, offload_optimizer="host")
    assert switch(job, "phase", away) == near(2 * 2 * P / rate), (
        "what is on the host anyway does not move"
    )
