"""A run's plan and the search say the same bytes of the same layout: device by phase, host, disk,
and the begin of a stage. Also over tensor ranks, of which the plan has one rank's part given and
the search takes it by itself."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gyre.memory.config import Residency
from gyre.models.layout import local_spec
from gyre.planner.decide import make_plan
from gyre.planner.memory_model.job import MODELS, RankPart, TrainingJob, layout_of
from gyre.planner.memory_model.states import Layout
from gyre.planner.model_zoo import model_numbers, model_part, tensor_parts
from gyre.planner.plan import Hardware, Plan, PlanInputs, Shards
from gyre.planner.search.candidates import Candidate, Fixed, GpuCluster, judge
from gyre.planner.search.search import choose
from planner_cases import job_of, make_spec
from unit.planner.memory_model.test_exact_bytes import TOY, UNTIED, WIDE, make_inputs
from unit.planner.search.test_exact_search import make_gpu

PLENTY = 1 << 60
SPEC, ASKED = make_spec(), make_spec(num_layers=2, hidden_size=64, tied=False)  # a reward model
TRAIN = ("loss", "deepest layer", "end of backward", "optimizer step")
GPU = Hardware(
    device="cuda",
    device_name="toy",
    device_total_bytes=PLENTY,
    device_free_bytes=PLENTY,
    host_total_bytes=PLENTY,
    host_available_bytes=PLENTY,
    disk_free_bytes=PLENTY,
    cores=8,
    bf16=True,
    saving="triton",
)


@st.composite
def asked(draw: st.DrawFn) -> PlanInputs:
    """Settings that a config can have, of a run on a GPU."""
    ranks, zero = draw(st.sampled_from([(1, 0), (2, 0), (4, 1), (4, 2), (2, 3), (8, 3)]))
    online, critic, reference = (draw(st.booleans()) for _ in range(3))
    offload = draw(st.sampled_from(["none", "host", "disk"]))
    gradients = offload != "none" and draw(st.booleans())
    weights = ("actor",) if zero < 2 and not online and gradients and draw(st.booleans()) else ()
    split = Shards(zero=zero, ranks=ranks) if zero else Shards()
    changes: dict[str, Any] = {
        "model": draw(st.sampled_from([TOY, UNTIED, WIDE])),
        "online": online,
        "critic": critic,
        "reference": reference,
        "reference_average": reference and draw(st.booleans()),
        "reward_model": draw(st.sampled_from([None, UNTIED])),
        "ranks": ranks,
        "shards": {**dict.fromkeys(MODELS, split), "reward": Shards()},
        "shared_weights": zero < 2,
        "offload_optimizer": offload,
        "offload_gradients": gradients,
        "offload_parameters": weights,
        "offload_cut_bytes": 10_000,
        "disk_tier": offload == "disk",
        "checkpointing": draw(st.sampled_from(["none", "selective", "full"])),
        "moments": draw(st.sampled_from(["float32", "8_bit"])),
        "sum_gradients": draw(st.sampled_from(["chunk", "update"])),
        "snapshot_background": draw(st.booleans()),
        "tokens_per_chunk": 40 * draw(st.integers(1, 4)),
        "kv_host_bytes": draw(st.sampled_from([0, 1 << 20])),
        "page_tokens": 16,
        "dtype": "bfloat16",
        "residency": draw(st.sampled_from(["resident", "phase"])),
        "device_budget_bytes": PLENTY,
        "host_budget_bytes": PLENTY,
    }
    return make_inputs(**changes)


Degrees = tuple[int, int]  # tensor ranks of the trainer, of an engine
ONE: Degrees = (1, 1)


@st.composite
def asked_over_ranks(draw: st.DrawFn) -> tuple[PlanInputs, Degrees]:
    """The same with a model and a reward model that divide, and how many ranks share a layer."""
    inputs = draw(asked())
    reward = None if inputs.reward_model is None else model_numbers(ASKED)
    inputs = replace(inputs, model=model_numbers(SPEC), reward_model=reward)
    engines = [1, 2, 4] if inputs.online else [1]
    return inputs, (draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(engines)))


def one_rank(inputs: PlanInputs, degrees: Degrees) -> PlanInputs:
    """What `launch.stage_plan` gives the plan of one of several tensor ranks."""
    trained, served = degrees
    reward = None if inputs.reward_model is None else model_part(ASKED, trained)
    return replace(
        inputs,
        trained_part=model_part(SPEC, trained) if trained > 1 else None,
        reward_model=reward if trained > 1 else inputs.reward_model,
        engine_part=model_numbers(local_spec(SPEC, served)) if served > 1 else None,
        shared_weights=inputs.shared_weights and degrees == ONE,
    )


def both(
    inputs: PlanInputs, degrees: Degrees = ONE, *, searched: bool = False
) -> tuple[Plan, Candidate]:
    """The plan, and the layout as the search judges it: this one, or, `searched`, the best of a
    search that has no other choice."""
    part = one_rank(inputs, degrees) if degrees != ONE else inputs
    plan = make_plan(part, GPU)
    assert inputs.tokens_per_chunk is not None

    def make(given: PlanInputs) -> TrainingJob:
        running = plan.max_running or 1
        return job_of(given, "bfloat16", saving="triton", page_tokens=16, max_running=running)

    job = make(inputs)
    if degrees != ONE:
        rewards = tensor_parts(ASKED, 4) if inputs.reward_model is not None else {}
        parts = {
            ranks: RankPart(model=model, reward_model=rewards.get(ranks))
            for ranks, model in tensor_parts(SPEC, 4).items()
        }
        made = {ranks: make(one_rank(inputs, (1, ranks))).engine for ranks in (2, 4)}
        engines = {ranks: engine for ranks, engine in made.items() if engine is not None}
        job = replace(job, parts=parts, engines=engines)
    gpu = make_gpu(PLENTY, host_bytes=PLENTY)
    layout = layout_of(part, inputs.tokens_per_chunk)
    assert layout.gpus == inputs.ranks * degrees[0] and layout.data_ranks == inputs.ranks
    cluster = GpuCluster(gpus=layout.gpus, gpu=gpu)
    layout = replace(layout, engine_tensor_ranks=degrees[1])
    if searched:
        assert inputs.residency is not None
        return plan, choose(job, cluster, wholly_fixed(layout, inputs.residency)).best
    return plan, judge(job, cluster, layout, inputs.residency)


def wholly_fixed(layout: Layout, residency: Residency) -> Fixed:
    """What leaves the search this layout alone."""
    names = [field.name for field in fields(Fixed) if field.name != "residency"]
    return Fixed(**{name: getattr(layout, name) for name in names}, residency=residency)


@settings(max_examples=150, deadline=None)
@given(asked())
def test_the_device_holds_the_same_bytes_in_each_phase(inputs: PlanInputs) -> None:
    same_device_bytes(inputs, ONE)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(asked_over_ranks())
def test_a_tensor_rank_holds_the_same_bytes_in_each_phase(
    given: tuple[PlanInputs, Degrees],
) -> None:
    same_device_bytes(*given)


@settings(max_examples=100, deadline=None)
@given(asked_over_ranks())
def test_a_search_that_has_no_choice_finds_the_bytes_of_the_plan(
    given: tuple[PlanInputs, Degrees],
) -> None:
    """A layout of the search goes for all models, so the reward model is spread as the actor is;
    docs/planning.md says so."""
    inputs, degrees = given
    assume(inputs.ranks * degrees[0] % degrees[1] == 0)  # there is an engine's last GPU
    inputs = replace(inputs, shards=dict.fromkeys(MODELS, inputs.shards["actor"]))
    same_device_bytes(inputs, degrees, searched=True)
    same_bytes_elsewhere(inputs, degrees, searched=True)


def same_device_bytes(inputs: PlanInputs, degrees: Degrees, *, searched: bool = False) -> None:
    plan, found = both(inputs, degrees, searched=searched)
    in_plan = {one.phase: sum(one.device.values()) + one.working_bytes for one in plan.phases}
    names = {**dict.fromkeys(TRAIN, "train"), "start": None}
    in_search: dict[str, int] = {}
    for moment in found.moments:
        phase = names.get(moment.name, moment.name)
        if phase is not None:
            in_search[phase] = max(in_search.get(phase, 0), moment.allocated_bytes)
    assert {"train", *(("rollout", "score") if inputs.online else ())} <= in_search.keys()
    assert in_search == {phase: in_plan[phase] for phase in in_search}
    start = next(one for one in found.moments if one.name == "start")
    assert start.allocated_bytes == plan.start.peak_device_bytes


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(asked())
def test_host_and_disk_hold_the_same_bytes(inputs: PlanInputs) -> None:
    same_bytes_elsewhere(inputs, ONE)


@settings(max_examples=150, deadline=None)
@given(asked_over_ranks())
def test_host_and_disk_of_a_tensor_rank_hold_the_same_bytes(
    given: tuple[PlanInputs, Degrees],
) -> None:
    same_bytes_elsewhere(*given)


def same_bytes_elsewhere(inputs: PlanInputs, degrees: Degrees, *, searched: bool = False) -> None:
    plan, found = both(inputs, degrees, searched=searched)
    host = {name: size for phase in plan.phases for name, size in phase.host.items()}
    disk = {name: size for phase in plan.phases for name, size in phase.disk.items()}
    staged = PLENTY - plan.host_budget_bytes  # by background snapshots
    assert found.host_bytes == sum(host.values()) + staged
    assert found.disk_bytes == sum(disk.values())


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(asked())
def test_no_evaluation_needs_more_than_what_the_search_looks_at(inputs: PlanInputs) -> None:
    plan, found = both(inputs)
    evaluation = next(one for one in plan.phases if one.phase == "evaluate")
    most = max(moment.allocated_bytes for moment in found.moments)
    assert sum(evaluation.device.values()) + evaluation.working_bytes <= most
