"""Hand-over in a pod: two trainer ranks with the shards of zero 3, and two engines in processes of
their own on the same GPUs. In: a shape; with --peer-site a folder that has checkpoint-engine. Out:
seconds from registered host memory to verified bytes in both engines, of ours and of that peer.
Run: python bench/pod_handover.py --peer-site FOLDER --record   (33 GB of /dev/shm, 25 GB pinned)
     python bench/pod_handover.py --peer-site FOLDER --through cuda-ipc --record
     python bench/pod_handover.py --device cpu --shape tiny --through cuda-ipc   (that it runs)

Both sides begin with weights registered in host memory: ours by `publish_part`, each rank its own
shards; the peer's by `register_checkpoint`, each rank half of the whole tensors. What comes before,
from the device to host memory, is recorded apart, as is the first run, which locks pages. Ours ends
when every engine has verified its bytes. The peer has no checksums: one pass of ours over its
engine's tensors is added. It uses its broadcast, on the trainer's process group, with whichever of
its bucket sizes is fastest. In the end both engines must have the same bytes from both.

By default (`--through shm`) each engine reads all slots over its own GPU's link. With `--through
cuda-ipc` each rank serves its slot through staging buckets on its GPU, which both engines copy out,
so that each link carries half. The ranks' tensors are withdrawn and changed before the read begins:
what arrives is what host memory has. Engines lock no pages then.

The limit: half of the bytes over each GPU's PCIe link, at the rate of a page-locked copy that both
GPUs make at once. The other half can come from the neighbor by NVLink.

Prediction, before the first run on GPUs: 0.33 s, as an engine takes 0.30 s for all bytes over its
link, and keeps and verifies beside that. The peer 0.6 s: 0.15 s over the links, 0.05 s of
broadcasts, 0.03 s of copies, and as much again for its buffers, messages and collections of
garbage, which alone take 0.3 s on a CPU. Through staging buckets, before their first run: 0.15 s
over the links, 0.02 s to open and to free the buckets, 0.02 s for room to keep the last version and
for the last sums: 0.19 to 0.22 s.
"""

from __future__ import annotations

import argparse
import base64
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gyre.cluster.worker.frames import decode, encode
from gyre.core.offers import LocalShards, Offer
from gyre.core.records import Manifest
from gyre.distributed.process_group import RankGroup
from gyre.weights.gather import ShardSource, homes_of
from gyre.weights.manifest import shard_entries
from gyre.weights.shards import row_layout
from gyre.weights.transports.addresses import CUDA_IPC, SHM, host_id
from gyre.weights.transports.device.cuda_ipc import CudaStaging
from gyre.weights.transports.device.live_server import LiveServer, live_name
from gyre.weights.transports.publish import join_parts, publish_part
from gyre.weights.transports.shared_memory import SLOTS, SharedMemoryStore
from host_staging import HostStaging
from peers.checkpoint_engine_gpu import BUCKETS_GIB, PeerServer, bucket_size, find_peer
from pod_engine import EngineProcess
from ranks import Tell, call_and_read, keep_in, settle, timed
from record import circumstances, parser, say
from train_ranks import SHAPES

WARM_UP, RUNS, TRIES = 2, 5, 3  # both slots are page-locked in the first two
LOOK_S = 0.002  # between two looks at a device's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    shape: str
    layers: int
    through: str  # the way from the slots to the engines
    folder: str  # of the slots
    peer_site: str  # "": where packages are
    found: str  # a file: what was measured so far, if a part hangs
    pin: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = SHAPES[self.shape].parameter_shapes()
        return {
            name: tuple(shape)
            for name, shape in shapes.items()
            if not self.layers
            or not name.startswith("layers.")
            or int(name.split(".")[1]) < self.layers
        }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--gpus", type=int, default=2)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    options.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    options.add_argument("--through", choices=(SHM, CUDA_IPC), default=SHM)
    options.add_argument("--shared-memory", type=Path, default=Path("/dev/shm"))
    options.add_argument("--peer-site", default="", help="folder with checkpoint-engine")
    options.add_argument("--wall-s", type=float, default=220.0, help="longest that all may take")
    args = options.parse_args()
    if args.record:
        circumstances(args.commit)
    with tempfile.TemporaryDirectory(dir=args.shared_memory, prefix="bench-") as folder:
        task = Task(
            shape=args.shape,
            layers=args.layers,
            through=args.through,
            folder=folder,
            peer_site=args.peer_site,
            found=f"{folder}/found.json",
            pin=args.device == "cuda",
        )
        found = call_and_read(args, measure, task)
        if not found:
            raise SystemExit("nothing was measured")
        report(args, found)


