"""Registered weights from shared memory: a publisher and an engine's process on one device. In: a
shape. Out: seconds to prepare and swap in a version, and to register one. Beside it a copy of the
same bytes from page-locked memory of the engine's own process, in turns in one run: the limit.
Run: python bench/weights_shm.py --shape 8b --record   (33 GB of /dev/shm, 50 GB of the device)

Prediction, before the first run on a GPU: 95 % of the page-locked copy for the copy alone, 85 % for
the swap, which also keeps the last version on the device and verifies the new one there, at the
speed of its memory. It was 85 %; 95 % is expected since both happen beside the copies. The first
version is slower, by the page-locking of the slots.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gyre.cluster.worker.frames import decode, encode
from gyre.core.offers import LocalTensors, Offer
from gyre.core.records import Manifest
from gyre.weights.manifest import checksum, find_faults, make_manifest
from gyre.weights.registered import ReadOver
from gyre.weights.transports.addresses import host_id
from gyre.weights.transports.opened import PartOpener, Reading
from gyre.weights.transports.publish import join_parts, publish_part
from gyre.weights.transports.shared_memory import SharedMemoryStore
from record import parser, say
from train_ranks import SHAPES

WARM_UP, RUNS = 2, 5  # both slots are page-locked in the first two
CHUNK_BYTES = 1 << 30  # of the plain copy
DEADLINE_S = 170.0


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    options.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--shared-memory", type=Path, default=Path("/dev/shm"))
    args = options.parse_args()
    began_s = time.monotonic()
    tensors = make_tensors(args)
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory(dir=args.shared_memory, prefix="bench-") as folder:
        engine = context.Process(target=receive_all, args=(there, args, folder), daemon=True)
        engine.start()
        store = SharedMemoryStore(
            run_id="bench",
            owner=0,
            emit=silent,
            folder=Path(folder),
            pin=args.device == "cuda",
        )
        try:
            registered, received = run_versions(args, tensors, store, here)
        finally:
            store.close()
            engine.kill()
            engine.join(DEADLINE_S)
    received["checksums"] = checksum_rates(tensors, size_bytes)
    report(args, size_bytes, registered, received, began_s)


def make_tensors(args: argparse.Namespace) -> dict[str, Tensor]:
    """Random numbers, drawn once and rolled: that is fast on a CPU too."""
    spec = SHAPES[args.shape]
    shapes = spec.parameter_shapes()
    if args.layers:
        shapes = {
            name: shape
            for name, shape in shapes.items()
            if not name.startswith("layers.") or int(name.split(".")[1]) < args.layers
        }
    drawn = torch.randn(1 << 20, device=args.device).to(torch.bfloat16)
    made = {}
    for name, shape in shapes.items():
        made[name] = torch.empty(shape, dtype=torch.bfloat16, device=args.device)
        flat = made[name].view(-1)
        for start in range(0, flat.numel(), len(drawn)):
            piece = flat[start : start + len(drawn)]
            piece.copy_(drawn[: len(piece)])
    return made


def silent(kind: str, /, **fields: object) -> None: ...


def run_versions(
    args: argparse.Namespace, tensors: dict[str, Tensor], store: SharedMemoryStore, to: Connection
) -> tuple[list[float], dict[str, Any]]:
    """Register version after version; the engine takes each. Returns the seconds of registering,
    and what the engine measured."""
    registered = []
    for version in range(WARM_UP + RUNS):
        for tensor in tensors.values():
            tensor.view(-1)[:1].fill_(float(version))
        began_s = time.monotonic()
        manifest = make_manifest(version, tensors, shared=False, checksums=False)
        offer = Offer(manifest=manifest, source=LocalTensors(tensors=tensors))
        part = publish_part(offer, rank=0, num_ranks=1, store=store)
        registered.append(time.monotonic() - began_s)
        to.send_bytes(encode(join_parts(version, 0, [part])))
        assert to.poll(DEADLINE_S), "the engine's process has not answered"
        told = decode(to.recv_bytes())
        assert told["norm"] == checksum(next(iter(tensors.values()))), "another version arrived"
    to.send_bytes(b"")
    assert to.poll(DEADLINE_S)
    return registered, decode(to.recv_bytes())


def receive_all(source: Connection, args: argparse.Namespace, folder: str) -> None:
    """In the engine's process."""
    own = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(args).items()}
    size_bytes = sum(tensor.nbytes for tensor in own.values())
    is_cuda = args.device == "cuda"
    place = Path(folder)
    opener = PartOpener(Reading(host_id=host_id(place), folder=place, pin=is_cuda))
    plain = torch.empty(min(CHUNK_BYTES, size_bytes), dtype=torch.uint8, pin_memory=is_cuda)
    plain.fill_(1)
    landed = torch.empty_like(plain, device=args.device)
    found: dict[str, list[float]] = {"prepare": [], "swap": [], "copy": [], "plain": []}
    kept: list[str] = []

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began_s = time.monotonic()
        result = work()
        if is_cuda:
            torch.cuda.synchronize()
        found[name].append(time.monotonic() - began_s)
        return result

    def copy_plainly() -> None:
        for start in range(0, size_bytes, len(plain)):
            part = slice(0, min(len(plain), size_bytes - start))
            landed[part].copy_(plain[part], non_blocking=True)

    def copy_parts(offer: Offer) -> None:
        with opener.open_parts(offer) as parts:
            for part in parts:
                for one in part.placed:
                    bytes_N = part.reader.view(one.start, one.stop)
                    own[one.entry.name].view(-1).view(torch.uint8).copy_(bytes_N, non_blocking=True)

    while frame := source.recv_bytes():
        offer = decode(frame)
        swap = timed(
            "prepare",
            lambda offer=offer: ReadOver(
                offer,
                own,
                parts=opener,
                emit=lambda kind, **fields: kept.append(fields["undo_from"]),
            ),
        )
        timed("swap", swap.run)
        swap.settle()
        timed("copy", lambda offer=offer: copy_parts(offer))
        timed("plain", copy_plainly)
        source.send_bytes(encode({"norm": checksum(next(iter(own.values())))}))
    source.send_bytes(encode({"seconds": found, "undo_from": kept[-1]}))


