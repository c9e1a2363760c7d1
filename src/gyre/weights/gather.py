"""Gather: whole tensors back from their shards, a bucket at a time. In: a ShardLayout, this rank's
runs, the group that holds the shards. Out: runs of whole tensors, on every rank, or written into
given storage.

While the runs of one bucket are written where they belong, the next one travels. Never more than
these two exist beside the shards and the destination. A fast link outruns the host: what it does
for each run counts, and plans are kept.
"""

# N numbers of a run, S ranks

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gyre.distributed.layout import BoxRun
from gyre.distributed.process_group import RankGroup
from gyre.weights.boxes import views
from gyre.weights.shards import GatherBucket, Place, Shape, ShardLayout, plan_gather

BUCKET_BYTES = 256 << 20


class TensorRun(NamedTuple):
    """A run of the whole tensor `name`. `values_N` is valid until the next one is asked for."""

    name: str
    run: BoxRun
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
    source = ShardSource(layout, local, group=group, dtype=dtype)
    yield from source.gather_buckets(bucket_bytes=bucket_bytes)


class _Slot:
    """Room for a bucket. This rank sends its part from where it also arrives."""

    def __init__(self, longest: int, group: RankGroup, dtype: torch.dtype) -> None:
        self._group = group
        self._joined_SN = torch.empty(longest * group.size, dtype=dtype, device=group.device)
        self._wait: Callable[[], None] = lambda: None

    @torch.no_grad()
    def begin(
        self, bucket: GatherBucket, own: Mapping[str, Place], local: Mapping[str, Tensor]
    ) -> None:
        """Round this rank's numbers and begin to all-gather them. `own`: its places."""
        rank = self._group.rank
        joined_SN = self._joined_SN[: bucket.size * self._group.size]
        sent_N = joined_SN[rank * bucket.size : (rank + 1) * bucket.size]
        homes, runs = [], []
        for landing in bucket.landings:
            if landing.rank == rank:
                count, first = landing.run.stop - landing.run.start, own[landing.name].at
                homes.append(sent_N[landing.offset : landing.offset + count])
                held_N = local[landing.name].view(-1)
                runs.append(held_N[landing.at - first : landing.at - first + count])
        if homes:
            torch._foreach_copy_(homes, runs)
        self._wait = self._group.begin_all_gather(joined_SN, sent_N)

    def end(self, bucket: GatherBucket) -> list[TensorRun]:
        """Wait for the bucket and return its runs, valid until the slot's next `begin`."""
        self._wait()
        found = []
        for landing in bucket.landings:
            at = landing.rank * bucket.size + landing.offset
            values_N = self._joined_SN[at : at + landing.run.stop - landing.run.start]
            found.append(TensorRun(landing.name, landing.run, values_N))
        return found


def local_runs(
    layout: ShardLayout, local: Mapping[str, Tensor], *, rank: int, dtype: torch.dtype
) -> Iterator[TensorRun]:
    """Yield what one shard rank holds of local tensors, in place, without communication."""
    for name, place in layout.ranks[rank].items():
        if place.start < place.stop:
            run = BoxRun(start=place.start, stop=place.stop)
            yield TensorRun(name, run, local[name].detach().reshape(-1).to(dtype))


def homes_of(
    tensors: Mapping[str, Tensor], runs: Iterable[TensorRun]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return views of contiguous whole tensors, and what belongs there, shaped alike."""
    homes, values = [], []
    for name, run, values_N in runs:
        if run.columns is None:  # at once, since nearly all runs are
            homes.append(tensors[name].view(-1)[run.start : run.stop])
            values.append(values_N)
            continue
        for home in views(tensors[name], run):
            homes.append(home)
            values.append(values_N[: home.numel()].view(home.shape))
            values_N = values_N[home.numel() :]
    return homes, values


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
        self.layout = layout
        self.dtype = dtype
        self._local = local
        self._group = group
        self._plans: dict[int, tuple[GatherBucket, ...]] = {}  # by the bytes of a bucket

    def __getitem__(self, name: str) -> Tensor:
        return self._local[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.shapes)

    def __len__(self) -> int:
        return len(self.layout.shapes)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self.layout.shapes

    @property
    def holder(self) -> int:
        """Return which of the layout's holders this rank is."""
        return self._group.rank

    def read(self, name: str, start: int, stop: int, out_N: Tensor) -> None:
        """Write this rank's numbers [start, stop) into `out_N`, rounded to `dtype`."""
        place = self.layout.ranks[self.layout.shard_of(self._group.rank)][name]
        assert place.start <= start and stop <= place.stop, (
            f"{name}: numbers [{start}, {stop}) are not this rank's"
        )
        own_N = self._local[name].detach().reshape(-1)[start - place.start : stop - place.start]
        out_N.copy_(own_N.to(self.dtype))

    def gather_buckets(self, *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[TensorRun]:
        """Yield every number once on every rank, as `gather_runs` does."""
        for runs in self._gather_lists(bucket_bytes):
            yield from runs

    @torch.no_grad()
    def gather_into(
        self,
        destination: Mapping[str, Tensor],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        before_write: Callable[[list[Tensor]], None] = lambda homes: None,
    ) -> int:
        """Write the whole version into contiguous tensors of any dtype and device, and return the
        bytes written. All ranks of the group take part; one that wants nothing gives an empty
        mapping. `before_write` gets views of what each bucket is about to overwrite."""
        shapes = self.layout.model.shapes
        for name, tensor in destination.items():
            assert tuple(tensor.shape) == tuple(shapes[name]), f"{name}: {tuple(tensor.shape)}"
        assert not destination or destination.keys() == self.layout.shapes.keys(), sorted(
            destination.keys() ^ self.layout.shapes.keys()
        )
        for runs in self._gather_lists(bucket_bytes):
            if destination:
                homes, values = homes_of(destination, runs)
                before_write(homes)
                torch._foreach_copy_(homes, values)
        return sum(tensor.numel() * tensor.element_size() for tensor in destination.values())

    def _gather_lists(self, bucket_bytes: int) -> Iterator[list[TensorRun]]:
        """Yield the runs of each bucket in turn, valid until the next one is asked for."""
        layout, local, group = self.layout, self._local, self._group
        assert layout.num_holders == group.size, (
            f"{layout.num_holders} shards in a group of {group.size}"
        )
        if group.size == 1:
            for run in local_runs(layout, local, rank=0, dtype=self.dtype):
                yield [run]
            return
        buckets = self._plan(bucket_bytes)
        longest = max((bucket.size for bucket in buckets), default=0)
        slots = [_Slot(longest, group, self.dtype) for _ in buckets[:2]]
        own = layout.ranks[layout.shard_of(group.rank)]
        for index in range(len(buckets) + 1):
            if index < len(buckets):
                slots[index % 2].begin(buckets[index], own, local)
            if index:
                yield slots[(index - 1) % 2].end(buckets[index - 1])

    def _plan(self, bucket_bytes: int) -> tuple[GatherBucket, ...]:
        if bucket_bytes not in self._plans:
            numbers = max(1, bucket_bytes // self.dtype.itemsize)
            self._plans[bucket_bytes] = plan_gather(self.layout, numbers_per_bucket=numbers)
        return self._plans[bucket_bytes]
