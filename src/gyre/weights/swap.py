"""Swap: how the numbers of a version take the place of the last one's, and how they are put back.
In: tensors beside the engine's own, or shards of them. Out: the engine's tensors, overwritten whole
or as they were.

Addresses stay, so the numbers move and the tensors do not. A swap checks names, shapes and dtypes
before it writes its first byte. What it overwrites is kept until it is settled, so a step that
fails is undone from memory of the same device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gyre.core.events import Emit
from gyre.core.records import Manifest
from gyre.weights.gather import ShardSource
from gyre.weights.manifest import dtype_name, verify_manifest

BUCKET_BYTES = 64 << 20


def shares_storage(source: Mapping[str, Tensor], destination: Mapping[str, Tensor]) -> bool:
    """Return whether each destination tensor is its source's memory, so that publishing moves no
    byte."""
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
        entries=tuple(
            replace(entry, segments=tuple(replace(one, checksum=None) for one in entry.segments))
            for entry in manifest.entries
        ),
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


class Swap(Protocol):
    """One version that waits to take the place of another."""

    moves_bytes: bool  # False where the engine has the numbers already

    def run(self) -> None:
        """Overwrite the engine's numbers. After an error call `undo`."""
        ...

    def verify(self) -> None:
        """Verify with the other ranks of the engine what none could alone. All call it at the same
        point, after `run`. Over one tensor rank it does nothing: staging or `run` has verified."""
        ...

    def undo(self) -> None:
        """Put back what `run` has overwritten so far, to the bit; `run` may be called again."""
        ...

    def settle(self) -> None:
        """Free what was kept for `undo`, and what `run` reads. No call may follow."""
        ...


class VersionBump:
    """The engine reads the trainer's storage: nothing moves and nothing can fail."""

    moves_bytes = False

    def run(self) -> None: ...

    def verify(self) -> None: ...

    def undo(self) -> None: ...

    def settle(self) -> None: ...


class Exchange:
    """Staged tensors trade places with the engine's, a piece at a time: nothing is kept but one
    piece, since the last version ends up where the new one was staged."""

    moves_bytes = True

    def __init__(
        self,
        staged: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        _check_alike(staged, own)
        self._bucket_bytes = bucket_bytes
        # flat, so that a piece is a run; engine and staging tensors are contiguous
        self._pairs = [(own[name].view(-1), staged[name].view(-1)) for name in own]
        self._traded: list[tuple[Tensor, Tensor]] = []
        # of the piece at hand: own, staged, what own was, whether own is written whole
        self._open: tuple[Tensor, Tensor, Tensor, bool] | None = None

    @torch.no_grad()
    def run(self) -> None:
        assert not self._traded and self._open is None, "this swap has run already"
        for own_N, staged_N in self._pairs:
            step = max(1, self._bucket_bytes // own_N.element_size())
            for start in range(0, len(own_N), step):
                self._trade(own_N[start : start + step], staged_N[start : start + step])

    def verify(self) -> None: ...  # each rank did, when it staged

    @torch.no_grad()
    def undo(self) -> None:
        if self._open is not None:
            own_N, staged_N, before_N, after_is_in_own = self._open
            if after_is_in_own:  # staged may be half overwritten
                staged_N.copy_(own_N)
            own_N.copy_(before_N)
            self._open = None
        while self._traded:
            own_N, staged_N = self._traded[-1]
            before_N = staged_N.clone()
            staged_N.copy_(own_N)
            own_N.copy_(before_N)
            self._traded.pop()

    def settle(self) -> None:
        self._traded.clear()

    def _trade(self, own_N: Tensor, staged_N: Tensor) -> None:
        before_N = own_N.clone()
        self._open = (own_N, staged_N, before_N, False)
        own_N.copy_(staged_N)
        self._open = (own_N, staged_N, before_N, True)
        staged_N.copy_(before_N)
        self._traded.append((own_N, staged_N))
        self._open = None


class GatherOver:
    """Shards are gathered over the engine's numbers, a bucket at a time. The bytes of each bucket
    are kept beside them before they are overwritten: a second set of the engine's weights, for as
    long as the swap lasts."""

    moves_bytes = True

    def __init__(
        self, version: int, shards: ShardSource, own: Mapping[str, Tensor], *, emit: Emit
    ) -> None:
        self._version = version
        self._shards = shards
        self._own = own
        self._emit = emit
        # what has been overwritten, and the bytes that were there
        self._homes: list[Tensor] = []
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def run(self) -> None:
        assert not self._homes, "this swap has run already"
        size_bytes = self._shards.gather_into(self._own, before_write=self._keep)
        for device in {tensor.device for tensor in self._own.values() if tensor.is_cuda}:
            # a copy that fails does so here, while it can be undone
            torch.cuda.current_stream(device).synchronize()
        self._emit("weights.gathered", version=self._version, size_bytes=size_bytes)

    def verify(self) -> None: ...  # a gather is of whole tensors

    @torch.no_grad()
    def undo(self) -> None:
        if self._homes:
            torch._foreach_copy_(self._homes, self._kept)
        self.settle()

    def settle(self) -> None:
        self._homes.clear()
        self._kept.clear()

    def _keep(self, homes: list[Tensor]) -> None:
        kept = [torch.empty_like(home) for home in homes]
        torch._foreach_copy_(kept, homes)
        self._homes += homes
        self._kept += kept


def _check_alike(staged: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    assert staged.keys() == own.keys(), sorted(staged.keys() ^ own.keys())
    for name, tensor in own.items():
        assert staged[name].shape == tensor.shape and staged[name].dtype == tensor.dtype, (
            f"{name}: {dtype_name(staged[name].dtype)} {tuple(staged[name].shape)} into "
            f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of bytes of one tensor."""

    name: str
    start: int  # byte within the tensor
    stop: int
    offset: int  # byte within the bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Pieces that travel together."""

    pieces: tuple[Piece, ...]
    size_bytes: int


def plan_buckets(sizes_bytes: Mapping[str, int], *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Fill buckets in order and cut tensors that do not fit. Every bucket but the last is full."""
    assert bucket_bytes > 0
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    filled = 0
    for name, size in sizes_bytes.items():
        start = 0
        while start < size:
            stop = min(size, start + bucket_bytes - filled)
            pieces.append(Piece(name=name, start=start, stop=stop, offset=filled))
            filled += stop - start
            start = stop
            if filled == bucket_bytes:
                buckets.append(Bucket(pieces=tuple(pieces), size_bytes=filled))
                pieces, filled = [], 0
    if pieces:
        buckets.append(Bucket(pieces=tuple(pieces), size_bytes=filled))
    return tuple(buckets)
