"""Faults of publishers and receivers in processes of their own: whoever dies, a version arrives
whole or is refused by name, and nothing stays behind."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import part_child
from gyre.cluster.worker.frames import decode, encode
from gyre.core.errors import InputError, MemoryBudgetError, SnapshotError
from gyre.core.offers import Offer, RegisteredPart, RegisteredShards
from gyre.weights.transports import mapped as mapped_memory
from gyre.weights.transports import shared_memory
from gyre.weights.transports.addresses import host_id
from gyre.weights.transports.mapped import MappedFile, populate
from gyre.weights.transports.opened import PartOpener, Reading
from gyre.weights.transports.shared_memory import SharedMemoryStore, group_room
from gyre.weights.transports.slot_header import HEADER_BYTES, SlotHeader, pack
from gyre.weights.transports.tcp_server import PartServer
from part_cases import (
    RUN,
    TOKEN,
    filled,
    open_shards,
    register,
    shared_folder,
    silent,
    stores_of,
    whole_tensors,
)

DEADLINE_S = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as found:
        yield found


class Child:
    """A process that does what it is told."""

    def __init__(self, folder: Path, run_id: str = RUN, *schemes: str) -> None:
        program = [sys.executable, part_child.__file__, str(folder), run_id, *schemes]
        self.process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def tell(self, **command: Any) -> str:
        self.tell_only(**command)
        return self.answer()

    def tell_only(self, **command: Any) -> None:
        self.process.stdin.write(json.dumps(command) + "\n")

    def answer(self) -> str:
        return self.process.stdout.readline().strip()

    def register(self, version: int, epoch: int = 0) -> Offer:
        return decode(bytes.fromhex(self.tell(do="register", version=version, epoch=epoch)))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)


@contextmanager
def child(folder: Path, run_id: str = RUN, *schemes: str) -> Iterator[Child]:
    found = Child(folder, run_id, *schemes)
    try:
        yield found
    finally:
        found.kill()


def read(offer: Offer, folder: Path) -> dict[str, torch.Tensor]:
    with open_shards(offer, Reading(host_id=host_id(folder), folder=folder)) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_a_version_outlives_its_publisher(folder):
    """Killed after it registered: a late receiver takes the version without it. A publisher of the
    next attempt goes on in the same slots, and the version is there until it has registered two."""
    with child(folder) as publisher:
        publisher.register(1)
        last = publisher.register(2)
    files = {name: (folder / name).stat().st_ino for name in names(folder)}
    assert len(files) == 2
    assert same(read(last, folder), whole_tensors(2))
    server = PartServer(run_id=RUN, token=TOKEN, emit=silent, host="127.0.0.1", folder=folder)
    (part,) = last.source.parts
    name = part.addresses[0].rpartition("/")[2]
    served = RegisteredPart(addresses=(f"tcp://{server.place}/{name}",), size_bytes=part.size_bytes)
    elsewhere = replace(last, source=RegisteredShards(parts=(served,)))
    with open_shards(elsewhere, Reading(host_id="other", token=TOKEN)) as tensors:
        assert same(dict(tensors), whole_tensors(2))
    server.close()
    with child(folder) as publisher:
        newer = publisher.register(1, epoch=1)
        assert same(read(last, folder), whole_tensors(2))
        assert same(read(newer, folder), whole_tensors(1))
        publisher.register(2, epoch=1)
        with pytest.raises(
            InputError, match="has version 2 of epoch 1, and not version 2 of epoch 0"
        ):
            read(last, folder)
        assert {name: (folder / name).stat().st_ino for name in names(folder)} == files


@pytest.mark.slow
def test_versions_that_follow_each_other_fast_are_whole_or_refused(folder):
    """A publisher overwrites slot after slot while they are read: nothing that was read is of two
    versions."""
    count = 60
    with child(folder) as publisher:
        publisher.tell_only(do="churn", count=count)
        whole, refused = 0, 0
        last = None
        while (line := publisher.answer()) != "end":
            offer = decode(bytes.fromhex(line))
            for one in (offer, last):
                try:
                    found = one and read(one, folder)
                except (InputError, SnapshotError):
                    refused += 1
                    continue
                if found:
                    whole += 1
                    assert same(found, filled(one.version)), one.version
            last = offer
        assert offer.version == count and same(read(offer, folder), filled(count))
        assert whole + refused == 2 * count - 1


def test_a_publisher_that_dies_while_it_writes_leaves_the_newest_version(folder):
    with child(folder) as publisher:
        older, newest = publisher.register(1), publisher.register(2)
        size_bytes = newest.source.parts[0].size_bytes
        told = publisher.tell(do="write half", version=3, epoch=0, size_bytes=size_bytes)
        assert told == "half is written"
    with pytest.raises(SnapshotError, match="not whole: its publisher is writing it, or died"):
        read(older, folder)
    assert same(read(newest, folder), whole_tensors(2))


def test_a_receiver_that_dies_in_a_bucket_harms_nobody(folder):
    with stores_of(folder, 1) as stores, child(folder, "receiver") as receiver:
        offer = register(stores, whole_tensors(1), version=1)
        assert receiver.tell(do="receive", offer=encode(offer).hex()) == "in a bucket"
        receiver.kill()
        assert same(read(offer, folder), whole_tensors(1))
        for version in (2, 3, 4):
            offer = register(stores, whole_tensors(version), version=version)
            assert same(read(offer, folder), whole_tensors(version))
        assert len(names(folder)) == 2


def test_one_publisher_at_a_time(folder):
    """A second process of the same run and rank is refused while the first lives."""
    with child(folder) as publisher, stores_of(folder, 1) as stores:
        offer = publisher.register(1)
        with pytest.raises(InputError, match="another trainer publishes the same run"):
            register(stores, whole_tensors(2), version=2, epoch=1)
        assert same(read(offer, folder), whole_tensors(1))
        publisher.kill()
        newer = register(stores, whole_tensors(2), version=2, epoch=1)
        assert same(read(newer, folder), whole_tensors(2))


def test_what_dead_publishers_left_is_removed_and_nothing_else(folder):
    told = []

    def opened() -> None:
        SharedMemoryStore(
            run_id="new",
            owner=0,
            emit=lambda kind, **fields: told.append((kind, fields)),
            folder=folder,
        )

    with child(folder, "dead") as dead, child(folder, "alive") as alive:
        offer = dead.register(1)
        living = alive.register(2)
        opened()
        assert told == [], "both live"
        dead.kill()
        (folder / "gyre-other-0-0").write_bytes(b"not a slot of ours, by chance")
        (folder / "gyre-renamed-0-0").write_bytes(pack(SlotHeader(run_id="else", owner=0)))
        (folder / "gyre-link-0-0").symlink_to(folder / "gyre-dead-0-0")
        if os.geteuid() == 0:  # of another user
            theirs = folder / "gyre-theirs-0-0"
            theirs.write_bytes(pack(SlotHeader(run_id="theirs", owner=0)))
            os.chown(theirs, 65534, 65534)
        kept = [name for name in names(folder) if not name.startswith("gyre-dead")]
        opened()
        size_bytes = 2 * (HEADER_BYTES + offer.source.parts[0].size_bytes)
        fields = {"count": 2, "size_bytes": size_bytes, "folder": str(folder)}
        assert told == [("weights.leftovers_removed", fields)]
        assert names(folder) == kept
        assert same(read(living, folder), whole_tensors(2))
        alive.register(3)


def test_slots_are_closed_to_other_users_and_go_with_their_store(folder):
    with stores_of(folder, 2) as stores:
        register(stores, whole_tensors(1), version=1)
        assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600] * 4
    assert names(folder) == []


def test_other_files_of_the_name_are_refused(folder):
    with stores_of(folder, 1) as stores:
        offer = register(stores, whole_tensors(1), version=1)
        path = folder / offer.source.parts[0].addresses[0].rpartition("/")[2]
        whole = path.read_bytes()
    for content, error, what in (
        (b"", InputError, "fewer than a header"),
        (b"?" * len(whole), InputError, "no slot of a run of Gyre"),
        (whole.replace(RUN.encode(), b"other678", 1), InputError, "or of another run"),
        (whole[:-1], SnapshotError, "bytes in a file of"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), SnapshotError, "checksum"),
    ):
        path.write_bytes(content)
        with pytest.raises(error, match=what):
            read(offer, folder)
    path.write_bytes(whole)
    assert same(read(offer, folder), whole_tensors(1))
    path.unlink()
    with pytest.raises(InputError, match="cannot be opened: No such file"):
        read(offer, folder)
    path.symlink_to("/etc/passwd")
    with pytest.raises(InputError, match="cannot be opened"):
        read(offer, folder)
    if os.geteuid() == 0:
        path.unlink()
        path.write_bytes(whole)
        os.chown(path, 65534, 65534)
        with pytest.raises(InputError, match="is of user 65534"):
            read(offer, folder)


def test_a_part_elsewhere_is_named(folder):
    with stores_of(folder, 1) as stores:
        offer = register(stores, whole_tensors(1), version=1)
        refused = pytest.raises(InputError, match="none can be opened from host elsewhere")
        with refused, open_shards(offer, Reading(host_id="elsewhere", folder=folder)):
            pass


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 KiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a small tmpfs is mounted by root, with the program mount")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    ran = subprocess.run(mount, capture_output=True, text=True, timeout=DEADLINE_S)
    if ran.returncode:
        pytest.skip(f"this container may not mount a tmpfs: {ran.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=DEADLINE_S)


def test_a_full_shared_memory_is_told_before_a_byte_is_written(small):
    whole = {"a": torch.ones(20_000, dtype=torch.bfloat16)}  # one slot fits, two do not
    with stores_of(small, 1) as stores:
        what = r"has \d+ of 88192 bytes free that slots of this rank's weights need"
        with pytest.raises(MemoryBudgetError, match=what):
            register(stores, whole, version=1)
        assert names(small) == []
        fits = {"a": whole["a"][:8000]}
        offer = register(stores, fits, version=1)
        assert same(read(offer, small), fits)


@contextmanager
def mapped(path: Path, size_bytes: int) -> Iterator[mmap.mmap]:
    """A file of this size, whose pages nobody has written."""
    with path.open("w+b") as file:
        file.truncate(size_bytes)
        with mmap.mmap(file.fileno(), size_bytes, flags=mmap.MAP_SHARED) as pages:
            yield pages


def address_of(pages: mmap.mmap) -> int:
    return np.frombuffer(pages, dtype=np.uint8).ctypes.data


def test_pages_are_taken_before_they_are_used_and_keep_what_they_have(folder, monkeypatch):
    monkeypatch.setattr(mapped_memory, "POPULATE_BYTES", 8192)  # a thread's cut
    size_bytes, path = 10 * 4096, folder / "pages"
    with mapped(path, size_bytes) as pages:
        pages[5000:5003] = b"abc"
        before = path.stat().st_blocks
        assert populate(address_of(pages), size_bytes)
        assert path.stat().st_blocks * 512 == size_bytes > before * 512
        assert pages[5000:5003] == b"abc" and pages[:5000] == bytes(5000)


def test_pages_that_the_system_has_not_are_told_and_end_no_process(small):
    told = pytest.raises(
        MemoryBudgetError, match=r"no room for 1048576 bytes of shared memory \(EFAULT\)"
    )
    with mapped(small / "pages", 1 << 20) as pages, told:
        populate(address_of(pages), 1 << 20)


def test_a_kernel_that_cannot_populate_is_told_once(folder, monkeypatch):
    monkeypatch.setattr(mapped_memory, "MADV_POPULATE_WRITE", 99)  # of no kernel
    with mapped(folder / "pages", 8192) as pages:
        assert not populate(address_of(pages), 8192)
    (folder / "pages").unlink()

    class Populated(MappedFile):
        def __init__(self, handle: int, size_bytes: int, *, writable: bool, pin: bool) -> None:
            super().__init__(handle, size_bytes, writable=writable, pin=pin)
            self.is_populated = populate(self.bytes_N.data_ptr(), size_bytes)

    monkeypatch.setattr(shared_memory, "MappedFile", Populated)
    told: list[tuple[str, dict[str, Any]]] = []
    with stores_of(folder, 1, emit=lambda kind, **fields: told.append((kind, fields))) as stores:
        for version in (1, 2, 3):
            register(stores, whole_tensors(version), version=version)
    assert told == [("weights.populate_unsupported", {"kernel": platform.release()})]


def test_slots_that_cannot_be_page_locked_leave_no_file(folder, monkeypatch):
    """One of the two is there by then, or not."""
    turns = itertools.count()

    class Refused(MappedFile):
        def __init__(self, handle: int, size_bytes: int, *, writable: bool, pin: bool) -> None:
            if next(turns) == 1:
                raise MemoryBudgetError("no room", hint="more")
            super().__init__(handle, size_bytes, writable=writable, pin=pin)

    monkeypatch.setattr(shared_memory, "MappedFile", Refused)
    with stores_of(folder, 1) as stores, pytest.raises(MemoryBudgetError, match="no room"):
        register(stores, whole_tensors(1), version=1)
    assert names(folder) == []


def test_a_containers_limit_is_told_before_the_system_ends_it(folder, tmp_path):
    """What the cache of files takes is given back by the system."""
    assert group_room(tmp_path) is None
    for name, text in (
        ("memory.max", "100000\n"),
        ("memory.current", "70000\n"),
        ("memory.stat", "anon 5\ninactive_file 6000\nactive_file 4000\nshmem 9\n"),
    ):
        (tmp_path / name).write_text(text)
    assert group_room(tmp_path) == 40_000
    with stores_of(folder, 1, group=tmp_path) as stores:
        with pytest.raises(MemoryBudgetError, match="container has 40000 of 88192 bytes left"):
            register(stores, {"a": torch.ones(20_000, dtype=torch.bfloat16)}, version=1)
        assert names(folder) == []
        register(stores, {"a": torch.ones(7_000, dtype=torch.bfloat16)}, version=1)
        kept = {path: path.read_bytes() for path in folder.iterdir()}
    for path, data in kept.items():  # of an owner that died before it had its pages
        with path.open("wb") as file:
            file.write(data[:HEADER_BYTES])
            file.truncate(len(data))
    (tmp_path / "memory.max").write_text("80000\n")
    again = {"a": torch.ones(7_000, dtype=torch.bfloat16)}
    with stores_of(folder, 1, group=tmp_path) as stores:
        with pytest.raises(MemoryBudgetError, match="container has 20000 of 28000 bytes left"):
            register(stores, again, version=2)
        (tmp_path / "memory.max").write_text("100000\n")
        assert same(read(register(stores, again, version=2), folder), again)
        assert all(path.stat().st_blocks * 512 >= len(data) for path, data in kept.items())
    (tmp_path / "memory.max").write_text("max\n")
    assert group_room(tmp_path) is None


def test_a_file_of_anothers_in_the_place_of_a_slot_is_left_alone(folder):
    path = folder / f"gyre-{RUN}-0-0"
    path.write_bytes(b"not ours")
    with stores_of(folder, 1) as stores:
        with pytest.raises(InputError, match="and another content"):
            register(stores, whole_tensors(1), version=1)
        assert names(folder) == [path.name] and path.read_bytes() == b"not ours"
        path.unlink()
        register(stores, whole_tensors(1), version=1)
        path.unlink()  # by an operator; then somebody else has the name
        path.write_bytes(b"not ours")
    assert names(folder) == [path.name]


def test_a_slot_that_is_cut_is_refused_by_a_reader_that_has_it_mapped(folder):
    """Its bytes are gone: touching them would end the reader's process."""
    opener = PartOpener(Reading(host_id=host_id(folder), folder=folder))
    with stores_of(folder, 1) as stores:
        offer = register(stores, whole_tensors(1), version=1)
        with opener.open_parts(offer):
            pass
        slot = folder / offer.source.parts[0].addresses[0].rpartition("/")[2]
        os.truncate(slot, HEADER_BYTES + 64)
        with pytest.raises(SnapshotError, match="in a file of 64"), opener.open_parts(offer):
            pass
    opener.close()


