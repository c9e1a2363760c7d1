"""A run's plan and the search say the same bytes of the same layout: device by phase, host, disk,
and the begin of a stage."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.planner.decide import make_plan
from gyre.planner.memory_model.job import MODELS, layout_of
from gyre.planner.plan import Hardware, Plan, PlanInputs, Shards
from gyre.planner.search.candidates import Candidate, GpuCluster, judge
from planner_cases import job_of
from unit.planner.memory_model.test_exact_bytes import TOY, UNTIED, WIDE, make_inputs
from unit.planner.search.test_exact_search import make_gpu

PLENTY = 1 << 60
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


def both(inputs: PlanInputs) -> tuple[Plan, Candidate]:
    plan = make_plan(inputs, GPU)
    assert inputs.tokens_per_chunk is not None
    job = job_of(
        inputs, "bfloat16", saving="triton", page_tokens=16, max_running=plan.max_running or 1
    )
    cluster = GpuCluster(gpus=inputs.ranks, gpu=make_gpu(PLENTY, host_bytes=PLENTY))
    layout = layout_of(inputs, inputs.tokens_per_chunk)
    return plan, judge(job, cluster, layout, inputs.residency)


@settings(max_examples=150, deadline=None)
@given(asked())
def test_the_device_holds_the_same_bytes_in_each_phase(inputs: PlanInputs) -> None:
    plan, found = both(inputs)
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


@settings(max_examples=150, deadline=None)
@given(asked())
def test_host_and_disk_hold_the_same_bytes(inputs: PlanInputs) -> None:
    plan, found = both(inputs)
    host = {name: size for phase in plan.phases for name, size in phase.host.items()}
    disk = {name: size for phase in plan.phases for name, size in phase.disk.items()}
    staged = PLENTY - plan.host_budget_bytes  # by background snapshots
    assert found.host_bytes == sum(host.values()) + staged
    assert found.disk_bytes == sum(disk.values())


@settings(max_examples=100, deadline=None)
@given(asked())
def test_no_evaluation_needs_more_than_what_the_search_looks_at(inputs: PlanInputs) -> None:
    plan, found = both(inputs)
    evaluation = next(one for one in plan.phases if one.phase == "evaluate")
    most = max(moment.allocated_bytes for moment in found.moments)
    assert sum(evaluation.device.values()) + evaluation.working_bytes <= most
