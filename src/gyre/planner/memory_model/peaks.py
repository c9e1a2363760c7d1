"""Peaks: the device bytes of one rank at each instant that may be its peak. In: a TrainingJob, a
Layout. Out: PeakInstants with their parts; the peak is the largest. Pure arithmetic over
`activations` and `states`.

A training step has four such instants: the loss, the deepest layer, the end of the backward pass
and the optimizer step. Others are between steps, while the engine has the GPU, and the begin of a
stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gyre.core.records import Matmul, Moments
from gyre.core.rounding import ceil_div
from gyre.distributed.config import SumGradients
from gyre.memory.config import Residency
from gyre.planner.memory_model.activations import (
    ITEM_BYTES,
    again_bytes,
    forward_layer_bytes,
    head_backward_bytes,
    head_forward_bytes,
    layer_backward_bytes,
    saved_bytes,
)
from gyre.planner.memory_model.components import staging_bytes
from gyre.planner.memory_model.states import (
    FLOAT,
    Layout,
    away_bytes,
    device_staging_bytes,
    disk_state_bytes,
    frozen_bytes,
    gathered_bytes,
    head_parameters,
    host_staging_bytes,
    host_state_bytes,
    layer_group_bytes,
    most_chunks,
    room_bytes,
    root_parameters,
    state_bytes,
    unsummed_bytes,
)
from gyre.planner.plan import Dtype, ModelNumbers, Saving

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What generation needs on each GPU beside the trainer."""

    running: int  # completions of full length that should hold pages at the same time, per GPU
    longest: int  # tokens of a sequence
    kv_bytes_per_token: int
    working_bytes: int  # a step's temporaries and logits
    graph_bytes: int  # private pools of CUDA graphs
    buffer_bytes: int = 0  # scratch, staging and logits with fixed addresses, which the graphs have


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What is trained, whatever it runs on."""

    model: ModelNumbers
    dtype: Dtype
    saving: Saving
    longest: int  # tokens of the longest sequence; a chunk holds at least one
    mean_tokens: int  # of a sequence: attention's share of the work
    tokens_per_update: int  # over all ranks, expected
    most_tokens_per_update: int  # when every sequence is as long as it may be
    updates_per_step: int = 1  # between two hand-overs to the engine
    target_share: float = 1.0  # of the tokens that have a loss
    matmul: Matmul = "same"
    moments: Moments = "float32"
    critic: bool = False
    reference: bool = False
    reward_model: ModelNumbers | None = None
    engine: Engine | None = None  # None: nothing is generated
    snapshot_background: bool = False  # snapshots are staged in host memory, which stays taken
    reference_average: bool = False
    offload_parameters: tuple[str, ...] = ()  # models whose weights live in host memory
    offload_cut_bytes: int = 128 * MIB  # of offloaded state that visits the device at a time
    sum_gradients: SumGradients = "chunk"  # when ranks that hold shards sum their gradients

    @property
    def copies(self) -> int:
        """Models that are trained."""
        return 2 if self.critic else 1

    def chunk_tokens(self, layout: Layout) -> int:
        """Return the tokens of a rank's fullest chunk: an update may be too small to fill one."""
        share = max(self.longest, ceil_div(self.most_tokens_per_update, layout.gpus))
        return min(layout.tokens_per_chunk, share)

    def most_chunks(self, layout: Layout) -> int:
        """Return the most chunks that a rank has in an update."""
        tokens, room = self.most_tokens_per_update, layout.tokens_per_chunk
        return most_chunks(tokens, longest=self.longest, ranks=layout.gpus, tokens_per_chunk=room)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakInstant:
    """One instant on one rank."""

    name: str
    parts: Mapping[str, int]  # device bytes by what they are for

    @property
    def allocated_bytes(self) -> int:
        """Return what the allocator has given out: torch.cuda.max_memory_allocated's number."""
        return sum(self.parts.values())


