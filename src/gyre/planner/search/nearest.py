"""Nearest: the words of "does not fit on these GPUs", with the settings that do. Pure.

In: a Job that fits nowhere, its judged candidates. Out: a MemoryBudgetError with the shortfall in
bytes and the ways out, each of which has been judged to fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gyre.core.errors import MemoryBudgetError
from gyre.memory.errors import words
from gyre.planner.gpus import GPUS
from gyre.planner.memory_model.job import TrainingJob
from gyre.planner.search.candidates import Candidate, Fixed, GpuCluster, in_order, judge, layouts
from gyre.planner.ways import CHEAPEST_FIRST, Way, join_ways, ways_out

MOST_GPUS = 4096  # that a refusal proposes
STEP_TOKENS = 256  # the longest sequence that fits is a multiple of it
_Way = Way[tuple[GpuCluster, Fixed], Candidate]


def refusal_of(
    job: TrainingJob, cluster: GpuCluster, fixed: Fixed, judged: Sequence[Candidate]
) -> MemoryBudgetError:
    nearest = min(judged, key=lambda c: (c.short_device_bytes + c.short_host_bytes, c.time.seconds))
    largest = sorted(nearest.peak.parts.items(), key=lambda item: -item[1])[:4]
    short = []
    if nearest.short_device_bytes:
        parts = ", ".join(f"{name} {words(size)}" for name, size in largest)
        short.append(
            f"{nearest.device_bytes} bytes on each GPU at moment '{nearest.peak.name}' ({parts}), "
            "budget "
            f"{cluster.device_budget_bytes}: {nearest.short_device_bytes} bytes too little"
        )
    if nearest.short_host_bytes:
        short.append(
            f"{nearest.host_bytes} bytes of host memory per GPU, budget "
            f"{cluster.host_budget_bytes}: "
            f"{nearest.short_host_bytes} bytes too little"
        )
    least = _with_widest_engines(job, fixed)
    ways = list(ways_out(_kinds(cluster, fixed), lambda asked: _best_of(least, *asked)))
    if (tokens := _longest_that_fits(least, cluster, fixed)) >= STEP_TOKENS:
        ways.append(f"sequences of at most {tokens} tokens instead of {job.longest}")
    return MemoryBudgetError(
        f"the model does not fit on {cluster.gpus} × {cluster.gpu.name}; the layout that comes "
        "nearest "
        f"({nearest.layout.words()}) needs {' and '.join(short)}",
        hint=join_ways(ways)
        if ways
        else "no number of these GPUs holds one layer of it: shorten the sequences or take a "
        "smaller model",
    )


def _with_widest_engines(job: TrainingJob, fixed: Fixed) -> TrainingJob:
    """Return a job whose engines have one rank, as many as are given, or the most, which take the
    least of a GPU: for what fits, those between change nothing."""
    kept = {max(job.engines, default=1), fixed.engine_tensor_ranks}
    return replace(job, engines={n: one for n, one in job.engines.items() if n in kept})


def _kinds(cluster: GpuCluster, fixed: Fixed) -> Iterator[Iterator[_Way]]:
    """Return each setting that was given, opened alone; then more GPUs, then larger ones."""
    given = fixed.given()
    for name in CHEAPEST_FIRST:
        if name in given:
            yield iter([_opened(cluster, fixed, name, given[name])])
    yield _more_gpus(cluster, fixed)
    yield _larger_gpus(cluster, fixed)


def _opened(cluster: GpuCluster, fixed: Fixed, name: str, value: object) -> _Way:
    opened = replace(fixed, **{name: None})
    if name == "zero":
        opened = replace(opened, shard_ranks=None)

    def say(found: Candidate) -> str:
        instead = found.residency if name == "residency" else getattr(found.layout, name)
        return f"{name} = {instead!r} instead of {value!r} ({found.layout.words()})"

    return Way(asked=(cluster, opened), words=say)


def _more_gpus(cluster: GpuCluster, fixed: Fixed) -> Iterator[_Way]:
    gpus = cluster.gpus
    opened = replace(fixed, shard_ranks=None, zero=None if gpus == 1 else fixed.zero)
    while (gpus := 2 * gpus) <= MOST_GPUS:
        more = replace(cluster, gpus=gpus, host_bytes=_host_of(cluster, gpus))
        yield Way(
            asked=(more, opened),
            words=lambda found, gpus=gpus: f"{gpus} GPUs ({found.layout.words()})",
        )


def _larger_gpus(cluster: GpuCluster, fixed: Fixed) -> Iterator[_Way]:
    larger = [gpu for gpu in GPUS.values() if gpu.device_bytes > cluster.gpu.device_bytes]
    for gpu in sorted(larger, key=lambda gpu: gpu.device_bytes):
        yield Way(
            asked=(replace(cluster, gpu=gpu), fixed),
            words=lambda found, name=gpu.name: f"{cluster.gpus} × {name} ({found.layout.words()})",
        )


def _host_of(cluster: GpuCluster, gpus: int) -> int | None:
    """Return the host memory for more GPUs: what was given was for so many, and more in a host
    share it no worse."""
    if cluster.host_bytes is None:
        return None
    return cluster.host_bytes * min(gpus, cluster.gpu.gpus_per_host) // cluster.per_host


def _best_of(job: TrainingJob, cluster: GpuCluster, fixed: Fixed) -> Candidate | None:
    fitting = [
        c
        for c in (
            judge(job, cluster, layout, fixed.residency) for layout in layouts(job, cluster, fixed)
        )
        if c.fits
    ]
    return min(fitting, key=in_order) if fitting else None


def _longest_that_fits(job: TrainingJob, cluster: GpuCluster, fixed: Fixed) -> int:
    """Tokens, to the nearest 256 below; 0 when even short sequences do not fit."""
    low, high = 0, job.longest // STEP_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        engine = (
            replace(job.engine, longest=STEP_TOKENS * middle) if job.engine is not None else None
        )
        mean = min(job.mean_tokens, STEP_TOKENS * middle)
        shorter = replace(job, longest=STEP_TOKENS * middle, mean_tokens=mean, engine=engine)
        if _best_of(shorter, cluster, fixed):
            low = middle
        else:
            high = middle - 1
    return STEP_TOKENS * low
