"""Search: of the layouts of a job that fit, the one with the least predicted time, and why the
faster ones were discarded. Pure.

In: a Job, a Cluster, what the user fixed. Out: a Choice, or a MemoryBudgetError that names the
shortfall in bytes and the nearest settings that fit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gyre.core.errors import ConfigError
from gyre.planner.memory_model.job import TrainingJob
from gyre.planner.search.advice import Advised, find_advised
from gyre.planner.search.candidates import Candidate, Fixed, GpuCluster, in_order, judge, layouts
from gyre.planner.search.nearest import refusal_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What to run, and what was passed over for it."""

    job: TrainingJob
    cluster: GpuCluster
    fixed: Fixed
    best: Candidate
    next_best: tuple[Candidate, ...]  # that fit, in order, one of each kind
    discarded: tuple[Candidate, ...]  # predicted faster than the best, and they do not fit
    advised: tuple[Advised, ...] = ()  # what the reference says


def choose(job: TrainingJob, cluster: GpuCluster, fixed: Fixed | None = None) -> SearchResult:
    """Return the fastest layout that fits. MemoryBudgetError when none does."""
    fixed = fixed or Fixed()
    _check(job, cluster, fixed)
    judged = [
        judge(job, cluster, layout, fixed.residency) for layout in layouts(job, cluster, fixed)
    ]
    fitting = sorted((c for c in judged if c.fits), key=in_order)
    if not fitting:
        raise refusal_of(job, cluster, fixed, judged)
    best = fitting[0]
    faster = [c for c in judged if not c.fits and c.time.seconds < best.time.seconds]
    return SearchResult(
        job=job,
        cluster=cluster,
        fixed=fixed,
        best=best,
        next_best=_one_of_each_kind([c for c in fitting if _kind(c) != _kind(best)])[:4],
        discarded=_nearest_of_each_kind(faster)[:6],
        advised=find_advised(job, cluster, judged, best),
    )


def _check(job: TrainingJob, cluster: GpuCluster, fixed: Fixed) -> None:
    if fixed.tokens_per_chunk is not None and fixed.tokens_per_chunk < job.longest:
        raise ConfigError(
            f"tokens_per_chunk = {fixed.tokens_per_chunk} cannot hold a sequence of {job.longest} "
            "tokens",
            hint=f"set tokens_per_chunk to at least {job.longest}: a sequence is never split",
        )
    _check_tensor_ranks(job, cluster, fixed)
    ranks = fixed.shard_ranks
    if ranks is not None and (
        cluster.gpus % ranks or (cluster.gpus > 1 and ranks == 1 and fixed.zero not in (None, 0))
    ):
        divisors = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        raise ConfigError(
            f"shard_ranks = {ranks}: {cluster.gpus} GPUs do not split into equal groups of that "
            "size",
            hint=f"choose one of {', '.join(map(str, divisors[1:] or divisors))}",
        )
    if not any(layouts(job, cluster, fixed)):
        given, hint = str(fixed.given()), "leave zero or shard_ranks open"
        if any(layouts(replace(job, offload_parameters=()), cluster, fixed)):
            given += (
                f" with trainer.offload_parameters = {json.dumps(job.offload_parameters)}, "
                "whose weights lie whole"
            )
            hint = (
                "leave zero open or set it to 0 or 1, which goes for all models here, or "
                "empty the list"
            )
        raise ConfigError(f"no layout of {cluster.gpus} GPUs has {given}", hint=hint)


def _check_tensor_ranks(job: TrainingJob, cluster: GpuCluster, fixed: Fixed) -> None:
    """Raise ConfigError for tensor ranks that are given and cannot be."""
    for name, ranks, parts in (
        ("parallel.tensor_ranks", fixed.tensor_ranks, job.parts),
        ("engine.tensor_ranks", fixed.engine_tensor_ranks, job.engines),
    ):
        if ranks is None or ranks == 1:
            continue
        takes = [size for size in (1, *sorted(parts)) if cluster.takes(size)]
        if ranks not in takes:
            why = "the model does not divide over so many, or other settings refuse them,"
            if not cluster.takes(ranks):
                why = "ranks that share layers stay within a host, and there are no equal groups"
            raise ConfigError(
                f"{name} = {ranks}: {why} on {cluster.gpus} GPUs in hosts of {cluster.per_host}",
                hint=f"choose one of {', '.join(map(str, takes))}",
            )


def _kind(candidate: Candidate) -> tuple[object, ...]:
    layout = candidate.layout
    offload = layout.offload_optimizer, layout.offload_gradients
    ranks = layout.tensor_ranks, layout.engine_tensor_ranks, layout.zero, layout.shard_ranks
    return *ranks, layout.checkpointing, *offload


def _one_of_each_kind(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    kinds: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        kinds.setdefault(_kind(candidate), candidate)
    return tuple(kinds.values())


def _nearest_of_each_kind(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Keep, of those that differ only in how states are split or chunks are cut, the one that
    needs the least; in order of their time."""
    kinds: dict[tuple[object, ...], Candidate] = {}
    for candidate in sorted(
        candidates, key=lambda c: (c.short_device_bytes + c.short_host_bytes, c.time.seconds)
    ):
        layout = candidate.layout
        kinds.setdefault(
            (layout.checkpointing, layout.offload_optimizer, layout.offload_gradients), candidate
        )
    return tuple(sorted(kinds.values(), key=in_order))
