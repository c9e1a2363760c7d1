"""Faults while a version goes from device to device: whoever dies or stands still, it arrives whole
or is refused by name, and the next version does not suffer from it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gyre.cluster.worker.frames import encode
from gyre.core.errors import DeadlineError, GyreError, InputError, SnapshotError
from gyre.core.offers import Offer
from gyre.weights.registered import ReadOver
from gyre.weights.transports.addresses import CUDA_IPC, GLOO, SHM, host_id
from gyre.weights.transports.device.cuda_ipc import bytes_at
from gyre.weights.transports.device.live_server import LiveServer, live_name
from gyre.weights.transports.opened import PartOpener, Reading
from gyre.weights.transports.shared_memory import SharedMemoryStore
from part_cases import (
    RUN,
    Memory,
    live_servers,
    register,
    shared_folder,
    silent,
    stores_of,
    whole_tensors,
)

from ..test_faults import DEADLINE_S, child

pytestmark = pytest.mark.slow

Tell = Callable[..., None]


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as found:
        yield found


class Receiver:
    """An engine's tensors, and what it was told."""

    def __init__(self, folder: Path, *preference: str, deadline_s: float = 20.0) -> None:
        self.told: list[str] = []
        reading = Reading(
            host_id=host_id(folder),
            folder=folder,
            preference=preference,
            open_staging=Memory,
            deadline_s=deadline_s,
        )
        self.opener = PartOpener(reading, emit=self.emit)
        self.own = At(whole_tensors(0))

    def emit(self, kind: str, /, **fields) -> None:
        self.told.append(kind)

    def prepare(self, offer: Offer) -> ReadOver:
        return ReadOver(offer, self.own, parts=self.opener, emit=self.emit, bucket_bytes=128)

    def take(self, swap: ReadOver) -> None:
        swap.run()
        swap.settle()

    def has(self, version: int) -> bool:
        return all(torch.equal(self.own[n], t) for n, t in whole_tensors(version).items())


class At(dict):
    """Tensors that call `act` when the third bucket asks for its own."""

    left, act = 0, staticmethod(lambda: None)

    def __getitem__(self, name: str):
        self.left -= 1
        if self.left == 0:
            self.act()
        return super().__getitem__(name)


def act_amid(receiver: Receiver, act: Callable[[], None]) -> None:
    receiver.own.left, receiver.own.act = 3, act


def test_readers_take_a_version_together_and_keep_their_group(folder):
    """Versions 1 to 4 go to both at once, by one group. A third that comes late has a round of its
    own while the version is there; the others then form a group again."""
    with (
        stores_of(folder, 2) as stores,
        live_servers(folder, 2, GLOO) as lives,
        ThreadPoolExecutor(2) as threads,
    ):
        readers = [Receiver(folder, GLOO, SHM) for _ in range(2)]
        for version in range(1, 5):
            offer = register(stores, whole_tensors(version), version=version, lives=lives)
            swaps = [reader.prepare(offer) for reader in readers]
            for done in [
                threads.submit(reader.take, swap)
                for reader, swap in zip(readers, swaps, strict=True)
            ]:
                done.result(DEADLINE_S)
            assert all(reader.has(version) for reader in readers)
        assert [live.broadcaster.generation for live in lives] == [1, 1]
        late = Receiver(folder, GLOO, SHM)
        late.take(late.prepare(offer))
        assert late.has(4)
        assert [live.broadcaster.generation for live in lives] == [2, 2]
        for reader in (*readers, late):
            assert set(reader.told) == {"weights.read"}, "the slot was not needed"
            reader.opener.close()


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_reader_that_is_lost_in_a_bucket_ends_the_round_for_all(folder, fault):
    deadline_s = 20.0 if fault == "killed" else 1.0
    with (
        stores_of(folder, 1) as stores,
        live_servers(folder, 1, GLOO, deadline_s=deadline_s) as lives,
        child(folder, "receiver") as other,
        ThreadPoolExecutor(1) as threads,
    ):
        offer = register(stores, whole_tensors(1), version=1, lives=lives)
        told = {"do": "receive", "offer": encode(offer).hex(), "preference": [GLOO]}
        assert other.tell(**told) == "opened"
        reader = Receiver(folder, GLOO)
        swap = reader.prepare(offer)
        running = threads.submit(swap.run)
        assert other.tell(do="go on") == "in a bucket"
        if fault == "killed":
            other.kill()
            expected = pytest.raises(SnapshotError, match=r"hung up|is broken")
        else:
            os.kill(other.process.pid, signal.SIGSTOP)
            expected = pytest.raises((SnapshotError, DeadlineError), match=r"within 1 s|is broken")
        with expected:
            running.result(DEADLINE_S)
        swap.undo()
        assert reader.has(0)
        swap.settle()
        offer = register(stores, whole_tensors(2), version=2, lives=lives)
        reader.take(reader.prepare(offer))
        assert reader.has(2)
        assert lives[0].broadcaster.generation == 2
        reader.opener.close()


