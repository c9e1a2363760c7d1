"""Asynchronous snapshots on several GPUs: how long training stands still for one. In: shapes, a
folder. Out: seconds of stall, of copying, of writing, and of steps meanwhile. Run: python
bench/snapshot.py --gpus 4 --rows 8b 0.6b --to /dev/shm/snapshots --record

What stalls is `Saver.save`, and the update that follows: in the background each rank's part is
copied to pinned host memory beside that step's passes, and the update waits for what is left.
`copies` are copies beside a step of which no file is written; the step after the save has the begin
of the writing beside it, too. A row is SHAPE and any of layers=N and chunks=N, under zero 3, with a
training step of 8,192 tokens per rank and chunk. Pinned memory is made when a run's trainer is, so
how long that takes is told apart. Host memory is touched before anything is timed: a virtual
machine may only get it then. The link is a plain copy to pinned memory on all GPUs at once, in the
same run; the limit is what a copy at its speed takes longer than a step.

Whether the write ends within --write-s or not, the stall is recorded. A snapshot that was written
is read back whole.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import shutil
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from gyre.core.errors import DeadlineError
from gyre.distributed.process_group import RankGroup
from gyre.memory.pools.host_buffer import HostBuffer
from gyre.observability.hardware import describe_hardware
from gyre.trainer.checkpoint.saver import Saver
from gyre.trainer.checkpoint.store import SnapshotStore, find_faults
from gyre.trainer.trainer import NativeTrainer
from ranks import Ranks, RanksFailed, Tell, print_line, settle, timed
from record import circumstances, parser, say
from train_ranks import SHAPES, Row, make_batch, make_trainer

TITAN = {
    "name": "torchtitan, 7B, 6.3 s as published; 0.02 s with a process for staging",
    "value": 6.3,
}
STATE_BYTES = 12  # per parameter: master weights and two moments
STEPS, SAVES = 5, 3
LINK_BYTES = 2 << 30
CACHED_BYTES = 16 << 30  # of a rank's file: the system keeps what is written in memory for a while
TOUCH_SHARE = 0.8  # of the host memory that is free
TINY_TOKENS, TOKENS = 256, 8192


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--gpus", type=int, default=torch.cuda.device_count(), help="left out, all there are"
    )
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--rows", nargs="+", default=["8b", "0.6b"], metavar="SHAPE[:NAME=N]")
    options.add_argument(
        "--to",
        type=Path,
        required=True,
        help="a folder on the disk to measure; nothing stays there",
    )
    options.add_argument(
        "--write-s", type=float, default=60.0, help="longest that a write is waited for"
    )
    options.add_argument("--row-s", type=float, default=200.0, help="longest that a row may take")
    options.add_argument("--wall-s", type=float, default=480.0, help="longest that all may take")
    args = options.parse_args()
    if args.record:
        circumstances(args.commit)
    with Ranks(args.gpus, device=args.device, wall_s=args.wall_s) as ranks:
        for text in args.rows:
            row, folder = (
                read_row(text),
                args.to / f"snapshots-{text.replace(':', '-').replace('=', '')}",
            )
            try:
                found = ranks.call(measure, row, str(folder), args.write_s, deadline_s=args.row_s)[
                    0
                ]
            except RanksFailed as error:
                print_line(
                    {
                        "row": text,
                        "failed": {str(rank): dict(told) for rank, told in error.by_rank.items()},
                    }
                )
                continue
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            if found["write_s"] is None:
                ranks.kill()  # its writers go on for a while
            report(args, text, row, found)


def read_row(text: str) -> Row:
    shape, *rest = text.split(":")
    tokens = TINY_TOKENS if shape == "tiny" else TOKENS
    numbers = {key: int(value) for key, _, value in (part.partition("=") for part in rest)}
    return Row.model_validate(
        {"shape": shape, "checkpointing": "none", "matmul": "same", "tokens": tokens, **numbers}
    )


def report(args: argparse.Namespace, text: str, row: Row, found: dict[str, Any]) -> None:
    on_link = found.get("link_gb_per_s")
    say(
        args,
        name=f"snapshot_{args.gpus}x_{text.replace('.', '_').replace(':', '_').replace('=', '')}",
        unit="s of stall",
        ours=found.pop("stall_s"),
        peer=TITAN if row.spec == SHAPES["8b"] else None,
        limit=None
        if on_link is None
        else max(0.0, found["rank_bytes"] / on_link / 1e9 - found["step_s"]),
        settings={
            "gpus": args.gpus,
            **row.model_dump(),
            "layers": row.spec.num_layers,
            "folder": str(args.to),
            "device": args.device,
        },
        detail=found,
    )


def measure(group: RankGroup, tell: Tell, row: Row, folder: str, write_s: float) -> dict[str, Any]:
    """On every rank."""
    numbers = sum(torch.Size(shape).numel() for shape in row.spec.parameter_shapes().values())
    expected = STATE_BYTES * numbers // group.size
    found: dict[str, Any] = {
        "touch_s": round(
            timed(group, functools.partial(touch, expected + min(expected, CACHED_BYTES), group)), 2
        )
    }
    tell({"row": row.name, **found})
    trainer, batch = make_trainer(group, row, []), make_batch(row, group.size)
    step = functools.partial(trainer.step_now, batch)
    on_gpu, events = group.device.type == "cuda", []
    store = SnapshotStore(Path(folder), keep=1, emit=lambda kind, **fields: None)
    saver = Saver(
        store,
        group,
        background=True,
        deadline_s=write_s,
        emit=lambda kind, **fields: events.append((kind, fields)),
    )
    found["memory_made_s"] = round(timed(group, lambda: make_memory(saver, trainer)), 2)
    steps_s = [timed(group, step) for _ in range(2 + STEPS)][2:]
    if on_gpu:
        found["link_gb_per_s"] = round(LINK_BYTES / copy_plainly(group) / 1e9, 1)
    usual_s = statistics.median(steps_s)
    copies_s = [copy_beside(group, saver, trainer, step) for _ in range(SAVES)]
    settle(group)
    began = time.monotonic()
    saver.save(1, parts=trainer.live_snapshot, state={}, blobs={})
    saved_at = time.monotonic()
    next_s = timed(group, step)
    save_s = max(group.share(saved_at - began))
    held_s = max(
        group.share(sum(fields["seconds"] for kind, fields in events if kind == "snapshot.held"))
    )
    found |= {
        "stall_s": save_s + max(0.0, next_s - usual_s),
        "save_s": round(save_s, 4),
        "next_step_s": round(next_s, 4),
        "held_s": round(held_s, 4),
        "step_s": round(usual_s, 4),
        "copies": copies_s,
        "rank_bytes": saver._staging.size_bytes,
    }
    tell({"row": row.name, **found})
    found["step_s_while_writing"] = train_meanwhile(group, saver, step, saved_at + write_s)
    try:
        saver.finish()
    except DeadlineError as error:
        return found | {"write_s": None, "write_failed": str(error)}
    found["write_s"] = round(max(group.share(time.monotonic() - saved_at)), 2)
    tell({"row": row.name, "write_s": found["write_s"]})
    return found | look_through(group, store)


def make_memory(saver: Saver, trainer: NativeTrainer) -> None:
    """Return when it is there."""
    saver.prepare(trainer.snapshot_bytes())
    saver._staging.place([])


def copy_beside(
    group: RankGroup, saver: Saver, trainer: NativeTrainer, step: Any
) -> dict[str, float]:
    """A copy beside a training step, and no file: seconds of both on the slowest rank."""
    placed, took_s = [], []

    def copy() -> None:
        began = time.monotonic()
        saver._staging.fill(placed[0])
        took_s.append(time.monotonic() - began)

    copying = threading.Thread(target=copy)

    def beside() -> None:
        parts = list(trainer.live_snapshot(copying.join)["tensors"].values())
        placed.append(saver._staging.place(parts))
        copying.start()
        step()

    step_s = timed(group, beside)
    copying.join()
    return {"copy_s": round(max(group.share(took_s[0])), 4), "step_s": round(step_s, 4)}


def touch(size_bytes: int, group: RankGroup) -> None:
    """Use so much host memory once, by many threads, and give it back; or what is free, if that is
    less."""
    free = describe_hardware()["memory_available_bytes"] or 0
    size_bytes = min(size_bytes, int(TOUCH_SHARE * free) // group.size)
    buffer, threads = (
        HostBuffer(size_bytes, pin=False, owner="bench"),
        max(1, describe_hardware()["cores"] // group.size),
    )
    start, part = buffer.bytes.data_ptr(), -(-size_bytes // threads)
    with ThreadPoolExecutor(threads) as pool:
        spans = [(start + at, min(part, size_bytes - at)) for at in range(0, size_bytes, part)]
        list(pool.map(lambda span: ctypes.memset(span[0], 0, span[1]), spans))


def copy_plainly(group: RankGroup) -> float:
    """Seconds of a copy of LINK_BYTES from the device into pinned memory, on all ranks at once."""
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=group.device)
    here = HostBuffer(LINK_BYTES, pin=True, owner="bench")  # pinned as long as it lives
    return min(timed(group, lambda: here.bytes.copy_(there, non_blocking=True)) for _ in range(3))


def train_meanwhile(group: RankGroup, saver: Saver, step: Any, until: float) -> list[float]:
    """Seconds of steps while any rank still writes; ranks stop together."""
    times_s: list[float] = []
    while True:
        thread = saver._thread
        writing = (
            isinstance(thread, threading.Thread) and thread.is_alive() and time.monotonic() < until
        )
        if not any(group.share(writing)):
            return times_s[:50]
        times_s.append(round(timed(group, step), 4))


def look_through(group: RankGroup, store: SnapshotStore) -> dict[str, Any]:
    """Read what was written, all ranks together."""
    (path,) = store.paths()
    faults: list[Any] = []
    read_s = timed(
        group, lambda: faults.extend(find_faults(path, share=group.rank, num_shares=group.size))
    )
    assert not any(group.share([str(fault) for fault in faults])), faults
    written = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return {"written_bytes": written, "looked_through_s": round(read_s, 2)}


if __name__ == "__main__":
    main()