def train_moments(
    job: TrainingJob, layout: Layout, beside: Mapping[str, int] | None = None
) -> tuple[PeakInstant, ...]:
    """Return the four instants of a training step. `beside`: what else stays on the device
    meanwhile."""
    base = _resident(job, layout) | dict(beside or {})
    tokens, m, dtype = job.chunk_tokens(layout), job.model, job.dtype
    item = ITEM_BYTES[dtype]
    targets = min(tokens - 1, max(1, round(tokens * job.target_share)))
    kept = saved_bytes(
        m,
        dtype,
        job.saving,
        layout.checkpointing,
        tokens=tokens,
        targets=targets,
        longest=job.longest,
    )
    gathered = {"gathered weights": gathered_bytes(m, dtype, layout, job.matmul)}
    head = item * m.embedding_parameters if m.tied else 0  # waits for the embedding's gradient
    whole_head, summed = (
        (item * head_parameters(m), FLOAT * head_parameters(m)) if layout.zero >= 2 else (0, 0)
    )
    chunks = job.most_chunks(layout)
    waiting = {UNSUMMED: job.copies * unsummed_bytes(m, layout, chunks)}
    # what stays from one chunk to the next
    between = waiting | (gathered if layout.zero == 2 and chunks > 1 else {})
    loss = max(
        head_forward_bytes(m, job.saving, targets),
        head_backward_bytes(m, dtype, job.saving, targets),
    )
    layer = layer_backward_bytes(m, dtype, tokens, job.matmul) + layer_group_bytes(
        m, dtype, layout, job.matmul
    )
    embedding = item * m.embedding_parameters + head
    if waiting[UNSUMMED]:  # what is reduced leaves its place among these
        layer, summed = max(layer, summed), 0
    elif layout.zero >= 2:  # the root group is reduced as one, when its last gradient is there
        embedding = max(embedding, (item + FLOAT) * root_parameters(m))
    again = again_bytes(m, dtype, job.saving, layout.checkpointing, tokens, longest=job.longest)
    during = {**base, **gathered, **waiting, KEPT: kept}
    let_go = {
        "gathered weights": gathered["gathered weights"] - (whole_head if layout.zero == 3 else 0)
    }
    deepest = let_go | {
        "computed again": again,
        "layer's gradients": layer,
        "head's gradient": head + summed,
    }
    return (
        _moment("loss", during | {"log-probs": loss}),
        _moment("deepest layer", during | deepest),
        _moment(
            "end of backward", base | between | {"embedding's and head's gradients": embedding}
        ),
        _moment("optimizer step", base),
    )


def phase_moments(
    job: TrainingJob, layout: Layout, residency: Residency, running: int
) -> tuple[PeakInstant, ...]:
    """Return every instant of an iteration. "resident": nothing leaves the device. "phase": what a
    phase does not need is on the host, or destroyed. `running` completions of full length hold
    pages."""
    frozen, engine = _frozen(job, layout), _engine(job, layout, running)
    stays, always = residency == "resident", _fixed(job)
    moments = [
        _start_moment(job, layout, engine if stays else None),
        *train_moments(job, layout, frozen | engine if stays else always),
    ]
    if job.engine is not None or frozen:
        states = _resident(job, layout)
        parked = {
            name: size for name, size in states.items() if name.endswith((".params", ".rooms"))
        }
        beside = states | engine if stays else parked | always
        moments.append(_score_moment(job, layout, beside | frozen))
    if job.engine is not None:
        parts = (_resident(job, layout) | frozen if stays else {}) | engine
        if layout.zero < 2:  # the engine reads the trainer's whole compute weights
            parts["actor.params"] = _states(job, layout)["actor.params"]
        moments.append(_moment("rollout", parts | {"engine's step": job.engine.working_bytes}))
    return tuple(moments)


def _start_moment(
    job: TrainingJob, layout: Layout, engine: Mapping[str, int] | None
) -> PeakInstant:
    """Return the instant when a stage begins: a rank makes its part of each model and reads its own
    runs. Master weights are rounded to the compute dtype on the way, a run at a time. Without
    `engine`, phases take turns: what the first one does not need is parked when its model is
    made."""
    models, item = (job.model, *_frozen_models(job).values()), ITEM_BYTES[job.dtype]
    # of a tensor
    largest = max(max(m.embedding_parameters, 2 * m.mlp_size * m.hidden_size) for m in models)
    run = (
        item * ceil_div(largest, layout.shard_ranks)
        if layout.zero >= 2 and job.dtype != "float32"
        else 0
    )
    states, frozen, reading = _resident(job, layout), _frozen(job, layout), {"run being read": run}
    if engine is not None:
        return _moment("start", {**states, **frozen, **engine, **reading})
    actor = {name: size for name, size in states.items() if name.startswith("actor.")}
    kept = {} if job.engine is not None else frozen  # the first phase is a rollout, or else a score
    first = _moment("start", {**actor, **kept, **reading})
    last = _moment("start", {"actor.params": actor.get("actor.params", 0), **frozen, **reading})
    return max(first, last, key=lambda moment: moment.allocated_bytes)


def _score_moment(job: TrainingJob, layout: Layout, beside: Mapping[str, int]) -> PeakInstant:
    """Log-probs without a gradient, of the policy and of the frozen models; the one of them that
    takes most."""
    tokens = job.chunk_tokens(layout)
    passes = []
    for model in (job.model, *_frozen_models(job).values()):
        one_layer = forward_layer_bytes(model, job.dtype, job.saving, tokens, longest=job.longest)
        forward = {
            "gathered weights": gathered_bytes(model, job.dtype, layout, job.matmul),
            "forward pass": one_layer + head_forward_bytes(model, job.saving, tokens),
        }
        passes.append(_moment("score", {**beside, **forward}))
    return max(passes, key=lambda moment: moment.allocated_bytes)


