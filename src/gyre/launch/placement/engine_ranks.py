"""Engine ranks: the processes of engines alone, started and stopped together. In: the roles of one
engine's tensor ranks. Out: handles, of which the first is called as the engine.

The others follow the first one. They are called for their memory alone, at their begin and at phase
changes. A rank that is lost ends the engine: the first one hears of it, and the pool starts all
ranks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from gyre.cluster.watchdog import GRACE_S, HINT, find_cause
from gyre.cluster.worker.server import WorkerFault
from gyre.core.contracts import Cluster, WorkerHandle
from gyre.core.errors import RankError, WorkerLate
from gyre.core.records import RoleSpec

Result = TypeVar("Result")


class EngineRanks:
    """Which processes belong to which engine."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._others: dict[str, list[WorkerHandle]] = {}  # by the name of the first rank

    async def start(self, roles: Sequence[RoleSpec]) -> list[WorkerHandle]:
        """Start an engine's processes, by rank. What is left of an earlier life ends first."""
        name = roles[0].name
        await self._stop_others(name)
        started: dict[int, WorkerHandle] = {}

        async def start(rank: int) -> None:
            started[rank] = await self._cluster.start(roles[rank])

        try:
            await all_or_first_error([start(rank) for rank in range(len(roles))])
        except BaseException:
            for handle in started.values():
                await self._cluster.stop(handle)
            raise
        handles = [started[rank] for rank in range(len(roles))]
        self._others[name] = handles[1:]
        return handles

    def behind(self, first: WorkerHandle) -> Sequence[WorkerHandle]:
        """Return an engine's other ranks, which follow its first one."""
        return tuple(self._others.get(first.name, ()))

    async def stop(self, first: WorkerHandle) -> None:
        """Stop an engine with all its ranks."""
        await self._cluster.stop(first)
        await self._stop_others(first.name)

    async def _stop_others(self, name: str) -> None:
        for handle in self._others.pop(name, []):
            await self._cluster.stop(handle)


def name_rank(engine: str, tensor_rank: int) -> str:
    """Return the name of the process of an engine's rank. Pure."""
    return f"{engine}.{tensor_rank}" if tensor_rank else engine


async def all_or_first_error(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results of all. When one fails, that error: the others have a moment to say what they saw,
    and are ended then, since they may wait for the one that failed. A worker that breaks or does
    not come up in time is a lost rank: its node may be gone, and another attempt finds it so."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        _, late = (
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION) if tasks else ((), ())
        )
        if late:
            await asyncio.wait(late, timeout=GRACE_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    errors = [
        error for task in tasks if not task.cancelled() and (error := task.exception()) is not None
    ]
    if errors:
        _, error = find_cause(dict(enumerate(errors)))
        if isinstance(error, WorkerFault | WorkerLate):
            hint = f"{error.hint}. {HINT}" if isinstance(error, WorkerLate) else HINT
            raise RankError(f"a worker could not be started: {error}", hint=hint) from error
        raise error
    return [task.result() for task in tasks]
