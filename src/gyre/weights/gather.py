"""Gather: whole tensors back from their shards, a bucket at a time. In: a ShardLayout, this rank's runs, the group that
holds the shards. Out: runs of whole tensors, on every rank, or written into given storage. Callers: trainer (engines'
weights, the reference), wire.

Never more than one bucket exists beside the shards and the destination.
"""

# N numbers of a run, S ranks

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gyre.parallel.group import Group
from gyre.weights.shards import ShardLayout, plan_gather

BUCKET_BYTES = 256 << 20


class Run(NamedTuple):
    """Numbers [start, stop) of the row-major tensor `name`. `values_N` is valid until the next one is asked for."""

    name: str
    start: int
    stop: int
    values_N: Tensor


def gather_runs(
    layout: ShardLayout,
    local: Mapping[str, Tensor],
    *,
    group: Group,
    dtype: torch.dtype,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[Run]:
    """Yield every number of every tensor once, as `dtype`, on every rank of `group`, in buckets of about
    `bucket_bytes`. `local` has this rank's run of each tensor, on any device; values come on the group's device. Every
    rank must iterate to the end."""
    assert len(layout.ranks) == group.size, f"{len(layout.ranks)} shards in a group of {group.size}"
    if group.size == 1:
        yield from local_runs(layout, local, rank=0, dtype=dtype)
        return
    buckets = plan_gather(layout, numbers_per_bucket=max(1, bucket_bytes // dtype.itemsize))
    longest = max((bucket.size for bucket in buckets), default=0)
    sent_N = torch.zeros(longest, dtype=dtype, device=group.device)
    joined_SN = torch.zeros(longest * group.size, dtype=dtype, device=group.device)
    own = layout.ranks[group.rank]
    for bucket in buckets:
        for landing in bucket.landings:
            replicated = own[landing.name] == layout.ranks[landing.rank][landing.name]
            if landing.rank == group.rank or replicated:
                first = landing.start - own[landing.name].start
                run_N = local[landing.name].reshape(-1)[first : first + landing.stop - landing.start]
                sent_N[landing.offset : landing.offset + len(run_N)].copy_(run_N)
        got_SN = joined_SN[: bucket.size * group.size]
        group.all_gather(got_SN, sent_N[: bucket.size])
        for landing in bucket.landings:
            at = landing.rank * bucket.size + landing.offset
            yield Run(landing.name, landing.start, landing.stop, got_SN[at : at + landing.stop - landing.start])


def local_runs(layout: ShardLayout, local: Mapping[str, Tensor], *, rank: int, dtype: torch.dtype) -> Iterator[Run]:
    """Yield what one rank holds, where it is; no rank is asked for anything."""
    for name, place in layout.ranks[rank].items():
        if place.start < place.stop:
            yield Run(name, place.start, place.stop, local[name].detach().reshape(-1).to(dtype))


class ShardSource(Mapping[str, Tensor]):
    """A version whose tensors lie in shards: name → this rank's run, flat. What `register` of a sharded trainer hands
    out; it is read by `gather_buckets` or `gather_into`, on all ranks at once."""

    def __init__(self, layout: ShardLayout, local: Mapping[str, Tensor], *, group: Group, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        self._local, self._group = local, group

    def __getitem__(self, name: str) -> Tensor:
        return self._local[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.shapes)

    def __len__(self) -> int:
        return len(self.layout.shapes)

    def gather_buckets(self, *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Run]:
        """See `gather_runs`."""
        return gather_runs(self.layout, self._local, group=self._group, dtype=self.dtype, bucket_bytes=bucket_bytes)

    def gather_into(self, destination: Mapping[str, Tensor], *, bucket_bytes: int = BUCKET_BYTES) -> int:
        """Write the whole version into contiguous tensors of any dtype and device; returns the bytes written. All
        ranks of the group take part; one that wants nothing gives an empty mapping."""
        flat = {name: tensor.detach().view(-1) for name, tensor in destination.items()}
        for name, tensor in destination.items():
            assert tuple(tensor.shape) == tuple(self.layout.shapes[name]), f"{name}: {tuple(tensor.shape)}"
        assert not flat or flat.keys() == self.layout.shapes.keys(), sorted(flat.keys() ^ self.layout.shapes.keys())
        for run in self.gather_buckets(bucket_bytes=bucket_bytes):
            if run.name in flat:
                flat[run.name][run.start : run.stop].copy_(run.values_N)
        return sum(tensor.numel() * tensor.element_size() for tensor in flat.values())
