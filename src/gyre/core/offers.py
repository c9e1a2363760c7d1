"""Offers: a policy version that engines may have, and where its numbers are. In: a Manifest and one
of six sources. Out: records that a trainer hands out and an engine takes.

The properties of an Offer distinguish the sources, and no other module asks for their classes, but
`weights.receive`, which takes each one, and codecs. Tensors are borrowed: they are those of the
version until the trainer's next step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gyre.core.records import Manifest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedStorage:
    """The engine reads these very tensors: a version is a number, and no byte moves."""

    tensors: Mapping[str, Any]  # torch tensors by parameter name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalTensors:
    """Whole tensors in the receiver's process, to be copied."""

    tensors: Mapping[str, Any]  # torch tensors by parameter name, on any device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalShards:
    """One rank's part of each tensor. The ranks of a group gather the whole together."""

    shards: Any  # a weights.gather.ShardSource


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteTensors:
    """Tensors of another process. `fetch` brings them here, with a checksum of each; InputError
    when their owner is past the version."""

    fetch: Callable[[], Awaitable[Offer]]  # of LocalTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTensors:
    """Files in hub layout that each receiver reads by itself. No tensor crosses a process."""

    folder: str  # absolute, on the receiver's host


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredPart:
    """What one owner has registered of a version: its segments in the manifest's order, each at the
    next multiple of 64 bytes."""

    addresses: tuple[str, ...]  # of the same bytes: "shm://host-id/name", "tcp://host:port/name"
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredShards:
    """A part for each owner of the manifest's segments, which other processes open by address. The
    manifest has the checksum of each segment."""

    parts: tuple[RegisteredPart, ...]  # by owner


WeightSource = (
    SharedStorage | LocalTensors | LocalShards | RemoteTensors | FolderTensors | RegisteredShards
)
# that an engine may take; RemoteTensors are fetched first, and then are LocalTensors
SourceKind = Literal[
    "SharedStorage", "LocalTensors", "LocalShards", "FolderTensors", "RegisteredShards"
]
SOURCE_KINDS: tuple[SourceKind, ...] = (
    "SharedStorage",
    "LocalTensors",
    "LocalShards",
    "FolderTensors",
    "RegisteredShards",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offer:
    """A version and where it is. Workers in `homes` have it beside their engine, from their own
    trainer rank; any other takes it from `source`."""

    manifest: Manifest
    source: WeightSource
    homes: frozenset[str] = frozenset()

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def kind(self) -> str:
        """Return the name of the source's class, for errors."""
        return type(self.source).__name__

    @property
    def folder(self) -> FolderTensors | None:
        return self.source if isinstance(self.source, FolderTensors) else None

    @property
    def registered(self) -> RegisteredShards | None:
        return self.source if isinstance(self.source, RegisteredShards) else None

    @property
    def addressed(self) -> FolderTensors | RegisteredShards | None:
        """Return the source if its address is enough: any process of the host can read it, each
        tensor rank its own part."""
        return self.folder or self.registered

    @property
    def is_per_rank(self) -> bool:
        """Return whether it is of the trainer in this process: each tensor rank has its own."""
        return isinstance(self.source, SharedStorage | LocalShards)

    @property
    def whole_tensors(self) -> Mapping[str, Any] | None:
        """Return the whole tensors that this process holds, or None."""
        if isinstance(self.source, SharedStorage | LocalTensors):
            return self.source.tensors
        return None

    @property
    def shards(self) -> Any:
        """Return the part of this rank as a weights.gather.ShardSource, or None."""
        return self.source.shards if isinstance(self.source, LocalShards) else None


def kinds_for(*, shared: bool, reads_part: bool) -> tuple[SourceKind, ...]:
    """Return the kinds that an engine may take. `shared`: it was built on its trainer's tensors.
    `reads_part`: it has weights of its own, a tensor rank's part."""
    if reads_part:
        return ("FolderTensors", "RegisteredShards")
    return tuple(kind for kind in SOURCE_KINDS if (kind == "SharedStorage") == shared)