def test_a_reader_of_staging_buckets_that_is_lost_harms_no_other(folder):
    with (
        stores_of(folder, 1) as stores,
        live_servers(folder, 1, CUDA_IPC) as lives,
        child(folder, "receiver") as other,
    ):
        reader = Receiver(folder, CUDA_IPC)
        offer = register(stores, whole_tensors(1), version=1, lives=lives)
        told = {"do": "receive", "offer": encode(offer).hex(), "preference": [CUDA_IPC]}
        assert other.tell(**told) == "opened"
        assert other.tell(do="go on") == "in a bucket"
        swap = reader.prepare(offer)
        act_amid(reader, other.kill)
        reader.take(swap)
        assert reader.has(1)
        # it reads nothing now, so that its tensors may change
        lives[0].withdraw()
        offer = register(stores, whole_tensors(2), version=2, lives=lives)
        reader.take(reader.prepare(offer))
        assert reader.has(2)


@pytest.mark.parametrize("scheme", [GLOO, CUDA_IPC])
def test_a_publisher_that_is_killed_in_a_bucket(folder, scheme):
    """The version is refused by name, and is in the slot still; the next publisher's arrives."""
    with child(folder, RUN, scheme) as publisher:
        reader, other = Receiver(folder, scheme), Receiver(folder, scheme, SHM)
        offer = publisher.register(1)

        def kill() -> None:
            until_whole(folder, offer)  # it is written behind the version
            publisher.kill()

        assert isinstance(read_amid(reader, offer, kill), SnapshotError)
        assert reader.has(0)
        other.take(other.prepare(offer))
        assert other.has(1) and other.told == ["weights.slot_used", "weights.read"]
    with stores_of(folder, 1) as stores, live_servers(folder, 1, scheme) as lives:
        offer = register(stores, whole_tensors(1), version=1, epoch=1, lives=lives)
        reader.take(reader.prepare(offer))
        assert reader.has(1)
        reader.opener.close()


def until_whole(folder: Path, offer: Offer) -> None:
    """Wait until the slot has the version."""
    ends_at = time.monotonic() + DEADLINE_S
    while True:
        try:
            Receiver(folder, SHM).prepare(offer).settle()
            return
        except SnapshotError:
            assert time.monotonic() < ends_at
            time.sleep(0.01)


@pytest.mark.parametrize("behind", [(), (SHM,)])
@pytest.mark.parametrize("scheme", [GLOO, CUDA_IPC])
def test_a_version_that_is_no_longer_served_in_a_bucket(folder, scheme, behind):
    """It is refused by name, or comes whole out of the slot; the next one arrives."""
    with stores_of(folder, 1) as stores, live_servers(folder, 1, scheme) as lives:
        reader = Receiver(folder, scheme, *behind)
        offer = register(stores, whole_tensors(1), version=1, lives=lives)
        failed = read_amid(reader, offer, lives[0].end_version)
        assert isinstance(failed, GyreError) == (not behind), failed
        assert reader.has(1 if behind else 0)
        assert ("weights.slot_used" in reader.told) == bool(behind)
        offer = register(stores, whole_tensors(2), version=2, lives=lives)
        reader.take(reader.prepare(offer))
        assert reader.has(2)
        reader.opener.close()


def read_amid(reader: Receiver, offer: Offer, act: Callable[[], None]) -> GyreError | None:
    swap = reader.prepare(offer)
    act_amid(reader, act)
    try:
        reader.take(swap)
    except GyreError as error:
        swap.undo()
        swap.settle()
        return error
    return None


@pytest.mark.parametrize("scheme", [GLOO, CUDA_IPC])
def test_a_version_that_is_no_longer_served_is_read_from_its_slot(folder, scheme):
    with stores_of(folder, 1) as stores, live_servers(folder, 1, scheme) as lives:
        offer = register(stores, whole_tensors(1), version=1, lives=lives)
        early, late = Receiver(folder, scheme, SHM), Receiver(folder, scheme, SHM)
        swap = early.prepare(offer)
        lives[0].end_version()
        early.take(swap)
        late.take(late.prepare(offer))
        for reader in (early, late):
            assert reader.has(1)
            assert reader.told == ["weights.slot_used", "weights.read"]
        alone = Receiver(folder, scheme)
        with pytest.raises(InputError, match="version 1 of epoch 0 is no longer on its publisher"):
            alone.prepare(offer)


