"""Weights in host memory: the same bits, two layers on the device, the next on its way, and what is
refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gyre.memory.config import MemoryConfig
from gyre.memory.manager import MemoryManager
from gyre.memory.phases import default_needs
from gyre.models.decoder import Decoder
from gyre.planner.model_zoo import model_numbers
from gyre.planner.plan import PlanInputs
from gyre.trainer.config import TrainerConfig
from gyre.trainer.offload.weight_stream import WeightStream
from gyre.trainer.passes.forward import chunk_logprobs
from gyre.trainer.roles.memory_components import MemoryComponents
from gyre.trainer.trainer import NativeTrainer
from planner_cases import assert_planned
from rank_pool import RankPool
from trainer_cases import (
    CPU,
    assert_bits_equal,
    make_batch,
    make_trainer,
    saved_tensors,
    weights_of,
    whole_tensors,
)
from weight_cases import ALL, SMALL, equal_weights_away, gathered_by_parts, refused
from zero_cases import DEEP, batch_for, decoder_on, scored_model, trainer_on


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "rm", "dpo", "grpo", "ppo"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_process_trains_and_evaluates_to_the_same_bits(kind, dtype) -> None:
    assert equal_weights_away(None, kind, dtype=dtype) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("spec", ["tied", "deep"])
def test_checkpointing_and_depth_change_nothing(mode, spec) -> None:
    """With two layers both stay; with five they take turns. Chunks are many."""
    assert (
        equal_weights_away(
            None, "grpo", spec=spec, checkpointing=mode, tokens_per_chunk=32, dtype="bfloat16"
        )
        == []
    )


def test_products_in_8_bits_and_a_file_change_nothing(tmp_path) -> None:
    away = {
        "dtype": "bfloat16",
        "matmul": "fp8",
        "offload_optimizer": "disk",
        "disk_folder": tmp_path,
    }
    plain = make_trainer("sft", dtype=torch.bfloat16, matmul="fp8")
    other = make_trainer(
        "sft", **{**SMALL, **away, "dtype": torch.bfloat16}, offload_parameters=("actor",)
    )
    for step in range(2):
        for trainer in (plain, other):
            trainer.step_now(make_batch(seed=step, step=step))
    assert_bits_equal(weights_of(other), weights_of(plain))


@pytest.mark.slow
def test_moments_in_8_bits_change_nothing(pair) -> None:
    pytest.importorskip("bitsandbytes")
    settings = {"spec": "blocks", "dtype": "bfloat16", "moments": "8_bit"}
    assert equal_weights_away(None, "sft", **settings) == []
    assert pair.run(equal_weights_away, "sft", layout="zero1", **settings) == [[], []]


def deep_trainer(**settings) -> NativeTrainer:
    return trainer_on(
        None,
        "grpo",
        spec="deep",
        dtype="bfloat16",
        **{**SMALL, "offload_parameters": ALL[2:], **settings},
    )


def places_of(stream: WeightStream, decoder: Decoder) -> set[int]:
    """Layers that are in a room now, by where their parameters point."""
    low = stream.buffers_B.data_ptr()
    high = low + stream.buffers_B.nbytes
    pointed = [
        {low <= parameter.data_ptr() < high for parameter in layer.parameters()}
        for layer in decoder.layers
    ]
    assert all(len(where) == 1 for where in pointed), "a layer moves whole"
    return {index for index, where in enumerate(pointed) if where == {True}}


def test_a_pass_holds_two_layers_and_the_next_one_is_on_its_way() -> None:
    """At each layer, forward and backward: what is on the device when it computes."""
    trainer = deep_trainer(offload_parameters=("actor",), tokens_per_chunk=10_000)
    actor, seen = trainer.models.actor, []
    stream = trainer.memory.streams["actor"]

    def note(index: int) -> None:
        seen.append((index, places_of(stream, actor.decoder)))

    for index, layer in enumerate(actor.decoder.layers):  # after the stream's own hooks
        layer.register_forward_pre_hook(lambda *_, index=index: note(index))
        layer.register_forward_hook(
            lambda _, __, output_TE, index=index: (
                output_TE.register_hook(lambda _: note(index)) and None
            )
        )
    (update,) = trainer.plan(batch_for(4, seed=0)).updates
    with stream.visit():
        logprobs_N, _ = chunk_logprobs(actor.decoder, update.chunks[0])
        there = stream.take_traffic().in_bytes
        logprobs_N.sum().backward()
        back = stream.take_traffic().in_bytes
    forward = [(0, {0, 1}), (1, {1, 2}), (2, {2, 3}), (3, {3, 4}), (4, {3, 4})]
    backward = [(4, {3, 4}), (3, {3, 2}), (2, {2, 1}), (1, {1, 0}), (0, {1, 0})]
    assert seen == forward + backward
    weights = {name: p.nbytes for name, p in actor.decoder.named_parameters()}
    layers = sum(size for name, size in weights.items() if name.startswith("layers."))
    assert there == sum(weights.values()) and back == layers * 3 // 5
    assert places_of(stream, actor.decoder) == set()


def test_what_layer_buffers_hold_between_visits_is_never_read() -> None:
    found = []
    for poison in (False, True):
        trainer = deep_trainer(offload_parameters=ALL)
        for step in range(3):
            for stream in trainer.memory.streams.values() if poison else ():
                stream.buffers_B.fill_(255)  # every bfloat16 of it a NaN
            trainer.step_now(batch_for(8, seed=step))
        found.append(saved_tensors(trainer))
    assert_bits_equal(*found)


def test_a_pass_outside_a_visit_is_refused_and_a_failed_one_leaves_all_at_rest() -> None:
    trainer = deep_trainer(offload_parameters=ALL)
    stream, before = trainer.memory.streams["actor"], saved_tensors(trainer)
    batch = batch_for(8, seed=0)
    (update,) = trainer.plan(batch).updates
    with pytest.raises(AssertionError, match="outside a visit"):
        trainer.models.logprobs(trainer.models.actor.decoder, update.chunks[0])
    with pytest.raises(Exception, match="temperature"):
        trainer.step_now(
            replace(batch, sequences=tuple(replace(s, temperature=0.0) for s in batch.sequences))
        )
    assert places_of(stream, trainer.models.actor.decoder) == set()
    with stream.visit():
        assert places_of(stream, trainer.models.actor.decoder) == set(), "no layer came yet"
    assert_bits_equal(saved_tensors(trainer), before)
    trainer.step_now(batch)


def test_what_is_left_after_the_end_computes() -> None:
    """The actor's weights belong to the caller, who may start another trainer with them."""
    trainer = deep_trainer(offload_parameters=("actor",))
    decoder = trainer.models.actor.decoder
    trainer.step_now(batch_for(8, seed=0))
    left = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    trainer.close_now()
    again = make_trainer("sft", decoder=decoder, **SMALL, offload_parameters=("actor",))
    assert_bits_equal(weights_of(again), left)
    again.step_now(make_batch())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("models", [ALL, ("critic", "reward"), ("reference",)])
