"""Staging ring: which bucket has which bytes, where up to two readers of one version share buckets.
In: seats; what each asks for, in order. Out: the bucket to read it from, and whether it is to be
filled. Pure.

    seat 0   asked for a b c d    leases b c d
    seat 1   asked for a b        leases a b; c and d are kept for it

A seat has at most three buckets at a time: to ask again is to release the oldest. Two seats go
together while the second to ask has asked for what the first had. What one has been given is then
kept for the other, so each bucket is filled once. Else they are apart, and no seat waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gyre.weights.transports.device.control import STAGING_BUCKETS
from gyre.weights.transports.part_range import PartRange

SEATS = 2
Fill = tuple[PartRange, ...]  # of one bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class LentBucket:
    """A bucket that a seat may read until it has asked for three more."""

    bucket: int
    is_new: bool  # it must be filled


class StagingRing:
    """The buckets of one part of one version. It has no lock: one caller at a time."""

    def __init__(self, num_seats: int = SEATS) -> None:
        assert 1 <= num_seats <= SEATS, num_seats
        self._num_seats = num_seats
        self.num_buckets = num_seats * STAGING_BUCKETS
        self._contents: list[Fill | None] = [None] * self.num_buckets
        self._filled: list[int] = [0] * self.num_buckets  # when: the order of fills
        self._num_fills = 0
        self._leases: dict[int, deque[int]] = {}  # by seat, the oldest first
        # what the seat ahead was given and the other was not yet, the oldest first; None: apart
        self._owed: deque[int] | None = deque()
        self._ahead = 0

    @property
    def is_together(self) -> bool:
        """Return whether a seat may have to wait for the other one."""
        return self._owed is not None and len(self._leases) == SEATS

    @property
    def is_empty(self) -> bool:
        return not self._leases

    def enter(self) -> int | None:
        """Take a seat; None where all are taken."""
        for seat in range(self._num_seats):
            if seat not in self._leases:
                self._leases[seat] = deque()
                return seat
        return None

    def leave(self, seat: int) -> None:
        """Release all that a seat has. Who stays, or comes later, goes by itself."""
        del self._leases[seat]
        self.part()

    def part(self) -> None:
        """Let the seats go apart, for good: nothing is kept for either."""
        self._owed = None

    def ask(self, seat: int, fill: Fill) -> LentBucket | None:
        """Lease the bucket that has these bytes, or is to be filled with them. None while every
        bucket is read or kept for the other seat, which must ask first: ask again then."""
        leases = self._leases[seat]
        if len(leases) == STAGING_BUCKETS:
            leases.popleft()
        lease = self._given_before(seat, fill) or self._find_or_overwrite(seat, fill)
        if lease is not None:
            leases.append(lease.bucket)
        return lease

    def forget(self, bucket: int) -> None:
        """Note that a bucket could not be filled."""
        self._contents[bucket] = None

    def _given_before(self, seat: int, fill: Fill) -> LentBucket | None:
        """Return what the seat ahead was given at the same place in its order, if it is this."""
        if not self._owed or seat == self._ahead:
            return None
        if self._contents[self._owed[0]] == fill:
            return LentBucket(bucket=self._owed.popleft(), is_new=False)
        self.part()
        return None

    def _find_or_overwrite(self, seat: int, fill: Fill) -> LentBucket | None:
        is_new = fill not in self._contents
        bucket = self._oldest_free() if is_new else self._contents.index(fill)
        if bucket is None and not self.is_together:
            self.part()  # alone, and further ahead than a second one could follow
            bucket = self._oldest_free()
        if bucket is None:
            return None
        if is_new:
            self._num_fills += 1
            self._contents[bucket], self._filled[bucket] = fill, self._num_fills
        if self._owed is not None:
            self._owed.append(bucket)
            self._ahead = seat
        return LentBucket(bucket=bucket, is_new=is_new)

    def _oldest_free(self) -> int | None:
        """Return the bucket that was filled first of those that no reader has or is to have."""
        taken = {bucket for leases in self._leases.values() for bucket in leases}
        taken.update(self._owed or ())
        free = [bucket for bucket in range(self.num_buckets) if bucket not in taken]
        return min(free, key=lambda bucket: self._filled[bucket], default=None)