def page_bytes(job: TrainingJob) -> int:
    """KV pages of one completion of full length."""
    return job.engine.longest * job.engine.kv_bytes_per_token if job.engine is not None else 0


def device_bytes_of(moment: PeakInstant, layout: Layout) -> int:
    """Bytes that the device must have free for it: allocated, reserved beside it, and outside the
    allocator."""
    whole = sum(size for name, size in moment.parts.items() if _is_whole(name))
    passing = moment.allocated_bytes - whole
    outside = CONTEXT_BYTES + WORKSPACE_BYTES + (COLLECTIVE_BYTES if layout.gpus > 1 else 0)
    return whole + int(passing * (1 + FRAGMENT_SHARE)) + outside


def host_bytes_of(job: TrainingJob, layout: Layout, residency: Residency) -> int:
    """Pinned host memory per rank: what is offloaded, what snapshots are staged in, and under
    "phase" everything that leaves and is not destroyed."""
    states = _states(job, layout)
    away = host_state_bytes(states, layout) | _host_staging(job, layout) | _frozen_away(job, layout)
    if job.snapshot_background:
        away["snapshots"] = staging_bytes(
            job.model,
            job.dtype,
            trained=job.copies,
            reference=job.reference,
            average=job.reference_average,
            ranks=layout.gpus,
            moments=layout.moments,
        )
    if residency == "resident":
        return sum(away.values())
    on_disk = disk_state_bytes(states, layout)
    shared = job.engine is not None and layout.zero < 2
    leaves = {
        name: size
        for name, size in states.items()
        if job.engine is not None
        and not name.endswith(".grads")
        and not (shared and name == "actor.params")
        and name not in on_disk
    }
    frozen = {
        name: size for name, size in _frozen(job, layout).items() if not name.endswith(".rooms")
    }
    return sum((away | leaves | frozen).values())


def disk_bytes_of(job: TrainingJob, layout: Layout) -> int:
    """Return the bytes of a rank's file of offloaded state."""
    return sum(disk_state_bytes(_states(job, layout), layout).values())


def _states(job: TrainingJob, layout: Layout) -> dict[str, int]:
    states = state_bytes(job.model, job.dtype, layout)
    if job.critic:
        states |= state_bytes(job.model, job.dtype, layout, "critic")
    return states


def _resident(job: TrainingJob, layout: Layout) -> dict[str, int]:
    states = _states(job, layout)
    away = away_bytes(states, layout)
    places = {}
    for owner in _owners(job):
        given = job.model, job.dtype, layout, job.offload_cut_bytes
        places[f"{owner}.staging"] = device_staging_bytes(*given, owner=owner)
        places[f"{owner}.rooms"] = (
            0 if layout.holds_weights(owner) else room_bytes(job.model, job.dtype)
        )
    kept = {name: size for name, size in states.items() if name not in away}
    return kept | {name: size for name, size in places.items() if size}


def _host_staging(job: TrainingJob, layout: Layout) -> dict[str, int]:
    given = job.model, job.dtype, layout, job.offload_cut_bytes
    sizes = {
        f"{owner}.staging_host": host_staging_bytes(*given, owner=owner) for owner in _owners(job)
    }
    return {name: size for name, size in sizes.items() if size}


def _owners(job: TrainingJob) -> tuple[str, ...]:
    return ("actor", "critic") if job.critic else ("actor",)


def _frozen(job: TrainingJob, layout: Layout) -> dict[str, int]:
    """Return the bytes on the device of models that are not trained, while they run."""
    sizes = {
        owner: frozen_bytes(
            model, job.dtype, layout, average=owner == "reference" and job.reference_average
        )
        for owner, model in _frozen_models(job).items()
    }
    there = {owner: size for owner, size in sizes.items() if layout.holds_weights(owner)}
    away = {owner: model for owner, model in _frozen_models(job).items() if owner not in there}
    return there | {f"{owner}.rooms": room_bytes(model, job.dtype) for owner, model in away.items()}


def _frozen_away(job: TrainingJob, layout: Layout) -> dict[str, int]:
    models = {
        owner: model
        for owner, model in _frozen_models(job).items()
        if not layout.holds_weights(owner)
    }
    return {owner: frozen_bytes(model, job.dtype, layout) for owner, model in models.items()}


def _frozen_models(job: TrainingJob) -> dict[str, ModelNumbers]:
    found = {"reference": job.model} if job.reference else {}
    return found | ({"reward": job.reward_model} if job.reward_model is not None else {})


def _engine(job: TrainingJob, layout: Layout, running: int) -> dict[str, int]:
    """Return what generation has on the device: weights of its own where the trainer's are in
    shards, pages, what is fixed."""
    if job.engine is None:
        return {}
    own = 0 if layout.zero < 2 else ITEM_BYTES[job.dtype] * job.model.num_parameters
    return {"engine.weights": own, "engine.kv": running * page_bytes(job)} | _fixed(job)


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