@pytest.mark.parametrize("how", ["cut", "removed"])
def test_a_slot_that_is_cut_or_removed_is_made_anew_by_its_owner(folder, how):
    told = []
    emit = lambda kind, **fields: told.append((kind, fields))  # noqa: E731
    with stores_of(folder, 1, emit=emit) as stores:
        older = register(stores, whole_tensors(1), version=1)
        newer = register(stores, whole_tensors(2), version=2)
        slot = folder / older.source.parts[0].addresses[0].rpartition("/")[2]
        if how == "cut":
            os.truncate(slot, HEADER_BYTES)
        else:
            slot.unlink()
        offer = register(stores, whole_tensors(3), version=3)
        assert told == [("weights.slot_replaced", {"name": slot.name})]
        assert same(read(offer, folder), whole_tensors(3))
        assert same(read(newer, folder), whole_tensors(2)), "the other slot is as it was"
    assert names(folder) == []


def test_ranks_that_a_resumed_run_no_longer_has_leave_nothing(folder):
    told = []
    emit = lambda kind, **fields: told.append(fields["count"])  # noqa: E731
    with child(folder) as publisher:
        publisher.register(1)
        for slot in (0, 1):  # as of a second rank that died with the first
            data = (folder / f"gyre-{RUN}-0-{slot}").read_bytes()
            moved = pack(SlotHeader(run_id=RUN, owner=1, sequence=2)) + data[80:]
            (folder / f"gyre-{RUN}-1-{slot}").write_bytes(moved)
    with stores_of(folder, 1, emit=emit) as stores:
        register(stores, whole_tensors(2), version=2, epoch=1)
        assert len(names(folder)) == 4 and not told
        register(stores, whole_tensors(3), version=3, epoch=1)
        assert len(names(folder)) == 2 and told == [2]


