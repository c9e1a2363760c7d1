"""Rank pool: real processes that are the ranks of a group, for tests. In: how many, a back end, a device type. Out:
`run(function, …)` calls `function(group, …)` on every rank and returns the results by rank."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

START_S = 120.0
CALL_S = 120.0


class RankFailed(Exception):
    """`errors`: what each rank raised, None where it returned."""

    def __init__(self, errors: list[tuple[str, str] | None]) -> None:
        super().__init__("\n\n".join(f"rank {rank}: {e[1]}" for rank, e in enumerate(errors) if e is not None))
        self.errors = errors


class RankPool:
    """Starts the processes at once; `close` ends them."""

    def __init__(self, size: int, *, backend: str = "gloo", device: str = "cpu", timeout_s: float = 20.0) -> None:
        from gyre.parallel.start import child_environment, hold_store

        self.size = size
        self._store = hold_store()
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(size)]
        self._ends = [ours for ours, _ in pipes]
        kept = dict(os.environ)
        os.environ.update(child_environment() | {"OMP_NUM_THREADS": "1"})
        try:
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
        finally:
            os.environ.clear()
            os.environ.update(kept)
        for _, theirs in pipes:
            theirs.close()
        self._collect(START_S)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Results by rank. RankFailed if any rank raised."""
        results = self.attempt(function, *args, **kwargs)
        errors = [value if failed else None for failed, value in results]
        if any(errors):
            raise RankFailed(errors)
        return [value for _, value in results]

    def attempt(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[bool, Any]]:
        """(whether it raised, result or (type, text)) by rank."""
        for end in self._ends:
            end.send((function, args, kwargs))
        return self._collect(CALL_S)

    def _collect(self, timeout_s: float) -> list[tuple[bool, Any]]:
        found = []
        for rank, end in enumerate(self._ends):
            try:
                assert end.poll(timeout_s), f"rank {rank} did not answer in {timeout_s} s"
                found.append(end.recv())
            except EOFError:
                found.append((True, ("Dead", "the process is gone")))
        return found

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self.processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join(10.0)


def _serve(end: Connection, rank: int, size: int, port: int, backend: str, device: str, timeout_s: float) -> None:
    import torch

    from gyre.parallel.start import Seat, join, leave

    torch.set_num_threads(1)
    seat = Seat(
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
    end.send((False, None))
    while True:
        try:
            function, args, kwargs = end.recv()
        except EOFError:
            break
        try:
            end.send((False, function(group, *args, **kwargs)))
        except BaseException as error:  # noqa: BLE001  the test that waits for it judges
            end.send((True, (type(error).__name__, f"{error}\n{traceback.format_exc()}")))
    leave(group)
