"""Publish: a trainer rank registers its part of a version, and the parts become one offer. In: the
rank's own offer, a PartStore. Out: a PublishedPart that crosses processes; an Offer of them all. No
engine has the version then: to publish it whole is the work of `loop.handover`.

Of shards each rank writes the runs that it owns, without a gather. Of whole tensors, which every
rank has, the ranks write one cut each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gyre.core.errors import InputError, SnapshotError
from gyre.core.offers import (
    Offer,
    RegisteredPart,
    RegisteredShards,
)
from gyre.core.records import Manifest, Segment, TensorEntry
from gyre.distributed.layout import BoxRun, find_gap
from gyre.kernels.checksum import as_hex, checksums
from gyre.observability.spans import ActivityClock
from gyre.weights.gather import ShardSource
from gyre.weights.manifest import dtype_name, segment_run
from gyre.weights.transports.contracts import LivePublisher, OpenSlot, PartStore
from gyre.weights.transports.part_layout import PlacedSegment, dtype_of, part_bytes, place_part

HOST_PIECE_BYTES = 1 << 20  # copied and summed while it is in the processor's cache
DEVICE_PIECE_BYTES = 64 << 20  # rounded on the device beside the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPart:
    """What one owner has registered: every tensor of the version, with the owner's own segments
    and their checksums."""

    version: int
    epoch: int
    owner: int
    entries: tuple[TensorEntry, ...]
    part: RegisteredPart


@torch.no_grad()
def publish_part(
    offer: Offer,
    *,
    rank: int,
    num_ranks: int,
    store: PartStore,
    activities: ActivityClock | None = None,
    live: LivePublisher | None = None,
) -> PublishedPart:
    """Copy this rank's part of a version into the store, with a checksum of each segment. `live`
    serves it from the rank's own tensors too, until they change; the store may then be written
    while readers have them. It serves from the slot after that, and at once where the tensors have
    left the device. InputError for an offer of which this process has no tensors."""
    activities = activities or ActivityClock()
    with activities.timing("convert") as converting:
        runs_of = _owned_runs(offer, rank, num_ranks)
        placed = place_part([entry for entry, _ in runs_of], rank)
        runs = [run_N for _, runs in runs_of for run_N in runs]
        converting.size_bytes = _rounded_bytes(placed, runs)
    with activities.timing("register") as registering:
        registering.size_bytes = part_bytes(placed)
        part, totals = _write_part(offer.manifest, placed, runs, store, live)
    entries = tuple(
        replace(
            entry,
            segments=tuple(replace(one, checksum=as_hex(next(totals))) for one in entry.segments),
        )
        for entry, _ in runs_of
    )
    return PublishedPart(
        version=offer.version, epoch=offer.manifest.epoch, owner=rank, entries=entries, part=part
    )


def _write_part(
    manifest: Manifest,
    placed: Sequence[PlacedSegment],
    runs: Sequence[Tensor],
    store: PartStore,
    live: LivePublisher | None,
) -> tuple[RegisteredPart, Iterator[int]]:
    """Copy the segments into the store, now or while `live` serves them; return where they are and
    their sums, in order."""
    of_version = {"epoch": manifest.epoch, "version": manifest.version}
    if live is not None:
        live.end_version()
    with ExitStack() as stack:
        slot = stack.enter_context(store.writing(**of_version, size_bytes=part_bytes(placed)))
        further = () if live is None else live.put(**of_version, placed=placed, runs=runs)
        if live is None or not further:
            # the copies have ended when their device has given the sums
            totals = iter(_to_host(_write_all(placed, runs, slot)))
            stack.close()
            further = () if live is None else live.put_slot(**of_version, slot=slot)
            return _with_addresses(slot.part, further), totals
        sums = [_sum(one, run_N) for one, run_N in zip(placed, runs, strict=True)]
        totals = iter(_to_host(sums))
        serve = partial(live.put_slot, **of_version, slot=slot)
        write = partial(_write_behind, stack.pop_all(), placed, runs, slot, serve)
        if not live.write_behind(**of_version, write=write):
            write()
    return _with_addresses(slot.part, further), totals


def _with_addresses(part: RegisteredPart, further: tuple[str, ...]) -> RegisteredPart:
    return replace(part, addresses=(*part.addresses, *further))


def _rounded_bytes(placed: Sequence[PlacedSegment], runs: Sequence[Tensor]) -> int:
    """Return the bytes of numbers whose format changes as they are written."""
    pairs = zip(placed, runs, strict=True)
    return sum(one.stop - one.start for one, run_N in pairs if run_N.dtype != dtype_of(one.entry))


def join_parts(version: int, epoch: int, parts: Sequence[PublishedPart]) -> Offer:
    """Make one offer of all owners' parts. SnapshotError unless they are of this version and tile
    each tensor once. Pure."""
    parts = sorted(parts, key=lambda part: part.owner)
    faults = [
        f"rank {part.owner} has version {part.version} of epoch {part.epoch}"
        for part in parts
        if (part.version, part.epoch) != (version, epoch)
    ]
    if [part.owner for part in parts] != list(range(len(parts))) or not parts:
        faults.append(f"parts are of ranks {[part.owner for part in parts]}")
    bare = [[replace(entry, segments=()) for entry in part.entries] for part in parts]
    if any(one != bare[0] for one in bare):
        faults.append("the ranks list different tensors")
    if not faults:
        entries = tuple(
            replace(entry, segments=tuple(one for cut in same for one in cut.segments))
            for entry, *same in zip(bare[0], *(part.entries for part in parts), strict=True)
        )
        gaps = [(entry.name, _gap(entry)) for entry in entries]
        faults = [f"{name}: {gap}" for name, gap in gaps if gap is not None]
        if not faults:
            return Offer(
                manifest=Manifest(version=version, entries=entries, shared=False, epoch=epoch),
                source=RegisteredShards(parts=tuple(part.part for part in parts)),
            )
    raise SnapshotError(
        f"version {version} of epoch {epoch} was not registered whole: {'; '.join(faults[:3])}",
        hint="register the version again on every rank",
    )


def _gap(entry: TensorEntry) -> str | None:
    runs = [BoxRun(start=s.start, stop=s.stop, columns=s.columns) for s in entry.segments]
    return find_gap(entry.shape, runs)


def _owned_runs(
    offer: Offer, rank: int, num_ranks: int
) -> list[tuple[TensorEntry, tuple[Tensor, ...]]]:
    """Return every tensor's entry with the segments of this rank, and their numbers, flat."""
    if offer.shards is not None:
        assert offer.shards.layout.num_holders <= num_ranks, f"{num_ranks} ranks hold no whole"
        return list(_shard_runs(offer.shards, rank))
    if offer.whole_tensors is not None:
        return list(_cut_runs(offer.whole_tensors, rank, num_ranks))
    raise InputError(
        f"version {offer.version} cannot be registered from {offer.kind}: its tensors are not in "
        "this process",
        hint="register it where its trainer is",
    )