def test_an_error_while_a_part_is_written_registers_nothing(folder):
    with stores_of(folder, 1) as (store,):
        first = register([store], whole_tensors(1), version=1)
        second = register([store], whole_tensors(2), version=2)
        size_bytes = second.source.parts[0].size_bytes
        with pytest.raises(RuntimeError), store.writing(epoch=0, version=3, size_bytes=size_bytes):
            raise RuntimeError
        with pytest.raises(SnapshotError, match="not whole"):
            read(first, folder)
        assert same(read(second, folder), whole_tensors(2))
        third = register([store], whole_tensors(3), version=3)
        assert same(read(third, folder), whole_tensors(3))
        assert same(read(second, folder), whole_tensors(2))


def test_other_shapes_take_other_files(folder):
    with stores_of(folder, 1) as stores:
        register(stores, whole_tensors(1), version=1)
        larger = {"a": torch.ones(5000)}
        offer = register(stores, larger, version=2)
        assert same(read(offer, folder), larger) and len(names(folder)) == 2


def test_a_manifest_that_is_not_of_the_bytes_is_refused(folder):
    with stores_of(folder, 1) as stores:
        offer = register(stores, whole_tensors(1), version=1)
        entries = offer.manifest.entries[:-1]
        short = replace(offer, manifest=replace(offer.manifest, entries=entries))
        with pytest.raises(SnapshotError, match="and its manifest lists"):
            read(short, folder)