def checksum_rates(tensors: dict[str, Tensor], size_bytes: int) -> dict[str, float]:
    """GB/s of checksums: of all tensors where they are, of host memory, and of blake2b, which the
    manifests had before."""
    host = torch.ones(1 << 26, dtype=torch.int16)
    data = host[: 1 << 25].numpy().tobytes()
    rates = {}
    for name, count, work in (
        ("here", size_bytes, lambda: find_faults(manifest_of(0, tensors), tensors)),
        ("host", host.nbytes, lambda: checksum(host)),
        ("blake2b", len(data), lambda: hashlib.blake2b(data, digest_size=8).digest()),
    ):
        work()
        began_s = time.monotonic()
        work()
        passes = 2 if name == "here" else 1  # one to make the manifest, one to verify it
        rates[name] = round(passes * count / (time.monotonic() - began_s) / 1e9, 2)
    return rates


def manifest_of(version: int, tensors: dict[str, Tensor]) -> Manifest:
    return make_manifest(version, tensors, shared=False, checksums=True)


def report(
    args: argparse.Namespace,
    size_bytes: int,
    registered: list[float],
    received: dict[str, Any],
    began_s: float,
) -> None:
    seconds = {**received["seconds"], "register": registered}
    medians = {name: statistics.median(runs[WARM_UP:]) for name, runs in seconds.items()}
    say(
        args,
        name=f"weights_shm_{args.shape.replace('.', '_')}_{args.device}",
        unit="s to swap in a version",
        ours=medians["swap"],
        peer={"name": "a copy from page-locked memory", "value": medians["plain"]},
        limit=medians["plain"],
        settings={
            "shape": args.shape,
            "layers": args.layers or SHAPES[args.shape].num_layers,
            "dtype": "bfloat16",
            "device": args.device,
            "runs": RUNS,
        },
        detail={
            "size_bytes": size_bytes,
            "gb_per_s": {name: round(size_bytes / one / 1e9, 2) for name, one in medians.items()},
            "median_s": {name: round(one, 4) for name, one in medians.items()},
            "first_s": {name: round(runs[0], 3) for name, runs in seconds.items()},
            "checksum_gb_per_s": received["checksums"],
            "undo_from": received["undo_from"],
            "script_s": round(time.monotonic() - began_s, 1),
        },
    )


if __name__ == "__main__":
    main()
