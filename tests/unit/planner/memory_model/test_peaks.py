"""Moments of a step: the survey's table of fake-tensor traces reproduced from our terms, states
against real optimizers, and what must hold whatever the job."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.distributed.mesh import make_mesh
from gyre.distributed.process_group import alone
from gyre.planner.memory_model.engine import EngineDemand
from gyre.planner.memory_model.peaks import (
    PeakInstant,
    device_bytes_of,
    disk_bytes_of,
    host_bytes_of,
    phase_moments,
    train_moments,
)
from gyre.planner.memory_model.states import Layout, away_bytes, gathered_bytes, state_bytes
from gyre.planner.model_zoo import find_shape, model_numbers
from gyre.planner.plan import PlanInputs
from gyre.trainer.optim.flat import FlatOptimizer
from planner_cases import make_job, predict_components

GIB = 1 << 30
LLAMA = model_numbers(find_shape("llama-3-8b"))


def make_layout(**changes) -> Layout:
    base = {
        "gpus": 8,
        "zero": 3,
        "shard_ranks": 8,
        "checkpointing": "none",
        "tokens_per_chunk": 8192,
        "offload_optimizer": "none",
        "offload_gradients": False,
    }
    return Layout(**{**base, **changes})


@pytest.mark.parametrize(
    ("ranks", "tokens", "per_token_and_layer", "traced_gib"),
    [
        (8, 8192, 8192, 27.23),  # full checkpointing
        (8, 16_384, 8192, 41.28),
        (8, 32_768, 8192, 69.39),
        (8, 8192, 102_528, 50.26),  # every product and attention kept
        (8, 16_384, 102_528, 86.97),
        (8, 8192, 63_616, 40.76),  # every second product kept
        (8, 16_384, 63_616, 68.35),
        (128, 16_384, 63_616, 57.83),
    ],
)
def test_states_and_gathered_weights_give_the_surveys_traces(
    ranks: int, tokens: int, per_token_and_layer: int, traced_gib: float
) -> None:
    """Research 3.5: FSDPMemTracker of Llama-3-8B at the loss, before gradients exist. Activations
    per token and the plain cross-entropy (12·T·V + 6·T·h) are the peer's; sharded states and the
    gathered root are our terms."""
    layout = make_layout(gpus=ranks, shard_ranks=ranks, tokens_per_chunk=tokens)
    states = state_bytes(LLAMA, "bfloat16", layout)
    without_gradients = sum(states.values()) - states["actor.grads"]
    activations = LLAMA.num_layers * tokens * per_token_and_layer
    loss = 12 * tokens * LLAMA.vocab_size + 6 * tokens * LLAMA.hidden_size
    predicted = without_gradients + gathered_bytes(LLAMA, "bfloat16", layout) + activations + loss
    assert predicted / GIB == pytest.approx(traced_gib, rel=0.01)


def test_end_of_backward_is_the_surveys_at_short_sequences() -> None:
    """17.89 GiB traced for Llama-3-8B on 8 ranks at 2,048 tokens: 16·P/N + 6·V·h."""
    states = sum(state_bytes(LLAMA, "bfloat16", make_layout()).values())
    assert (states + 6 * LLAMA.embedding_parameters) / GIB == pytest.approx(17.89, rel=0.01)
    job = make_job("llama-3-8b", longest=2048)
    end = next(
        m
        for m in train_moments(job, make_layout(tokens_per_chunk=2048))
        if m.name == "end of backward"
    )
    assert end.allocated_bytes == states + 6 * (LLAMA.embedding_parameters + LLAMA.hidden_size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_of_one_rank_are_those_of_the_flat_optimizer(dtype) -> None:
    """Up to the alignment of tensors in the flat buffers."""
    parameters = {
        "matrix": torch.nn.Parameter(torch.zeros(320, 64, dtype=getattr(torch, dtype))),
        "norm": torch.nn.Parameter(torch.zeros(64, dtype=getattr(torch, dtype))),
    }
    mesh = make_mesh(alone(), 0)
    optimizer = FlatOptimizer(parameters, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, mesh=mesh)
    flat = (optimizer.grad_N, *optimizer.moments.values(), optimizer.master_N)
    real = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in flat
    }
    real |= {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters.values()
    }
    model = replace(LLAMA, num_parameters=sum(p.numel() for p in parameters.values()))
    layout = make_layout(gpus=1, zero=0, shard_ranks=1)
    assert sum(state_bytes(model, dtype, layout).values()) == sum(real.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_holds_what_the_ledger_will_be_told(dtype) -> None:
    inputs = PlanInputs(
        model=LLAMA,
        objective="sft",
        online=False,
        prompts_per_step=1,
        completions_per_prompt=1,
        max_prompt_tokens=1,
        max_completion_tokens=0,
    )
    components = {
        c.name: c.size_bytes
        for c in predict_components(inputs, dtype=dtype, page_tokens=16, kv_pages=0)
    }
    assert state_bytes(LLAMA, dtype, make_layout(gpus=1, zero=0, shard_ranks=1)) == components


def test_sharded_states_are_the_surveys_bytes_per_parameter() -> None:
    """Research 3.2: 16/N under FSDP2; 6 + 12/N under ZeRO-1 with float32 gradients."""
    for ranks in (2, 8, 64):
        zero3 = sum(
            state_bytes(LLAMA, "bfloat16", make_layout(gpus=ranks, shard_ranks=ranks)).values()
        )
        assert zero3 / LLAMA.num_parameters == pytest.approx(16 / ranks, rel=1e-6)
        zero1 = sum(
            state_bytes(
                LLAMA, "bfloat16", make_layout(gpus=ranks, shard_ranks=ranks, zero=1)
            ).values()
        )
        assert zero1 / LLAMA.num_parameters == pytest.approx(6 + 12 / ranks, rel=1e-6)


layouts = st.builds(
    lambda zero, split, mode, chunks, optimizer, gradients: make_layout(
        gpus=8,
        zero=zero,
        shard_ranks=1 if zero == 0 else split,
        checkpointing=mode,
        tokens_per_chunk=2048 * chunks,
        offload_optimizer=optimizer,
        offload_gradients=gradients,
    ),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([2, 4, 8]),
    st.sampled_from(["none", "selective", "full"]),
    st.integers(1, 16),
    st.sampled_from(["none", "host", "disk"]),
    st.booleans(),
)


def peak(job, layout: Layout) -> int:
    return max(moment.allocated_bytes for moment in train_moments(job, layout))


@settings(max_examples=60, deadline=None)
@given(layout=layouts, shape=st.sampled_from(["qwen3-0.6b", "qwen3-8b", "llama-3-8b"]))
def test_peaks_grow_and_shrink_with_what_they_depend_on(layout: Layout, shape: str) -> None:
    job = make_job(shape, longest=2048)
    here = peak(job, layout)
    model = job.model
    deeper = replace(
        model,
        num_layers=model.num_layers + 1,
        num_parameters=model.num_parameters + model.layer_parameters,
    )
    assert peak(replace(job, model=deeper), layout) > here
    assert peak(job, replace(layout, tokens_per_chunk=layout.tokens_per_chunk + 2048)) >= here
    if layout.zero:
        wider = replace(layout, gpus=2 * layout.gpus, shard_ranks=2 * layout.shard_ranks)
        assert peak(job, wider) <= here
        assert peak(job, replace(layout, zero=3)) <= peak(job, replace(layout, zero=2))
    bare = replace(layout, offload_optimizer="none", offload_gradients=False)
    away = away_bytes(state_bytes(model, "bfloat16", layout), layout)
    staging = 3 * job.offload_cut_bytes
    for here_, there in zip(train_moments(job, layout), train_moments(job, bare), strict=True):
        saved = there.allocated_bytes - here_.allocated_bytes
        assert sum(away.values()) - staging <= saved <= sum(away.values())
    on_disk = disk_bytes_of(job, layout)
    on_host = host_bytes_of(job, layout, "resident")
    assert (
        sum(away.values())
        <= on_disk + on_host
        <= sum(away.values()) + staging + 2 * job.offload_cut_bytes
    )
    assert bool(on_disk) == (layout.offload_optimizer == "disk")
    everything = sum(state_bytes(model, "bfloat16", layout).values())
    on_device = everything - sum(
        away_bytes(state_bytes(model, "bfloat16", layout), layout).values()
    )
    for moment in train_moments(job, layout):
        assert moment.allocated_bytes >= on_device
        assert device_bytes_of(moment, layout) > moment.allocated_bytes


ENGINE = EngineDemand(
    running=32, longest=4096, kv_bytes_per_token=147_456, working_bytes=GIB, graph_bytes=GIB // 2
)


@pytest.mark.parametrize("zero", [0, 3])
def test_phases_hold_only_what_they_need_when_they_take_turns(zero) -> None:
    job = make_job(longest=4096, engine=ENGINE, reference=True)
    layout = make_layout(zero=zero, shard_ranks=8 if zero else 1, tokens_per_chunk=4096)

    def by_name(residency) -> dict[str, PeakInstant]:
        return {
            moment.name: moment for moment in phase_moments(job, layout, residency, ENGINE.running)
        }

    stay, turn = by_name("resident"), by_name("phase")
    assert list(stay) == [
        "start",
        "loss",
        "deepest layer",
        "end of backward",
        "optimizer step",
        "score",
        *(("handover",) if zero == 3 else ()),
        "rollout",
    ]
    for name, moment in turn.items():
        assert moment.allocated_bytes < stay[name].allocated_bytes, name
    assert not {"engine.kv", "reference"} & set(turn["loss"].parts)
    assert (
        "actor.optimizer" not in turn["rollout"].parts
        and "actor.optimizer" in stay["rollout"].parts
    )
    weights = 2 * job.model.num_parameters
    rollout = turn["rollout"].parts
    assert (rollout["actor.params"] if zero == 0 else rollout["engine.weights"]) == weights
    assert ("engine.weights" in rollout) == (zero == 3), (
        "whole compute weights are read where they are"
    )
    assert rollout["engine.kv"] == (32 * 4096 + 1) * 147_456
    assert host_bytes_of(job, layout, "phase") > host_bytes_of(job, layout, "resident") == 0


def test_a_moving_average_lies_in_float32_beside_the_reference() -> None:
    """On the device, and on the host while another phase has it; in shards like the reference
    itself."""
    for zero, split in ((1, 8), (3, 8)):
        layout = make_layout(zero=zero, shard_ranks=split, tokens_per_chunk=4096)
        plain = make_job(longest=4096, engine=ENGINE, reference=True)
        average = replace(plain, reference_average=True)
        more = 4 * plain.model.num_parameters // (split if zero == 3 else 1)

        def peak_of(job, layout=layout) -> PeakInstant:
            return phase_moments(job, layout, "resident", ENGINE.running)[1]

        assert peak_of(average).parts["reference"] - peak_of(plain).parts["reference"] == more
        assert (
            host_bytes_of(average, layout, "phase") - host_bytes_of(plain, layout, "phase") == more
        )


def test_staging_of_snapshots_is_shared_by_all_ranks_whatever_the_layout() -> None:
    for layout in (
        make_layout(zero=0, gpus=8, shard_ranks=1),
        make_layout(zero=3, gpus=8, shard_ranks=4),
    ):
        job = make_job(reference=True)
        staged = host_bytes_of(replace(job, snapshot_background=True), layout, "resident")
        assert staged == -(-14 * job.model.num_parameters // 8)


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_that_are_summed_once_are_held_whole_between_chunks(zero) -> None:
    job = make_job("llama-3-8b", longest=2048)
    layout = make_layout(zero=zero, tokens_per_chunk=4096)
    whole = 4 * LLAMA.num_parameters

    def sizes(when, *, update: int) -> dict[str, int]:
        asked = replace(job, tokens_per_update=update, most_tokens_per_update=update)
        found = train_moments(asked, replace(layout, sum_gradients=when))
        return {moment.name: moment.allocated_bytes for moment in found}

    one_chunk, several = 8 * 4096, 8 * 4096 + 1
    assert sizes("update", update=one_chunk) == sizes("chunk", update=one_chunk), (
        "the last chunk reduces as it goes"
    )
    by_chunk, by_update = sizes("chunk", update=several), sizes("update", update=several)
    assert by_update["loss"] == by_chunk["loss"] + whole
    assert by_update["optimizer step"] == by_chunk["optimizer step"]
    # of the head while a layer's are found, later of the embedding
    reduced = 4 * LLAMA.embedding_parameters
    assert whole - reduced <= by_update["deepest layer"] - by_chunk["deepest layer"] <= whole
    assert (
        whole - 2 * reduced <= by_update["end of backward"] - by_chunk["end of backward"] <= whole
    )
    for flat in (0, 1):
        asked = make_layout(zero=flat, shard_ranks=8 if flat else 1, tokens_per_chunk=4096)
        assert train_moments(job, replace(asked, sum_gradients="update")) == train_moments(
            job, asked
        )


def test_a_small_update_fills_no_large_chunk() -> None:
    job = make_job(longest=2048, update=16_384)
    assert job.chunk_tokens(make_layout(tokens_per_chunk=65_536)) == 2048
    assert peak(job, make_layout(tokens_per_chunk=65_536)) == peak(
        job, make_layout(tokens_per_chunk=2048)
    )


def test_a_start_makes_one_model_after_the_other() -> None:
    """What stays resident is there at once. Where phases take turns the frozen models are parked
    before the actor is made; whole or in shards, nothing beside them but one run that is being
    rounded."""
    frozen = {"reference": True, "reward_model": LLAMA}
    for zero, split in ((0, 1), (1, 8), (3, 8)):
        layout = make_layout(zero=zero, shard_ranks=split, tokens_per_chunk=4096)
        job = make_job("llama-3-8b", longest=4096, engine=ENGINE, critic=True, **frozen)
        stay, turn = (
            phase_moments(job, layout, how, ENGINE.running)[0] for how in ("resident", "phase")
        )
        assert stay.name == turn.name == "start"
        states = state_bytes(LLAMA, "bfloat16", layout)
        run = 2 * LLAMA.embedding_parameters // split if zero == 3 else 0
        weights = 2 * LLAMA.num_parameters
        one_copy = weights // split if zero == 3 else weights
        own = weights if zero == 3 else 0
        pages = (ENGINE.running * ENGINE.longest + 1) * ENGINE.kv_bytes_per_token
        engine = pages + ENGINE.graph_bytes + own
        stayed = 0 if zero == 3 else weights  # which the engine reads
        assert turn.allocated_bytes == max(sum(states.values()) + run, stayed + engine)
        assert stay.allocated_bytes == pytest.approx(
            2 * sum(states.values()) + 2 * one_copy + engine, rel=1e-6
        )
        offline = make_job("llama-3-8b", longest=4096, **frozen)
        kept = phase_moments(offline, layout, "phase", 0)[0]
        assert kept.parts["reference"] == pytest.approx(one_copy, rel=1e-6)
        assert kept.allocated_bytes - run == pytest.approx(
            sum(states.values()) + one_copy, rel=1e-6
        )
