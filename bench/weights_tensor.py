"""Weights from a trainer's ranks with zero 2 to an engine of as many tensor ranks, each a process
of its own on the same GPUs. In: a shape. Out: seconds from registered to verified bytes on every
engine rank. Beside it, as the limit, an all-gather of the whole weights by NCCL.
Run: python bench/weights_tensor.py --shape 8b --record                (two GPUs of one host)
     python bench/weights_tensor.py --shape 32b --wall-s 540 --record  (two GPUs of 141 GB)
     python bench/weights_tensor.py --device cpu --shape tiny          (gloo, which broadcasts)

Every trainer rank has the masters of its rows. It registers them by `publish_part`, which sums them
where they are; a LiveServer then rounds them into staging buckets on its GPU, which engine ranks
read by cuda-ipc. No GPU has a whole tensor, but in the check at the end. By default no slots in
host memory are written, which a pod's ranks do meanwhile: `--slots behind` writes them too, and
needs twice the weights in shared memory. Every engine rank keeps its last part for an undo: on its
device if there is room, else on the host, which is far slower (`undo_from`). `extra_device_bytes`
is beside the tensors, with the undo on the host; `extra_device_bytes_with_undo` is as it was timed.

The rates, each of one GPU:
  bytes_per_s             bytes of an engine rank's part / seconds
  read_bytes_per_s        bytes that it read / seconds; by gloo those of a whole broadcast
  received_bytes_per_s    those of them that came from another GPU / seconds
  all_gather_bytes_per_s  bytes of the gathered weights, the own ones among them / seconds
  all_gather_received_bytes_per_s   those of them that came from another GPU / seconds
  share_of_all_gather     seconds of an all-gather of the whole weights / ours
  share_by_received_rate  received_bytes_per_s / all_gather_received_bytes_per_s

Prediction, before the first run on GPUs, at 8B on two H200s: an engine rank reads 10.6 GB for its
part of 8.2 GB, 4.5 GB of them from the other GPU. A swap of one large tensor was timed at 47 to 68
GB/s with its undo copy and check: 0.18 s at 60 GB/s, and 0.05 s for small tensors, cut columns and
the sums that ranks share. So 0.23 s, 36 GB/s of part. The all-gather receives 8.2 GB per GPU at 300
GB/s: 0.027 s, so a share of 0.12 of its time, and 0.07 by received bytes. At 32B an engine rank
reads 43.8 GB: 0.9 s, and the same shares. docs/lab-notes/pod.md says what it came to, and why.
"""

from __future__ import annotations

import argparse
import base64
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tensor_engine
from gyre.cluster.worker.frames import decode, encode
from gyre.core.offers import LocalShards, Offer, RegisteredPart
from gyre.core.records import Manifest
from gyre.distributed.init import hold_store
from gyre.distributed.process_group import RankGroup
from gyre.kernels.checksum import checksum as sum_of
from gyre.models.layout import local_spec, model_layout
from gyre.weights.boxes import local_source
from gyre.weights.gather import ShardSource
from gyre.weights.manifest import shard_entries
from gyre.weights.shards import row_layout
from gyre.weights.tensor_source import LiveTensors
from gyre.weights.transports.addresses import CUDA_IPC, GLOO, host_id
from gyre.weights.transports.contracts import OpenSlot, PartStore
from gyre.weights.transports.device.live_server import LiveServer, live_name
from gyre.weights.transports.publish import join_parts, publish_part
from gyre.weights.transports.shared_memory import SharedMemoryStore
from pod_engine import EngineProcess
from pod_handover import device_name, next_version, rounded, watch
from ranks import Tell, call_and_read, keep_in, print_line, timed
from record import circumstances, parser, say
from tensor_engine import SHAPES, spec_of

