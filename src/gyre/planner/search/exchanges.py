"""Exchanges: what the ranks that share layers send each other in one update, and how long they wait
for it. By the table of docs/parallel.md: sequence parallel, ring algorithms. Pure arithmetic.

In: the job of one rank, a Layout, a Gpu. Out: CollectiveTraffic; bytes; seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gyre.planner.gpus import EXCHANGE_S, Gpu
from gyre.planner.memory_model.activations import ITEM_BYTES
from gyre.planner.memory_model.job import TrainingJob
from gyre.planner.memory_model.states import FLOAT, Layout

Collective = Literal["all-gather", "reduce-scatter", "all-reduce"]
GATHER: Collective = "all-gather"
SCATTER: Collective = "reduce-scatter"

# Of the backward pass's exchanges, which run beside products. 38 of 78 ms were hidden, and of the
# forward pass's 31 ms nothing (train_2x_8b_8192_none_same_sft_zero0_tensor2.json).
HIDDEN_SHARE = 0.82
LOGPROB_BYTES = 12  # a row's maximum, sum and target in float32, from each vocabulary part


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTraffic:
    """Collectives of one kind in an update of one trained model."""

    collective: Collective
    calls: int
    sent_bytes: float  # by one rank, in all calls together
    hidden: bool = False  # started ahead, beside products of the backward pass; others are awaited


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTime:
    """Seconds of one update."""

    all_s: float = 0.0
    waited_s: float = 0.0  # of it, not hidden by products


def list_exchanges(
    job: TrainingJob, layout: Layout, *, chunks: int
) -> tuple[CollectiveTraffic, ...]:
    """Return what one rank exchanges for one trained model; nothing with one tensor rank."""
    if layout.tensor_ranks == 1:
        return ()
    ring, tokens = (
        (layout.tensor_ranks - 1) / layout.tensor_ranks,
        job.tokens_per_update / layout.data_ranks,
    )
    row_bytes = ring * ITEM_BYTES[job.dtype] * job.model.hidden_size
    targets = tokens * min(1.0, job.target_share)
    again = layout.checkpointing == "full"
    found = [
        CollectiveTraffic(
            collective=collective,
            calls=calls * chunks,
            sent_bytes=row_bytes * rows * calls,
            hidden=hidden,
        )
        for calls, collective, rows, hidden in (
            *_of_layers(job.model.num_layers - 1, tokens, tokens, again=again),
            *_of_layers(1, tokens, targets, again=again),
            *_around_layers(tokens, targets),
        )
    ]
    logprobs = ring * LOGPROB_BYTES * layout.tensor_ranks * targets
    found.append(CollectiveTraffic(collective=GATHER, calls=chunks, sent_bytes=logprobs))
    gradient = 2 * row_bytes * targets
    found.append(CollectiveTraffic(collective="all-reduce", calls=chunks, sent_bytes=gradient))
    copies = 2 * ring * FLOAT * copied_numbers(job) / layout.shard_ranks
    return (*found, CollectiveTraffic(collective="all-reduce", calls=1, sent_bytes=copies))


Row = tuple[int, Collective, float, bool]  # calls, collective, rows of each, whether hidden


def _of_layers(calls: int, before: float, after: float, *, again: bool) -> Iterator[Row]:
    """Yield the exchanges of so many layers, with so many rows before and behind attention. A layer
    that is run `again` sends all but its last sum once more."""
    for _ in range(2 if again else 1):
        yield calls, GATHER, before, False
        yield calls, SCATTER, after, False
        yield calls, GATHER, after, False
    yield calls, SCATTER, after, False
    yield 3 * calls, GATHER, after, True
    yield calls, SCATTER, after, True
    yield calls, GATHER, before, True
    yield calls, SCATTER, before, True


def _around_layers(tokens: float, targets: float) -> Iterator[Row]:
    """Yield those of the embedding, of rows that are selected, and of the final norm."""
    yield 1, SCATTER, tokens, False
    yield 1, GATHER, tokens, False
    if targets < tokens:
        yield 1, GATHER, tokens, False
        yield 1, SCATTER, tokens, False
    yield 1, GATHER, targets, False


def copied_numbers(job: TrainingJob) -> int:
    """Return the numbers of which several tensor ranks hold a copy, in all of them: norms, and KV
    heads where there are fewer than ranks."""
    part, whole = job.model, job.engine_model or job.model
    heads = 2 * part.head_dim if part.qk_norm else 0
    norms = part.num_layers * (2 * part.hidden_size + heads) + part.hidden_size
    if part.row_ranks <= whole.num_kv_heads:
        return norms
    columns = part.hidden_size + (1 if part.qkv_bias else 0)
    return norms + part.num_layers * 2 * whole.kv_size * columns


def sent_by_tensor_ranks(job: TrainingJob, layout: Layout, *, chunks: int) -> dict[str, int]:
    """Return the bytes that one rank sends in an update, by collective."""
    found: dict[str, float] = {}
    for exchange in list_exchanges(job, layout, chunks=chunks):
        name = f"tensor {exchange.collective}"
        found[name] = found.get(name, 0.0) + job.copies * exchange.sent_bytes
    return {name: int(size) for name, size in found.items()}


def exchange_time(
    job: TrainingJob, layout: Layout, gpu: Gpu, *, chunks: int, products_s: float
) -> ExchangeTime:
    """Return the time of all exchanges in a host. `products_s`: of a forward pass's products. The
    backward pass's exchanges hide beside the gradients of weights, which take as long."""
    hidden_s, waited_s = (
        sum(
            each.calls * EXCHANGE_S + each.sent_bytes / gpu.exchange_bytes_per_s
            for each in list_exchanges(job, layout, chunks=chunks)
            if each.hidden is hidden
        )
        * job.copies
        for hidden in (True, False)
    )
    return ExchangeTime(
        all_s=hidden_s + waited_s,
        waited_s=waited_s + hidden_s - min(HIDDEN_SHARE * hidden_s, products_s),
    )
