"""Registered weights by TCP, between two network namespaces of a machine. In: a size, a number of
connections. Out: GB/s that the reader reads. Beside it raw TCP by sendfile and recv_into over as
many connections, and a whole receipt: opened, read, copied over an engine's tensors with the last
version kept, verified. All take turns in one run. Needs root. Run: python bench/weights_tcp.py

Prediction, before the first run: 90 % of raw TCP for the reader, since both are the kernel's copies
in large pieces. The whole keeps, copies and sums beside the reading, at 0.4 s of one core for each
GB: as fast as the reader on four cores, and 60 % of raw TCP on two, which that takes both. `fresh`:
how fast new memory is filled, in which the last version is kept. Where a virtual machine gives such
memory back to its host, that is slower than everything else.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from gyre.cluster.worker.frames import decode, encode
from gyre.core.offers import LocalTensors, Offer
from gyre.weights.manifest import make_manifest
from gyre.weights.registered import ReadOver
from gyre.weights.transports.addresses import TCP
from gyre.weights.transports.mapped import huge_pages
from gyre.weights.transports.opened import PartOpener, Reading
from gyre.weights.transports.publish import join_parts, publish_part
from gyre.weights.transports.shared_memory import SharedMemoryStore
from gyre.weights.transports.slot_header import HEADER_BYTES
from gyre.weights.transports.tcp_server import PartServer
from record import parser, say

TOKEN = b"of a run that is measured"
SERVER, READER = "10.231.77.1", "10.231.77.2"
ASKED = struct.Struct("<QQ")  # start, bytes: the whole protocol of raw TCP
ROUNDS = 5
DEADLINE_S = 120.0


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--gb", type=float, default=1.0, help="of weights")
    options.add_argument("--connections", type=int, default=4)
    options.add_argument("--role", choices=("all", "serve", "read"), default="all")
    options.add_argument("--shared-memory", type=Path, default=Path("/dev/shm"))
    args = options.parse_args()
    if args.role == "serve":
        serve(args)
    elif args.role == "read":
        read(args)
    else:
        run_both(args)


def silent(kind: str, /, **fields: object) -> None: ...


def tensors_of(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    count = int(args.gb * 1e9 / 2 / 16) // 1024 * 1024
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(count, generator=generator).to(torch.bfloat16)
    return {f"layers.{index}": drawn.roll(index) for index in range(16)}


def run_both(args: argparse.Namespace) -> None:
    with (
        tempfile.TemporaryDirectory(dir=args.shared_memory, prefix="bench-") as folder,
        namespaces() as (serving, reading),
    ):
        given = ["--gb", str(args.gb), "--connections", str(args.connections)]
        given += ["--shared-memory", folder]
        processes = []
        try:
            for space, role in ((serving, "serve"), (reading, "read")):
                program = ["ip", "netns", "exec", space, sys.executable, __file__, "--role", role]
                processes.append(
                    subprocess.Popen(
                        program + given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                    )
                )
            server, reader = processes
            offered = server.stdout.readline()
            told, _ = reader.communicate(offered, timeout=DEADLINE_S)
            server.communicate("end\n", timeout=DEADLINE_S)
        finally:
            for process in processes:
                process.kill()
                process.wait(DEADLINE_S)
    rates = decode(bytes.fromhex(told.split()[-1]))
    whole, alone, raw = (statistics.median(rates[name]) for name in ("whole", "reader", "raw"))
    say(
        args,
        name="weights_tcp",
        unit="GB/s read",
        ours=alone,
        peer={"name": "raw TCP, sendfile to recv_into", "value": raw},
        limit=raw,
        settings={"gb": args.gb, "connections": args.connections, "rounds": ROUNDS},
        detail={
            "share_of_raw": round(alone / raw, 3),
            "whole_gb_per_s": round(whole, 3),
            "whole_share_of_raw": round(whole / raw, 3),
            "fresh_gb_per_s": round(statistics.median(rates["fresh"]), 3),
            "rounds": {name: [round(one, 3) for one in rates[name]] for name in sorted(rates)},
        },
    )


@contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two that are joined by a pair of virtual links."""
    if os.geteuid() != 0:
        raise SystemExit("network namespaces are made by root")
    names = tuple(f"bench-{os.getpid()}-{end}" for end in "ab")
    links = tuple(f"b{os.getpid()}{end}" for end in "ab")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=DEADLINE_S)

    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1],
           "netns", names[1])  # fmt: skip
        for name, link, address in zip(names, links, (SERVER, READER), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]
    finally:
        for name in made:
            ip("netns", "delete", name)


