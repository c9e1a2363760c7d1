"""Components: predicted bytes and places of everything that a run keeps on each rank. Pure.

In: a TrainingJob, a Layout, KV pages. Out: ComponentPlans. What a run really holds is measured by
`memory.manager`; the two agree to the byte, up to alignment.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from gyre.core.records import Moments, Phase, Tier
from gyre.core.rounding import ceil_div
from gyre.memory.phases import default_needs, leave_tiers, match_name, needing_phases
from gyre.planner.memory_model.activations import ITEM_BYTES
from gyre.planner.memory_model.job import TrainingJob
from gyre.planner.memory_model.states import (
    CODED_BYTES,
    Layout,
    coded_parameters,
    device_staging_bytes,
    frozen_bytes,
    host_staging_bytes,
    layer_buffer_bytes,
    state_bytes,
)
from gyre.planner.plan import ComponentPlan, DeviceKind, Dtype, ModelNumbers
from gyre.trainer.adamw.blocks import BLOCK
from gyre.trainer.offload.slices import LAYER_BUFFERS, SLOTS

BRIEF: tuple[Tier, ...] = ("device", "none")  # nothing to keep between steps
PARKED: tuple[Tier, ...] = ("device", "host")
LAYERS_ON_DEVICE = (
    f"embedding, head and {LAYER_BUFFERS} layers of weights on the host, on the device"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    name: str
    size_bytes: int
    tiers: tuple[Tier, ...]
    formula: str


def predict_components(
    job: TrainingJob,
    layout: Layout,
    *,
    kv_pages: int,
    device: DeviceKind = "cuda",
    disk_tier: bool = False,
) -> tuple[ComponentPlan, ...]:
    """Return the bytes of each component on one rank, and where it may be."""
    keeping: tuple[Tier, ...] = (*PARKED, "disk") if disk_tier else PARKED
    rows: list[_Row] = []
    for owner in job.trained:
        rows += _trained(owner, job, layout, device, keeping)
    for owner, model in job.frozen.items():
        rows += _frozen(owner, model, job, layout, keeping)
    rows += _engine(job, layout, kv_pages, keeping)
    shared_weights = not job.own_weights(layout)
    return tuple(_component(row, shared_weights, job) for row in rows)


def staging_bytes(
    model: ModelNumbers,
    dtype: Dtype,
    *,
    trained: int,
    reference: bool,
    average: bool,
    ranks: int,
    moments: Moments = "float32",
) -> int:
    """Host bytes per rank that background snapshots are staged in: float32 masters and both moments
    of each trained model, the reference, its average. Ranks share it evenly, whatever the
    layout."""
    coded = coded_parameters(model, moments)
    state = 12 * model.num_parameters - 8 * coded + CODED_BYTES * (coded // BLOCK)
    frozen = (ITEM_BYTES[dtype] if reference else 0) + (4 if reference and average else 0)
    return ceil_div(trained * state + frozen * model.num_parameters, ranks)


def snapshot_bytes(job: TrainingJob, layout: Layout) -> int:
    """Return the host bytes per rank in which a job's background snapshots are staged."""
    if not job.snapshot_background:
        return 0
    return staging_bytes(
        job.model,
        job.dtype,
        trained=job.copies,
        reference=job.reference,
        average=job.reference_average,
        ranks=layout.data_ranks,  # those of a tensor group have a part each
        moments=layout.moments,
    )


def _trained(
    owner: str, job: TrainingJob, layout: Layout, device: DeviceKind, keeping: tuple[Tier, ...]
) -> list[_Row]:
    """Weights that are trained: float32 gradients and moments, and float32 masters beside
    lower-precision weights; what is offloaded, and the places through which it visits the
    device."""
    model, dtype, cut_bytes, layout = job.model, job.dtype, job.offload_cut_bytes, layout.of(owner)
    away: dict[str, tuple[Tier, ...]] = {"none": keeping, "host": ("host",), "disk": ("disk",)}
    state = away[layout.offload_optimizer]
    weights: tuple[Tier, ...] = keeping if layout.holds_weights(owner) else ("host",)
    tiers = {"params": weights, "grads": ("host",) if layout.offload_gradients else BRIEF}
    split = f" / {layout.shard_ranks} ranks" if layout.zero else ""
    each = _formulas(model, dtype, layout)
    rows = []
    for name, size_bytes in state_bytes(model, dtype, layout, owner).items():
        kind = name.rpartition(".")[2]
        whole = kind in tiers and layout.zero < 2
        formula = f"{each[kind]} bytes{'' if whole else split}"
        rows.append(
            _Row(name=name, size_bytes=size_bytes, tiers=tiers.get(kind, state), formula=formula)
        )
    if not layout.holds_weights(owner):
        rows.append(_layer_buffers(owner, model, dtype))
    if places := device_staging_bytes(model, dtype, layout, cut_bytes, owner=owner):
        what = f"{SLOTS} cuts of offloaded state, on the device"
        rows.append(_Row(name=f"{owner}.staging", size_bytes=places, tiers=BRIEF, formula=what))
    if beside := host_staging_bytes(model, dtype, layout, cut_bytes, owner=owner, device=device):
        what = "buffers between the device and what is offloaded"
        name = f"{owner}.staging_host"
        rows.append(_Row(name=name, size_bytes=beside, tiers=("host",), formula=what))
    return rows