def report(args: argparse.Namespace, found: dict[str, Any]) -> None:
    ours, peer, link = (found.get(name) for name in ("ours", "peer", "link"))
    if ours is None:
        raise SystemExit("ours was not measured")
    size_bytes = ours["size_bytes"]
    beside, limit_s = None, None
    if peer and "seconds" in peer:
        beside = {"name": f"checkpoint-engine {peer['version']}", "value": peer["seconds"]}
        found["equal_bytes"] = peer["bytes"] == ours["bytes"]
        found["ours_of_peer_unverified"] = round(ours["seconds"] / peer["update_s"], 3)
    if link:
        limit_s = size_bytes / args.gpus / link["bytes_per_s"]
        # of what our transport moves over each link
        moved = ours["link_bytes"] / link["bytes_per_s"]
        found["share_of_link"] = round(moved / ours["seconds"], 4)
        found["share_of_link_copying"] = round(moved / ours["parts_s"]["copy"], 4)
    staged = "_staged" if args.through == CUDA_IPC else ""
    say(
        args,
        name=f"pod_handover_{args.gpus}x_{args.shape.replace('.', '_')}_{args.device}{staged}",
        unit="s from registered to verified",
        ours=ours["seconds"],
        peer=beside,
        limit=limit_s,
        settings={
            "gpus": args.gpus,
            "shape": args.shape,
            "layers": args.layers or SHAPES[args.shape].num_layers,
            "zero": 3,
            "dtype": "bfloat16",
            "through": args.through,
            "device": args.device,
            "runs": RUNS,
        },
        detail=found,
    )


# -- on every rank


def measure(group: RankGroup, tell: Tell, task: Task) -> None:
    began_s, keep = time.monotonic(), keep_in(Path(task.found), group, tell)
    shapes = task.shapes()
    engine = EngineProcess(rank=group.rank, device=group.device, shapes=shapes, task=task)
    try:
        shards = make_shards(group, shapes)
        engine.ask("ready")
        keep(made_s=round(time.monotonic() - began_s, 1), device=device_name(group.device))
        keep(ours=measure_ours(group, shards, engine, task))
        keep(link=measure_link(group, engine))
        version, why_not = find_peer(task.peer_site, group.device)
        if why_not:
            keep(peer={"missing": why_not})
            return
        measure_peer(group, shards, engine, lambda **told: keep(peer={"version": version, **told}))
    finally:
        engine.kill()


def make_shards(group: RankGroup, shapes: dict[str, tuple[int, ...]]) -> ShardSource:
    """Make what zero 3 offers, float32 masters in rows, without the moments."""
    layout = row_layout(shapes, num_ranks=group.size)
    drawn_N = torch.randn(1 << 20, device=group.device) / 50
    local: dict[str, Tensor] = {}
    for name, place in layout.ranks[group.rank].items():
        count = place.stop - place.start
        local[name] = drawn_N.repeat(math.ceil(count / len(drawn_N)))[:count].clone()
    return ShardSource(layout, local, group=group, dtype=torch.bfloat16)


def next_version(shards: ShardSource, version: int) -> None:
    for held_N in shards.values():
        held_N[:1].fill_(version / 8)


