"""TCP between hosts: who may read, and what becomes of peers that are slow, gone or strangers."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gyre.core.errors import ConfigError, DeadlineError, InputError, SnapshotError
from gyre.core.offers import Offer, RegisteredPart, RegisteredShards
from gyre.weights.transports.opened import Reading
from gyre.weights.transports.tcp_server import PartServer
from gyre.weights.transports.tcp_wire import (
    ANSWER_BYTES,
    NONCE_BYTES,
    OK,
    PartAnswer,
    PartRequest,
    pack_answer,
    pack_request,
    prove,
    unpack_answer,
    unpack_request,
)
from part_cases import (
    RUN,
    TOKEN,
    open_shards,
    register,
    shared_folder,
    silent,
    stores_of,
    whole_tensors,
)

DEADLINE_S = 20.0
HOST = "127.0.0.1"


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as found:
        yield found


@contextmanager
def serving(folder: Path, **settings) -> Iterator[PartServer]:
    given = {"run_id": RUN, "token": TOKEN, "emit": silent, "host": HOST, **settings}
    server = PartServer(folder=folder, **given)
    try:
        yield server
    finally:
        server.close()


def read_from(place: str, offer: Offer, **settings) -> dict[str, torch.Tensor]:
    """Read a version from a server at another place than its offer names."""
    parts = tuple(
        RegisteredPart(
            addresses=(f"tcp://{place}/{part.addresses[0].rpartition('/')[2]}",),
            size_bytes=part.size_bytes,
        )
        for part in offer.source.parts
    )
    given = {"token": TOKEN, "num_connections": 2, "deadline_s": DEADLINE_S, **settings}
    moved = replace(offer, source=RegisteredShards(parts=parts))
    with open_shards(moved, Reading(host_id="elsewhere", **given)) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def read_when_free(place: str, offer: Offer, **settings) -> dict[str, torch.Tensor]:
    """Read as `read_from`, once the server's threads have seen that the last readers are gone."""
    end_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            return read_from(place, offer, **settings)
        except InputError as refused:
            if "readers, as many as it may have" not in refused.message or (
                time.monotonic() > end_s
            ):
                raise
            time.sleep(0.01)


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def large(seed: int) -> dict[str, torch.Tensor]:
    """More than sockets hold of themselves: 18 MB, which one connection asks for in two pieces."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(4_500_000, generator=generator).to(torch.bfloat16) for name in ("a", "b")
    }


@contextmanager
def between(place: str, carry: Callable[[socket.socket, socket.socket], None]) -> Iterator[str]:
    """A proxy; `carry` moves what the server says, until it returns."""
    listening = socket.create_server((HOST, 0))
    sockets: list[socket.socket] = [listening]
    threads = []

    def accept() -> None:
        while True:
            try:
                reader, _ = listening.accept()
            except OSError:
                return
            host, port = place.split(":")
            server = socket.create_connection((host, int(port)), DEADLINE_S)
            sockets.extend([reader, server])
            for work, pair in ((pass_on, (reader, server)), (carry, (server, reader))):
                threads.append(threading.Thread(target=quietly, args=(work, *pair)))
                threads[-1].start()

    threads.append(threading.Thread(target=accept))
    threads[0].start()
    try:
        yield "{}:{}".format(*listening.getsockname())
    finally:
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in threads:
            thread.join(DEADLINE_S)


def quietly(work: Callable[..., None], *pair: socket.socket) -> None:
    with suppress(OSError):
        work(*pair)


def pass_on(source: socket.socket, to: socket.socket) -> None:
    while data := source.recv(1 << 16):
        to.sendall(data)


def test_large_parts_arrive_in_pieces_over_several_connections(folder):
    with stores_of(folder, 2) as stores, serving(folder) as server:
        offer = register(stores, large(1), version=1)
        for num_connections in (1, 3):
            assert same(read_from(server.place, offer, num_connections=num_connections), large(1))


def test_a_stranger_reads_nothing(folder):
    told: queue.Queue[tuple[str, dict]] = queue.Queue()
    emit = lambda kind, **fields: told.put((kind, fields))  # noqa: E731
    with stores_of(folder, 1) as stores, serving(folder, emit=emit) as server:
        offer = register(stores, whole_tensors(1), version=1)
        with pytest.raises(InputError, match="the token is not that of this run"):
            read_from(server.place, offer, token=b"of another run, I fear")
        assert told.get(timeout=DEADLINE_S) == (
            "weights.reader_refused",
            {"peer": HOST, "reason": "the token is not that of this run"},
        )
        with pytest.raises(InputError, match="this receiver has none"):
            read_from(server.place, offer, token=b"")
        host, port = server.place.split(":")
        with socket.create_connection((host, int(port)), DEADLINE_S) as talking:
            talking.recv(NONCE_BYTES, socket.MSG_WAITALL)
            talking.sendall(b"GET / HTTP/1.1\r\nHost: weights\r\n\r\n".ljust(32))
            answer = talking.recv(ANSWER_BYTES, socket.MSG_WAITALL)
            with pytest.raises(InputError, match="token"):
                unpack_answer(answer, "it")
        assert same(read_from(server.place, offer), whole_tensors(1))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"name": "../../etc/passwd"}, "is no slot of this run"),
        ({"name": "gyre-other-0-0"}, "is no slot of this run"),
        ({"name": f"gyre-{RUN}-7-0"}, "cannot be opened"),
        ({"version": 9}, "has version 1 of epoch 0"),
        ({"epoch": 9}, "has version 1 of epoch 0"),
        ({"part_bytes": 64}, "its manifest lists 64"),
        ({"start": 1 << 40}, "has no such bytes"),
        ({"size_bytes": 1 << 40}, "has no such bytes"),
        ({"start": (1 << 64) - 1, "size_bytes": 2}, "has no such bytes"),
    ],
)
def test_only_bytes_of_a_version_of_the_run_are_given(folder, change, what):
    with stores_of(folder, 1) as stores, serving(folder) as server:
        offer = register(stores, whole_tensors(1), version=1)
        (part,) = offer.source.parts
        request = PartRequest(
            name=part.addresses[0].rpartition("/")[2],
            epoch=0,
            version=1,
            part_bytes=part.size_bytes,
            start=0,
            size_bytes=64,
        )
        host, port = server.place.split(":")
        with socket.create_connection((host, int(port)), DEADLINE_S) as talking:
            nonce = talking.recv(NONCE_BYTES, socket.MSG_WAITALL)
            talking.sendall(prove(TOKEN, nonce))
            assert unpack_answer(talking.recv(ANSWER_BYTES, socket.MSG_WAITALL), "it").code == OK
            for asked in (replace(request, **change), request):
                talking.sendall(pack_request(asked))
                answer = talking.recv(ANSWER_BYTES, socket.MSG_WAITALL)
                if asked != request:
                    with pytest.raises((InputError, SnapshotError), match=what):
                        unpack_answer(answer, "it")
            assert unpack_answer(answer, "it").sequence > 0  # the connection goes on
            assert len(talking.recv(64, socket.MSG_WAITALL)) == 64
            unpack_answer(talking.recv(ANSWER_BYTES, socket.MSG_WAITALL), "it")


def test_requests_and_answers_are_read_as_they_were_written():
    request = PartRequest(
        name="gyre-a-1-0", epoch=-1, version=3, part_bytes=9, start=1 << 40, size_bytes=2
    )
    assert unpack_request(pack_request(request)) == request
    answer = PartAnswer(code=OK, sequence=6, message="all is well")
    assert unpack_answer(pack_answer(answer), "it") == answer


def test_a_network_that_stalls_is_named_at_the_deadline(folder):
    def stall(server: socket.socket, reader: socket.socket) -> None:
        left = 1 << 20
        while left > 0 and (data := server.recv(1 << 16)):
            reader.sendall(data)
            left -= len(data)

    with stores_of(folder, 1) as stores, serving(folder) as server:
        offer = register(stores, large(1), version=1)
        refused = pytest.raises(DeadlineError, match=r"has left \d+ bytes unsent at the deadline")
        with between(server.place, stall) as place, refused:
            read_from(place, offer, deadline_s=1.0)


def test_a_network_that_trickles_is_named_at_the_deadline(folder):
    """Some byte always comes in time, and the piece does not."""

    def trickle(server: socket.socket, reader: socket.socket) -> None:
        pause = threading.Event()
        sent = 0
        while data := server.recv(1 << 16 if sent < 1 << 20 else 1):
            reader.sendall(data)
            sent += len(data)
            if sent >= 1 << 20:
                pause.wait(0.05)

    with stores_of(folder, 1) as stores, serving(folder) as server:
        offer = register(stores, large(1), version=1)
        refused = pytest.raises(DeadlineError, match=r"has left \d+ bytes unsent at the deadline")
        with between(server.place, trickle) as place, refused:
            read_from(place, offer, deadline_s=1.0)


def test_a_network_that_changes_a_bit_is_found(folder):
    def flip(server: socket.socket, reader: socket.socket) -> None:
        sent = 0
        while data := server.recv(1 << 16):
            if sent <= 1_000_000 < sent + len(data):
                at = 1_000_000 - sent
                data = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
            reader.sendall(data)
            sent += len(data)

    with stores_of(folder, 1) as stores, serving(folder) as server:
        offer = register(stores, large(1), version=1)
        refused = pytest.raises(SnapshotError, match=r"of version 1: numbers 0 to \d+ from")
        with between(server.place, flip) as place, refused:
            read_from(place, offer)


def test_a_server_that_ends_is_named(folder):
    with stores_of(folder, 1) as stores, serving(folder) as server:
        offer = register(stores, large(1), version=1)

        def end(source: socket.socket, reader: socket.socket) -> None:
            sent = 0
            while sent < 1 << 20 and (data := source.recv(1 << 16)):
                reader.sendall(data)
                sent += len(data)
            server.close()
            reader.shutdown(socket.SHUT_RDWR)

        refused = pytest.raises(SnapshotError, match="was lost or overwritten while version 1")
        with between(server.place, end) as place, refused:
            read_from(place, offer, num_connections=1)
    with pytest.raises(InputError, match="cannot be reached"):
        read_from(server.place, offer)


def test_a_reader_that_does_not_read_is_let_go(folder):
    told: queue.Queue[tuple[str, dict]] = queue.Queue()
    emit = lambda kind, **fields: told.put((kind, fields))  # noqa: E731
    with stores_of(folder, 1) as stores, serving(folder, emit=emit, deadline_s=0.5) as server:
        offer = register(stores, large(1), version=1)
        (part,) = offer.source.parts
        host, port = server.place.split(":")
        with socket.create_connection((host, int(port)), DEADLINE_S) as talking:
            nonce = talking.recv(NONCE_BYTES, socket.MSG_WAITALL)
            talking.sendall(prove(TOKEN, nonce))
            request = PartRequest(
                name=part.addresses[0].rpartition("/")[2],
                epoch=0,
                version=1,
                part_bytes=part.size_bytes,
                start=0,
                size_bytes=part.size_bytes,
            )
            talking.sendall(pack_request(request))
            kind, fields = told.get(timeout=DEADLINE_S)
            assert kind == "weights.reader_lost" and fields["peer"] == HOST
        assert same(read_from(server.place, offer), large(1))


def test_readers_are_bounded(folder):
    with stores_of(folder, 1) as stores, serving(folder, max_connections=3) as server:
        offer = register(stores, whole_tensors(1), version=1)
        with pytest.raises(InputError, match="has 3 readers, as many as it may have"):
            read_from(server.place, offer, num_connections=4)
        assert same(read_when_free(server.place, offer, num_connections=3), whole_tensors(1))


def test_an_address_that_cannot_be_had_is_named(folder):
    with serving(folder) as server:
        port = int(server.place.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot be served at {HOST} port {port}"):
            PartServer(run_id=RUN, token=TOKEN, emit=silent, host=HOST, port=port, folder=folder)
