"""Candidates: every layout of a job on so many GPUs, and how each does. Pure.

In: a Job, a Cluster, what the user fixed. Out: Layouts; Candidates with their moments, shortfalls
and time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gyre.core.records import Checkpointing
from gyre.core.rounding import ceil_div
from gyre.distributed.config import Zero
from gyre.memory.config import Residency
from gyre.planner.gpus import Gpu
from gyre.planner.memory_model.job import TrainingJob
from gyre.planner.memory_model.peaks import (
    USABLE_SHARE,
    PeakInstant,
    device_bytes_of,
    disk_bytes_of,
    host_bytes_of,
    phase_moments,
)
from gyre.planner.memory_model.states import Layout, Offload
from gyre.planner.search.speed import StepTime, step_time

HOST_SHARE = 0.6  # of a host's memory that may be pinned, as in `planner.decide`
LARGEST_CHUNK = 131_072  # tokens
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
OFFLOAD: tuple[Offload, ...] = ("none", "host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCluster:
    """What there is to run on."""

    gpus: int
    gpu: Gpu
    host_bytes: int | None = None  # of one host; None: the vendor's usual one

    @property
    def per_host(self) -> int:
        return min(self.gpus, self.gpu.gpus_per_host)

    def takes(self, tensor_ranks: int) -> bool:
        """Return whether groups of so many ranks stay within a host and share it out evenly."""
        return self.per_host % tensor_ranks == 0 and self.gpus % tensor_ranks == 0

    @property
    def device_budget_bytes(self) -> int:
        return int(USABLE_SHARE * self.gpu.device_bytes)

    @property
    def host_budget_bytes(self) -> int:
        """Per GPU."""
        whole = self.gpu.host_bytes * self.per_host if self.host_bytes is None else self.host_bytes
        return int(HOST_SHARE * whole / self.per_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What the user decided; None is open."""

    zero: Zero | None = None
    shard_ranks: int | None = None
    tensor_ranks: int | None = None
    engine_tensor_ranks: int | None = None
    checkpointing: Checkpointing | None = None
    tokens_per_chunk: int | None = None
    offload_optimizer: Offload | None = None
    offload_gradients: bool | None = None
    residency: Residency | None = None

    def given(self) -> dict[str, object]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout, judged."""

    layout: Layout
    residency: Residency
    running: int  # completions per engine whose pages fit; 0 when nothing is generated
    moments: tuple[PeakInstant, ...]
    peak: PeakInstant  # the one that needs the most
    device_bytes: int  # that it needs per GPU
    host_bytes: int  # that it pins per GPU
    disk_bytes: int  # of a file per GPU; what the disk has is not known here
    short_device_bytes: int  # beyond the budget; 0 when it fits
    short_host_bytes: int
    time: StepTime

    @property
    def fits(self) -> bool:
        return not self.short_device_bytes and not self.short_host_bytes


def layouts(job: TrainingJob, cluster: GpuCluster, fixed: Fixed) -> Iterator[Layout]:
    """Return every layout that the fixed settings leave."""
    for trained, served in tensor_degrees(job, cluster, fixed):
        for one in _layouts_of(job, cluster, fixed, tensor_ranks=trained):
            yield one if served == 1 else replace(one, engine_tensor_ranks=served)


def _layouts_of(
    job: TrainingJob, cluster: GpuCluster, fixed: Fixed, *, tensor_ranks: int
) -> Iterator[Layout]:
    ranks, per_host = cluster.gpus // tensor_ranks, cluster.gpu.gpus_per_host // tensor_ranks
    for zero, shard_ranks in _splits(ranks, per_host, fixed):
        for checkpointing in (
            CHECKPOINTING if fixed.checkpointing is None else (fixed.checkpointing,)
        ):
            for optimizer, gradients in _offloads(fixed):
                if job.offload_parameters and _refuses_weights_away(job, zero, optimizer):
                    continue
                for tokens in _chunks(job, ranks, fixed):
                    yield Layout(
                        gpus=cluster.gpus,
                        tensor_ranks=tensor_ranks,
                        zero=zero,
                        shard_ranks=shard_ranks,
                        checkpointing=checkpointing,
                        tokens_per_chunk=tokens,
                        offload_optimizer=optimizer,
                        offload_gradients=gradients,
                        offload_parameters=job.offload_parameters,
                        moments=job.moments,
                        sum_gradients=job.sum_gradients,
                    )


def tensor_degrees(
    job: TrainingJob, cluster: GpuCluster, fixed: Fixed
) -> Iterator[tuple[int, int]]:
    """Yield (tensor ranks of the trainer, of an engine) for which the job has parts, within a
    host."""
    for trained in (1, *sorted(job.parts)):
        for served in (1, *sorted(job.engines)):
            given = (
                fixed.tensor_ranks in (None, trained),
                fixed.engine_tensor_ranks in (None, served),
            )
            if all(given) and cluster.takes(trained) and cluster.takes(served):
                yield trained, served


def _refuses_weights_away(job: TrainingJob, zero: Zero, optimizer: Offload) -> bool:
    """Split as the trainer and its config do: weights on the host are whole, and the larger state
    goes first."""
    trained = {"actor", "critic"} & set(job.offload_parameters)
    return zero >= 2 or (bool(trained) and optimizer == "none")


def judge(
    job: TrainingJob, cluster: GpuCluster, layout: Layout, residency: Residency | None = None
) -> Candidate:
    """Return a layout's memory and time. Where `residency` leaves it open, everything stays
    resident if that fits with every completion that should run; else phases take turns, with as
    many completions as fit."""
    job = job.of_rank(layout)
    engine, wanted = job.engine, job.engine.running if job.engine is not None else 0
    if residency != "phase":
        resident = _judge_as(job, cluster, layout, "resident", wanted)
        alone = engine is None and not job.frozen
        if resident.fits or residency == "resident" or alone:
            return resident
    least = _judge_as(job, cluster, layout, "phase", min(1, wanted))
    if engine is None or not least.fits or wanted <= 1:
        return least
    rollout = next(moment for moment in least.moments if moment.name == "rollout")
    each = engine.pages_per_sequence * engine.page_bytes
    room = (cluster.device_budget_bytes - device_bytes_of(rollout, layout)) // each
    return _judge_as(job, cluster, layout, "phase", min(wanted, 1 + room))


def _judge_as(
    job: TrainingJob, cluster: GpuCluster, layout: Layout, residency: Residency, running: int
) -> Candidate:
    moments = phase_moments(job, layout, residency, running)
    peak = max(moments, key=lambda moment: device_bytes_of(moment, layout))
    device_bytes, host_bytes = device_bytes_of(peak, layout), host_bytes_of(job, layout, residency)
    return Candidate(
        layout=layout,
        residency=residency,
        running=running,
        moments=moments,
        peak=peak,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes_of(job, layout),
        short_device_bytes=max(0, device_bytes - cluster.device_budget_bytes),
        short_host_bytes=max(0, host_bytes - cluster.host_budget_bytes),
        time=step_time(job, layout, cluster.gpu, residency, running),
    )


def _offloads(fixed: Fixed) -> Iterator[tuple[Offload, bool]]:
    """(where the optimizer's state lives, whether gradients are on the host): the larger state goes
    first."""
    for optimizer in OFFLOAD if fixed.offload_optimizer is None else (fixed.offload_optimizer,):
        for gradients in (
            (False, True) if fixed.offload_gradients is None else (fixed.offload_gradients,)
        ):
            if gradients and optimizer == "none" and fixed.offload_gradients is None:
                continue
            yield optimizer, gradients


def _splits(ranks: int, per_host: int, fixed: Fixed) -> Iterator[tuple[Zero, int]]:
    """(ZeRO stage, ranks that split the states): over everything, over a host, over parts of a
    host, each by the ranks that have sequences of their own. A model that no rank shares is whole,
    whatever its ZeRO stage."""
    stages: tuple[Zero, ...] = (0, 1, 2, 3) if fixed.zero is None else (fixed.zero,)
    for zero in (0,) if ranks == 1 else stages:
        if zero == 0:
            if fixed.shard_ranks in (None, 1):
                yield zero, 1
            continue
        sizes = {ranks} | {size for size in range(2, min(ranks, per_host) + 1) if ranks % size == 0}
        for size in sorted(sizes):
            if fixed.shard_ranks in (None, size):
                yield zero, size


def _chunks(job: TrainingJob, ranks: int, fixed: Fixed) -> list[int]:
    """Return sizes from the longest sequence upwards, to what one rank gets of an update."""
    if fixed.tokens_per_chunk is not None:
        return [fixed.tokens_per_chunk]
    most = max(job.longest, min(LARGEST_CHUNK, ceil_div(job.most_tokens_per_update, ranks)))
    sizes = [job.longest]
    while 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    return sizes


def in_order(candidate: Candidate) -> tuple[float, int]:
    """Faster first; of equally fast ones the one that needs less memory."""
    return candidate.time.seconds, candidate.device_bytes
