"""Two readers of one part: each bucket is filled once for both, and neither suffers from the other.
And a part that is read from its publisher's slot, once the tensors are withdrawn."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from gyre.cluster.worker.frames import encode
from gyre.core.errors import InputError, SnapshotError
from gyre.core.offers import Offer
from gyre.weights.registered import ReadOver
from gyre.weights.transports.addresses import CUDA_IPC, LIVE_SCHEMES, SHM, parse
from gyre.weights.transports.device import reader_ring
from gyre.weights.transports.device.control import (
    FILL,
    OPEN,
    STAGING_BUCKETS,
    ControlLink,
    ControlRequest,
)
from gyre.weights.transports.device.live_part import LivePart
from gyre.weights.transports.device.served_part import Filling, SlotPart
from gyre.weights.transports.device.staging_ring import StagingRing
from gyre.weights.transports.part_range import PartRange
from gyre.weights.transports.slot_header import HEADER_BYTES
from part_cases import Memory, live_servers, register, shared_folder, stores_of, whole_tensors

from ..test_faults import DEADLINE_S, child
from .test_faults import Receiver, act_amid, read_amid

pytestmark = pytest.mark.slow
BUCKET_BYTES = 64
SOURCES = ["tensors", "slot"]


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as found:
        yield found


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers wait for each other for as long as a test may take."""
    monkeypatch.setattr(reader_ring, "LAG_S", 2 * DEADLINE_S)


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where each bucket was filled from."""
    found: list[str] = []
    for kind, name in ((LivePart, "tensors"), (SlotPart, "slot")):

        def begin(self, stretches, out_N, *, plain=kind.begin, name=name):
            found.append(name)
            return plain(self, stretches, out_N)

        monkeypatch.setattr(kind, "begin", begin)
    return found


def publish(stores, lives, version: int = 1, *, source: str = "tensors") -> Offer:
    """Register a version; of the source "slot" its tensors are changed by the next step."""
    whole = whole_tensors(version)
    offer = register(stores, whole, version=version, lives=lives)
    if source == "slot":
        step(lives, whole)
    return offer


def step(lives, whole: dict[str, torch.Tensor]) -> None:
    """As a trainer's next step."""
    for live in lives:
        live.withdraw()
    for tensor in whole.values():
        tensor.zero_()


def take_together(readers: list[Receiver], swaps: list[ReadOver]) -> None:
    with ThreadPoolExecutor(len(readers)) as threads:
        for done in [
            threads.submit(reader.take, swap) for reader, swap in zip(readers, swaps, strict=True)
        ]:
            done.result(DEADLINE_S)