class HeldStore(SharedMemoryStore):
    """A slot is whole only when it may be."""

    may_end = threading.Event()

    @contextmanager
    def writing(self, **version):
        with super().writing(**version) as slot:
            yield slot
            assert self.may_end.wait(DEADLINE_S)


def test_a_slot_is_written_behind_its_version(folder):
    """A reader has the version while the slot is not whole; one that comes when the tensors are
    wanted back waits for it, and so does whoever wants them."""
    store = HeldStore(run_id=RUN, owner=0, emit=silent, folder=folder)
    with live_servers(folder, 1, CUDA_IPC) as lives, ThreadPoolExecutor(2) as threads:
        offer = register([store], whole_tensors(1), version=1, lives=lives)
        early, late = Receiver(folder, CUDA_IPC), Receiver(folder, CUDA_IPC, SHM)
        early.take(early.prepare(offer))
        assert early.has(1)
        with pytest.raises(SnapshotError, match="not whole: its publisher is writing it"):
            Receiver(folder, SHM).prepare(offer)
        withdrawn = threads.submit(lives[0].withdraw)
        while lives[0].current.has(epoch=0, version=1):
            time.sleep(0.001)
        prepared = threads.submit(late.prepare, offer)
        assert not withdrawn.done() and not prepared.done()
        store.may_end.set()
        withdrawn.result(DEADLINE_S)
        late.take(prepared.result(DEADLINE_S))
        assert late.has(1) and late.told == ["weights.read"]
    store.close()


def test_a_slot_that_cannot_be_written_is_told(folder):
    class TornStore(SharedMemoryStore):
        @contextmanager
        def writing(self, **version):
            with super().writing(**version) as slot:
                yield slot
                raise OSError("torn")

    told = []
    store = TornStore(run_id=RUN, owner=0, emit=silent, folder=folder)
    emit = lambda kind, **fields: told.append((kind, fields))  # noqa: E731
    with live_servers(folder, 1, CUDA_IPC, emit=emit) as lives:
        offer = register([store], whole_tensors(1), version=1, lives=lives)
        reader = Receiver(folder, CUDA_IPC)
        reader.take(reader.prepare(offer))
        assert reader.has(1)
        lives[0].withdraw()
        ends_at = time.monotonic() + DEADLINE_S
        while not told and time.monotonic() < ends_at:
            time.sleep(0.001)
        assert told == [("weights.slot_failed", {"version": 1, "error": "torn"})]
    store.close()


def test_one_server_of_a_rank(folder):
    given = {"device": torch.device("cpu"), "emit": silent, "schemes": [GLOO]}
    with (
        live_servers(folder, 1, GLOO),
        pytest.raises(InputError, match="is served by another process"),
    ):
        LiveServer(name=live_name(RUN, 0), host=host_id(folder), **given)


def test_memory_of_gpus_is_refused_on_a_cpu(folder):
    """By the publisher, and by a reader of what a GPU has published."""
    given = {"device": torch.device("cpu"), "emit": silent, "schemes": [CUDA_IPC]}
    with pytest.raises(InputError, match="this publisher's are on cpu"):
        LiveServer(name=live_name(RUN, 0), host=host_id(folder), **given)
    with stores_of(folder, 1) as stores, live_servers(folder, 1, CUDA_IPC) as lives:
        offer = register(stores, whole_tensors(1), version=1, lives=lives)
        reading = Reading(host_id=host_id(folder), folder=folder, preference=(CUDA_IPC,))
        own, opener = whole_tensors(0), PartOpener(reading)
        with pytest.raises(InputError, match="this process works on cpu"):
            ReadOver(offer, own, parts=opener, emit=silent)


def test_bytes_at_an_address_are_those_that_are_there():
    whole = torch.arange(256, dtype=torch.uint8)
    found = bytes_at(torch.device("cpu"), whole.data_ptr(), 256)
    assert found.data_ptr() == whole.data_ptr() and torch.equal(found, whole)
    found[64:66].view(torch.bfloat16).fill_(1.0)
    assert whole[64:66].tolist() == [0x80, 0x3F]


def test_threads_and_connections_end_with_their_reader(folder):
    with stores_of(folder, 1) as stores, live_servers(folder, 1, CUDA_IPC) as lives:
        before = threading.active_count()
        for version in range(1, 6):
            reader = Receiver(folder, CUDA_IPC)
            offer = register(stores, whole_tensors(version), version=version, lives=lives)
            reader.take(reader.prepare(offer))
            reader.opener.close()
        ends_at = time.monotonic() + DEADLINE_S
        while threading.active_count() > before and time.monotonic() < ends_at:
            time.sleep(0.01)
        assert threading.active_count() == before
