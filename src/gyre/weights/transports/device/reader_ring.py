"""Reader ring: staging buckets on the publisher's device that readers of a version share. In: what
each reader asks for. Out: a bucket of it, filled once for both while they go together.

    reader's thread   asks; fills, or finds filled; waits while the other is behind.
                      Woken by the other one's next request or end, or LAG_S.
    last reader       frees the buckets, which all readers have closed then. Where the publisher
                      hung up first, they stay until its process ends.
"""

# N bytes

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gyre.weights.transports.device.cuda_ipc import Staging
from gyre.weights.transports.device.served_part import Filling
from gyre.weights.transports.device.staging_ring import Fill, LentBucket, StagingRing

LAG_S = 0.25  # that readers of one version wait for each other, all in all
Begin = Callable[[Fill, Tensor], Filling]  # into a bucket


class ReaderRing:
    """One ring's memory. Its readers' threads call it."""

    def __init__(
        self,
        ring: StagingRing,
        staging: Staging,
        *,
        epoch: int,
        version: int,
        bucket_bytes: int,
        on_apart: Callable[[int], None],
    ) -> None:
        """`on_apart` hears of the version whose readers no longer wait for each other."""
        self.epoch = epoch
        self.version = version
        self.handle = staging.handle
        self.num_buckets = ring.num_buckets
        self._staging = staging
        self._bucket_bytes = bucket_bytes
        self._on_apart = on_apart
        self._ring = ring
        self._fillings: dict[int, Filling] = {}  # by bucket
        self._left_s = LAG_S
        self._changed = threading.Condition()

    def enter(self) -> int | None:
        with self._changed:
            return self._ring.enter()

    def leave(self, seat: int) -> bool:
        """Give a seat back, whose buckets are no longer written or read. Returns whether it was the
        last one."""
        with self._changed:
            self._ring.leave(seat)
            self._changed.notify_all()
            return self._ring.is_empty

    def abandon(self) -> None:
        """Keep the buckets of a reader that may still copy them, for good."""
        with self._changed:
            self._ring.part()
            self._changed.notify_all()

    def take(self, seat: int, fill: Fill, begin: Begin) -> tuple[int, Filling]:
        """Lease the bucket of these bytes, and begin to fill it unless the other reader has.
        Returns its number, and what waits until it is filled."""
        with self._changed:
            lease = self._lease(seat, fill)
            self._changed.notify_all()
            if lease.is_new:
                first = lease.bucket * self._bucket_bytes
                out_N = self._staging.bytes_N[first : first + self._bucket_bytes]
                try:
                    self._fillings[lease.bucket] = begin(fill, out_N)
                except BaseException:
                    self._ring.forget(lease.bucket)
                    raise
            return lease.bucket, self._fillings[lease.bucket]

    def free(self) -> None:
        self._staging.close()

    def _lease(self, seat: int, fill: Fill) -> LentBucket:
        while (lease := self._ring.ask(seat, fill)) is None:
            self._changed.notify_all()  # it has released a bucket
            began_s = time.monotonic()
            self._changed.wait(self._left_s)
            self._left_s -= time.monotonic() - began_s
            if self._left_s <= 0 and self._ring.is_together:
                self._ring.part()
                self._on_apart(self.version)
        return lease


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSeat:
    """A reader's place in a ring."""

    ring: ReaderRing
    seat: int


class ReaderRings:
    """The rings of a publisher."""

    def __init__(
        self,
        make_staging: Callable[[int], Staging],
        *,
        num_seats: int,
        bucket_bytes: int,
        on_apart: Callable[[int], None],
    ) -> None:
        """`make_staging` allocates bytes on the publisher's device. `num_seats`: of a ring."""
        self._make_staging = make_staging
        self._num_seats = num_seats
        self._bucket_bytes = bucket_bytes
        self._on_apart = on_apart
        self._rings: list[ReaderRing] = []  # that further readers of their version may enter
        # held while memory is allocated: a second reader shares it
        self._lock = threading.Lock()

    def enter(self, *, epoch: int, version: int) -> RingSeat:
        """Find a reader a place among the readers of its version. MemoryBudgetError where no ring
        has one, and the device no room for another ring."""
        with self._lock:
            for ring in self._rings:
                if (ring.epoch, ring.version) == (epoch, version):
                    seat = ring.enter()
                    if seat is not None:
                        return RingSeat(ring=ring, seat=seat)
            ring = self._make(epoch, version)
            seat = ring.enter()
            assert seat is not None, "a new ring has seats"
            self._rings.append(ring)
            return RingSeat(ring=ring, seat=seat)

    def leave(self, place: RingSeat) -> None:
        """Give a place back. The last reader's end frees the memory."""
        with self._lock:
            if not place.ring.leave(place.seat):
                return
            if place.ring in self._rings:
                self._rings.remove(place.ring)
        place.ring.free()

    def retire(self) -> None:
        """Let no further reader into the rings: the same version may be registered again."""
        with self._lock:
            self._rings.clear()

    def _make(self, epoch: int, version: int) -> ReaderRing:
        ring = StagingRing(self._num_seats)
        staging = self._make_staging(ring.num_buckets * self._bucket_bytes)
        try:
            return ReaderRing(
                ring,
                staging,
                epoch=epoch,
                version=version,
                bucket_bytes=self._bucket_bytes,
                on_apart=self._on_apart,
            )
        except BaseException:  # it cannot be shared
            staging.close()
            raise