def measure_ours(
    group: RankGroup, shards: ShardSource, engine: EngineProcess, task: Task
) -> dict[str, Any]:
    with ExitStack() as stack:
        ours = OurHandOver(group, shards, engine, task, stack)
        engine.ask("clear")
        parts_s = [ours.run(version) for version in range(WARM_UP + RUNS)]
        assert all(told["transport"] == task.through for told in parts_s), parts_s
        for told in parts_s[WARM_UP:]:
            told["copy"] = timed(group, lambda: engine.ask("copy_parts"))
        summed = group.share(engine.ask("sum"))
        assert len({one["bytes"] for one in summed}) == 1, "engines have different bytes"
        total_s, register_s = list(ours.total_s), list(ours.register_s)
        watched = watch(group.device, lambda: ours.run(WARM_UP + RUNS))
        events = group.share(ours.events)
    size_bytes = sum(entry.size_bytes for entry in ours.entries)
    return {
        "seconds": statistics.median(total_s[WARM_UP:]),
        "first_version_s": round(register_s[0] + total_s[0], 4),
        "runs_s": rounded(total_s),
        "register_s": rounded(register_s),
        "parts_s": {
            name: round(statistics.median(one[name] for one in parts_s[WARM_UP:]), 4)
            for name in ("prepare", "swap", "settle", "copy")
        },
        "undo_from": parts_s[-1]["undo_from"],
        "transport": parts_s[-1]["transport"],
        "events": events,
        "size_bytes": size_bytes,
        # of each GPU; by shared memory each engine reads all
        "link_bytes": size_bytes // (group.size if task.through == CUDA_IPC else 1),
        "host_bytes": SLOTS * ours.part_bytes * group.size,
        "extra_device_bytes": max(group.share(watched)),
        "bytes": summed[0]["bytes"],
    }


class OurHandOver:
    """Version after version, from this rank's slot and the others' to its engine."""

    def __init__(
        self,
        group: RankGroup,
        shards: ShardSource,
        engine: EngineProcess,
        task: Task,
        stack: ExitStack,
    ) -> None:
        self._group, self._shards, self._engine = group, shards, engine
        self.entries = shard_entries(shards.layout, shards.dtype)
        self.total_s, self.register_s = list[float](), list[float]()
        self.events: list[str] = []  # that the report of a run would count
        self.part_bytes = 0
        emit = lambda kind, **fields: self.events.append(kind)  # noqa: E731
        folder = Path(task.folder)
        self._store = SharedMemoryStore(
            run_id="bench", owner=group.rank, emit=emit, folder=folder, pin=task.pin
        )
        stack.enter_context(closing(self._store))
        self._live: LiveServer | None = None
        if task.through == CUDA_IPC:
            self._live = LiveServer(
                name=live_name("bench", group.rank),
                host=host_id(folder),
                device=group.device,
                emit=emit,
                schemes=(CUDA_IPC,),
                make_staging=CudaStaging if group.device.type == "cuda" else HostStaging,
                writes_behind=False,
            )
            stack.enter_context(closing(self._live))

    def run(self, version: int) -> dict[str, Any]:
        """Register a version, and let every engine take it. Returns what this one said."""
        group, told = self._group, []
        next_version(self._shards, version)
        offer = self._register(version)
        with self._trained():
            frame = encode(offer)
            ask = lambda: told.append(self._engine.ask("read", frame))  # noqa: E731
            self.total_s.append(timed(group, ask))
        return told[0]

    def _register(self, version: int) -> Offer:
        group, made = self._group, []
        manifest = Manifest(version=version, entries=self.entries, shared=False, epoch=0)
        offer = Offer(manifest=manifest, source=LocalShards(shards=self._shards))
        given = {"rank": group.rank, "num_ranks": group.size}
        register = lambda: made.append(  # noqa: E731
            publish_part(offer, store=self._store, live=self._live, **given)
        )
        self.register_s.append(timed(group, register))
        self.part_bytes = made[0].part.size_bytes
        frames = group.share(base64.b64encode(encode(made[0])).decode())
        return join_parts(version, 0, [decode(base64.b64decode(frame)) for frame in frames])

    @contextmanager
    def _trained(self) -> Iterator[None]:
        """Have other numbers in the tensors meanwhile, as after the next step: whoever read them
        would find wrong sums. So what is read is in host memory."""
        if self._live is None:
            yield
            return
        self._live.withdraw()
        negate(self._shards)
        yield
        negate(self._shards)