def _formulas(model: ModelNumbers, dtype: Dtype, layout: Layout) -> dict[str, str]:
    """Return how the bytes of each kind of state are counted, in words."""
    count, item = model.num_parameters, 4 if layout.zero >= 2 else ITEM_BYTES[dtype]
    optimizer = f"{count} × 2 moments × 4"
    if coded := coded_parameters(model, layout.moments):
        optimizer = f"2 moments × ({count - coded} × 4 + {coded} × (1 + 4/{BLOCK}))"
    return {
        "params": f"{count} × {item}",
        "grads": f"{count} × 4",
        "master": f"{count} × 4",
        "optimizer": optimizer,
    }


def _frozen(
    owner: str, model: ModelNumbers, job: TrainingJob, layout: Layout, keeping: tuple[Tier, ...]
) -> list[_Row]:
    layout, item = layout.of(owner), ITEM_BYTES[job.dtype]
    split = f" / {layout.shard_ranks} ranks" if layout.zero >= 2 else ""
    average = owner == "reference" and job.reference_average
    each = f"({item} + 4 of the average)" if average else f"{item}"
    away = not layout.holds_weights(owner)
    row = _Row(
        name=owner,
        size_bytes=frozen_bytes(model, job.dtype, layout, average=average),
        tiers=("host",) if away else keeping,
        formula=f"{model.num_parameters} × {each} bytes{split}",
    )
    return [row, _layer_buffers(owner, model, job.dtype)] if away else [row]


def _layer_buffers(owner: str, model: ModelNumbers, dtype: Dtype) -> _Row:
    size_bytes = layer_buffer_bytes(model, dtype)
    return _Row(
        name=f"{owner}.layer_buffers", size_bytes=size_bytes, tiers=BRIEF, formula=LAYERS_ON_DEVICE
    )


def _engine(
    job: TrainingJob, layout: Layout, kv_pages: int, keeping: tuple[Tier, ...]
) -> list[_Row]:
    engine, rows = job.engine, []
    if engine is None:
        return rows
    tiers: tuple[Tier, ...] = (*keeping, "none")
    if job.own_weights(layout):
        count, item = job.engine_parameters, ITEM_BYTES[job.dtype]
        what = f"{count} × {item} bytes" + (", of each rank" if engine.part is not None else "")
        rows.append(_Row(name="engine.weights", size_bytes=count * item, tiers=tiers, formula=what))
    page = engine.page_bytes
    what = f"({kv_pages} pages + 1 spare) × {page} bytes"
    rows.append(_Row(name="engine.kv", size_bytes=(kv_pages + 1) * page, tiers=tiers, formula=what))
    if engine.peer_bytes:
        what = "partial sums of few rows, which the engine's other ranks write"
        stays: tuple[Tier, ...] = ("device",)
        rows.append(
            _Row(name="engine.peers", size_bytes=engine.peer_bytes, tiers=stays, formula=what)
        )
    if slots := engine.host_slots:
        what = f"{slots} slots × {page} bytes"
        tiers = ("host", "none")
        rows.append(_Row(name="engine.kv_host", size_bytes=slots * page, tiers=tiers, formula=what))
    return rows


def _component(row: _Row, shared_weights: bool, job: TrainingJob) -> ComponentPlan:
    chosen = job.leave
    return ComponentPlan(
        name=row.name,
        size_bytes=row.size_bytes,
        tiers=row.tiers,
        phases=_phases(row.name, row.tiers, shared_weights),
        leave=leave_tiers(row.name, row.tiers, chosen) if chosen else _leave(row.name, row.tiers),
        formula=row.formula,
    )


# a search asks for few names, for each of thousands of layouts


@functools.cache
def _phases(name: str, tiers: tuple[Tier, ...], shared_weights: bool) -> tuple[Phase, ...]:
    need = match_name(default_needs(shared_weights=shared_weights), name)
    assert need is not None, name
    return needing_phases(need, tiers)


@functools.cache
def _leave(name: str, tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    return leave_tiers(name, tiers, {})
