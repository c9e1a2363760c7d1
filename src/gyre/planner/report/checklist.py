"""Checklist: the reference's training and inference checklists for one plan, each line on or off
and why. Pure.

In: a Choice, the settings that the lines ask about, the features that exist. Out: Lines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from gyre.core.rounding import ceil_div
from gyre.memory.errors import words
from gyre.planner.memory_model.activations import layer_bytes
from gyre.planner.memory_model.states import coded_parameters, on_one_gpu, state_bytes
from gyre.planner.search.advice import over_one_gpu, strategy_for, tree_for
from gyre.planner.search.search import SearchResult
from gyre.planner.search.speed import FP8_GAIN
from gyre.trainer.adamw.blocks import BLOCK

State = Literal["on", "off", "not built"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a config says that a layout does not."""

    features: Mapping[str, bool]  # planner.report.features
    snapshot_every_steps: int  # 0: one at the end of a stage
    snapshot_in_background: bool
    max_running: int
    token_budget: int  # of an engine step
    page_tokens: int
    prefix_cache: bool
    completions_per_prompt: int
    max_restarts: int  # of a run whose ranks or engines die
    cluster_kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    name: str
    state: State
    reason: str


# the lines that no config changes
LOADING = Line(
    name="Data loading",
    state="on",
    reason="records are read and encoded before the first step, and no step waits for a file",
)
HEALTH = Line(
    name="Health checks",
    state="off",
    reason="this plan serves nothing; gyre serve answers GET /health/live and GET /health/ready",
)


def training_lines(choice: SearchResult, settings: Settings) -> tuple[Line, ...]:
    return (
        _parallelism(choice, settings),
        _memory(choice, settings),
        _checkpointing(choice, settings),
        _precision(choice, settings),
        LOADING,
        _snapshots(settings),
        _faults(settings),
    )


def inference_lines(choice: SearchResult, settings: Settings) -> tuple[Line, ...]:
    built, gpu = settings.features, choice.cluster.gpu
    weights = choice.job.model.num_parameters * 2
    fits = weights < choice.cluster.device_budget_bytes
    size = f"weights of {words(weights)} {'fit on' if fits else 'are more than'} one {gpu.name}"
    return (
        *_engine_lines(choice, settings),
        _lacking(
            "Quantization",
            "quantized weights",
            built,
            "generation uses the weights as they are trained",
        ),
        _lacking(
            "Speculative decoding", "speculative decoding", built, "no draft model or n-gram is set"
        ),
        _tensor_engine(choice, built, f"{size}: {'not needed' if fits else 'needed'}"),
        HEALTH,
    )


def _tensor_engine(choice: SearchResult, built: Mapping[str, bool], size: str) -> Line:
    """Return whether engines have several ranks. Where one GPU does not hold the weights, the
    fewest that do are named."""
    name, feature, job = "Tensor parallelism", "tensor parallel engine", choice.job
    ranks = choice.best.layout.engine_tensor_ranks
    if ranks > 1:
        held = words(job.of_rank(choice.best.layout).engine_parameters * 2)
        return Line(
            name=name, state="on", reason=f"engines over {ranks} GPUs, {held} on each; {size}"
        )
    parts = {n: part.model.num_parameters * 2 for n, part in sorted(job.parts.items())}
    holds = [n for n, held in parts.items() if held < choice.cluster.device_budget_bytes]
    if size.endswith(": needed") and holds:
        size += f": {holds[0]} ranks have {words(parts[holds[0]])} each"
    return _lacking(name, feature, built, size)


def _engine_lines(choice: SearchResult, settings: Settings) -> tuple[Line, ...]:
    """Return the lines that the engine of a ring answers."""
    engine, names = choice.job.engine, ("Continuous batching", "PagedAttention", "Prefix caching")
    if engine is None:
        return tuple(
            Line(name=name, state="off", reason="nothing is generated in this stage")
            for name in names
        )
    pages = ceil_div(engine.longest, settings.page_tokens)
    batching = (
        f"each step takes up to {settings.token_budget} tokens of up to "
        f"{settings.max_running} completions"
    )
    paging = (
        f"pages of {settings.page_tokens} tokens, {pages} for a full sequence; room per "
        f"{'engine' if choice.best.layout.engine_tensor_ranks > 1 else 'GPU'} for "
        f"{choice.best.running} of {engine.running} completions at full length"
    )
    sharing = f"{settings.completions_per_prompt} completions of a prompt share its pages"
    cached = settings.prefix_cache
    return (
        Line(name=names[0], state="on", reason=batching),
        Line(name=names[1], state="on", reason=paging),
        Line(
            name=names[2],
            state="on" if cached else "off",
            reason=sharing if cached else "engine.prefix_cache = false",
        ),
    )


