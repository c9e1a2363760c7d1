"""Search: every layout of a job on so many GPUs, those that fit ranked by predicted time, and why the faster ones were
discarded. Pure.

In: a Job, a number of GPUs of a kind, host bytes, what the user fixed. Out: a Choice, or a MemoryBudgetError that names
the shortfall in bytes and the nearest settings that fit. Callers: `wire.clusters`, through `gyre plan --gpus`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gyre.core.errors import ConfigError, MemoryBudgetError
from gyre.planner.activations import Checkpointing
from gyre.planner.gpus import GPUS, Gpu
from gyre.planner.layouts import Layout, Offload, Zero
from gyre.planner.moments import (
    USABLE_SHARE,
    Job,
    Moment,
    device_bytes_of,
    host_bytes_of,
    page_bytes,
    phase_moments,
)
from gyre.planner.speed import StepTime, step_time
from gyre.vram.config import Residency
from gyre.vram.refusals import words

HOST_SHARE = 0.6  # of a host's memory that may be pinned, as in `planner.decide`
LARGEST_CHUNK = 131_072  # tokens
MOST_GPUS = 4096  # that a refusal proposes
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
OFFLOAD: tuple[Offload, ...] = ("none", "optimizer", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What there is to run on."""

    gpus: int
    gpu: Gpu
    host_bytes: int | None = None  # of one host; None: the vendor's usual one

    @property
    def per_host(self) -> int:
        return min(self.gpus, self.gpu.gpus_per_host)

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
    checkpointing: Checkpointing | None = None
    tokens_per_chunk: int | None = None
    offload: Offload | None = None

    def given(self) -> dict[str, object]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout, judged."""

    layout: Layout
    residency: Residency
    running: int  # completions per GPU whose pages fit; 0 when nothing is generated
    moments: tuple[Moment, ...]
    peak: Moment  # the one that needs the most
    device_bytes: int  # that it needs per GPU
    host_bytes: int  # that it pins per GPU
    short_device_bytes: int  # beyond the budget; 0 when it fits
    short_host_bytes: int
    time: StepTime

    @property
    def fits(self) -> bool:
        return not self.short_device_bytes and not self.short_host_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to run, and what was passed over for it."""

    job: Job
    cluster: Cluster
    fixed: Fixed
    best: Candidate
    next_best: tuple[Candidate, ...]  # that fit, in order, one of each kind
    discarded: tuple[Candidate, ...]  # predicted faster than the best, and they do not fit


def choose(job: Job, cluster: Cluster, fixed: Fixed | None = None) -> Choice:
    """The fastest layout that fits. MemoryBudgetError when none does."""
    fixed = fixed or Fixed()
    _check(job, cluster, fixed)
    judged = [judge(job, cluster, layout) for layout in layouts(job, cluster, fixed)]
    fitting = sorted((c for c in judged if c.fits), key=_order)
    if not fitting:
        raise _refusal(job, cluster, fixed, judged)
    best = fitting[0]
    faster = [c for c in judged if not c.fits and c.time.seconds < best.time.seconds]
    return Choice(
        job=job,
        cluster=cluster,
        fixed=fixed,
        best=best,
        next_best=_one_of_each_kind([c for c in fitting if _kind(c) != _kind(best)])[:4],
        discarded=_nearest_of_each_kind(faster)[:6],
    )


def layouts(job: Job, cluster: Cluster, fixed: Fixed) -> Iterator[Layout]:
    """Every layout that the fixed settings leave."""
    for zero, shard_ranks in _splits(cluster.gpus, cluster.gpu.gpus_per_host, fixed):
        for checkpointing in CHECKPOINTING if fixed.checkpointing is None else (fixed.checkpointing,):
            for offload in OFFLOAD if fixed.offload is None else (fixed.offload,):
                if offload == "all" and zero < 2 and fixed.offload is None:
                    continue  # flat gradients stay on the device: the same as "optimizer"
                for tokens in _chunks(job, cluster.gpus, fixed):
                    yield Layout(
                        gpus=cluster.gpus,
                        zero=zero,
                        shard_ranks=shard_ranks,
                        checkpointing=checkpointing,
                        tokens_per_chunk=tokens,
                        offload=offload,
                    )