WARM_UP, RUNS = 2, 5
GATHER_BYTES = 512 << 20  # of a bucket of the all-gather, from all ranks together
ALL_NAMES = 64  # tensors of a model that is compared whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    shape: str
    layers: int
    masters: str
    slots: str
    scheme: str
    size: int  # ranks of the trainer, and of the engine
    port: int  # of the store where the engine's ranks meet
    folder: str  # of the slots
    found: str  # a file: what was measured so far, if a part hangs
    pin: bool


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--gpus", type=int, choices=(2, 4, 8), default=2)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    options.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    options.add_argument("--masters", choices=("float32", "bfloat16"), default="float32")
    options.add_argument(
        "--slots", choices=("none", "behind"), default="none", help="behind: as a pod's ranks do"
    )
    options.add_argument("--shared-memory", type=Path, default=Path("/dev/shm"))
    options.add_argument("--wall-s", type=float, default=280.0, help="longest that all may take")
    args = options.parse_args()
    if args.record:
        circumstances(args.commit)
    store = hold_store()
    with tempfile.TemporaryDirectory(dir=args.shared_memory, prefix="bench-") as folder:
        task = Task(
            shape=args.shape,
            layers=args.layers,
            masters=args.masters,
            slots=args.slots,
            scheme=CUDA_IPC if args.device == "cuda" else GLOO,
            size=args.gpus,
            port=store.port,
            folder=folder,
            found=f"{folder}/found.json",
            pin=args.device == "cuda",
        )
        found = call_and_read(args, measure, task)
        if "ours" not in found or "equal" not in found:
            raise SystemExit("ours was not measured, or not found equal")
        report(args, task, found)


def report(args: argparse.Namespace, task: Task, found: dict[str, Any]) -> None:
    ours, gather = found["ours"], found.get("all_gather")
    if gather:
        found["share_of_all_gather"] = round(gather["seconds"] / ours["seconds"], 4)
        found["share_by_received_rate"] = round(
            ours["received_bytes_per_s"] / gather["all_gather_received_bytes_per_s"], 4
        )
    name = f"weights_tensor_{args.gpus}x_{args.shape.replace('.', '_')}_{args.device}"
    kinds = {
        f"{args.layers}_layers": args.layers,
        f"{args.masters}_masters": args.masters != "float32",
        "slots_behind": args.slots == "behind",
    }
    say(
        args,
        name="_".join([name, *[kind for kind, asked in kinds.items() if asked]]),
        unit="s from registered to verified",
        ours=ours["seconds"],
        peer=None,
        limit=gather["seconds"] if gather else None,
        settings={
            "gpus": args.gpus,
            "shape": args.shape,
            "layers": spec_of(args.shape, args.layers).num_layers,
            "zero": 2,
            "tensor_ranks": args.gpus,
            "masters": args.masters,
            "dtype": "bfloat16",
            "transport": task.scheme,
            "slots": args.slots,
            "device": args.device,
            "runs": RUNS,
        },
        detail=found,
    )


# -- on every rank of the trainer


def measure(group: RankGroup, tell: Tell, task: Task) -> None:
    began_s, keep = time.monotonic(), keep_in(Path(task.found), group, tell)
    engine = EngineProcess(
        rank=group.rank,
        device=group.device,
        shapes=local_spec(spec_of(task.shape, task.layers), task.size).parameter_shapes(),
        task=task,
        script=tensor_engine.__file__,
    )
    try:
        shards = make_shards(group, task)
        engine.ask("ready")
        keep(made_s=round(time.monotonic() - began_s, 1), device=device_name(group.device))
        with ExitStack() as stack:
            handover = HandOver(group, shards, engine, task, stack)
            measure_ours(handover, keep)
            keep(equal=compare(group, shards, engine, task))
            keep(all_gather=measure_all_gather(group, sum(entry_bytes(handover))))
            measure_memory(handover, keep)
    finally:
        engine.kill()


def make_shards(group: RankGroup, task: Task) -> ShardSource:
    """Make what zero 2 offers, masters in rows, without the moments. Ranks and tensors differ."""
    shapes = spec_of(task.shape, task.layers).parameter_shapes()
    layout = row_layout(shapes, num_ranks=group.size)
    torch.manual_seed(group.rank)
    dtype = getattr(torch, task.masters)
    drawn_N = torch.randn(1 << 20, device=group.device).to(dtype) / 50
    local: dict[str, Tensor] = {}
    for number, (name, place) in enumerate(layout.ranks[group.rank].items()):
        count, rolled_N = place.stop - place.start, drawn_N.roll(1009 * number)
        local[name] = rolled_N.repeat(math.ceil(count / len(rolled_N)))[:count].clone()
    if group.device.type == "cuda":
        torch.cuda.empty_cache()  # the engine's process needs the room
    return ShardSource(layout, local, group=group, dtype=torch.bfloat16)