def _parallelism(choice: SearchResult, settings: Settings) -> Line:
    layout, gpu = choice.best.layout, choice.cluster.gpu
    advice = (
        "the reference's matrix says "
        f"{strategy_for(choice.job.model.num_parameters).says} at this size"
    )
    if layout.gpus == 1:
        return Line(name="Parallelism configured", state="off", reason=f"one GPU; {advice}")
    inside = layout.shard_ranks * layout.tensor_ranks <= gpu.gpus_per_host
    where = "inside one host" if inside else f"across hosts, {gpu.gpus_per_host} GPUs each"
    split = f", states split over {layout.shard_ranks} {where}" if layout.zero else ""
    others = [
        name
        for name in ("tensor parallelism", "pipeline parallelism")
        if not settings.features[name]
    ]
    missing = f"; {' and '.join(others)}: not built" if others else ""
    shared = [f"tensor ranks {layout.tensor_ranks}"] if layout.tensor_ranks > 1 else []
    data = [f"data parallel over {layout.data_ranks}{split}"] if layout.data_ranks > 1 else []
    reason = f"{' × '.join(shared + data)}; {advice}{missing}"
    return Line(
        name="Parallelism configured", state=_state("several GPUs", settings), reason=reason
    )


def _memory(choice: SearchResult, settings: Settings) -> Line:
    layout, job = choice.best.layout, choice.job
    from_one = sum(state_bytes(job.model, job.dtype, on_one_gpu(layout)).values()) * job.copies
    ratio = over_one_gpu(job, choice.cluster, layout)
    held = sum(state_bytes(job.of_rank(layout).model, job.dtype, layout).values()) * job.copies
    reason = (
        f"states of {words(from_one)} are {ratio:.2f} × what one GPU has to give: the reference's "
        "tree says "
        f"{tree_for(ratio).says}; the fastest that fits is {layout.words()}, "
        f"{words(held)} per GPU; "
        f"{_moments(choice, settings)}; {_offload(choice)}"
    )
    offloads = (
        layout.offload_optimizer != "none"
        or layout.offload_gradients
        or bool(layout.offload_parameters)
    )
    if not layout.zero and not offloads and layout.moments == "float32":
        return Line(name="Memory optimization", state="off", reason=reason)
    needed = (["ZeRO"] if layout.zero else []) + (["optimizer offload"] if offloads else [])
    missing = [feature for feature in needed if not settings.features[feature]]
    reason += "".join(f"; {feature}: not built" for feature in missing)
    return Line(name="Memory optimization", state="not built" if missing else "on", reason=reason)


def _moments(choice: SearchResult, settings: Settings) -> str:
    """Return what the optimizer's moments take in 8 bits, or would."""
    if not settings.features["8-bit optimizer states"]:
        return "8-bit optimizer states: not built"
    layout, name = choice.best.layout, "actor.optimizer"
    job = choice.job.of_rank(layout)
    wide, coded = (
        state_bytes(job.model, job.dtype, replace(layout, moments=kind))[name] * job.copies
        for kind in ("float32", "8_bit")
    )
    if not coded_parameters(job.model, "8_bit"):
        return f"8-bit optimizer states off: no matrix has rows of whole blocks of {BLOCK} numbers"
    if layout.moments == "8_bit":
        return f"8-bit optimizer states on: {words(coded)} per GPU instead of {words(wide)}"
    return (
        f"8-bit optimizer states off: trainer.moments = '8_bit' would make {words(coded)} of "
        f"{words(wide)} per GPU"
    )


def _offload(choice: SearchResult) -> str:
    """Return whether state lives away from the device, where, and why."""
    layout, best = choice.best.layout, choice.best
    parts = []
    if layout.offload_optimizer != "none":
        parts.append(f'trainer.offload_optimizer = "{layout.offload_optimizer}"')
    if layout.offload_gradients:
        parts.append("trainer.offload_gradients = true")
    if layout.offload_parameters:
        parts.append(f"trainer.offload_parameters = {json.dumps(layout.offload_parameters)}")
    if not parts:
        return "offload off: the states fit on the devices, and copies would take time"
    sizes = [f"{words(best.host_bytes)} of pinned host memory"]
    sizes += [f"{words(best.disk_bytes)} under memory.disk_folder"] if best.disk_bytes else []
    fixed = choice.fixed.offload_optimizer is not None or choice.fixed.offload_gradients is not None
    given = fixed or bool(layout.offload_parameters)
    why = "as the config says" if given else "nothing faster fits without"
    return f"offload on ({' and '.join(parts)}), {why}: {' and '.join(sizes)} per GPU"


