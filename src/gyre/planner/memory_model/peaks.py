"""Peaks: the device bytes of one rank at each instant that may be its peak. Pure arithmetic.

In: a TrainingJob, a Layout. Out: PeakInstants with their parts; the working bytes of each phase. A
training step has four such instants: the loss, the deepest layer, the end of the backward pass and
the optimizer step. Others are between steps, while the engine has the GPU, and as a stage begins.

What a run's plan and the search for a layout say of memory comes from here and from `components`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from gyre.core.records import Phase
from gyre.core.rounding import ceil_div
from gyre.memory.config import Residency
from gyre.memory.phases import RING
from gyre.planner.memory_model.activations import (
    ITEM_BYTES,
    again_bytes,
    forward_layer_bytes,
    head_backward_bytes,
    head_forward_bytes,
    layer_backward_bytes,
    saved_bytes,
)
from gyre.planner.memory_model.components import predict_components, snapshot_bytes
from gyre.planner.memory_model.job import TrainingJob
from gyre.planner.memory_model.states import (
    FLOAT,
    Layout,
    gathered_bytes,
    head_parameters,
    layer_group_bytes,
    root_parameters,
    unsummed_bytes,
)
from gyre.planner.plan import ComponentPlan, Dtype, ModelNumbers, Saving

MIB, GIB = 1 << 20, 1 << 30

USABLE_SHARE = 0.92  # of the device, as the survey's skeleton says (3.8)
CONTEXT_BYTES = 512 * MIB  # CUDA context and kernels, which the allocator never sees (survey 3.5)
# buffers of one process group per rank; an estimate: they grow with groups and channels
COLLECTIVE_BYTES = GIB
# The allocator reserves more than is in use. Whole buffers that live for the run do not fragment;
# what comes and goes does. Survey 3.5: reserved over active is 8-16 % of the transient part with
# compiled layers, 17-26 % with eager ones.
FRAGMENT_SHARE = 0.10
# cuBLAS keeps 32 MiB per thread: those of the engine, the trainer and the backward pass
WORKSPACE_BYTES = 96 * MIB
KEPT = "kept activations"
UNSUMMED = "gradients not yet summed"
HANDOVER_BYTES = 2 * (256 << 20)  # two buckets, as in weights.gather
MADE_IN_TURN = ("reference", "critic", "actor", "reward", "engine")  # owners, as stages make them


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakInstant:
    """One instant on one rank."""

    name: str
    parts: Mapping[str, int]  # device bytes by what they are for

    @property
    def allocated_bytes(self) -> int:
        """Return what the allocator has given out: torch.cuda.max_memory_allocated's number."""
        return sum(self.parts.values())


def phase_order(job: TrainingJob) -> tuple[Phase, ...]:
    """Return the phases of an iteration."""
    return RING if job.engine is not None else ("score", "train", "evaluate")


def working_bytes(job: TrainingJob, layout: Layout) -> dict[Phase, int]:
    """Return the device bytes beside the components, by phase; on a GPU with the engine's buffers,
    which stay in all of them."""
    kept = sum(_fixed(job).values())
    return {
        phase: kept + max((instant.allocated_bytes for instant in instants), default=0)
        for phase, instants in _passing(job, layout).items()
    }


def phase_moments(
    job: TrainingJob, layout: Layout, residency: Residency, running: int
) -> tuple[PeakInstant, ...]:
    """Return every instant of an iteration. "resident": nothing leaves the device. "phase": what a
    phase does not need is on the host, or destroyed. `running` completions of full length hold
    pages."""
    pages = running * job.engine.pages_per_sequence if job.engine is not None else 0
    components, passing = predict_components(job, layout, kv_pages=pages), _passing(job, layout)
    order = phase_order(job)
    first = {c.name for c in components if is_held(c, order[0], residency)}
    moments = [start_moment(job, layout, components, first)]
    phases: tuple[Phase, ...] = ("train", "score", "handover", "rollout")
    # an evaluation by the engine is a rollout
    for phase in phases if job.engine is not None else ("train", "score", "evaluate"):
        held = {c.name: c.size_bytes for c in components if is_held(c, phase, residency)}
        held |= _fixed(job)
        moments += [_moment(one.name, {**held, **one.parts}) for one in passing[phase]]
    return tuple(moments)


def train_moments(job: TrainingJob, layout: Layout) -> tuple[PeakInstant, ...]:
    """Return the four instants of a training step, with the models that are trained alone on the
    device."""
    alone = replace(job, engine=None, reference=False, reward_model=None)
    components = predict_components(alone, layout, kv_pages=0)
    held = {c.name: c.size_bytes for c in components if "train" in c.phases}
    return tuple(_moment(one.name, {**held, **one.parts}) for one in _train(job, layout))


