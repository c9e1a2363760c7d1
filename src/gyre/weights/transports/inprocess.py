"""In-process transport: from a trainer's tensors to an engine's, in one process. In: source tensors
by name and the Manifest. Out: nothing to do (same storage), or staged copies, verified, and then
swapped in.

A version is whole or not there: `stage` touches nothing of the receiver, `swap_in` checks
everything before it writes its first byte, and copies into the receiver's own storage so that
addresses stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gyre.core.events import Emit
from gyre.core.records import Manifest
from gyre.weights.buckets import Bucket, plan_buckets
from gyre.weights.manifest import dtype_name, verify_manifest

BUCKET_BYTES = 64 << 20


def shares_storage(source: Mapping[str, Tensor], destination: Mapping[str, Tensor]) -> bool:
    """Whether each destination tensor is the very memory of its source, so that publishing is a
    version bump."""
    return source.keys() == destination.keys() and all(
        source[name].data_ptr() == tensor.data_ptr()
        and source[name].dtype == tensor.dtype
        and source[name].shape == tensor.shape
        and source[name].stride() == tensor.stride()
        for name, tensor in destination.items()
    )


def stage(
    manifest: Manifest,
    source: Mapping[str, Tensor],
    *,
    device: torch.device,
    bucket_bytes: int = BUCKET_BYTES,
    emit: Emit,
) -> dict[str, Tensor]:
    """Copy a version beside the running one and verify it; SnapshotError leaves nothing behind.

    Between devices each bucket goes through one buffer of `bucket_bytes`, filled on the source's
    side.
    """
    plain = Manifest(
        version=manifest.version,
        entries=tuple(replace(entry, checksum="") for entry in manifest.entries),
        shared=manifest.shared,
    )
    verify_manifest(plain, source)
    staged = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        for name, tensor in source.items()
    }
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in source.items()}
    buckets = plan_buckets(sizes, bucket_bytes=bucket_bytes)
    from_bytes = {name: _as_bytes(tensor) for name, tensor in source.items()}
    to_bytes = {name: _as_bytes(tensor) for name, tensor in staged.items()}
    for bucket in buckets:
        _carry(bucket, from_bytes, to_bytes)
    verify_manifest(manifest, staged)
    emit(
        "weights.staged",
        version=manifest.version,
        size_bytes=sum(sizes.values()),
        buckets=len(buckets),
    )
    return staged


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _carry(bucket: Bucket, source: Mapping[str, Tensor], destination: Mapping[str, Tensor]) -> None:
    """Copy one bucket: piece by piece on one device, through a buffer when it crosses to
    another."""
    pairs = [
        (
            source[piece.name][piece.start : piece.stop],
            destination[piece.name][piece.start : piece.stop],
        )
        for piece in bucket.pieces
    ]
    if pairs[0][0].device == pairs[0][1].device:
        for from_bytes, to_bytes in pairs:
            to_bytes.copy_(from_bytes)
        return
    landed = torch.cat([from_bytes for from_bytes, _ in pairs]).to(pairs[0][1].device)
    for piece, (_, to_bytes) in zip(bucket.pieces, pairs, strict=True):
        to_bytes.copy_(landed[piece.offset : piece.offset + to_bytes.numel()])


def swap_in(staged: Mapping[str, Tensor], destination: Mapping[str, Tensor]) -> None:
    """Overwrite the destination with a staged version; all names, dtypes and shapes are checked
    first."""
    assert staged.keys() == destination.keys(), sorted(staged.keys() ^ destination.keys())
    for name, tensor in destination.items():
        assert staged[name].shape == tensor.shape and staged[name].dtype == tensor.dtype, (
            f"{name}: {dtype_name(staged[name].dtype)} {tuple(staged[name].shape)} into "
            f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
        )
    with torch.no_grad():
        torch._foreach_copy_(list(destination.values()), [staged[name] for name in destination])
