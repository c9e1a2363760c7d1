"""The buckets that two readers share: each is given what it asked for, whoever is slow; while they go
together each bucket is filled once, and neither can stop the other for good."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.weights.transports.device.control import STAGING_BUCKETS
from gyre.weights.transports.device.staging_ring import SEATS, Fill, StagingRing
from gyre.weights.transports.part_range import PartRange

RING_BUCKETS = SEATS * STAGING_BUCKETS


def fill_of(number: int) -> Fill:
    return (PartRange(start=64 * number, stop=64 * number + 64, at=0),)


@dataclass
class Readers:
    """Readers as the ring sees them, and the bytes that the buckets really have."""

    orders: list[list[int]]
    ring: StagingRing = field(default_factory=StagingRing)
    bytes_of: dict[int, int] = field(default_factory=dict)  # by bucket
    num_fills: int = 0

    def __post_init__(self) -> None:
        self.seats = [self.ring.enter() for _ in self.orders]
        assert self.seats == list(range(len(self.orders)))
        self.at = [0] * len(self.orders)
        self.read = [deque[tuple[int, int]](maxlen=STAGING_BUCKETS) for _ in self.orders]

    @property
    def unfinished(self) -> list[int]:
        return [one for one, order in enumerate(self.orders) if self.at[one] < len(order)]

    def move(self, reader: int) -> bool:
        """Let a reader ask for what is next in its order. Returns whether it was given it."""
        wanted = self.orders[reader][self.at[reader]]
        if len(self.read[reader]) == STAGING_BUCKETS:
            self.read[reader].popleft()  # it has copied that one out
        lease = self.ring.ask(reader, fill_of(wanted))
        if lease is None:
            return False
        if lease.is_new:
            self.bytes_of[lease.bucket] = wanted
            self.num_fills += 1
        self.read[reader].append((lease.bucket, wanted))
        self.at[reader] += 1
        self.check()
        return True

    def check(self) -> None:
        """What anybody reads now has the bytes that were asked for."""
        for read in self.read:
            for bucket, wanted in read:
                assert 0 <= bucket < RING_BUCKETS and self.bytes_of[bucket] == wanted


ORDERS = st.lists(st.integers(0, 9), max_size=40)
TURNS = st.lists(st.integers(0, 1), max_size=120)


def play(readers: Readers, turns: list[int], *, parts_at: int | None = None) -> None:
    """Let readers move by turns, then each that may, until all have what they want."""
    for number, reader in enumerate(turns):
        if number == parts_at:
            readers.ring.part()
        if reader in readers.unfinished:
            readers.move(reader)
    while left := readers.unfinished:
        if not sum(readers.move(reader) for reader in left):
            # one that has all waits for no one, so the other waits for it until LAG_S
            assert len(left) < len(readers.orders), "both wait for each other"
            readers.ring.part()


@given(ORDERS, ORDERS, TURNS, st.none() | st.integers(0, 60))
def test_every_reader_is_given_what_it_asked_for(first, second, turns, parts_at):
    readers = Readers([first, second])
    play(readers, turns, parts_at=parts_at)
    assert not readers.unfinished


@given(st.lists(st.integers(0, 1000), max_size=40, unique=True), TURNS)
def test_readers_that_go_together_have_each_bucket_filled_once(order, turns):
    readers = Readers([order, order])
    for reader in turns:
        if reader in readers.unfinished:
            readers.move(reader)
            assert readers.ring.is_together
    while left := readers.unfinished:
        assert sum(readers.move(reader) for reader in left), "both wait for each other"
    assert readers.ring.is_together and readers.num_fills == len(order)


@given(st.integers(1, 40), TURNS)
def test_readers_of_different_bytes_do_not_wait(count, turns):
    """As of tensor ranks: once each has asked, neither is stopped."""
    readers = Readers([list(range(count)), list(range(100, 100 + count))])
    for reader in (0, 1):
        assert readers.move(reader)
    assert not readers.ring.is_together
    for reader in turns:
        if reader in readers.unfinished:
            assert readers.move(reader)


@given(ORDERS, ORDERS, TURNS, st.integers(0, 40))
def test_whoever_leaves_harms_no_other(first, second, turns, leaves_at):
    readers = Readers([first, second])
    for number, reader in enumerate(turns):
        if number == leaves_at:
            break
        if reader in readers.unfinished:
            readers.move(reader)
    readers.ring.leave(1)
    readers.read[1].clear()
    while readers.at[0] < len(first):
        assert readers.move(0)
    third = readers.ring.enter()
    assert third == 1
    for wanted in second:
        lease = readers.ring.ask(1, fill_of(wanted))
        assert lease is not None
        if lease.is_new:
            readers.bytes_of[lease.bucket] = wanted
        readers.check()
        assert readers.bytes_of[lease.bucket] == wanted
    readers.ring.leave(0)
    assert not readers.ring.is_empty
    readers.ring.leave(1)
    assert readers.ring.is_empty


@pytest.mark.parametrize("ahead", range(12))
def test_one_that_comes_late_shares_what_is_there_still(ahead):
    """Six buckets are there from the beginning; one that comes later has its own filled."""
    ring = StagingRing()
    assert ring.enter() == 0
    for number in range(ahead):
        lease = ring.ask(0, fill_of(number))
        assert lease is not None and lease.is_new
    assert ring.enter() == 1
    assert ring.is_together == (ahead <= RING_BUCKETS)
    first = ring.ask(1, fill_of(0))
    assert first is not None and first.is_new == (ahead == 0 or ahead > RING_BUCKETS)


@pytest.mark.parametrize("num_seats", range(1, SEATS + 1))
def test_a_ring_has_as_many_seats_as_readers_come(num_seats):
    ring = StagingRing(num_seats)
    assert [ring.enter() for _ in range(num_seats + 1)] == [*range(num_seats), None]
    assert ring.num_buckets == num_seats * STAGING_BUCKETS


@given(ORDERS)
def test_a_reader_of_a_ring_of_its_own_never_waits(order):
    readers = Readers([order], StagingRing(1))
    while readers.unfinished:
        assert readers.move(0)
    assert not readers.ring.is_together


def test_the_reader_ahead_waits_until_it_may_overwrite():
    """With nothing read by the other: six buckets, and the seventh when the other has released its
    first."""
    readers = Readers([list(range(9)), list(range(9))])
    assert all(readers.move(0) for _ in range(RING_BUCKETS))
    assert not readers.move(0)
    for _ in range(STAGING_BUCKETS):
        assert readers.move(1) and not readers.move(0)
    assert readers.move(1) and readers.move(0)
    assert readers.num_fills == RING_BUCKETS + 1


def test_a_bucket_that_could_not_be_filled_is_filled_again():
    ring = StagingRing()
    ring.enter()
    lease = ring.ask(0, fill_of(1))
    assert lease is not None
    ring.forget(lease.bucket)
    again = ring.ask(0, fill_of(1))
    assert again is not None and again.is_new