def test_the_planner_knows_what_is_where(models, dtype) -> None:
    """Names, tiers and, but for padding, bytes of the components that a trainer has."""
    kind = "ppo" if "critic" in models else "grpo"
    kept = getattr(torch, dtype)
    extra = {"critic": scored_model(CPU, kept, spec="deep", seed=3)} if kind == "ppo" else {}
    trainer = make_trainer(
        kind,
        decoder=decoder_on(CPU, kept, spec="deep"),
        reward_model=scored_model(CPU, kept, spec="deep", seed=7),
        **extra,
        **SMALL,
        offload_parameters=models,
    )
    inputs = PlanInputs(
        model=model_numbers(DEEP),
        objective=kind,
        online=False,
        prompts_per_step=1,
        completions_per_prompt=1,
        max_prompt_tokens=8,
        max_completion_tokens=8,
        critic=kind == "ppo",
        reference=kind == "grpo",
        reward_model=model_numbers(DEEP),
        offload_optimizer="host",
        offload_parameters=models,
        offload_cut_bytes=SMALL["offload_cut_bytes"],
    )
    assert_planned(trainer.components(), inputs, dtype, relative=0.05, pages=2)


def test_phases_keep_layer_buffers_only_and_bytes_are_counted_once() -> None:
    """Through the memory manager, which measures after each phase change and refuses what is not
    where it says."""
    trainer, whole = deep_trainer(offload_parameters=ALL), deep_trainer(offload_parameters=())
    budgets = MemoryConfig(
        device_budget_bytes=1 << 30,
        host_budget_bytes=1 << 30,
        disk_budget_bytes=0,
        residency="phase",
    )
    needs = default_needs(shared_weights=False)
    manager = MemoryManager([trainer], budgets, CPU, lambda *_, **__: None, needs=needs)
    sizes = {component.name: component.size_bytes for component in trainer.components()}
    on_host = sum(
        size
        for name, size in sizes.items()
        if not name.endswith((".layer_buffers", ".staging", ".grads"))
    )
    for step in range(2):
        manager.enter("score")
        assert manager.ledger.usage().device_bytes == sum(
            sizes[f"{n}.layer_buffers"] for n in ("actor", "reference", "reward")
        )
        scores = [
            one.evaluate_now(batch_for(8, seed=step), "reward").per_sequence
            for one in (trainer, whole)
        ]
        assert scores[0] is not None and scores[1] is not None and (scores[0] == scores[1]).all()
        manager.enter("train")
        assert manager.ledger.usage().device_bytes == sum(
            sizes[f"actor.{part}"] for part in ("layer_buffers", "staging", "grads")
        )
        for one in (trainer, whole):
            one.step_now(batch_for(8, seed=step))
        manager.enter("rollout")
        assert (
            manager.ledger.usage().device_bytes == 0
            and manager.ledger.usage().host_bytes == on_host
        )
    assert_bits_equal(weights_of(trainer), weights_of(whole))


