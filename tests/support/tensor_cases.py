"""Cases for tensor parallel: what one rank holds of a model, and passes over it; functions here run
in rank processes (rank_pool)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyre.core.chunks import collect
from gyre.core.contracts import MemoryTenant
from gyre.core.offers import Offer
from gyre.core.records import Checkpointing, Phase, Request, Sampling
from gyre.distributed.process_group import RankGroup, alone
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.engine.replay import replay
from gyre.engine.scheduler.journal import Entry, read_journal
from gyre.engine.tensor_group import enlist, follow, lead
from gyre.engine.weights import read_weights
from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.kernels.logprobs import token_logprobs
from gyre.kernels.rope import rope_tables
from gyre.launch.placement.following_rank import FollowingRank
from gyre.memory.config import MemoryConfig
from gyre.memory.manager import MemoryManager
from gyre.memory.phases import default_needs
from gyre.models.decoder import Decoder
from gyre.models.hub.checkpoint import Checkpoint
from gyre.models.init import FreshWeights
from gyre.models.layers.layer import Layer
from gyre.models.layers.tensor_parallel import ReplicatedRows, SequenceParallel
from gyre.models.layers.vocabulary_logprobs import vocabulary_logprobs
from gyre.models.layout import local_spec, model_layout
from gyre.models.spec import ModelSpec
from gyre.weights.transports.addresses import SHARED_MEMORY, host_id
from gyre.weights.transports.opened import Reading
from gyre.weights.transports.shared_memory import SharedMemoryStore
from part_cases import register, stores_of

CPU = torch.device("cpu")
PHASES: tuple[Phase, ...] = ("rollout", "score", "train", "handover")
LENGTHS = [5, 1, 6]  # of packed sequences: twelve tokens


def decoder_of(
    spec: ModelSpec,
    group: RankGroup,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
    kind: type[ReplicatedRows | SequenceParallel] = ReplicatedRows,
) -> Decoder:
    """A rank's part of the model of a seed; the whole of it where there is one rank. `scale` times
    the matrices."""
    tensor = None if group.size == 1 else kind(group)
    decoder = Decoder(spec, device=group.device, dtype=dtype, tensor=tensor)
    fill_decoder(decoder, seed=7, scale=scale)
    return decoder


@torch.no_grad()
def fill_decoder(decoder: Decoder, *, seed: int, scale: float = 1.0) -> None:
    """Read the rank's part of initial weights, through the table. Vectors differ from one."""
    read_weights(decoder, FreshWeights(decoder.whole_spec, seed))
    for name, parameter in decoder.named_parameters():
        if parameter.dim() > 1:
            parameter.mul_(scale)
        elif name.endswith("norm.weight"):
            parameter.mul_(torch.linspace(0.5, 1.5, parameter.numel(), device=parameter.device))


def gradients_of(
    group: RankGroup,
    spec: ModelSpec,
    checkpointing: Checkpointing,
    dtype: torch.dtype = torch.float64,
    how: str = "replicated",
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, int]]:
    """Return hidden states, logits, the gradient of every local parameter, and the bytes sent for
    hidden states and gradients. Of 12 tokens five are wanted, which no two ranks split evenly."""
    kind = ReplicatedRows if how == "replicated" else SequenceParallel
    decoder, device = decoder_of(spec, group, dtype=dtype, kind=kind), group.device
    layout = PackedLayout.of(LENGTHS, device)
    tokens_T = torch.arange(sum(LENGTHS), device=device) * 5 % spec.vocab_size
    group.traffic.take()
    hidden_NE = decoder.hidden(
        tokens_T,
        layout.positions_T,
        lambda _, q_THD, k_TKD, v_TKD: varlen_attention(q_THD, k_TKD, v_TKD, layout, None),
        torch.tensor([0, 3, 4, 9, 11], device=device),
        checkpointing=checkpointing,
    )
    (hidden_NE.square() * torch.arange(1.0, 6.0, device=device)[:, None]).sum().backward()
    sent = dict(group.traffic.take().bytes_by_kind)
    with torch.no_grad():
        logits_NV = decoder.logits(hidden_NE)
    return hidden_NE.detach().cpu(), logits_NV.cpu(), gradients(decoder), sent


