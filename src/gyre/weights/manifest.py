"""Manifest of a policy version: what a receiver must hold to have it whole. In: tensors by name, or
a layout of shards. Out: a Manifest, or the faults of tensors compared with one.

Checksums are those of `kernels.checksum`, 16 hex digits; a float is compared by its bits and never
by value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gyre.core.errors import SnapshotError
from gyre.core.records import Manifest, Segment, TensorEntry
from gyre.kernels.checksum import SummedRun, as_hex, checksums
from gyre.kernels.checksum import checksum as sum_of
from gyre.weights.shards import ShardLayout

# also where nothing was overwritten: what finds a fault does not know what its caller has written
AGAIN = "the last version is put back: prepare this one again from the trainer that owns it"


def checksum(tensor: Tensor) -> str:
    """Return the checksum of a whole tensor."""
    return as_hex(int(sum_of(tensor.detach().contiguous().reshape(-1))))


def make_manifest(
    version: int, tensors: Mapping[str, Tensor], *, shared: bool, checksums: bool, epoch: int = 0
) -> Manifest:
    """Describe whole tensors, each one segment. Without `checksums` only shapes are verified."""
    entries = tuple(
        TensorEntry(
            name=name,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            size_bytes=tensor.numel() * tensor.element_size(),
            segments=(
                Segment(
                    start=0, stop=tensor.numel(), checksum=checksum(tensor) if checksums else None
                ),
            ),
        )
        for name, tensor in tensors.items()
    )
    return Manifest(version=version, entries=entries, shared=shared, epoch=epoch)


def shard_entries(layout: ShardLayout, dtype: torch.dtype) -> tuple[TensorEntry, ...]:
    """Describe whole tensors in shards, a segment for each run that a rank owns."""
    segments: dict[str, list[Segment]] = {name: [] for name in layout.shapes}
    for rank in range(layout.num_holders):
        for name, run, _ in layout.owned(rank):
            segments[name].append(
                Segment(start=run.start, stop=run.stop, columns=run.columns, owner=rank)
            )
    return tuple(
        TensorEntry(
            name=name,
            dtype=dtype_name(dtype),
            shape=tuple(shape),
            size_bytes=math.prod(shape) * dtype.itemsize,
            segments=tuple(segments[name]),
        )
        for name, shape in layout.model.shapes.items()
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def segments_match(entry: TensorEntry, tensor: Tensor) -> bool:
    """Return whether a tensor has the checksum of each segment that lists one."""
    listed = [segment for segment in entry.segments if segment.checksum is not None]
    runs = [segment_run(entry, segment, cut(tensor, segment)) for segment in listed]
    sums = checksums(runs).tolist() if runs else []
    return all(as_hex(total) == one.checksum for total, one in zip(sums, listed, strict=True))


def find_faults(
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    *,
    matches: Callable[[TensorEntry, Tensor], bool] = segments_match,
) -> list[str]:
    """Compare tensors with a manifest: names, dtypes, shapes, and bytes where it has checksums.
    `matches` may know the sums already."""
    listed = {entry.name for entry in manifest.entries}
    faults = [f"{name} is missing" for name in sorted(listed - set(tensors))]
    faults += [f"{name} is not part of the version" for name in sorted(set(tensors) - listed)]
    for entry in manifest.entries:
        if entry.name not in tensors:
            continue
        tensor = tensors[entry.name]
        if tuple(tensor.shape) != entry.shape or dtype_name(tensor.dtype) != entry.dtype:
            faults.append(
                f"{entry.name} is {dtype_name(tensor.dtype)} {tuple(tensor.shape)}, "
                f"the version has {entry.dtype} {entry.shape}"
            )
        elif not matches(entry, tensor):
            faults.append(checksum_fault(entry))
    return faults


def checksum_fault(entry: TensorEntry) -> str:
    """Say that a tensor has another checksum, and from which ranks of the publisher it is."""
    owners = sorted({segment.owner for segment in entry.segments})
    return (
        f"{entry.name} does not match its checksum "
        f"(from rank{'s' * (len(owners) > 1)} {', '.join(str(owner) for owner in owners)})"
    )


def segment_run(entry: TensorEntry, segment: Segment, values_N: Tensor) -> SummedRun:
    """Return a segment's numbers, or the first of them, as a run to be summed."""
    return SummedRun(
        values_N=values_N.contiguous(),  # a column of a matrix is flat, and has a stride
        start=segment.start,
        columns=segment.columns,
        num_columns=0 if segment.columns is None else entry.shape[1],
    )


def cut(tensor: Tensor, segment: Segment) -> Tensor:
    """Return the numbers of a segment, flat."""
    held = tensor.detach()
    if segment.columns is not None:
        held = held[:, slice(*segment.columns)]
    return held.reshape(-1)[segment.start : segment.stop]


def verify_manifest(
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    *,
    matches: Callable[[TensorEntry, Tensor], bool] = segments_match,
) -> None:
    """Raise SnapshotError, naming the first faults, unless the tensors are the version whole."""
    refuse_faults(manifest, find_faults(manifest, tensors, matches=matches))


def refuse_faults(manifest: Manifest, faults: Sequence[str]) -> None:
    """Raise SnapshotError, naming the first faults, if there are any."""
    if faults:
        raise SnapshotError(
            f"weights of version {manifest.version} are not whole ({len(faults)} faults): "
            f"{'; '.join(faults[:3])}",
            hint=AGAIN,
        )