def _shard_runs(shards: ShardSource, rank: int) -> Iterator[tuple[TensorEntry, tuple[Tensor, ...]]]:
    layout = shards.layout
    owned: dict[str, list[tuple[Segment, Tensor]]] = {name: [] for name in layout.model.shapes}
    if rank < layout.num_holders:  # any other has a copy of what a lower one owns
        assert shards.holder == rank, f"rank {rank} holds the shards of rank {shards.holder}"
        places = layout.ranks[layout.shard_of(rank)]
        for name, run, at in layout.owned(rank):
            first = at - places[name].at
            held_N = shards[name].detach().reshape(-1)[first : first + run.stop - run.start]
            segment = Segment(start=run.start, stop=run.stop, columns=run.columns, owner=rank)
            owned[name].append((segment, held_N))
    for name, shape in layout.model.shapes.items():
        segments = tuple(segment for segment, _ in owned[name])
        yield (
            _entry(name, shards.dtype, tuple(shape), segments),
            tuple(run_N for _, run_N in owned[name]),
        )


def _cut_runs(
    tensors: Mapping[str, Tensor], rank: int, num_ranks: int
) -> Iterator[tuple[TensorEntry, tuple[Tensor, ...]]]:
    cuts = cut_evenly([tensor.nbytes for tensor in tensors.values()], num_ranks)[rank]
    for (name, tensor), (low, high) in zip(tensors.items(), cuts, strict=True):
        size_bytes = tensor.element_size()
        start, stop = low // size_bytes, high // size_bytes
        segments = (Segment(start=start, stop=stop, owner=rank),) if start < stop else ()
        runs = (tensor.detach().reshape(-1)[start:stop],) if segments else ()
        yield _entry(name, tensor.dtype, tuple(tensor.shape), segments), runs