def judge(job: Job, cluster: Cluster, layout: Layout) -> Candidate:
    """A layout's memory and time. Everything stays resident if that fits with every completion that should run, else
    phases take turns, with as many completions as fit."""
    wanted = job.engine.running if job.engine is not None else 0
    resident = _judge_as(job, cluster, layout, "resident", wanted)
    if resident.fits or (job.engine is None and not job.reference and job.reward_model is None):
        return resident
    least = _judge_as(job, cluster, layout, "phase", min(1, wanted))
    if not least.fits or wanted <= 1:
        return least
    rollout = next(moment for moment in least.moments if moment.name == "rollout")
    room = (cluster.device_budget_bytes - device_bytes_of(rollout, layout)) // max(1, page_bytes(job))
    return _judge_as(job, cluster, layout, "phase", min(wanted, 1 + room))


def _judge_as(job: Job, cluster: Cluster, layout: Layout, residency: Residency, running: int) -> Candidate:
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
        short_device_bytes=max(0, device_bytes - cluster.device_budget_bytes),
        short_host_bytes=max(0, host_bytes - cluster.host_budget_bytes),
        time=step_time(job, layout, cluster.gpu, residency),
    )


def _splits(gpus: int, per_host: int, fixed: Fixed) -> Iterator[tuple[Zero, int]]:
    """(ZeRO stage, ranks that split the states): over everything, over a host, over parts of a host."""
    stages: tuple[Zero, ...] = (0, 1, 2, 3) if fixed.zero is None else (fixed.zero,)
    for zero in stages:
        if zero == 0 or gpus == 1:
            if zero in (0, fixed.zero) and fixed.shard_ranks in (None, 1):
                yield zero, 1
            continue
        sizes = {gpus} | {size for size in range(2, min(gpus, per_host) + 1) if gpus % size == 0}
        for size in sorted(sizes):
            if fixed.shard_ranks in (None, size):
                yield zero, size