def is_held(component: ComponentPlan, phase: Phase, residency: Residency) -> bool:
    """Return whether a component is on the device: the rule of memory.ledger where nothing, or all
    that can, leaves."""
    if "device" not in component.tiers:
        return False
    return residency == "resident" or phase in component.phases or not component.leave


def start_moment(
    job: TrainingJob, layout: Layout, components: Sequence[ComponentPlan], first: Collection[str]
) -> PeakInstant:
    """Return the fullest instant while a stage begins. Owners are made one after the other; what
    the `first` phase does not hold on the device leaves as soon as its owner is there. A rank reads
    its own runs of each model; weights in shards are rounded to the compute dtype on the way."""
    held: dict[str, int] = {}
    moments = []
    for owner in MADE_IN_TURN:
        own = {
            c.name: c.size_bytes
            for c in components
            if c.name.partition(".")[0] == owner and "device" in c.tiers
        }
        if own:
            beside = (
                _fixed(job) if owner == "engine" else {"run being read": _run_bytes(job, layout)}
            )
            moments.append(_moment("start", held | own | beside))
        held |= {name: size for name, size in own.items() if name in first}
    return max(moments, key=lambda moment: moment.allocated_bytes)


def _run_bytes(job: TrainingJob, layout: Layout) -> int:
    """Return a rank's run of the largest tensor, where it is rounded as it is read."""
    if layout.zero < 2 or job.dtype == "float32":
        return 0
    models = (job.model, *job.frozen.values())
    largest = max(max(m.embedding_parameters, 2 * m.mlp_size * m.hidden_size) for m in models)
    return ITEM_BYTES[job.dtype] * ceil_div(largest, layout.shard_ranks)


def _passing(job: TrainingJob, layout: Layout) -> dict[Phase, tuple[PeakInstant, ...]]:
    """Return the instants of each phase, with what they hold beside the components and the engine's
    fixed buffers."""
    score = _score(job, layout)
    evaluation = _moment("evaluate", score.parts)
    asks = job.engine is not None or bool(job.frozen)
    found: dict[Phase, tuple[PeakInstant, ...]] = {
        "score": (score,) if asks else (),
        "train": _train(job, layout),
        "evaluate": (evaluation,),
        "rollout": (),
        "handover": (),
    }
    if job.engine is not None:
        step = _moment("rollout", {"engine's step": job.engine.working_bytes})
        found |= {"rollout": (step,), "evaluate": (step,)}
        if coming := _handover_bytes(job, layout):
            found["handover"] = (_moment("handover", {"weights on their way": coming}),)
    return found


def _handover_bytes(job: TrainingJob, layout: Layout) -> int:
    """Return the buckets of a gather, and what it overwrites, which is kept until it is whole."""
    own = ITEM_BYTES[job.dtype] * job.engine_parameters if job.own_weights(layout) else 0
    return min(HANDOVER_BYTES, 2 * own) + own


def _train(job: TrainingJob, layout: Layout) -> tuple[PeakInstant, ...]:
    """Return the four instants of a training step."""
    m, dtype, layouts = job.model, job.dtype, [layout.of(owner) for owner in job.trained]
    item, tokens, chunks = ITEM_BYTES[dtype], job.chunk_tokens(layout), job.most_chunks(layout)
    targets = min(tokens - 1, max(1, round(tokens * job.target_share)))
    waiting = sum(unsummed_bytes(m, one, chunks) for one in layouts)
    gathered = {
        one: sum(gathered_bytes(m, dtype, here, job.matmul) for here in layouts if here.zero == one)
        for one in (2, 3)
    }
    whole = {"gathered weights": sum(gathered.values()), UNSUMMED: waiting}
    # what stays from one chunk to the next
    between = {"gathered weights": gathered[2] if chunks > 1 else 0, UNSUMMED: waiting}
    head = item * m.embedding_parameters if m.tied else 0  # waits for the embedding's gradient
    lets_go = item * head_parameters(m) if layout.zero == 3 else 0  # by the deepest layer
    summed = FLOAT * head_parameters(m) if layout.zero >= 2 else 0
    layer = max(layer_group_bytes(m, dtype, one, job.matmul) for one in layouts)
    layer += layer_backward_bytes(m, dtype, tokens, job.matmul)
    embedding = item * m.embedding_parameters + head
    if waiting:  # what is reduced leaves its place among these
        layer, summed = max(layer, summed), 0
    elif layout.zero >= 2:  # the root group is reduced as one, when its last gradient is there
        embedding = max(embedding, (item + FLOAT) * root_parameters(m))
    kept = _kept_bytes(job, layout, tokens, targets)
    again = again_bytes(m, dtype, job.saving, layout.checkpointing, tokens, longest=job.longest)
    loss = max(
        head_forward_bytes(m, job.saving, targets),
        head_backward_bytes(m, dtype, job.saving, targets),
    )
    deepest = {
        KEPT: kept,
        "gathered weights": whole["gathered weights"] - lets_go,
        "computed again": again,
        "layer's gradients": layer,
        "head's gradient": head + summed,
    }
    return (
        _moment("loss", whole | {KEPT: kept, "log-probs": loss}),
        _moment("deepest layer", whole | deepest),
        _moment("end of backward", between | {"embedding's and head's gradients": embedding}),
        _moment("optimizer step", {}),
    )


