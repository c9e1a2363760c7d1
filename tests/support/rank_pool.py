"""Rank pool: real processes that are the ranks of a group, for tests. In: how many, a back end, a
device type. Out: `run(function, …)` calls `function(group, …)` on every rank and returns the
results by rank."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from gyre.distributed.environment import child_environment
from gyre.distributed.init import RankSpec, hold_store, join, leave
from gyre.distributed.process_group import RankGroup, alone

START_S = 120.0
CALL_S = 180.0
# ranks would import the latter at their first calls
PRELOADED = [
    "zero_cases",
    "torch.distributed.fsdp",
    "gyre.trainer.parallelize.fsdp",
    "torch._dynamo",
    "numpy.random",
    "torch.utils.serialization",
]


def by_itself(group: RankGroup, case: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """A case on this rank's own device, without the others."""
    return case(alone(group.device), *args, **settings)


class RankFailed(Exception):
    """`errors`: what each rank raised, None where it returned."""

    def __init__(self, errors: list[tuple[str, str] | None]) -> None:
        super().__init__(
            "\n\n".join(f"rank {rank}: {e[1]}" for rank, e in enumerate(errors) if e is not None)
        )
        self.errors = errors


class RankPool:
    """Starts the processes at once; `close` ends them."""

    def __init__(
        self, size: int, *, backend: str = "gloo", device: str = "cpu", timeout_s: float = 90.0
    ) -> None:
        self.size = size
        self._store = hold_store()
        self.port = self._store.port
        # which imports these once for all ranks of all pools
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        pipes = [context.Pipe() for _ in range(size)]
        self._ends = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(
                target=_serve,
                args=(theirs, rank, size, self._store.port, backend, device, timeout_s),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        for rank in range(size):
            self.answer(rank, START_S)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Results by rank. RankFailed if any rank raised."""
        results = self.attempt(function, *args, **kwargs)
        errors = [value if failed else None for failed, value in results]
        if any(errors):
            raise RankFailed(errors)
        return [value for _, value in results]

    def attempt(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[tuple[bool, Any]]:
        """(whether it raised, result or (type, text)) by rank."""
        self.send(function, *args, **kwargs)
        return [self.answer(rank) for rank in range(self.size)]

    def send(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Begin a call on every rank."""
        asked = pickle.dumps((function, args, kwargs))
        for end in self._ends:
            end.send_bytes(asked)

    def answer(self, rank: int, timeout_s: float = CALL_S) -> tuple[bool, Any]:
        """What a rank returned, or raised."""
        try:
            assert self._ends[rank].poll(timeout_s), f"rank {rank} did not answer in {timeout_s} s"
            return pickle.loads(self._ends[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return True, ("Dead", "the process is gone")

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self.processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join(10.0)


def _serve(
    end: Connection, rank: int, size: int, port: int, backend: str, device: str, timeout_s: float
) -> None:
    os.environ.update(child_environment())
    torch.set_num_threads(1)
    seat = RankSpec(
        rank=rank,
        world_size=size,
        store_host="127.0.0.1",
        store_port=port,
        round_id="test",
        backend=backend,
        device=torch.device(device, rank) if device == "cuda" else torch.device(device),
        timeout_s=timeout_s,
    )
    group = join(seat)
    gc.freeze()  # what was imported needs no look at the end of each call
    _tell(end, (False, None))
    while True:
        try:
            function, args, kwargs = pickle.loads(end.recv_bytes())
        except EOFError:
            break
        try:
            _tell(end, (False, function(group, *args, **kwargs)))
        except BaseException as error:  # noqa: BLE001  the test that waits for it judges
            _tell(end, (True, (type(error).__name__, f"{error}\n{traceback.format_exc()}")))
        end_groups()
    leave(group)


def _tell(end: Connection, answer: tuple[bool, Any]) -> None:
    """Send bytes: a connection's own pickles put each tensor into shared memory, which takes far
    longer for the hundreds of small ones of a snapshot."""
    end.send_bytes(pickle.dumps(answer))


def end_groups() -> None:
    """End the groups that a call made: gloo wakes a thread of each a hundred times a second."""
    gc.collect()
    for made in list(dist.distributed_c10d._world.pg_map):
        if made is not dist.group.WORLD:
            dist.destroy_process_group(made)
