"""Engine groups: each served engine is several worker processes, one for each tensor rank. In: the
role of an engine. Out: one handle for all its ranks. Implements Cluster over the one that starts
processes. Imports no torch.

    pool ─calls─▶ engine-0 ─entries─▶ engine-0.1, …

The first rank gets the calls. A look is at all ranks, and answered once each has. When one rank has
ended, so has the engine; stopping it then ends the others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal

from gyre.cluster.worker.rpc import STARTS, ask
from gyre.core.contracts import Cluster, WorkerHandle
from gyre.core.errors import WorkerLost
from gyre.core.events import Emit
from gyre.core.records import RoleSpec
from gyre.launch.placement.engine_ranks import all_or_first_error, name_rank


class EngineGroup:
    """The ranks of one engine as one worker."""

    def __init__(self, ranks: Sequence[WorkerHandle]) -> None:
        self.ranks = tuple(ranks)
        self.name = ranks[0].name
        self.place = "; ".join(f"rank {rank}: {one.place}" for rank, one in enumerate(ranks))
        self.cause = ""  # of its end: the rank that was gone first, and why

    def begin(self, method: str, *args: Any) -> Future[Any]:
        """Call the first rank. When another one is gone, the error of a call names that one."""
        whole: Future[Any] = Future()
        whole.set_running_or_notify_cancel()

        def pass_on(answer: Future[Any]) -> None:
            error = answer.exception()
            if isinstance(error, WorkerLost) and self.cause:
                error = WorkerLost(f"{self.name} is lost: {self.cause}")
            if error is not None:
                whole.set_exception(error)
            else:
                whole.set_result(answer.result())

        self.ranks[0].begin(method, *args).add_done_callback(pass_on)
        return whole

    def look(self, what: Literal["pulse", "stacks"]) -> Future[Any]:
        looks = [one.look(what) for one in self.ranks]
        return joined(looks, sum if what == "pulse" else self._name_stacks)

    def _name_stacks(self, texts: Sequence[str]) -> str:
        return "\n".join(f"= rank {rank}\n{text}" for rank, text in enumerate(texts))


class EngineGroups:
    """A cluster whose workers are engines of `num_ranks` processes each."""

    def __init__(self, cluster: Cluster, num_ranks: int, *, emit: Emit) -> None:
        self._cluster = cluster
        self._num_ranks = num_ranks
        self._emit = emit

    async def start(self, spec: RoleSpec) -> WorkerHandle:
        """Start an engine's processes, and let them meet. `spec.devices` are those of all ranks.
        After an error none of them is left."""
        roles = [rank_role(spec, rank) for rank in range(self._num_ranks)]
        started: dict[int, WorkerHandle] = {}
        limits = {"deadline_s": spec.deadline_s, "key": STARTS}

        async def start(rank: int) -> None:
            started[rank] = await self._cluster.start(roles[rank])

        try:
            await all_or_first_error([start(rank) for rank in range(self._num_ranks)])
            ranks = [started[rank] for rank in range(self._num_ranks)]
            port = await ask(ranks[0], "open_store", **limits)
            await all_or_first_error([ask(one, "meet", port, **limits) for one in ranks])
        except BaseException:  # they would keep their devices
            await asyncio.gather(*(self._cluster.stop(one) for one in started.values()))
            raise
        self._emit("cluster.started", workers={one.name: one.place for one in ranks})
        return EngineGroup(ranks)

    async def stop(self, handle: WorkerHandle) -> None:
        assert isinstance(handle, EngineGroup)
        await asyncio.gather(*(self._cluster.stop(one) for one in handle.ranks))

    async def watch(self, handle: WorkerHandle) -> str:
        """Return when one of the ranks is gone, with its number and the reason."""
        assert isinstance(handle, EngineGroup)
        watches = [asyncio.create_task(self._cluster.watch(one)) for one in handle.ranks]
        try:
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            rank = next(rank for rank, watch in enumerate(watches) if watch.done())
            why = await watches[rank]
            handle.cause = f"rank {rank} of the engine ({handle.ranks[rank].place}): {why}"
            return handle.cause
        finally:
            for watch in watches:
                watch.cancel()

    def share(self, value: Any) -> Any:
        return self._cluster.share(value)

    async def close(self) -> None:
        await self._cluster.close()


def rank_role(spec: RoleSpec, rank: int) -> RoleSpec:
    """Return the role of one rank of an engine. Pure."""
    return replace(
        spec,
        name=name_rank(spec.name, rank),
        arguments={**spec.arguments, "tensor_rank": rank},
        devices=spec.devices[rank : rank + 1],
    )


def joined(parts: Sequence[Future[Any]], join: Callable[[Sequence[Any]], Any]) -> Future[Any]:
    """Return the answers of all as one; the first error of any. Futures may end in any thread."""
    whole: Future[Any] = Future()
    whole.set_running_or_notify_cancel()  # a caller that stops waiting does not end it
    lock, num_open = threading.Lock(), len(parts)

    def note(part: Future[Any]) -> None:
        nonlocal num_open
        with lock:
            num_open -= 1
            if whole.done():
                return
            if (error := part.exception()) is not None:
                whole.set_exception(error)
            elif not num_open:
                whole.set_result(join([one.result() for one in parts]))

    for part in parts:
        part.add_done_callback(note)
    return whole
