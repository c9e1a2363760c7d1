"""Weights from device to device: a publisher and an engine, each a process. In: a shape, a
transport, the engine's GPU. Out: seconds to swap in a version. Beside it, in turns in one run, the
same version from the publisher's slot (the peer), and a plain copy between the devices (the limit).
Run: python bench/weights_device.py --transport cuda-ipc --record                 (one GPU)
     python bench/weights_device.py --transport cuda-ipc --engine-gpu 1 --record  (two GPUs)
     python bench/weights_device.py --transport nccl --engine-gpu 1 --record      (two GPUs)
     python bench/weights_device.py --transport nccl --device cpu --shape tiny    (gloo)

Prediction, before the first run on a GPU: the read alone 150 GB/s on one GPU and on two, where each
bucket of 32 MiB pays two waits and a message; the swap, which keeps the last version and verifies
the new one at the speed of the device's memory, 100 GB/s: half the time of the slot's 47 GB/s.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
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
from gyre.core.errors import SnapshotError
from gyre.core.offers import LocalTensors, Offer
from gyre.distributed.environment import child_environment
from gyre.weights.manifest import checksum, make_manifest
from gyre.weights.registered import BUCKET_BYTES, ReadOver
from gyre.weights.transports.addresses import CUDA_IPC, GLOO, NCCL, SHM, host_id
from gyre.weights.transports.device.live_server import LiveServer, live_name
from gyre.weights.transports.opened import PartOpener, Reading
from gyre.weights.transports.part_layout import plan_reads
from gyre.weights.transports.publish import join_parts, publish_part
from gyre.weights.transports.shared_memory import SharedMemoryStore
from record import parser, say
from train_ranks import SHAPES
from weights_shm import DEADLINE_S, RUNS, WARM_UP, make_tensors

CHUNK_BYTES = 1 << 30  # of the plain copy


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--transport", choices=(CUDA_IPC, NCCL), required=True)
    options.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    options.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--engine-gpu", type=int, default=0, help="the publisher has GPU 0")
    options.add_argument(
        "--slots-first", action="store_true", help="write the slot before the version is offered"
    )
    options.add_argument("--shared-memory", type=Path, default=Path("/dev/shm"))
    args = options.parse_args()
    os.environ.update(child_environment(), NCCL_SOCKET_IFNAME="lo")
    began_s = time.monotonic()
    own_device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    tensors = make_on(args, str(own_device))
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory(dir=args.shared_memory, prefix="bench-") as name:
        folder = Path(name)
        engine = context.Process(target=receive_all, args=(there, args, name), daemon=True)
        engine.start()
        store = SharedMemoryStore(
            run_id="bench",
            owner=0,
            emit=print_event,
            folder=folder,
            pin=args.device == "cuda",
        )
        live = LiveServer(
            name=live_name("bench", 0),
            host=host_id(folder),
            device=own_device,
            emit=print_event,
            schemes=(scheme_of(args),),
            writes_behind=not args.slots_first,
        )
        try:
            registered, received = run_versions(tensors, store, live, here)
        finally:
            live.close()
            store.close()
            engine.kill()
            engine.join(DEADLINE_S)
    report(args, size_bytes, registered, received, began_s)


def scheme_of(args: argparse.Namespace) -> str:
    return GLOO if args.device == "cpu" else args.transport


def make_on(args: argparse.Namespace, device: str) -> dict[str, Tensor]:
    return make_tensors(argparse.Namespace(shape=args.shape, layers=args.layers, device=device))


def print_event(kind: str, /, **fields: object) -> None:
    print(f"  {kind}: {fields}", flush=True)


def run_versions(
    tensors: dict[str, Tensor], store: SharedMemoryStore, live: LiveServer, to: Connection
) -> tuple[list[float], dict[str, Any]]:
    """Register version after version; the engine takes each. Returns the seconds of registering,
    and what the engine measured."""
    registered = []
    for version in range(WARM_UP + RUNS):
        live.withdraw()
        for tensor in tensors.values():
            tensor.view(-1)[:1].fill_(float(version))
        began_s = time.monotonic()
        manifest = make_manifest(version, tensors, shared=False, checksums=False)
        offer = Offer(manifest=manifest, source=LocalTensors(tensors=tensors))
        part = publish_part(offer, rank=0, num_ranks=1, store=store, live=live)
        registered.append(time.monotonic() - began_s)
        to.send_bytes(encode(join_parts(version, 0, [part])))
        assert to.poll(DEADLINE_S), "the engine's process has not answered"
        told = decode(to.recv_bytes())
        assert told["norm"] == checksum(next(iter(tensors.values()))), "another version arrived"
    to.send_bytes(b"")
    assert to.poll(DEADLINE_S)
    return registered, decode(to.recv_bytes())


def receive_all(source: Connection, args: argparse.Namespace, name: str) -> None:
    """In the engine's process."""
    is_cuda, folder = args.device == "cuda", Path(name)
    device = torch.device("cuda", args.engine_gpu) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    own = {
        key: torch.zeros_like(tensor, device=device)
        for key, tensor in make_on(args, str(device)).items()
    }
    size_bytes = sum(tensor.nbytes for tensor in own.values())

    def opener_of(*preference: str) -> PartOpener:
        reading = Reading(
            host_id=host_id(folder),
            folder=folder,
            preference=preference,
            pin=is_cuda,
            device=device,
        )
        return PartOpener(reading, emit=print_event)

    openers = {"device": opener_of(scheme_of(args)), "slot": opener_of(SHM)}
    there = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    plain = torch.ones(min(CHUNK_BYTES, size_bytes), dtype=torch.uint8, device=there)
    landed = torch.empty_like(plain, device=device)
    room = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device)
    found: dict[str, list[float]] = {}
    kept: list[str] = []

    def timed(what: str, work: Callable[[], Any]) -> Any:
        began_s = time.monotonic()
        result = work()
        if is_cuda:
            torch.cuda.synchronize(device)
        found.setdefault(what, []).append(time.monotonic() - began_s)
        return result

    def copy_plainly() -> None:
        for start in range(0, size_bytes, len(plain)):
            part = slice(0, min(len(plain), size_bytes - start))
            landed[part].copy_(plain[part], non_blocking=True)

    def read_only(offer: Offer) -> None:
        """The bytes to this device, and neither to their places nor verified."""
        with openers["device"].open_parts(offer) as parts:
            buckets = plan_reads(
                offer.manifest.entries, owners=range(len(parts)), bucket_bytes=BUCKET_BYTES
            )
            for bucket in buckets:
                parts[bucket.owner].reader.read(bucket.stretches, room[: bucket.size_bytes])
            for part in parts:
                part.reader.check()

    def swap_by(way: str, offer: Offer) -> None:
        swap = timed(
            f"prepare_{way}",
            lambda: ReadOver(
                offer,
                own,
                parts=openers[way],
                emit=lambda kind, **fields: kept.append(f"{fields['undo_from']} {way}"),
            ),
        )
        timed(f"swap_{way}", swap.run)
        swap.settle()

    while frame := source.recv_bytes():
        offer = decode(frame)
        swap_by("device", offer)
        timed("read_device", lambda offer=offer: read_only(offer))
        timed("plain", copy_plainly)
        for tensor in own.values():
            tensor.zero_()  # so that what is verified next has come from the slot
        wait_for_slot(openers["slot"], offer)
        swap_by("slot", offer)
        source.send_bytes(encode({"norm": checksum(next(iter(own.values())))}))
    peak = torch.cuda.max_memory_allocated(device) if is_cuda else 0
    source.send_bytes(encode({"seconds": found, "undo_from": sorted(set(kept)), "peak": peak}))
    for opener in openers.values():
        opener.close()


