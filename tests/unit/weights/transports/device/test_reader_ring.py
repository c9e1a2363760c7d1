"""The memory of a ring: who may enter it, and when it is freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gyre.weights.transports.device.reader_ring import ReaderRings, RingSeat
from gyre.weights.transports.device.served_part import Filling
from gyre.weights.transports.device.staging_ring import Fill
from gyre.weights.transports.part_range import PartRange

BUCKET_BYTES = 64


class Room:
    """Bytes of this process in place of a GPU's."""

    handle = b"room"

    def __init__(self, size_bytes: int) -> None:
        self.bytes_N = torch.zeros(size_bytes, dtype=torch.uint8)
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


class Source:
    takes_long = False

    def check(self) -> None:
        pass


def rings() -> tuple[ReaderRings, list[Room]]:
    made: list[Room] = []

    def make(size_bytes: int) -> Room:
        made.append(Room(size_bytes))
        return made[-1]

    return (
        ReaderRings(make, num_seats=2, bucket_bytes=BUCKET_BYTES, on_apart=lambda version: None),
        made,
    )


def fill_of(number: int) -> Fill:
    return (PartRange(start=64 * number, stop=64 * number + 64, at=0),)


def begin(fill: Fill, out_N: Tensor) -> Filling:
    out_N.fill_(fill[0].start // 64)
    source: Any = Source()
    return Filling(source, None, lambda: None)


def take(place: RingSeat, number: int, begin: Callable[..., Filling] = begin) -> int:
    bucket, filling = place.ring.take(place.seat, fill_of(number), begin)
    filling.finish()
    return bucket


def value(room: Room, bucket: int) -> int:
    return int(room.bytes_N[bucket * BUCKET_BYTES])


def test_what_a_lost_connection_still_reads_is_never_overwritten_or_freed() -> None:
    """Where the publisher hung up first, its reader may be copying."""
    found, made = rings()
    lost, other = (found.enter(epoch=0, version=1) for _ in range(2))
    buckets = [take(lost, number) for number in range(3)]
    assert [take(other, number) for number in range(3)] == buckets
    lost.ring.abandon()
    for number in range(3, 30):
        assert value(made[0], take(other, number)) == number
        assert [value(made[0], bucket) for bucket in buckets] == [0, 1, 2]
    found.leave(other)
    assert made[0].is_open


def test_the_last_reader_frees_the_memory() -> None:
    found, made = rings()
    first, second = (found.enter(epoch=0, version=1) for _ in range(2))
    assert len(made) == 1 and first.ring is second.ring
    found.leave(first)
    assert made[0].is_open
    found.leave(second)
    assert not made[0].is_open


def test_the_same_version_registered_again_has_buckets_of_its_own() -> None:
    """What the first registration gave may be damaged."""
    found, made = rings()
    late = found.enter(epoch=0, version=1)
    take(late, 0)
    found.retire()
    again = found.enter(epoch=0, version=1)
    assert again.ring is not late.ring
    filled: list[Fill] = []

    def note(fill: Fill, out_N: Tensor) -> Filling:
        filled.append(fill)
        return begin(fill, out_N)

    take(again, 0, note)
    assert filled == [fill_of(0)]
    found.leave(late)
    assert [room.is_open for room in made] == [False, True]
    found.leave(again)
    assert not made[1].is_open