def layer_over_ranks(
    group: RankGroup, spec: ModelSpec, how: str = ""
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, int]]:
    """Run one layer, each rank on its rows of the residual stream. Return the rows after it, the
    gradient of those before it and of every local parameter, and the bytes sent."""
    whole = decoder_of(spec, alone(), dtype=torch.float64)
    layout, tokens = PackedLayout.of(LENGTHS, CPU), sum(LENGTHS)
    x_TE, up_TE = (
        torch.randn(
            tokens, spec.hidden_size, generator=torch.Generator().manual_seed(seed)
        ).double()
        for seed in (0, 1)
    )
    layer = whole.layers[0]
    if group.size > 1:
        held = decoder_of(spec, group, dtype=torch.float64).layers[0].state_dict()
        tensor = ReplicatedRows(group) if how == "replicated" else SequenceParallel(group)
        local = local_spec(spec, group.size)
        layer = Layer(local, device=CPU, dtype=torch.float64, tensor=tensor)
        layer.load_state_dict(held)
        if how == "sequence":
            x_TE, up_TE = (rows_TE.chunk(group.size)[group.rank] for rows_TE in (x_TE, up_TE))
        group.traffic.take()
    x_TE.requires_grad_()
    tables = rope_tables(layout.positions_T, whole.inv_freq_F, torch.float64)
    out_TE = layer(
        0,
        x_TE,
        *tables,
        lambda _, q_THD, k_TKD, v_TKD: varlen_attention(q_THD, k_TKD, v_TKD, layout, None),
        None,
    )
    out_TE.backward(up_TE)
    assert x_TE.grad is not None
    sent = dict(group.traffic.take().bytes_by_kind)
    return out_TE.detach(), x_TE.grad, gradients(layer), sent


def gathered_ahead(group: RankGroup) -> tuple[list[list[float]], dict[str, int]]:
    """Rows that were gathered ahead, of which some are never asked for; and bytes sent."""
    tensor = SequenceParallel(group)
    early, late, other = (torch.full((2, 3), 10.0 * n + group.rank) for n in (1, 2, 3))
    group.traffic.take()
    tensor.gather_ahead(early)
    tensor.gather_ahead(late)
    found = [tensor.gather_rows(rows)[:, 0].tolist() for rows in (other, late, late, early)]
    return found, dict(group.traffic.take().bytes_by_kind)


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: grad.cpu() for name, grad in found.items() if grad is not None}


def played(
    group: RankGroup,
    spec: ModelSpec,
    journal: str | Sequence[Entry],
    dtype: torch.dtype = torch.float32,
    # of the matrices: peaked choices, so that no rounding of float32 changes one
    scale: float = 8.0,
) -> tuple[dict[tuple[str, int], list[Any]], list[str]]:
    """Play a journal on a rank's part of the model. Return what each completion got, chunk by
    chunk as plain values, and the kinds of events. A version is the seed of its weights."""
    decoder, kinds = decoder_of(spec, group, dtype=dtype), []
    entries = read_journal(Path(journal)) if isinstance(journal, str) else journal
    found: dict[tuple[str, int], list[Any]] = {}
    chunks = replay(
        entries,
        decoder,
        load=lambda version: fill_decoder(decoder, seed=version, scale=scale),
        emit=lambda kind, **fields: kinds.append(kind),
    )
    for chunk in chunks:
        arrays = (chunk.tokens, chunk.logprobs, chunk.raw_logprobs, chunk.versions)
        told = (
            None if chunk.support is None else chunk.support.ids,
            chunk.top_ids,
            None if chunk.prompt_logprobs is None else chunk.prompt_logprobs.top_ids,
        )
        values = (
            *(array.tolist() for array in arrays),
            chunk.finish,
            chunk.reason,
            *(None if ids is None else ids.tolist() for ids in told),
        )
        found.setdefault((chunk.request_id, chunk.index), []).append(values)
    return found, kinds


def close(found: Tensor, expected: Tensor, what: str, *, relative: float = 1e-11) -> None:
    """Equal within a part of the largest number."""
    scale = max(float(expected.abs().max()), 1e-3)
    assert found.shape == expected.shape, what
    assert float((found - expected).abs().max()) < relative * scale, what


def joined(spec: ModelSpec, prefix: str, name: str, locals_: Sequence[Tensor]) -> Tensor:
    """The sum of what ranks hold of a whole gradient: of each number, all parts of it."""
    layout = model_layout(spec, len(locals_))
    whole = torch.zeros(layout.shapes[prefix + name], dtype=locals_[0].dtype)
    for boxes, local in zip(layout.ranks, locals_, strict=True):
        for box in boxes[prefix + name]:
            rows = whole[box.start : box.start + box.rows]
            part = rows[:, slice(*box.columns)] if box.columns else rows
            part += local[box.at : box.at + box.rows]
    return whole