def negate(shards: ShardSource) -> None:
    for held_N in shards.values():
        held_N.neg_()


def measure_link(group: RankGroup, engine: EngineProcess) -> dict[str, Any]:
    """Copy as many bytes from page-locked memory, every GPU at once."""
    runs = []
    for _ in range(1 + TRIES):
        settle(group)
        runs.append(min(group.share(engine.ask("copy_plainly")["bytes_per_s"])))
    return {"bytes_per_s": max(runs), "runs_gb_per_s": [round(one / 1e9, 2) for one in runs]}


def measure_peer(
    group: RankGroup, shards: ShardSource, engine: EngineProcess, keep: Callable[..., None]
) -> None:
    server = PeerServer(group)
    gather_s, register_s, metas_s, update_s, sum_s = [], [], [], [], []

    def register(version: int) -> None:
        next_version(shards, version)
        whole: list[dict[str, Tensor]] = []
        gather_s.append(timed(group, lambda: whole.append(gather_half(group, shards))))
        register_s.append(timed(group, lambda: server.register(whole[0])))
        whole.clear()
        if group.device.type == "cuda":
            torch.cuda.empty_cache()
        metas_s.append(timed(group, server.gather_metas))

    def update() -> float:
        return timed(group, lambda: server.update(lambda path: engine.ask("update", path)))

    engine.ask("clear")
    register(0)
    by_bucket: dict[float, list[float]] = {}
    for gib in BUCKETS_GIB:
        with bucket_size(gib):
            by_bucket[gib] = [update() for _ in range(1 + TRIES)]
    best = min(by_bucket, key=lambda gib: statistics.median(by_bucket[gib][1:]))
    told: dict[str, Any] = {
        "by_bucket_gib": {gib: rounded(runs) for gib, runs in by_bucket.items()}
    }
    keep(**told)
    with bucket_size(best):
        for version in range(WARM_UP + RUNS):
            register(version)
            update_s.append(update())
            sum_s.append(timed(group, lambda: engine.ask("sum")))
        summed = group.share(engine.ask("sum"))
        watched = watch(group.device, update)
    assert len({one["bytes"] for one in summed}) == 1, "the peer's engines have different bytes"
    verified_s = [one + more for one, more in zip(update_s, sum_s, strict=True)]
    keep(
        **told,
        bucket_gib=best,
        seconds=statistics.median(verified_s[WARM_UP:]),
        update_s=statistics.median(update_s[WARM_UP:]),
        runs_s=rounded(update_s),
        sum_s=rounded(sum_s),
        gather_s=rounded(gather_s),
        register_s=rounded(register_s),
        gather_metas_s=rounded(metas_s),
        host_bytes=sum(group.share(server.host_bytes)),
        extra_device_bytes=max(group.share(watched)),
        bytes=summed[0]["bytes"],
    )


@torch.no_grad()
def gather_half(group: RankGroup, shards: ShardSource) -> dict[str, Tensor]:
    """Return this rank's half of the whole tensors, which the peer wants: by bytes."""
    shapes, held, own = shards.shapes, [0] * group.size, []
    for name in sorted(shapes, key=lambda name: -math.prod(shapes[name])):
        rank = held.index(min(held))
        held[rank] += math.prod(shapes[name])
        if rank == group.rank:
            own.append(name)
    whole = {
        name: torch.empty(shapes[name], dtype=shards.dtype, device=group.device) for name in own
    }
    for run in shards.gather_buckets():
        if run.name in whole:
            homes, values = homes_of(whole, [run])
            torch._foreach_copy_(homes, values)
    return whole


def watch(device: torch.device, run: Callable[[], Any]) -> int:
    """Return the most bytes of the device that all processes took beyond those taken before."""
    if device.type != "cuda":
        run()
        return 0
    torch.cuda.empty_cache()
    before, free, ended = torch.cuda.mem_get_info(device)[0], [], threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            free.append(torch.cuda.mem_get_info(device)[0])

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        run()
    finally:
        ended.set()
        looking.join(1.0)
    return before - min(free, default=before)


def rounded(runs_s: list[float]) -> list[float]:
    return [round(one, 4) for one in runs_s]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