def cut_evenly(sizes_bytes: Sequence[int], num_ranks: int) -> list[list[tuple[int, int]]]:
    """Cut tensors, one after the other, into equal runs of bytes: for each rank, [start, stop) in
    each tensor. Cuts are at multiples of 64 bytes of a tensor. Pure."""
    total = sum(sizes_bytes)
    cuts = []
    for rank in range(num_ranks):
        low, high = total * rank // num_ranks, total * (rank + 1) // num_ranks
        runs, at = [], 0
        for size in sizes_bytes:
            runs.append((_round_cut(low - at, size), _round_cut(high - at, size)))
            at += size
        cuts.append(runs)
    return cuts


def _round_cut(byte: int, size: int) -> int:
    return size if byte >= size else max(0, byte) // 64 * 64


def _entry(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], segments: tuple[Segment, ...]
) -> TensorEntry:
    return TensorEntry(
        name=name,
        dtype=dtype_name(dtype),
        shape=shape,
        size_bytes=math.prod(shape) * dtype.itemsize,
        segments=segments,
    )


def _write_all(
    placed: Sequence[PlacedSegment], runs: Sequence[Tensor], slot: OpenSlot
) -> list[Tensor]:
    return [
        _sum(one, run_N, slot.bytes_N[one.start : one.stop])
        for one, run_N in zip(placed, runs, strict=True)
    ]


@torch.no_grad()
def _write_behind(
    writing: ExitStack,
    placed: Sequence[PlacedSegment],
    runs: Sequence[Tensor],
    slot: OpenSlot,
    serve: Callable[[], object],
) -> None:
    """Write the slot, and register it at the end; then `serve` from it."""
    with writing:
        _to_host(_write_all(placed, runs, slot))  # which waits for the copies
    serve()


def _sum(placed: PlacedSegment, run_N: Tensor, home_N: Tensor | None = None) -> Tensor:
    """Return one segment's sum, on the device of the numbers, and copy it into its bytes."""
    dtype = dtype_of(placed.entry)
    on_host = run_N.device.type == "cpu"
    step = max(1, (HOST_PIECE_BYTES if on_host else DEVICE_PIECE_BYTES) // dtype.itemsize)
    total = torch.zeros((), dtype=torch.int64, device=run_N.device)
    for first in range(0, len(run_N), step):
        piece_N = run_N[first : first + step]
        out_N = None if home_N is None else home_N.view(dtype)[first : first + len(piece_N)]
        if on_host and out_N is not None:
            summed_N = out_N.copy_(piece_N)
        else:  # rounded there, so that half as much crosses the link, then copied behind the sum
            summed_N = piece_N.to(dtype).contiguous()
            if out_N is not None:
                out_N.copy_(summed_N, non_blocking=True)
        part = replace(placed.segment, start=placed.segment.start + first)
        total += checksums([segment_run(placed.entry, part, summed_N)])[0]
    return total


def _to_host(sums: Sequence[Tensor]) -> list[int]:
    """Wait for the devices and return the numbers."""
    for device in {one.device for one in sums if one.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    if not sums:
        return []
    return torch.stack([one.to(sums[0].device) for one in sums]).tolist()