def whole_version(spec: ModelSpec, version: int) -> dict[str, Tensor]:
    """The whole tensors of a version: other numbers than an engine starts with."""
    other = Decoder(spec, device=CPU, dtype=torch.float32)
    fill_decoder(other, seed=version, scale=8.0)
    return {name: parameter.detach() for name, parameter in other.named_parameters()}


def offered(spec: ModelSpec, stores: Sequence[SharedMemoryStore], version: int) -> Offer:
    """A version that two trainer ranks have registered, each a cut of the whole tensors."""
    return register(stores, whole_version(spec, version), version=version)


Drive = Callable[[NativeEngine, Callable[[int], Any]], Awaitable[Any]]


def served(
    group: RankGroup,
    spec: ModelSpec,
    drive: Drive,
    settings: dict[str, Any],
    *,
    breaks: int = -1,
    others: dict[str, Any] | None = None,
    folder: str = "",
    apart: int = -1,
) -> Any:
    """Let rank 0 have an engine, which `drive` uses, and the others follow it; a group of one has
    an engine alone. Return what `drive` did; of a follower the steps that it made. `breaks` is a
    rank whose model fails in a step; `others` are settings of the followers that differ. `folder`
    has the weights to begin with. `apart` is a rank that looks for shared memory elsewhere."""
    decoder = decoder_of(spec, group, dtype=torch.float32, scale=8.0)
    if folder:
        with closing(Checkpoint(folder)) as source:
            read_weights(decoder, source)
    given = settings if group.rank == 0 else {**settings, **(others or {})}
    leads = group.rank == 0 and group.size > 1
    followers = lead(group, timeout_s=20.0, emit=lambda kind, **fields: None) if leads else None
    stream = enlist(group, timeout_s=20.0) if group.rank > 0 else None
    compute = ThreadPoolExecutor(1, initializer=partial(use, group.device))
    cores: list[Any] = []

    def emit(kind: str, **fields: Any) -> None:
        if kind == "engine.started":
            cores.append(engine.core)

    engine = NativeEngine(
        decoder,
        EngineConfig.model_validate(given),
        compute=compute,
        emit=emit,
        device=group.device,
        dtype=torch.float32,
        version=1,
        shared_weights=False,
        followers=followers,
    )
    if group.rank == breaks:
        break_late(decoder)
    if group.rank == apart:
        engine.read_parts(Reading(host_id=host_id(), folder=Path("/proc/self/fdinfo")))
    try:
        if stream is None:
            with stores_of(SHARED_MEMORY, 2, run_id=f"{os.getpid():08x}") as stores:
                return asyncio.run(drive(engine, partial(offered, spec, stores)))
        follow(stream, engine.worker, group)
        return cores[-1].state.counters.steps
    finally:
        if followers is not None:
            followers.close()
        compute.shutdown()


def switched(
    group: RankGroup, spec: ModelSpec, settings: dict[str, Any], times: int
) -> tuple[list[dict[str, dict[str, int]]], list[Any]]:
    """Let an engine's ranks change phases so many times, each with a ledger of its own, and answer
    requests in each rollout. Return what a rank's components held after each change, and on rank 0
    the answers."""
    leads, compute = group.rank == 0, ThreadPoolExecutor(1, initializer=partial(use, group.device))
    rows: list[dict[str, dict[str, int]]] = []

    def emit(kind: str, **fields: Any) -> None:
        if kind == "memory" and fields["phase"] in PHASES:
            rows.append({name: dict(sizes) for name, sizes in fields["owners"].items()})

    followers = lead(group, timeout_s=20.0, emit=emit) if leads else None
    stream = None if leads else enlist(group, timeout_s=20.0)
    engine = NativeEngine(
        decoder_of(spec, group, dtype=torch.float32, scale=8.0),
        EngineConfig.model_validate(settings),
        compute=compute,
        emit=emit,
        device=group.device,
        dtype=torch.float32,
        version=1,
        shared_weights=False,
        followers=followers,
    )

    def manage(tenant: MemoryTenant) -> MemoryManager:
        budgets = {f"{tier}_budget_bytes": 1 << 34 for tier in ("device", "host", "disk")}
        config = MemoryConfig.model_validate({**budgets, "residency": "phase"})
        needs = default_needs(shared_weights=False)
        return MemoryManager([tenant], config, group.device, emit, needs=needs)

    def enter(manager: MemoryManager, phase: Phase, step: int) -> None:
        manager.enter(phase, step=step)
        engine.worker.entered(phase, step)
        group.barrier()  # as the driver waits for the reports of all ranks

    async def drive() -> list[Any]:
        asked = [request_of(name, 9 + 4 * at) for at, name in enumerate("ab")]
        found = []
        await engine.start(dummy=False)
        manager = await engine.frontend.on_compute(manage, engine)
        for step in range(times):
            for phase in PHASES:
                await engine.frontend.on_compute(enter, manager, phase, step)
                if phase == "rollout":
                    found.append(await answers(engine, asked))
        await engine.terminate()
        return found

    async def keep_up() -> list[Any]:
        assert stream is not None
        rank = FollowingRank(stream, engine.worker, group, compute)
        await rank.until_started()
        manager = await rank.ask(lambda: manage(rank.memory))
        for step in range(times):
            for phase in PHASES:
                await rank.enter(phase, step, partial(manager.enter, phase, step=step))
                await rank.ask(group.barrier)
        await asyncio.wrap_future(compute.submit(int))  # once rank 0 has ended
        return []

    try:
        return rows, asyncio.run(drive() if leads else keep_up())
    finally:
        if followers is not None:
            followers.close()
        compute.shutdown()