def test_layer_buffers_of_a_reference_leave_before_a_step_trains(monkeypatch) -> None:
    """A step that asks the reference itself: its rooms are not there in the passes with a backward
    one."""
    trainer = trainer_on(None, "dpo", spec="deep", **SMALL, offload_parameters=("reference",))
    trainer.move(["reference.layer_buffers"], "none")
    seen, visiting = [], MemoryComponents.visiting

    def watch(tenancy, *owners):
        seen.append((owners, tenancy.tiers()["reference.layer_buffers"]))
        return visiting(tenancy, *owners)

    monkeypatch.setattr(MemoryComponents, "visiting", watch)
    trainer.step_now(make_batch())
    assert seen == [(("reference",), "device"), (("actor", "critic"), "none")]


def test_snapshots_go_both_ways() -> None:
    plain, away = deep_trainer(offload_parameters=()), deep_trainer(offload_parameters=ALL)
    plain.step_now(batch_for(8, seed=0))
    away.restore_now(plain.snapshot_now())
    for trainer in (plain, away):
        trainer.step_now(batch_for(8, seed=1))
    state = away.snapshot_now()
    assert_bits_equal(whole_tensors(state["tensors"].values()), saved_tensors(plain))
    again = deep_trainer(offload_parameters=())
    again.restore_now(state)
    for trainer in (plain, again):
        trainer.step_now(batch_for(8, seed=2))
    assert_bits_equal(weights_of(again), weights_of(plain))


def test_a_reference_in_host_memory_follows_the_policy() -> None:
    found = []
    for models in ((), ("reference",)):
        trainer = deep_trainer(offload_parameters=models, reference_refresh_steps=2)
        for step in range(3):
            trainer.step_now(batch_for(8, seed=step))
        found.append(saved_tensors(trainer))
    assert_bits_equal(*found)


def test_what_the_config_refuses() -> None:
    with pytest.raises(ValueError, match="the larger state goes first"):
        TrainerConfig(offload_parameters=("actor",))
    with pytest.raises(ValueError, match="the average has no place in host memory"):
        TrainerConfig(offload_parameters=("reference",), reference_moving_average=0.9)
    with pytest.raises(ValueError, match="name each model once"):
        TrainerConfig(offload_parameters=("reference", "reference"))
    TrainerConfig(offload_parameters=("reference", "reward"))


@pytest.fixture(scope="module")
def pair():
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout", "dtype"),
    [
        ("ppo", "zero0", "bfloat16"),
        ("ppo", "zero1", "float32"),
        ("rm", "zero1", "bfloat16"),
        ("grpo", "zero1", "bfloat16"),
    ],
)
def test_ranks_train_to_the_same_bits(pair, kind, layout, dtype) -> None:
    assert pair.run(equal_weights_away, kind, layout=layout, dtype=dtype) == [[], []]


def test_new_weights_are_gathered_by_parts(pair) -> None:
    assert pair.run(gathered_by_parts, layout="zero1", dtype="bfloat16", spec="odd") == [[], []]


@pytest.mark.parametrize("models", [("actor",), ("reference",)])
def test_weights_in_shards_are_refused(pair, models) -> None:
    for told in pair.run(refused, layout="zero3", offload_parameters=models):
        assert told.startswith("ConfigError") and f"names '{models[0]}'" in told
        assert "parallel.zero = 3 cuts over 2 ranks (accepted: zero 0 or 1)" in told