def num_buckets(offer: Offer) -> int:
    return sum(-(-part.size_bytes // BUCKET_BYTES) for part in offer.source.parts)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("source", SOURCES)
def test_two_readers_share_what_is_filled(folder, fills, source):
    with stores_of(folder, 2) as stores, live_servers(folder, 2, CUDA_IPC) as lives:
        readers = [Receiver(folder, CUDA_IPC) for _ in range(2)]
        for version in (1, 2, 3):
            fills.clear()
            offer = publish(stores, lives, version, source=source)
            take_together(readers, [reader.prepare(offer) for reader in readers])
            assert all(reader.has(version) for reader in readers)
            assert fills == [source] * num_buckets(offer)


@pytest.mark.parametrize("source", SOURCES)
def test_a_reader_that_does_not_read_holds_the_other_up_once(folder, monkeypatch, source):
    monkeypatch.setattr(reader_ring, "LAG_S", 0.05)
    told = []
    emit = lambda kind, **fields: told.append((kind, fields))  # noqa: E731
    with stores_of(folder, 1) as stores, live_servers(folder, 1, CUDA_IPC, emit=emit) as lives:
        readers = [Receiver(folder, CUDA_IPC) for _ in range(2)]
        offer = publish(stores, lives, source=source)
        swaps = [reader.prepare(offer) for reader in readers]
        for reader, swap in zip(readers, swaps, strict=True):
            reader.take(swap)
            assert reader.has(1)
        assert told == [("weights.readers_apart", {"version": 1})]


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("source", SOURCES)
def test_a_reader_that_is_killed_lets_the_other_go_on(folder, source):
    with (
        stores_of(folder, 1) as stores,
        live_servers(folder, 1, CUDA_IPC) as lives,
        child(folder, "receiver") as other,
    ):
        offer = publish(stores, lives, source=source)
        reader = Receiver(folder, CUDA_IPC)
        swap = reader.prepare(offer)
        told = {"do": "receive", "offer": encode(offer).hex(), "preference": [CUDA_IPC]}
        assert other.tell(**told) == "opened"
        assert other.tell(do="go on") == "in a bucket"
        act_amid(reader, other.kill)
        reader.take(swap)
        assert reader.has(1)
        offer = publish(stores, lives, 2, source=source)
        reader.take(reader.prepare(offer))
        assert reader.has(2)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("source", SOURCES)
def test_readers_of_other_stretches_do_not_share(folder, fills, source):
    """As tensor ranks, which want other bytes."""
    with (
        stores_of(folder, 1) as stores,
        live_servers(folder, 1, CUDA_IPC, bucket_bytes=256) as lives,
    ):
        offer = publish(stores, lives, source=source)
        readers = [Receiver(folder, CUDA_IPC) for _ in range(2)]
        swaps = [
            ReadOver(
                offer,
                reader.own,
                parts=reader.opener,
                emit=reader.emit,
                bucket_bytes=bucket_bytes,
            )
            for reader, bucket_bytes in zip(readers, (128, 256), strict=True)
        ]
        take_together(readers, swaps)
        assert all(reader.has(1) for reader in readers)
        assert len(fills) == sum(-(-offer.source.parts[0].size_bytes // n) for n in (128, 256))


class CountedMemory(Memory):
    """Says how much is allocated here."""

    held: ClassVar[list[int]]

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        super().__init__(device, size_bytes)
        self.held.append(size_bytes)
        self._size_bytes = size_bytes

    def close(self) -> None:
        self.bytes_N.fill_(0xFF)  # who reads it still would see
        super().close()
        self.held.remove(self._size_bytes)


def wait_for(true: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + DEADLINE_S
    while not true() and time.monotonic() < ends_at:
        time.sleep(0.001)
    assert true()


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("source", SOURCES)
def test_the_last_reader_frees_the_memory_of_two(folder, source):
    """And a third one has a ring of its own."""

    class Counted(CountedMemory):
        held: ClassVar[list[int]] = []

    with (
        stores_of(folder, 1) as stores,
        live_servers(folder, 1, CUDA_IPC, make_staging=Counted) as lives,
    ):
        offer, one = publish(stores, lives, source=source), StagingRing().num_buckets * BUCKET_BYTES
        readers = [Receiver(folder, CUDA_IPC) for _ in range(3)]
        swaps = [reader.prepare(offer) for reader in readers]
        assert Counted.held == [one, one]
        readers[2].take(swaps[2])
        wait_for(lambda: Counted.held == [one])
        swaps[0].settle()  # it has read nothing, and nobody waits for it
        assert Counted.held == [one]
        readers[1].take(swaps[1])
        wait_for(lambda: not Counted.held)
        assert readers[1].has(1) and readers[2].has(1)


@pytest.mark.parametrize("behind", [(), (SHM,)])
def test_a_version_that_is_withdrawn_in_a_bucket_comes_from_the_slot(folder, fills, behind):
    whole = whole_tensors(1)
    with stores_of(folder, 1) as stores, live_servers(folder, 1, CUDA_IPC) as lives:
        reader = Receiver(folder, CUDA_IPC, *behind)
        offer = register(stores, whole, version=1, lives=lives)
        assert read_amid(reader, offer, lambda: step(lives, whole)) is None
        assert reader.has(1) and reader.told == ["weights.read"]
        assert set(fills) == set(SOURCES) and len(fills) == num_buckets(offer)


def test_a_slot_that_is_overwritten_in_a_bucket(folder):
    """By the next version but one: the last version that came whole serves on."""
    with stores_of(folder, 1) as stores, live_servers(folder, 1, CUDA_IPC) as lives:
        reader = Receiver(folder, CUDA_IPC, SHM, deadline_s=0.5)
        offer = publish(stores, lives, 1, source="slot")
        reader.take(reader.prepare(offer))
        offer = publish(stores, lives, 2, source="slot")

        def overtake() -> None:
            for version in (3, 4):
                publish(stores, lives, version, source="slot")

        assert read_amid(reader, offer, overtake) is not None
        assert reader.has(1)


@pytest.mark.parametrize("fault", ["damaged", "cut"])
def test_a_slot_that_is_damaged_in_a_bucket(folder, fault):
    """It is refused by name, whoever looks."""

    def damage() -> None:
        for path in folder.iterdir():
            handle = os.open(path, os.O_RDWR)
            if fault == "cut":
                os.truncate(handle, HEADER_BYTES + BUCKET_BYTES)
            else:
                os.pwrite(handle, b"x", 16)  # the sequence
            os.close(handle)

    with stores_of(folder, 1) as stores, live_servers(folder, 1, CUDA_IPC) as lives:
        reader = Receiver(folder, CUDA_IPC)
        offer = publish(stores, lives, source="slot")
        found = read_amid(reader, offer, damage)
        assert isinstance(found, SnapshotError) and ("cut" in str(found)) == (fault == "cut")
        assert reader.has(0)
        offer = publish(stores, lives, 2, source="slot")
        reader.take(reader.prepare(offer))
        assert reader.has(2)


def test_the_next_version_ends_reads_from_the_slot(folder):
    """The slot itself has the last one still."""
    with stores_of(folder, 1) as stores, live_servers(folder, 1, CUDA_IPC) as lives:
        reader = Receiver(folder, CUDA_IPC, SHM)
        offer = publish(stores, lives, source="slot")
        assert read_amid(reader, offer, lambda: publish(stores, lives, 2)) is None
        assert reader.has(1) and reader.told == ["weights.slot_used", "weights.read"]


def test_fills_from_a_slot_are_begun_before_the_last_one_is_there(folder, fills, monkeypatch):
    """So the link is never idle. Three at most: one more is refused, and harms nobody."""
    may_end, finish = threading.Event(), Filling.finish

    def finish_later(self):
        assert may_end.wait(DEADLINE_S)
        finish(self)

    monkeypatch.setattr(Filling, "finish", finish_later)
    with stores_of(folder, 1) as stores, live_servers(folder, 1, CUDA_IPC) as lives:
        part = publish(stores, lives, source="slot").source.parts[0]
        link = ControlLink(parse(part.addresses[-1]), deadline_s=DEADLINE_S)
        scheme = LIVE_SCHEMES.index(CUDA_IPC)
        given = {"version": 1, "part_bytes": part.size_bytes, "first": scheme}
        link.ask(ControlRequest(op=OPEN, **given))
        for first in range(0, (STAGING_BUCKETS + 1) * BUCKET_BYTES, BUCKET_BYTES):
            stretch = PartRange(start=first, stop=first + BUCKET_BYTES, at=0)
            link.send(ControlRequest(op=FILL, stretches=(stretch,)))
        with pytest.raises(InputError, match="more than 3 buckets were asked for at once"):
            link.answer()
        assert fills == ["slot"] * STAGING_BUCKETS
        may_end.set()
        link.close()
        reader = Receiver(folder, CUDA_IPC)
        reader.take(reader.prepare(publish(stores, lives, 2, source="slot")))
        assert reader.has(2)


def test_one_reader_has_three_buckets(folder):
    """And further ones have rings of their own."""

    class Counted(CountedMemory):
        held: ClassVar[list[int]] = []

    given = {"make_staging": Counted, "num_seats": 1}
    with stores_of(folder, 1) as stores, live_servers(folder, 1, CUDA_IPC, **given) as lives:
        readers, offer = [Receiver(folder, CUDA_IPC) for _ in range(2)], publish(stores, lives)
        swaps = [reader.prepare(offer) for reader in readers]
        assert Counted.held == [STAGING_BUCKETS * BUCKET_BYTES] * 2
        for reader, swap in zip(readers, swaps, strict=True):
            reader.take(swap)
            assert reader.has(1)


def test_tensors_that_have_left_the_device_are_offered_by_it(folder, fills):
    """As of a trainer that is offloaded: its server is of a GPU, and its tensors are not."""
    device = torch.device("cuda", 0)
    with stores_of(folder, 1) as stores, live_servers(folder, 1, CUDA_IPC, device=device) as lives:
        offer = publish(stores, lives)
        assert [one.split(":")[0] for one in offer.source.parts[0].addresses] == [SHM, CUDA_IPC]
        reader = Receiver(folder, CUDA_IPC)
        reader.take(reader.prepare(offer))
        assert reader.has(1) and set(fills) == {"slot"}