class NoSlots:
    """A PartStore without memory."""

    @contextmanager
    def writing(self, *, epoch: int, version: int, size_bytes: int) -> Iterator[OpenSlot]:
        part = RegisteredPart(addresses=(), size_bytes=size_bytes)
        yield OpenSlot(part=part, bytes_N=torch.empty(0, dtype=torch.uint8))

    def close(self) -> None: ...


class LiveOnly(LiveServer):
    """Serves from the device, and leaves the slot unwritten."""

    def write_behind(self, *, epoch: int, version: int, write: Callable[[], None]) -> bool:
        return True


class HandOver:
    """Version after version, from this rank's shards and the others' to the engine."""

    def __init__(
        self,
        group: RankGroup,
        shards: ShardSource,
        engine: EngineProcess,
        task: Task,
        stack: ExitStack,
    ) -> None:
        self.group, self.shards, self.engine = group, shards, engine
        self.entries = shard_entries(shards.layout, shards.dtype)
        self.version, self.register_s, self.total_s = 0, list[float](), list[float]()
        self.frame = b""  # of the newest offer
        folder, has_slots = Path(task.folder), task.slots == "behind"
        self._store: PartStore = NoSlots()
        if has_slots:
            self._store = SharedMemoryStore(
                run_id="bench", owner=group.rank, emit=print_event, folder=folder, pin=task.pin
            )
        stack.enter_context(closing(self._store))
        kind = LiveServer if has_slots else LiveOnly
        self._live = kind(
            name=live_name("bench", group.rank),
            host=host_id(folder),
            device=group.device,
            emit=print_event,
            schemes=(task.scheme,),
        )
        stack.enter_context(closing(self._live))

    def run(self, read: str = "read") -> dict[str, Any]:
        """Register a version, and let every engine rank take it. Returns what this one's said."""
        group, version, made, told = self.group, self.version, [], []
        self.version += 1
        self._live.withdraw()
        next_version(self.shards, version)
        self.engine.ask("clear")  # so that no byte is there already
        manifest = Manifest(version=version, entries=self.entries, shared=False, epoch=0)
        offer = Offer(manifest=manifest, source=LocalShards(shards=self.shards))
        rank, size = group.rank, group.size

        def register() -> None:
            made.append(
                publish_part(offer, rank=rank, num_ranks=size, store=self._store, live=self._live)
            )

        self.register_s.append(timed(group, register))
        frames = group.share(base64.b64encode(encode(made[0])).decode())
        joined = join_parts(version, 0, [decode(base64.b64decode(frame)) for frame in frames])
        self.frame = encode(joined)
        self.total_s.append(timed(group, lambda: told.append(self.engine.ask(read, self.frame))))
        return told[0]


def print_event(kind: str, /, **fields: object) -> None:
    print_line({"event": kind, **{name: str(value) for name, value in fields.items()}})


def entry_bytes(handover: HandOver) -> list[int]:
    return [entry.size_bytes for entry in handover.entries]


