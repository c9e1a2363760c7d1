"""Advice: the reference's strategy matrix and decision tree, and the layout nearest to what they
say. Pure.

In: sizes of a job, judged candidates. Out: Advised: which line applies, and the fastest candidate
that follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gyre.planner.memory_model.job import TrainingJob
from gyre.planner.memory_model.states import Layout, on_one_gpu, state_bytes
from gyre.planner.search.candidates import Candidate, GpuCluster, in_order

Source = Literal["strategy matrix", "decision tree"]
LARGEST_GROUP = 8  # tensor ranks of the matrix; a smaller host has fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One line of a table."""

    below: float  # the line holds below (the matrix) or up to (the tree) so much
    case: str
    gpus: str = ""  # how many the reference names, in the matrix
    says: str
    follows: Callable[[Layout, int], bool]  # of a layout, with so many GPUs in a host
    built: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """What a table says of a job."""

    source: Source
    advice: Advice
    followed: bool  # by the best layout
    candidate: Candidate | None  # the fastest that follows it, or the nearest to fitting


def _no_tensor(layout: Layout, per_host: int) -> bool:
    return layout.tensor_ranks == 1


def _largest_group(layout: Layout, per_host: int) -> bool:
    return layout.tensor_ranks == min(LARGEST_GROUP, per_host)


# by model size, in parameters; models beyond 500B take the last dense line
MATRIX = (
    Advice(below=7e9, case="<7B", gpus="1-8", says="DP only", follows=_no_tensor),
    Advice(below=30e9, case="7B-30B", gpus="8-64", says="TP=8, DP=N/8", follows=_largest_group),
    Advice(
        below=100e9,
        case="30B-100B",
        gpus="64-512",
        says="TP=8, PP=2-4, DP=remaining",
        follows=_largest_group,
    ),
    Advice(
        below=float("inf"),
        case="100B-500B",
        gpus="512-4096",
        says="TP=8, PP=8-16, DP=remaining",
        follows=_largest_group,
    ),
    Advice(
        below=0.0,  # of no dense model
        case="MoE (any)",
        gpus="Varies",
        says="Add EP matching expert count",
        follows=lambda layout, per_host: False,
        built=False,
    ),
)
# by how many times the states of one copy are a GPU's memory; up to twice takes the line of 2-4x,
# the first of those that do not fit
TREE = (
    Advice(
        below=1.0,
        case="fits",
        says="DP only, ZeRO-1",
        follows=lambda layout, _: layout.zero <= 1 and layout.tensor_ranks == 1,
    ),
    Advice(
        below=4.0,
        case="2-4x over",
        says="ZeRO-2 + Gradient Checkpointing",
        follows=lambda layout, _: layout.zero == 2 and layout.checkpointing != "none",
    ),
    Advice(
        below=10.0,
        case="4-10x over",
        says="ZeRO-3",
        follows=lambda layout, _: layout.zero == 3,
    ),
    Advice(
        below=float("inf"),
        case=">10x over",
        says="ZeRO-3 + Offload (or add more GPUs)",
        follows=lambda layout, _: layout.zero == 3,  # where it fits as it is, there are more GPUs
    ),
)


def strategy_for(num_parameters: int) -> Advice:
    """Return the matrix's line for a model of so many parameters."""
    return next(advice for advice in MATRIX if num_parameters < advice.below)


def tree_for(over: float) -> Advice:
    """Return the tree's line for states of `over` times a GPU's memory."""
    return next(advice for advice in TREE if over <= advice.below)


def over_one_gpu(job: TrainingJob, cluster: GpuCluster, layout: Layout) -> float:
    """Return how many times the memory of one GPU the states of the trained models are."""
    states = state_bytes(job.model, job.dtype, on_one_gpu(layout))
    return sum(states.values()) * job.copies / cluster.device_budget_bytes


def find_advised(
    job: TrainingJob, cluster: GpuCluster, judged: Sequence[Candidate], best: Candidate
) -> tuple[Advised, ...]:
    """Return both tables' lines for a job, beside the best layout."""
    lines: tuple[tuple[Source, Advice], ...] = (
        ("strategy matrix", strategy_for(job.model.num_parameters)),
        ("decision tree", tree_for(over_one_gpu(job, cluster, best.layout))),
    )
    return tuple(
        Advised(
            source=source,
            advice=advice,
            followed=advice.follows(best.layout, cluster.per_host),
            candidate=_nearest([c for c in judged if advice.follows(c.layout, cluster.per_host)]),
        )
        for source, advice in lines
    )


def _nearest(candidates: Sequence[Candidate]) -> Candidate | None:
    return min(
        candidates,
        key=lambda c: (c.short_device_bytes + c.short_host_bytes, *in_order(c)),
        default=None,
    )
