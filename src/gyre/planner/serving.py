"""Serving: memory and limits of an engine without a trainer. In: sizes of the model, the engine's
settings, free bytes. Out: ServingPlan. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gyre.core.rounding import ceil_div
from gyre.engine.config import EngineConfig, plan_num_pages, plan_num_slots
from gyre.engine.runners.gpu_work import buffer_bytes
from gyre.models.spec import ModelSpec
from gyre.planner.gpus import recognize_gpu
from gyre.planner.memory_model.activations import ITEM_BYTES
from gyre.planner.memory_model.engine import GRAPH_BYTES, engine_bytes, kv_bytes_per_page
from gyre.planner.model_zoo import model_numbers, tensor_parts
from gyre.planner.plan import DeviceKind, Dtype, ModelNumbers
from gyre.planner.search.generation import decode_step

QUARTER = "a quarter of the free memory"
FULL_LENGTH = "engine.max_running sequences of full length"
GPUS_PER_HOST = 8  # of a kind that is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """One rank of an engine, and how many share its device's memory."""

    device: DeviceKind
    dtype: Dtype
    replicas: int
    tensor_ranks: int  # of each, all alike
    ranks_per_device: int  # on a CPU all of all replicas, on a GPU one
    free_bytes: int  # of the device, before anything is loaded
    weights_bytes: int
    kv_pages: int
    kv_decided_by: str
    kv_follows_free_bytes: bool  # so that a start may find another number
    page_tokens: int
    page_bytes: int
    kv_pool_bytes: int  # the pages and one that padding writes to
    kv_host_bytes: int  # of host memory, for preempted completions
    working_bytes: int  # temporaries of a step, and logits
    fixed_bytes: int  # graphs, and buffers with fixed addresses
    context_tokens: int  # of a prompt and its answer
    max_running: int
    max_queued: int
    max_queued_tokens: int

    @property
    def kv_tokens(self) -> int:
        """Return the tokens of all running sequences together that one engine holds."""
        return self.kv_pages * self.page_tokens

    @property
    def full_sequences(self) -> int:
        """Return how many sequences of full length one engine runs at the same time."""
        pages = ceil_div(self.context_tokens, self.page_tokens)
        return min(self.max_running, self.kv_pages // pages)

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of the device that its ranks need together, at most."""
        each = self.weights_bytes + self.kv_pool_bytes + self.working_bytes + self.fixed_bytes
        return each * self.ranks_per_device

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.free_bytes


def plan_serving(
    model: ModelNumbers,
    config: EngineConfig,
    *,
    device: DeviceKind,
    dtype: Dtype,
    weights_bytes: int,
    free_bytes: int,
    replicas: int,
    own_kernels: bool,
) -> ServingPlan:
    """Return the plan of an engine whose `config` leaves nothing open; `model` is what one of its
    ranks holds. `own_kernels` read keys and values where they are; torch gathers them."""
    together = replicas * config.tensor_ranks if device == "cpu" else 1
    page_bytes = kv_bytes_per_page(model, dtype, config.page_tokens)
    pages = plan_num_pages(
        config,
        page_bytes=page_bytes,
        context_tokens=model.context_tokens,
        # an engine looks at what is free once its weights are loaded
        free_bytes=max(0, free_bytes - weights_bytes * together),
    )
    decided_by = _decided_by(config, pages, model.context_tokens)
    on_gpu = device == "cuda" and own_kernels
    fixed = GRAPH_BYTES + _buffers(model, config, dtype, pages) if on_gpu else 0
    return ServingPlan(
        device=device,
        dtype=dtype,
        replicas=replicas,
        tensor_ranks=config.tensor_ranks,
        ranks_per_device=together,
        free_bytes=free_bytes,
        weights_bytes=weights_bytes,
        kv_pages=pages,
        kv_decided_by=decided_by,
        kv_follows_free_bytes=decided_by in (QUARTER, "engine.kv_fraction"),
        page_tokens=config.page_tokens,
        page_bytes=page_bytes,
        kv_pool_bytes=page_bytes * (pages + 1),
        kv_host_bytes=page_bytes * plan_num_slots(config.kv_host_bytes, page_bytes=page_bytes),
        working_bytes=engine_bytes(
            model,
            dtype,
            tokens=config.token_budget,
            running=config.max_running,
            longest=0 if own_kernels else model.context_tokens,
        ),
        fixed_bytes=fixed,
        context_tokens=min(model.context_tokens, pages * config.page_tokens + 1),
        max_running=config.max_running,
        max_queued=config.max_queued,
        max_queued_tokens=config.max_queued_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank of an engine over so many GPUs of a host."""

    tensor_ranks: int
    plan: ServingPlan
    token_s: float | None  # of a step of one sequence of half the context; None: unknown GPU


def plan_over_ranks(
    spec: ModelSpec,
    config: EngineConfig,
    *,
    dtype: Dtype,
    free_bytes: int,
    own_kernels: bool,
    device_name: str,
) -> tuple[RankPlan, ...]:
    """Return the plan of an engine on one GPU, and on each number of them in a host that the model
    divides over. Each rank has the logits of the whole vocabulary."""
    gpu = recognize_gpu(device_name)
    per_host = GPUS_PER_HOST if gpu is None else gpu.gpus_per_host
    found = []
    for ranks, part in ({1: model_numbers(spec)} | tensor_parts(spec, per_host)).items():
        plan = plan_serving(
            replace(part, vocab_size=spec.vocab_size),
            config,
            device="cuda",
            dtype=dtype,
            weights_bytes=ITEM_BYTES[dtype] * part.num_parameters,
            free_bytes=free_bytes,
            replicas=1,
            own_kernels=own_kernels,
        )
        token_s = None
        if gpu is not None:
            context = plan.context_tokens / 2
            step = decode_step(part, dtype, gpu, tensor_ranks=ranks, rows=1, context_tokens=context)
            token_s = step.seconds
        found.append(RankPlan(tensor_ranks=ranks, plan=plan, token_s=token_s))
    return tuple(found)


def fewest_ranks(plans: Sequence[RankPlan]) -> int | None:
    """Return the fewest tensor ranks that fit; None where none do."""
    return min((one.tensor_ranks for one in plans if one.plan.fits), default=None)


def _decided_by(config: EngineConfig, pages: int, context_tokens: int) -> str:
    """Return the first key that is set, as `plan_num_pages` takes them, or what bounds the rest."""
    for name in ("num_pages", "kv_bytes", "kv_fraction"):
        if getattr(config, name):
            return f"engine.{name}"
    everyone = config.max_running * ceil_div(context_tokens, config.page_tokens)
    return FULL_LENGTH if pages == everyone else QUARTER


def _buffers(model: ModelNumbers, config: EngineConfig, dtype: Dtype, pages: int) -> int:
    return buffer_bytes(
        max_running=config.max_running,
        token_budget=config.token_budget,
        pool_tokens=pages * config.page_tokens,
        page_tokens=config.page_tokens,
        context_tokens=model.context_tokens,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        logit_bytes=ITEM_BYTES[dtype],
        invariant=config.batch_invariant,
    )