def _checkpointing(choice: SearchResult, settings: Settings) -> Line:
    layout = choice.best.layout
    job = choice.job.of_rank(layout)
    sizes = {
        mode: job.chunk_tokens(layout)
        * job.model.num_layers
        * layer_bytes(job.model, job.dtype, job.saving, mode, longest=job.longest)
        for mode in ("none", layout.checkpointing)
    }
    if layout.checkpointing == "none":
        reason = f"{words(sizes['none'])} of activations fit, and nothing is computed twice"
        return Line(name="Gradient checkpointing", state="off", reason=reason)
    cost = choice.best.time.again_s / choice.best.time.compute_s
    reason = (
        f"{layout.checkpointing}: {words(sizes[layout.checkpointing])} of activations instead of "
        f"{words(sizes['none'])}, for {cost:.0%} more work"
    )
    return Line(
        name="Gradient checkpointing",
        state=_state("activation checkpointing", settings),
        reason=reason,
    )


def _precision(choice: SearchResult, settings: Settings) -> Line:
    """BF16, or FP16 with loss scaling where there is none; and what FP8 would do or does beside
    either."""
    gpu, dtype = choice.cluster.gpu, choice.job.dtype
    kept = "master weights" if choice.job.moments == "8_bit" else "master weights and moments"
    name, rest = "Mixed precision", f"FP32 {kept}; {_fp8(choice, settings)}"
    if dtype == "bfloat16":
        return Line(name=name, state="on", reason=f"BF16 compute, {rest}")
    if dtype == "float16":
        why = (
            f"{gpu.name} has BF16, which needs no scaling"
            if gpu.bf16
            else f"{gpu.name} has no BF16"
        )
        reason = f"FP16 compute with dynamic loss scaling ({why}), {rest}"
        return Line(name=name, state=_state("FP16 with loss scaling", settings), reason=reason)
    better = "BF16" if gpu.bf16 else "FP16 with loss scaling"
    reason = (
        f"run.dtype = {dtype}; {better} would be faster on {gpu.name}; {_fp8(choice, settings)}"
    )
    return Line(name=name, state="off", reason=reason)


def _fp8(choice: SearchResult, settings: Settings) -> str:
    gpu, job = choice.cluster.gpu, choice.job
    if not gpu.fp8_flops:
        return f"FP8 off: {gpu.name} does not multiply 8-bit floats"
    if not settings.features["FP8 training"]:
        return "FP8: not built"
    if job.matmul == "fp8":
        gathered = ", which are gathered in 8 bits" if choice.best.layout.zero >= 2 else ""
        return (
            f"FP8 on: products of the layers' matrices{gathered}; embedding, head and norms "
            f"stay in {job.dtype}"
        )
    return (
        f"FP8 off: trainer.matmul = 'same', where 'fp8' makes the layers' products {FP8_GAIN} "
        "× as fast"
    )


def _snapshots(settings: Settings) -> Line:
    built = settings.features["asynchronous snapshots"]
    every = settings.snapshot_every_steps
    when = f"every {every} steps" if every else "at the end of each stage"
    how = f"{when} each rank writes its part, checksummed and read back"
    aside = settings.snapshot_in_background
    reason = (
        f"{how}, while training goes on"
        if aside
        else f"training waits for it (snapshot.background = false); {how}"
    )
    state: State = "on" if aside else "off"
    return Line(name="Checkpointing", state=state if built else "not built", reason=reason)


def _faults(settings: Settings) -> Line:
    name, by_hand = "Fault detection", "go on by hand with gyre train --resume"
    if not settings.features["restart by itself"]:
        return Line(name=name, state="not built", reason=by_hand)
    if settings.cluster_kind == "inline":
        reason = f"cluster.kind = {settings.cluster_kind}: nobody watches one process; {by_hand}"
        return Line(name=name, state="off", reason=reason)
    watched = "a rank that dies, hangs or raises ends the step by name"
    if not settings.max_restarts:
        return Line(
            name=name, state="off", reason=f"{watched}; cluster.max_restarts = 0: {by_hand}"
        )
    reason = (
        f"{watched}, and the run goes on from its newest snapshot, up to "
        f"{settings.max_restarts} times"
    )
    return Line(name=name, state="on", reason=reason)


def _state(feature: str, settings: Settings) -> State:
    return "on" if settings.features[feature] else "not built"


def _lacking(name: str, feature: str, built: Mapping[str, bool], reason: str) -> Line:
    """Return a line that no setting of today turns on."""
    return Line(name=name, state="off" if built[feature] else "not built", reason=reason)
