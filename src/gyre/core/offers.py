"""Offers: a policy version that engines may have, and where its numbers are. In: a Manifest and one
of six sources. Out: records that a trainer hands out and an engine takes.

Only `weights.receive` distinguishes the sources. Tensors are borrowed: they are
those of the version until the trainer's next step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
