"""What the plan says of ranks, against a trainer on real processes over gloo: bytes of states,
bytes sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_cases import held_between_chunks
from gyre.planner.memory_model.states import Layout, frozen_bytes, state_bytes, unsummed_bytes
from gyre.planner.model_zoo import model_numbers, model_part
from gyre.planner.plan import PlanInputs, Shards
from gyre.planner.search.speed import chunks_per_update, sent_bytes
from planner_cases import make_job, predict_components
from trainer_cases import SPEC
from zero_cases import (
    LAYOUTS,
    SPECS,
    TENSOR_LAYOUTS,
    alive_bytes,
    batch_for,
    held_bytes,
    measures,
)

PLANNED = ("zero0", "zero1", "zero2", "zero3", "hybrid1", "hybrid2", "hybrid3")
TENSOR = ("tensor4", "zero0_tensor2", "zero1_tensor2", "zero3_tensor2")


def planned_layout(name: str, *, ranks: int = 4) -> Layout:
    config = (LAYOUTS | TENSOR_LAYOUTS)[name]
    zero, shard_ranks = config.of("actor")
    return Layout(
        gpus=ranks,
        tensor_ranks=config.tensor_ranks,
        zero=zero,
        shard_ranks=1 if zero == 0 else shard_ranks or ranks // config.tensor_ranks,
        checkpointing="none",
        tokens_per_chunk=1000,
        offload_optimizer="none",
        offload_gradients=False,
    )


@pytest.mark.parametrize("layout", [*PLANNED, *TENSOR])
def test_the_plan_is_what_the_ledger_and_the_tensors_say(ranks, layout):
    """Bytes of each component, planned and measured, and of every tensor that a rank has when
    nothing computes."""
    planned, which = planned_layout(layout), "blocks_apart" if layout in TENSOR else "tied"
    spec = SPECS[which]
    model = model_part(spec, planned.tensor_ranks) if layout in TENSOR else model_numbers(spec)
    expected = state_bytes(model, "bfloat16", planned)
    expected |= {name: frozen_bytes(model, "bfloat16", planned) for name in ("reference", "reward")}
    own = Shards(zero=planned.zero, ranks=planned.shard_ranks)
    shards = {"actor": own, "reference": own, "reward": own}
    inputs = PlanInputs(
        model=model_numbers(spec),
        trained_part=model if layout in TENSOR else None,
        objective="grpo",
        online=False,
        prompts_per_step=4,
        completions_per_prompt=1,
        max_prompt_tokens=32,
        max_completion_tokens=0,
        reference=True,
        reward_model=model,
        ranks=planned.data_ranks,
        shards=shards,
    )
    components = predict_components(inputs, dtype="bfloat16", page_tokens=16, kv_pages=0)
    assert {component.name: component.size_bytes for component in components} == expected, (
        "what a run is planned by"
    )
    head_bytes = 4 * spec.hidden_size  # the reward model's, float32, which the plan does not count
    results = ranks.run(alive_bytes, "grpo", dtype="bfloat16", layout=layout, spec=which)
    for told, alive in results:
        assert sum(told.values()) == pytest.approx(alive, abs=1024), (
            "a tensor that no component has, or the reverse"
        )
        told["reward"] -= head_bytes
        assert told == pytest.approx(expected, rel=0.025), (
            "up to the alignment of small tensors in flat buffers"
        )


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_a_moving_average_is_planned_as_the_ledger_counts_it(ranks, layout):
    own = Shards(zero=planned_layout(layout).zero, ranks=4)
    inputs = PlanInputs(
        model=model_numbers(SPEC),
        objective="grpo",
        online=False,
        prompts_per_step=4,
        completions_per_prompt=1,
        max_prompt_tokens=32,
        max_completion_tokens=0,
        reference=True,
        reference_average=True,
        ranks=4,
        shards={"actor": own, "reference": own},
    )
    (planned,) = [
        component.size_bytes
        for component in predict_components(inputs, dtype="bfloat16", page_tokens=16, kv_pages=0)
        if component.name == "reference"
    ]
    for told in ranks.run(
        held_bytes, "grpo", dtype="bfloat16", layout=layout, reference_moving_average=0.9
    ):
        assert told["reference"] == pytest.approx(planned, rel=0.025)


@pytest.mark.parametrize("layout", PLANNED)
def test_ranks_send_what_the_planner_says(ranks, layout):
    """By kind of collective, over all ranks; beside it only metrics are shared."""
    job = replace(
        make_job("qwen3-0.6b", longest=32, update=100), model=model_numbers(SPEC), dtype="float32"
    )
    expected: dict[str, int] = {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0}
    for name, size in sent_bytes(job, planned_layout(layout)).items():
        expected[name.removesuffix(" among groups").replace("-", "_")] += size * 4
    results = ranks.run(measures, "sft", layout=layout, tokens_per_chunk=1000)
    found = {kind: results[0]["measured"].get(f"sent_bytes/{kind}", 0.0) for kind in expected}
    assert found == pytest.approx(expected, abs=4096)
    assert min(expected[kind] for kind in expected if expected[kind]) > 100_000
    assert all(result["measured"] == results[0]["measured"] for result in results)
    assert results[0]["measured"]["communication_wait_seconds"] > 0.0


@pytest.mark.parametrize("layout", TENSOR)
def test_ranks_that_share_layers_send_what_the_planner_says(ranks, layout):
    """The same with what a layer's ranks exchange. Padding of the rows, and runs of targets that do
    not divide, are sent beside it."""
    planned, spec = planned_layout(layout), SPECS["parted"]
    sequences = batch_for(12, seed=0).sequences
    tokens = sum(len(one.tokens) for one in sequences)
    targets = sum(int(one.columns["loss_mask"].sum()) for one in sequences)
    job = replace(
        make_job("qwen3-0.6b", longest=32, update=tokens),
        model=model_part(spec, planned.tensor_ranks),
        engine_model=model_numbers(spec),
        dtype="float32",
        target_share=targets / tokens,
    )
    expected: dict[str, int] = {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0}
    for name, size in sent_bytes(job, planned).items():
        expected[name.removeprefix("tensor ").replace("-", "_")] += size * 4
    results = ranks.run(measures, "sft", layout=layout, spec="parted", tokens_per_chunk=1000)
    found = {kind: results[0]["measured"].get(f"sent_bytes/{kind}", 0.0) for kind in expected}
    assert found == pytest.approx(expected, rel=0.03, abs=4096)


@pytest.mark.parametrize("layout", ["zero2", "zero3", "zero3_once", "hybrid3", "hybrid3_once"])
def test_gradients_of_several_chunks_are_held_and_sent_as_planned(ranks, layout):
    """Whole in float32 on every rank from the first chunk on where ranks sum once; else nothing
    waits."""
    planned = replace(
        planned_layout(layout), tokens_per_chunk=32, sum_gradients=LAYOUTS[layout].sum_gradients
    )
    results = ranks.run(held_between_chunks, layout=layout, tokens_per_chunk=32, dtype="bfloat16")
    held, sent = results[0]
    model, chunks = model_numbers(SPEC), len(held)
    assert chunks > 1 and all(result[0] == held for result in results)
    assert held == [0] + [unsummed_bytes(model, planned, chunks)] * (chunks - 1)
    job = make_job("qwen3-0.6b", longest=32, update=4 * 32 * chunks, model=model)
    assert chunks_per_update(job, planned) == job.most_chunks(planned) == chunks
    expected = sent_bytes(job, planned)
    # what is summed by chunk is `test_ranks_send_what_the_planner_says`'s, in float32
    if not planned.sums_once:
        del expected["reduce-scatter"]
    for name, size in expected.items():  # beside an all-reduce only metrics are shared
        kind = name.removesuffix(" among groups").replace("-", "_")
        assert sent[kind] == pytest.approx(4 * size, abs=4096), name
