"""Gather: whole tensors back from their shards, a bucket at a time. In: a ShardLayout, this rank's
runs, the group that holds the shards. Out: runs of whole tensors, on every rank, or written into
given storage.

While the runs of one bucket are written where they belong, the next one travels. Never more than
these two exist beside the shards and the destination.
"""

# N numbers of a run, S ranks

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gyre.distributed.process_group import RankGroup
from gyre.weights.shards import GatherBucket, Shape, ShardLayout, plan_gather

BUCKET_BYTES = 256 << 20


class TensorRun(NamedTuple):
    """Numbers [start, stop) of the row-major tensor `name`. `values_N` is valid until the next one
    is asked for."""

    name: str
    start: int
    stop: int
    values_N: Tensor


def gather_runs(
    layout: ShardLayout,
    local: Mapping[str, Tensor],
    *,
    group: RankGroup,
    dtype: torch.dtype,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[TensorRun]:
    """Yield every number of every tensor once, as `dtype`, on every rank of `group`, in buckets of
    about `bucket_bytes`. `local` has this rank's run of each tensor, on any device; values come on
    the group's device. Every rank must iterate to the end."""
    for runs in _gather_lists(layout, local, group, dtype, bucket_bytes):
        yield from runs


def _gather_lists(
    layout: ShardLayout,
    local: Mapping[str, Tensor],
    group: RankGroup,
    dtype: torch.dtype,
    bucket_bytes: int,
) -> Iterator[list[TensorRun]]:
    """Yield the runs of each bucket in turn, valid until the next one is asked for."""
    assert len(layout.ranks) == group.size, f"{len(layout.ranks)} shards in a group of {group.size}"
    if group.size == 1:
        for run in local_runs(layout, local, rank=0, dtype=dtype):
            yield [run]
        return
    buckets = plan_gather(layout, numbers_per_bucket=max(1, bucket_bytes // dtype.itemsize))
    longest = max((bucket.size for bucket in buckets), default=0)
    slots = [_Slot(longest, group, dtype) for _ in buckets[:2]]
    for index in range(len(buckets) + 1):
        if index < len(buckets):
            slots[index % 2].begin(buckets[index], layout, local)
        if index:
            yield slots[(index - 1) % 2].end(buckets[index - 1])


class _Slot:
    """Room for a bucket: what this rank sends of it, and what all ranks sent."""

    def __init__(self, longest: int, group: RankGroup, dtype: torch.dtype) -> None:
        self._group = group
        self._sent_N = torch.empty(longest, dtype=dtype, device=group.device)
        self._joined_SN = torch.empty(longest * group.size, dtype=dtype, device=group.device)
        self._wait: Callable[[], None] = lambda: None

    @torch.no_grad()
    def begin(self, bucket: GatherBucket, layout: ShardLayout, local: Mapping[str, Tensor]) -> None:
        """Round this rank's numbers and begin to all-gather them."""
        own, rank = layout.ranks[self._group.rank], self._group.rank
        homes, runs = [], []
        for landing in bucket.landings:
            place = own[landing.name]
            # or every rank has it whole
            if landing.rank == rank or place == layout.ranks[landing.rank][landing.name]:
                count = landing.stop - landing.start
                homes.append(self._sent_N[landing.offset : landing.offset + count])
                runs.append(
                    local[landing.name].reshape(-1)[
                        landing.start - place.start : landing.stop - place.start
                    ]
                )
        if homes:
            torch._foreach_copy_(homes, runs)
        self._wait = self._group.begin_all_gather(self._joined(bucket), self._sent_N[: bucket.size])

    def end(self, bucket: GatherBucket) -> list[TensorRun]:
        """Wait for the bucket and return its runs, valid until the slot's next `begin`."""
        self._wait()
        joined_SN, found = self._joined(bucket), []
        for landing in bucket.landings:
            at = landing.rank * bucket.size + landing.offset
            values_N = joined_SN[at : at + landing.stop - landing.start]
            found.append(TensorRun(landing.name, landing.start, landing.stop, values_N))
        return found

    def _joined(self, bucket: GatherBucket) -> Tensor:
        return self._joined_SN[: bucket.size * self._group.size]


def local_runs(
    layout: ShardLayout, local: Mapping[str, Tensor], *, rank: int, dtype: torch.dtype
) -> Iterator[TensorRun]:
    """Yield what one rank holds, in place, without communication."""
    for name, place in layout.ranks[rank].items():
        if place.start < place.stop:
            yield TensorRun(
                name, place.start, place.stop, local[name].detach().reshape(-1).to(dtype)
            )


class ShardSource(Mapping[str, Tensor]):
    """A sharded version: name → this rank's run, flat. A sharded trainer's `register` offers it;
    all ranks read it together by `gather_buckets` or `gather_into`. It is also a TensorSource of
    this rank's runs, for models that are cut alike."""

    def __init__(
        self,
        layout: ShardLayout,
        local: Mapping[str, Tensor],
        *,
        group: RankGroup,
        dtype: torch.dtype,
    ) -> None:
        self.layout, self.dtype = layout, dtype
        self._local, self._group = local, group

    def __getitem__(self, name: str) -> Tensor:
        return self._local[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.shapes)

    def __len__(self) -> int:
        return len(self.layout.shapes)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self.layout.shapes

    def read(self, name: str, start: int, stop: int, out_N: Tensor) -> None:
        """Write this rank's numbers [start, stop) into `out_N`, rounded to `dtype`."""
        place = self.layout.ranks[self._group.rank][name]
        assert place.start <= start and stop <= place.stop, (
            f"{name}: numbers [{start}, {stop}) are not this rank's"
        )
        own_N = self._local[name].detach().reshape(-1)[start - place.start : stop - place.start]
        out_N.copy_(own_N.to(self.dtype))

    def gather_buckets(self, *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[TensorRun]:
        """Yield every number once on every rank, as `gather_runs` does."""
        return gather_runs(
            self.layout, self._local, group=self._group, dtype=self.dtype, bucket_bytes=bucket_bytes
        )

    def gather_into(
        self,
        destination: Mapping[str, Tensor],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        before_write: Callable[[list[TensorRun]], None] = lambda runs: None,
    ) -> int:
        """Write the whole version into contiguous tensors of any dtype and device, and return the
        bytes written. All ranks of the group take part; one that wants nothing gives an empty
        mapping. `before_write` gets the runs of each bucket before they overwrite anything."""
        flat = {name: tensor.detach().view(-1) for name, tensor in destination.items()}
        for name, tensor in destination.items():
            assert tuple(tensor.shape) == tuple(self.layout.shapes[name]), (
                f"{name}: {tuple(tensor.shape)}"
            )
        assert not flat or flat.keys() == self.layout.shapes.keys(), sorted(
            flat.keys() ^ self.layout.shapes.keys()
        )
        for runs in _gather_lists(self.layout, self._local, self._group, self.dtype, bucket_bytes):
            if flat:
                before_write(runs)
                homes = [flat[run.name][run.start : run.stop] for run in runs]
                torch._foreach_copy_(homes, [run.values_N for run in runs])
        return sum(tensor.numel() * tensor.element_size() for tensor in flat.values())