def _kept_bytes(job: TrainingJob, layout: Layout, tokens: int, targets: int) -> int:
    """Return the activations of a chunk that its backward pass wants."""
    return saved_bytes(
        job.model,
        job.dtype,
        job.saving,
        layout.checkpointing,
        tokens=tokens,
        targets=targets,
        longest=job.longest,
    )


def _score(job: TrainingJob, layout: Layout) -> PeakInstant:
    """Log-probs without a gradient, of the policy and of the frozen models; the one of them that
    takes most. In shards it has what is outside the layers whole, and two layers. Chunks are of a
    whole step, so an update that fills none bounds nothing here."""
    tokens, passes = layout.tokens_per_chunk, []
    models = dict.fromkeys(job.trained, job.model) | job.frozen
    for owner, model in models.items():
        one, layers = layout.of(owner), 2 * ITEM_BYTES[job.dtype] * model.layer_parameters
        gathered = gathered_bytes(model, job.dtype, one, job.matmul)
        forward = forward_bytes(model, job.dtype, tokens, longest=job.longest, saving=job.saving)
        weights = gathered + layers if one.zero >= 2 else 0
        passes.append(_moment("score", {"gathered weights": weights, "forward pass": forward}))
    return max(passes, key=lambda moment: moment.allocated_bytes)


def forward_bytes(
    model: ModelNumbers, dtype: Dtype, tokens: int, *, longest: int, saving: Saving
) -> int:
    """Return a forward pass without a backward: one layer's temporaries at a time."""
    layer = forward_layer_bytes(model, dtype, saving, tokens, longest=longest)
    return layer + head_forward_bytes(model, saving, tokens)


def device_bytes_of(moment: PeakInstant, layout: Layout) -> int:
    """Bytes that the device must have free for it: allocated, reserved beside it, and outside the
    allocator."""
    whole = sum(size for name, size in moment.parts.items() if _is_whole(name))
    passing = moment.allocated_bytes - whole
    outside = CONTEXT_BYTES + WORKSPACE_BYTES + (COLLECTIVE_BYTES if layout.gpus > 1 else 0)
    return whole + int(passing * (1 + FRAGMENT_SHARE)) + outside


def host_bytes_of(job: TrainingJob, layout: Layout, residency: Residency) -> int:
    """Pinned host memory per rank: what is offloaded, what snapshots are staged in, and under
    "phase" everything that leaves and is not destroyed. Pages that were pinned once stay so."""
    order, found = phase_order(job), snapshot_bytes(job, layout)
    for component in predict_components(job, layout, kv_pages=0):
        if "device" not in component.tiers:
            found += component.size_bytes if component.tiers[0] == "host" else 0
        elif component.leave[:1] == ("host",):
            stays = all(is_held(component, phase, residency) for phase in order)
            found += 0 if stays else component.size_bytes
    return found


def disk_bytes_of(job: TrainingJob, layout: Layout) -> int:
    """Return the bytes of a rank's file of offloaded state."""
    if layout.offload_optimizer != "disk":
        return 0
    components = predict_components(job, layout, kv_pages=0)
    return sum(c.size_bytes for c in components if c.tiers == ("disk",))


def _fixed(job: TrainingJob) -> dict[str, int]:
    """Return what the engine keeps in every phase, whatever is parked: graphs, and the buffers
    whose addresses they have."""
    if job.engine is None:
        return {}
    return {"engine.graphs": job.engine.graph_bytes, "engine.buffers": job.engine.buffer_bytes}


def _is_whole(name: str) -> bool:
    return name.startswith(("actor.", "critic.", "engine.", "reference", "reward"))


def _moment(name: str, parts: Mapping[str, int]) -> PeakInstant:
    return PeakInstant(name=name, parts={part: size for part, size in parts.items() if size})