def measure_ours(handover: HandOver, keep: Callable[..., None]) -> None:
    group = handover.group
    told = [handover.run() for _ in range(WARM_UP + RUNS)]
    seconds = statistics.median(handover.total_s[WARM_UP:])
    counted = handover.engine.ask("count_bytes", handover.frame)
    read_bytes = sum(counted["read_bytes"])
    assert read_bytes == told[-1]["size_bytes"], "the engine read other bytes than were counted"
    others = group.share(read_bytes - counted["read_bytes"][group.rank])
    part, read = group.share(counted["part_bytes"]), group.share(read_bytes)
    medians = {
        name: statistics.median(one["times"][name] for one in told[WARM_UP:])
        for name in told[0]["times"]
    }
    sizes = entry_bytes(handover)
    keep(
        ours={
            "seconds": seconds,
            "runs_s": rounded(handover.total_s),
            "register_s": rounded(handover.register_s),
            "parts_s": [
                {name: round(took, 4) for name, took in one.items()} for one in group.share(medians)
            ],
            "undo_from": group.share(told[-1]["undo_from"]),
            "transport": told[-1]["transport"],
            "buckets": group.share(told[-1]["buckets"]),
            "size_bytes": sum(sizes),
            "largest_tensor_bytes": max(sizes),
            # of each engine rank
            "part_bytes": part,
            "read_bytes": read,
            "read_from_other_gpus_bytes": others,
            # of the slowest, which has the fewest bytes
            "bytes_per_s": min(part) / seconds,
            "read_bytes_per_s": min(read) / seconds,
            "received_bytes_per_s": min(others) / seconds,
        }
    )


def measure_memory(handover: HandOver, keep: Callable[..., None]) -> None:
    """Take two further versions, and look at the device's memory meanwhile."""
    for name, read in (
        ("extra_device_bytes_with_undo", "read"),
        ("extra_device_bytes", "read_on_host"),
    ):
        handover.engine.ask("trim")
        taken = watch(handover.group.device, partial(handover.run, read))
        keep(**{name: max(handover.group.share(taken))})


@torch.no_grad()
def compare(group: RankGroup, shards: ShardSource, engine: EngineProcess, task: Task) -> str:
    """Compare the engine rank's tensors to what a folder's loader would cut for it of the gathered
    ones. One tensor is whole at a time. Of a large model the first and last layer, and all that is
    in no layer."""
    spec = spec_of(task.shape, task.layers)
    table = model_layout(spec, group.size)
    ends = ("layers.0.", f"layers.{spec.num_layers - 1}.")
    names = [
        name
        for name in table.shapes
        if len(table.shapes) <= ALL_NAMES or not name.startswith("layers.") or name.startswith(ends)
    ]
    expected = []
    for name in names:
        shape = tuple(table.shapes[name])
        one = row_layout({name: shape}, num_ranks=group.size)
        source = ShardSource(one, {name: shards[name]}, group=group, dtype=shards.dtype)
        whole = {name: torch.empty(shape, dtype=shards.dtype, device=group.device)}
        source.gather_into(whole)
        part = torch.empty(
            tuple(table.local_shapes[name]), dtype=shards.dtype, device=group.device
        ).view(-1)
        local_source(LiveTensors(whole), table, group.rank).read(name, 0, part.numel(), part)
        expected.append(int(sum_of(part)))
    if group.device.type == "cuda":
        torch.cuda.empty_cache()
    wrong = [
        name
        for name, here, there in zip(names, expected, engine.ask("sums", names), strict=True)
        if here != there
    ]
    every = [name for told in group.share(wrong) for name in told]
    assert not every, f"an engine rank has other bytes: {', '.join(every[:5])}"
    return f"{len(names)} of {len(table.shapes)} tensors on each engine rank"


def measure_all_gather(group: RankGroup, size_bytes: int) -> dict[str, Any]:
    """Gather as many bytes as the weights have, in buckets, on the trainer's ranks."""
    most = min(GATHER_BYTES, size_bytes) // group.size
    own_N = torch.ones(most, dtype=torch.uint8, device=group.device)
    joined_N = torch.empty(most * group.size, dtype=torch.uint8, device=group.device)

    def gather() -> None:
        left = size_bytes // group.size
        while left > 0:
            count = min(most, left)
            dist.all_gather_into_tensor(
                joined_N[: count * group.size], own_N[:count], group=group.process_group
            )
            left -= count

    runs_s = [timed(group, gather) for _ in range(WARM_UP + RUNS)]
    seconds = statistics.median(runs_s[WARM_UP:])
    gathered = size_bytes // group.size * group.size
    return {
        "seconds": seconds,
        "runs_s": rounded(runs_s),
        "all_gather_bytes_per_s": gathered / seconds,
        "all_gather_received_bytes_per_s": gathered / group.size * (group.size - 1) / seconds,
    }


if __name__ == "__main__":
    main()
