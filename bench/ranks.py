"""Ranks: processes, one per GPU of this host, that a bench calls alike. In: how many, a device
type. Out: what a function returned on every rank, and what rank 0 told meanwhile, printed at once
as lines of JSON. Callers: bench/engine.py, bench/train_ranks.py, bench/handover.py,
bench/pod_handover.py, bench/snapshot.py, bench/weights_tensor.py.

Ranks that wait in a collective for one that failed never come back: a call that fails anywhere, or
is late, ends all processes, and the next call starts fresh ones. So one measurement that runs out
of memory loses no other.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gyre.distributed.environment import child_environment
from gyre.distributed.init import RankSpec, hold_store, join, leave
from gyre.distributed.process_group import RankGroup

START_S = 150.0  # of processes: imports, the device, the first collective
COLLECTIVE_S = 60.0
LEAST_S = 10.0  # that a call needs
GRACE_S = 5.0  # how long the other ranks have to say what they saw, once one has failed
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG

Tell = Callable[[Mapping[str, Any]], None]  # partial results; only those of rank 0 are printed


class RanksFailed(Exception):
    """`by_rank`: what each rank that failed said: "error", and on a GPU "allocated_gib" and
    "peak_gib"."""

    def __init__(self, by_rank: Mapping[int, Mapping[str, Any]]) -> None:
        super().__init__(
            "; ".join(f"rank {rank}: {told['error']}" for rank, told in by_rank.items())
        )
        self.by_rank = by_rank

    @property
    def out_of_memory(self) -> bool:
        return any("out of memory" in told["error"] for told in self.by_rank.values())


class Ranks:
    """Use as a context manager, so that no process outlives the bench. All calls together end
    within `wall_s`."""

    def __init__(self, size: int, *, device: str, wall_s: float) -> None:
        self.size, self._device = size, device
        self._ends_at = time.monotonic() + wall_s
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        self._store: Any = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def call(self, function: Callable[..., Any], *args: Any, deadline_s: float) -> list[Any]:
        """Results of `function(group, tell, *args)` by rank. The time to start processes, if there
        are none, is not in `deadline_s`. RanksFailed when a rank raises, dies, or has not answered
        by then, or when no time is left."""
        if self.left_s() < LEAST_S:
            raise RanksFailed({0: {"error": "no time is left for it"}})
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send((function, args))
        found = self._collect(deadline_s)
        for end in self._ends:
            end.send((_clear, ()))
        try:
            self._collect(COLLECTIVE_S)
        except RanksFailed as error:  # nothing measured is lost
            print_line({"processes": "not cleared, ended", "error": str(error)})
        return found

    def left_s(self) -> float:
        """Until all must have ended."""
        return self._ends_at - time.monotonic()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(20.0)
        for end in self._ends:
            end.close()
        self._ends, self._processes, self._store = [], [], None

    def _start(self) -> None:
        self._store = hold_store()
        context = multiprocessing.get_context("spawn")
        started_s = time.monotonic()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            given = theirs, rank, self.size, self._store.port, self._device
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        self._collect(START_S)
        print_line({"ranks": self.size, "started_s": round(time.monotonic() - started_s, 1)})

    def _collect(self, deadline_s: float) -> list[Any]:
        """An answer of each rank."""
        results: dict[int, Any] = {}
        failures: dict[int, Mapping[str, Any]] = {}
        deadline_s = min(deadline_s, max(0.0, self.left_s()))
        ends_at = time.monotonic() + deadline_s
        while len(results) + len(failures) < self.size:
            waiting = {
                self._ends[r]: r for r in range(self.size) if r not in results and r not in failures
            }
            ready = wait(list(waiting), timeout=max(0.0, ends_at - time.monotonic()))
            if not ready:
                if not failures:
                    failures = {
                        rank: {"error": f"no answer within {deadline_s:.0f} s"}
                        for rank in waiting.values()
                    }
                break
            for end, rank in waiting.items():
                if end not in ready:
                    continue
                try:
                    kind, value = end.recv()
                except (EOFError, ConnectionResetError):
                    kind, value = "failed", {"error": "the process is gone"}
                if kind == "told":
                    print_line(value)
                elif kind == "failed":
                    ends_at = min(ends_at, time.monotonic() + GRACE_S)
                    failures[rank] = value
                else:
                    results[rank] = value
        if failures:
            self.kill()
            raise RanksFailed(failures)
        return [results[rank] for rank in range(self.size)]


def print_line(told: Mapping[str, Any]) -> None:
    print(json.dumps(told), flush=True)


def keep_in(path: Path, group: RankGroup, tell: Tell) -> Callable[..., None]:
    """Return what tells parts that were measured, and keeps them in a file as they come: a part
    that hangs takes the ranks with it."""
    began_s, found = time.monotonic(), dict[str, Any]()

    def keep(**parts: Any) -> None:
        found.update(parts, script_s=round(time.monotonic() - began_s, 1))
        tell(parts)
        if group.rank == 0:
            path.write_text(json.dumps(found))

    return keep


def call_and_read(
    args: argparse.Namespace, measure: Callable[..., None], task: Any
) -> dict[str, Any]:
    """Measure on `args.gpus` ranks, and return what was kept in the file `task.found`, also where
    they failed, which is printed."""
    with Ranks(args.gpus, device=args.device, wall_s=args.wall_s) as ranks:
        try:
            ranks.call(measure, task, deadline_s=args.wall_s)
        except RanksFailed as error:
            told = {str(rank): dict(failed) for rank, failed in error.by_rank.items()}
            print_line({"failed": told})
    kept = Path(task.found)
    return json.loads(kept.read_text()) if kept.is_file() else {}


def settle(group: RankGroup) -> None:
    """All ranks are here, and their devices idle."""
    group.barrier()
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)


def timed(group: RankGroup, run: Callable[[], Any]) -> float:
    """Seconds of the slowest rank, the same number on all."""
    settle(group)
    started_s = time.perf_counter()
    run()
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    return max(group.share(time.perf_counter() - started_s))


def memory_gib(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    return {
        "allocated_gib": round(torch.cuda.memory_allocated(device) / 2**30, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2),
    }


def _clear(group: RankGroup, tell: Tell) -> None:
    """Free what a call has left: memory, and the process groups of its meshes."""
    gc.collect()
    for made in list(dist.distributed_c10d._world.pg_map):
        if made is not group.process_group:
            dist.destroy_process_group(made)
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(group.device)


def _serve(end: Connection, rank: int, size: int, port: int, device: str) -> None:
    """A rank's process."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    os.environ.update(child_environment())
    on_gpu = device == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    own = torch.device(device, rank) if on_gpu else torch.device(device)
    seat = RankSpec(
        rank=rank,
        world_size=size,
        store_host="127.0.0.1",
        store_port=port,
        round_id="bench",
        backend="nccl" if on_gpu else "gloo",
        device=own,
        timeout_s=COLLECTIVE_S,
    )

    def tell(told: Mapping[str, Any]) -> None:
        if rank == 0:
            end.send(("told", dict(told)))

    def attempt(work: Callable[[], Any]) -> bool:
        try:
            end.send(("done", work()))
        except Exception as error:  # noqa: BLE001  the parent prints it
            text = f"{type(error).__name__}: {str(error)[:600]}"
            trace = "".join(traceback.format_tb(error.__traceback__)[-4:])
            end.send(("failed", {"error": text, "trace": trace, **memory_gib(own)}))
            return False
        return True

    groups: list[RankGroup] = []
    if not attempt(lambda: groups.append(join(seat))):
        return
    while True:
        try:
            function, args = end.recv()
        except EOFError:
            break
        if not attempt(lambda function=function, args=args: function(groups[0], tell, *args)):
            time.sleep(GRACE_S)  # the parent ends it
            return
    leave(groups[0])