def _chunks(job: Job, gpus: int, fixed: Fixed) -> list[int]:
    """From the longest sequence upwards, to what one rank gets of an update."""
    if fixed.tokens_per_chunk is not None:
        return [fixed.tokens_per_chunk]
    most = max(job.longest, min(LARGEST_CHUNK, -(-job.most_tokens_per_update // gpus)))
    sizes = [job.longest]
    while 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    return sizes


def _check(job: Job, cluster: Cluster, fixed: Fixed) -> None:
    if fixed.tokens_per_chunk is not None and fixed.tokens_per_chunk < job.longest:
        raise ConfigError(
            f"tokens_per_chunk = {fixed.tokens_per_chunk} cannot hold a sequence of {job.longest} tokens",
            hint=f"set tokens_per_chunk to at least {job.longest}: a sequence is never split",
        )
    ranks = fixed.shard_ranks
    if ranks is not None and (cluster.gpus % ranks or (cluster.gpus > 1 and ranks == 1 and fixed.zero not in (None, 0))):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        raise ConfigError(
            f"shard_ranks = {ranks} with {cluster.gpus} GPUs and ZeRO-{fixed.zero or 0}: groups must be equal",
            hint=f"choose one of {', '.join(map(str, divisors[1:] or divisors))}",
        )
    if not any(layouts(job, cluster, fixed)):
        raise ConfigError(
            f"no layout of {cluster.gpus} GPUs has {fixed.given()}", hint="leave zero or shard_ranks open"
        )


def _order(candidate: Candidate) -> tuple[float, int]:
    """Faster first; of equally fast ones the one that needs less memory."""
    return candidate.time.seconds, candidate.device_bytes


def _kind(candidate: Candidate) -> tuple[object, ...]:
    layout = candidate.layout
    return layout.zero, layout.shard_ranks, layout.checkpointing, layout.offload


def _one_of_each_kind(candidates: list[Candidate]) -> tuple[Candidate, ...]:
    kinds: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        kinds.setdefault(_kind(candidate), candidate)
    return tuple(kinds.values())


def _nearest_of_each_kind(candidates: list[Candidate]) -> tuple[Candidate, ...]:
    """Of those that differ only in how states are split or chunks are cut, the one that needs the least; in order of
    their time."""
    kinds: dict[tuple[object, ...], Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: (c.short_device_bytes + c.short_host_bytes, c.time.seconds)):
        kinds.setdefault((candidate.layout.checkpointing, candidate.layout.offload), candidate)
    return tuple(sorted(kinds.values(), key=_order))


def _refusal(job: Job, cluster: Cluster, fixed: Fixed, judged: list[Candidate]) -> MemoryBudgetError:
    nearest = min(judged, key=lambda c: (c.short_device_bytes + c.short_host_bytes, c.time.seconds))
    largest = sorted(nearest.peak.parts.items(), key=lambda item: -item[1])[:4]
    short = []
    if nearest.short_device_bytes:
        parts = ", ".join(f"{name} {words(size)}" for name, size in largest)
        short.append(
            f"{nearest.device_bytes} bytes on each GPU at moment '{nearest.peak.name}' ({parts}), budget "
            f"{cluster.device_budget_bytes}: {nearest.short_device_bytes} bytes too little"
        )
    if nearest.short_host_bytes:
        short.append(
            f"{nearest.host_bytes} bytes of host memory per GPU, budget {cluster.host_budget_bytes}: "
            f"{nearest.short_host_bytes} bytes too little"
        )
    ways = list(_ways_out(job, cluster, fixed))
    return MemoryBudgetError(
        f"the model does not fit on {cluster.gpus} × {cluster.gpu.name}; the layout that comes nearest "
        f"({nearest.layout.words()}) needs {' and '.join(short)}",
        hint="what fits: " + "; or ".join(ways) if ways else "no number of these GPUs holds one layer of it: "
        "shorten the sequences or take a smaller model",
    )


def _ways_out(job: Job, cluster: Cluster, fixed: Fixed) -> Iterator[str]:
    """Settings that fit, each changed alone, the smallest change first."""
    for name, value in fixed.given().items():
        opened = replace(fixed, **{name: None})
        if name == "shard_ranks":
            continue
        if name == "zero":
            opened = replace(opened, shard_ranks=None)
        if found := _best_of(job, cluster, opened):
            yield f"{name} = {getattr(found.layout, name)!r} instead of {value!r} ({found.layout.words()})"
    gpus = cluster.gpus
    while (gpus := 2 * gpus) <= MOST_GPUS:
        more = replace(cluster, gpus=gpus, host_bytes=_host_of(cluster, gpus))
        opened = replace(fixed, shard_ranks=None, zero=None if cluster.gpus == 1 else fixed.zero)
        if found := _best_of(job, more, opened):
            yield f"{gpus} GPUs ({found.layout.words()})"
            break
    larger = sorted((g for g in GPUS.values() if g.device_bytes > cluster.gpu.device_bytes), key=lambda g: g.device_bytes)
    for gpu in larger:
        if found := _best_of(job, replace(cluster, gpu=gpu), fixed):
            yield f"{cluster.gpus} × {gpu.name} ({found.layout.words()})"
            break
    if (tokens := _longest_that_fits(job, cluster, fixed)) >= 256:
        yield f"sequences of at most {tokens} tokens instead of {job.longest}"


def _host_of(cluster: Cluster, gpus: int) -> int | None:
    """The host memory that was given was for so many GPUs; more of them in a host share it no worse."""
    if cluster.host_bytes is None:
        return None
    return cluster.host_bytes * min(gpus, cluster.gpu.gpus_per_host) // cluster.per_host


def _best_of(job: Job, cluster: Cluster, fixed: Fixed) -> Candidate | None:
    fitting = [c for c in (judge(job, cluster, layout) for layout in layouts(job, cluster, fixed)) if c.fits]
    return min(fitting, key=_order) if fitting else None


def _longest_that_fits(job: Job, cluster: Cluster, fixed: Fixed) -> int:
    """Tokens, to the nearest 256 below; 0 when even short sequences do not fit."""
    low, high = 0, job.longest // 256
    while low < high:
        middle = (low + high + 1) // 2
        engine = replace(job.engine, longest=256 * middle) if job.engine is not None else None
        mean = min(job.mean_tokens, 256 * middle)
        shorter = replace(job, longest=256 * middle, mean_tokens=mean, engine=engine)
        chunk = None if fixed.tokens_per_chunk is None else min(fixed.tokens_per_chunk, 256 * middle)
        if _best_of(shorter, cluster, replace(fixed, tokens_per_chunk=chunk)):
            low = middle
        else:
            high = middle - 1
    return 256 * low
