"""Every collective of a group of two ranks, on different numbers of each, over gloo or NCCL."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gyre.distributed.process_group import RankGroup


def rows_of(sender: int, receiver: int, count: int, width: int) -> list[list[float]]:
    first = 1000.0 * sender + 100.0 * receiver
    return [[first + row + 0.1 * column for column in range(width)] for row in range(count)]


def sent_rows(group: RankGroup, counts: list[list[int]], width: int) -> dict[str, Any]:
    own = counts[group.rank]
    rows = [row for to in range(group.size) for row in rows_of(group.rank, to, own[to], width)]
    x_TE = torch.tensor(rows, dtype=torch.float64, device=group.device).view(sum(own), width)
    received = group.exchange_counts(own)
    group.traffic.take()
    out_TE = group.all_to_all(x_TE, own, received)
    return {"rows": out_TE.tolist(), "sent": dict(group.traffic.take().bytes_by_kind)}


def numbers_of(group: RankGroup, turn: int = 0) -> Tensor:
    """A rank's own numbers."""
    return torch.arange(4.0, device=group.device) + 10 * group.rank + turn


def every_collective(group: RankGroup, own_N: Tensor) -> list[list[float]]:
    """What each returns."""
    return [x_N.tolist() for x_N in run_all(group, own_N)]


def run_all(group: RankGroup, own_N: Tensor) -> list[Tensor]:
    """Results on the device, without a wait for it."""
    rank, other = group.rank, 1 - group.rank
    summed_N, gathered_N, largest_N = own_N.clone(), own_N.new_empty(8), own_N.clone()
    group.all_reduce(summed_N)
    group.all_reduce(largest_N, "max")
    group.all_gather(gathered_N, own_N)
    scattered_N = group.reduce_scatter(own_N.clone())
    sent, received = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    moved_TE = group.all_to_all(own_N.view(4, 1), sent, received)
    received_N = own_N.new_empty(4)
    group.begin_point_to_point({other: own_N}, {other: received_N})()
    return [summed_N, largest_N, gathered_N, scattered_N, moved_TE.flatten(), received_N]


def expected_of_all(rank: int, turn: int = 0) -> list[list[float]]:
    """What `every_collective` gives on a rank."""
    first, second = ([10.0 * one + turn + column for column in range(4)] for one in (0, 1))
    summed = [sum(pair) for pair in zip(first, second, strict=True)]
    moved = [first[:1] + second[:2], first[1:] + second[2:]][rank]
    return [
        summed, second, first + second, summed[2 * rank :][:2], moved, (second, first)[rank]
    ]  # fmt: skip