def wait_for_slot(opener: PartOpener, offer: Offer) -> None:
    """A slot is written behind the version on its publisher's device."""
    ends_at = time.monotonic() + DEADLINE_S
    while True:
        try:
            with opener.open_parts(offer):
                return
        except SnapshotError:
            assert time.monotonic() < ends_at, "the slot was not written"
            time.sleep(0.01)


def report(
    args: argparse.Namespace,
    size_bytes: int,
    registered: list[float],
    received: dict[str, Any],
    began_s: float,
) -> None:
    seconds = {**received["seconds"], "register": registered}
    medians = {name: statistics.median(runs[WARM_UP:]) for name, runs in seconds.items()}
    shape, where = args.shape.replace(".", "_"), args.engine_gpu if args.device == "cuda" else "cpu"
    say(
        args,
        name=f"weights_device_{shape}_{scheme_of(args).replace('-', '_')}_{where}"
        + ("_slots_first" if args.slots_first else ""),
        unit="s to swap in a version",
        ours=medians["swap_device"],
        peer={"name": "the same from a slot in shared memory", "value": medians["swap_slot"]},
        limit=medians["plain"],
        settings={
            "shape": args.shape,
            "layers": args.layers or SHAPES[args.shape].num_layers,
            "dtype": "bfloat16",
            "transport": scheme_of(args),
            "slots_first": args.slots_first,
            "engine_gpu": where,
            "runs": RUNS,
        },
        detail={
            "size_bytes": size_bytes,
            "gb_per_s": {name: round(size_bytes / one / 1e9, 2) for name, one in medians.items()},
            "median_s": {name: round(one, 4) for name, one in medians.items()},
            "first_s": {name: round(runs[0], 3) for name, runs in seconds.items()},
            "undo_from": received["undo_from"],
            "engine_peak_bytes": received["peak"],
            "script_s": round(time.monotonic() - began_s, 1),
        },
    )


if __name__ == "__main__":
    main()