def request_of(name: str, length: int) -> Request:
    tokens = (np.arange(length) * 7 % 5).astype(np.int32)
    sampling = Sampling(max_tokens=12, temperature=0.0)
    return Request(request_id=name, tokens=tokens, sampling=sampling, seed=length, chunk_tokens=4)


def use(device: torch.device) -> None:
    """Let this thread compute on the device, which is its own setting."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def break_late(decoder: Decoder) -> None:
    """Fail in the sixth step, between two collectives."""
    plain, calls = decoder.hidden, iter(range(5))

    def broken(*args: Any) -> Tensor:
        if next(calls, None) is None:
            raise RuntimeError("cosmic ray")
        return plain(*args)

    decoder.hidden = broken  # type: ignore[method-assign]


async def answers(engine: NativeEngine, asked: Sequence[Request]) -> dict[str, list[Any]]:
    """Each request's tokens, versions and endings."""
    found = await asyncio.gather(*[collect(engine.submit(request)) for request in asked])
    return {
        request.request_id: [
            (part.tokens.tolist(), part.versions.tolist(), part.finish, part.reason)
            for part in parts
        ]
        for request, parts in zip(asked, found, strict=True)
    }


def logprobs_of(
    group: RankGroup,
    vocab_size: int,
    *,
    truncated: bool = False,
    unused: str = "",
    chunk: int = 0,
    keep_logits: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return log-probs, entropies and gradients, the head's of this rank's rows; and bytes sent.
    `unused` names an output that no gradient goes through."""
    device, how = group.device, {"chunk": chunk, "keep_logits": keep_logits}
    generator = torch.Generator().manual_seed(vocab_size)
    rows, hidden = 7, 6

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    hidden_NE, weight_VE = random(rows, hidden), random(vocab_size, hidden)
    up_N, up_too_N = random(rows), random(rows)
    targets_N = torch.arange(rows, device=device) * 5 % vocab_size
    temperature_N = torch.linspace(0.5, 1.5, rows, device=device)
    support = None
    if truncated:  # the target, and another
        ids_N2 = torch.stack([targets_N, (targets_N + 3) % vocab_size], 1)
        support = torch.arange(rows + 1, device=device) * 2, ids_N2.flatten().int()
    hidden_NE.requires_grad_()
    given = targets_N, temperature_N, support
    if group.size == 1:
        weight_VE.requires_grad_()
        found = token_logprobs(hidden_NE, weight_VE, *given, **how)
    else:
        own = -(-vocab_size // group.size)
        padded_VE = torch.zeros(own * group.size, hidden, dtype=dtype, device=device)
        padded_VE[:vocab_size] = weight_VE
        weight_VE = padded_VE.view(group.size, own, hidden)[group.rank].clone().requires_grad_()
        tensor = ReplicatedRows(group)
        group.traffic.take()
        found = vocabulary_logprobs(
            hidden_NE, weight_VE, *given, vocab_size=vocab_size, tensor=tensor, **how
        )
    used = [
        (x_N, grad_N)
        for name, x_N, grad_N in zip(("logprobs", "entropy"), found, (up_N, up_too_N), strict=True)
        if name != unused
    ]
    torch.autograd.backward([x_N for x_N, _ in used], [grad_N.to(x_N) for x_N, grad_N in used])
    sent = dict(group.traffic.take().bytes_by_kind)
    assert hidden_NE.grad is not None and weight_VE.grad is not None
    told = {
        "logprobs": found[0].detach(),
        "entropy": found[1].detach(),
        "hidden": hidden_NE.grad,
        "head": weight_VE.grad,
    }
    return {name: tensor.cpu() for name, tensor in told.items()}, sent
