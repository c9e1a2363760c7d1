"""Contracts: what a publisher's store and a receiver's reader of registered parts do. In: a version
and its bytes. Out: a RegisteredPart; the same bytes in another process.

All implementations pass tests/contracts/test_weight_transport.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gyre.core.offers import RegisteredPart
from gyre.weights.transports.part_layout import PlacedSegment
from gyre.weights.transports.part_range import PartRange


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenSlot:
    """Room for one part. It is registered when the block that writes it ends well."""

    part: RegisteredPart
    bytes_N: Tensor  # uint8, zeroed or of an older version; page-locked where the store says so
    # SnapshotError unless the slot has the part whole, and may be read; None: it keeps no bytes
    check: Callable[[], None] | None = None


class PartStore(Protocol):
    """An owner's memory for two versions. Version n - 1 stays readable until n + 1 begins, or n
    begins a second time."""

    def writing(
        self, *, epoch: int, version: int, size_bytes: int
    ) -> AbstractContextManager[OpenSlot]:
        """Give room for a part; register it at the end. After an error nothing is registered, and
        readers refuse what was written. MemoryBudgetError where there is no room."""
        ...

    def close(self) -> None:
        """Free the memory. Readers that have it open keep it."""
        ...


class LivePublisher(Protocol):
    """Serves the part that this process has in its own tensors, and in its slot."""

    def put(
        self, *, epoch: int, version: int, placed: Sequence[PlacedSegment], runs: Sequence[Tensor]
    ) -> tuple[str, ...]:
        """Serve the numbers of placed segments, flat, which stay as they are until `withdraw` has
        returned. Returns further addresses of the part; none where it does not serve them."""
        ...

    def put_slot(self, *, epoch: int, version: int, slot: OpenSlot) -> tuple[str, ...]:
        """Serve the part from its slot, which is whole, once the tensors are withdrawn. Returns the
        addresses by which it is."""
        ...

    def write_behind(self, *, epoch: int, version: int, write: Callable[[], None]) -> bool:
        """Run `write`, which reads the tensors of the version that is served, on a thread of its
        own; `withdraw` waits for it. False where the publisher wants it done before."""
        ...

    def withdraw(self) -> None:
        """Serve nothing from the tensors any more; returns when nothing reads them."""
        ...

    def end_version(self) -> None:
        """Serve nothing any more; returns when nothing reads tensors or slot."""
        ...


class PartReader(Protocol):
    """One part of one version, opened in another process or in the same."""

    def view(self, start: int, stop: int) -> Tensor | None:
        """Return these bytes without a copy, valid while the part is; None where they must be
        read."""
        ...

    def read(
        self,
        stretches: Sequence[PartRange],
        out_N: Tensor,
        *,
        next_stretches: Sequence[PartRange] = (),
    ) -> None:
        """Fill the stretches' places in `out_N`; the bytes are there when this returns.
        `next_stretches`: of the next read, which the publisher may prepare meanwhile. SnapshotError
        once the version is gone, DeadlineError when no byte comes in time."""
        ...

    @property
    def lends_bytes(self) -> int:
        """Return the size of the largest bucket that it lends; 0 where it lends none."""
        ...

    def lend(
        self, stretches: Sequence[PartRange], *, next_stretches: Sequence[PartRange] = ()
    ) -> Tensor:
        """Return a bucket in memory of the reader's own, valid for what the current stream is given
        before the next call. Errors as of `read`."""
        ...

    def check(self) -> None:
        """Raise SnapshotError unless every byte given so far was of the version."""
        ...

    def close(self) -> None:
        """End all use, views among it."""
        ...


class LendsNothing:
    """The half of a PartReader that copies what it reads."""

    lends_bytes = 0

    def lend(
        self, stretches: Sequence[PartRange], *, next_stretches: Sequence[PartRange] = ()
    ) -> Tensor:
        raise AssertionError("it lends no bytes")