def serve(args: argparse.Namespace) -> None:
    folder = args.shared_memory
    server = PartServer(run_id="bench", token=TOKEN, emit=silent, host=SERVER, folder=folder)
    store = SharedMemoryStore(
        run_id="bench", owner=0, emit=silent, folder=folder, served_at=(server.place,)
    )
    tensors = tensors_of(args)
    manifest = make_manifest(1, tensors, shared=False, checksums=False)
    offer = Offer(manifest=manifest, source=LocalTensors(tensors=tensors))
    parts = [publish_part(offer, rank=0, num_ranks=1, store=store)]
    slot = folder / parts[0].part.addresses[0].rpartition("/")[2]
    threading.Thread(target=serve_plainly, args=(slot,), daemon=True).start()
    print(encode(join_parts(1, 0, parts)).hex(), flush=True)
    sys.stdin.readline()
    store.close()
    server.close()


def serve_plainly(slot: Path) -> None:
    listening = socket.create_server((SERVER, 7077))

    def answer(connection: socket.socket) -> None:
        with connection, slot.open("rb") as pages:
            while asked := connection.recv(ASKED.size, socket.MSG_WAITALL):
                start, size_bytes = ASKED.unpack(asked)
                connection.sendfile(pages, HEADER_BYTES + start, size_bytes)

    while True:
        connection, _ = listening.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def read(args: argparse.Namespace) -> None:
    # where the sender has the other cores, threads would wait for each other
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    offer = decode(bytes.fromhex(sys.stdin.readline().strip()))
    size_bytes = sum(part.size_bytes for part in offer.source.parts)
    own = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(args).items()}
    opener = PartOpener(
        Reading(
            host_id="elsewhere",
            preference=(TCP,),
            token=TOKEN,
            num_connections=args.connections,
            deadline_s=DEADLINE_S,
        )
    )

    def whole() -> None:
        swap = ReadOver(offer, own, parts=opener, emit=silent)
        swap.run()
        swap.settle()

    def fresh() -> None:
        huge_pages(size_bytes).fill_(1)

    room = torch.empty(64 << 20, dtype=torch.uint8)

    def reader() -> None:
        with opener.open_parts(offer) as (part,):
            for start in range(0, size_bytes, len(room)):
                part.reader.read(start, room[: size_bytes - start])

    rates: dict[str, list[float]] = {"whole": [], "reader": [], "raw": [], "fresh": []}
    for _ in range(ROUNDS + 1):
        for name, work in (
            ("raw", lambda: read_plainly(size_bytes, args.connections)),
            ("reader", reader),
            ("whole", whole),
            ("fresh", fresh),
        ):
            began_s = time.monotonic()
            work()
            rates[name].append(size_bytes / (time.monotonic() - began_s) / 1e9)
    expected = tensors_of(args)
    assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())
    print(encode({name: found[1:] for name, found in rates.items()}).hex(), flush=True)


def read_plainly(size_bytes: int, num_connections: int) -> None:
    share = -(-size_bytes // num_connections)

    def take(index: int) -> None:
        room = memoryview(bytearray(16 << 20))
        start, stop = index * share, min(size_bytes, (index + 1) * share)
        with socket.create_connection((SERVER, 7077), DEADLINE_S) as connection:
            connection.sendall(ASKED.pack(start, stop - start))
            while start < stop:
                found = connection.recv_into(room[: stop - start])
                assert found
                start += found

    with ThreadPoolExecutor(num_connections) as threads:
        list(threads.map(take, range(num_connections)))


if __name__ == "__main__":
    main()
