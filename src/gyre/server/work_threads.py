"""Work threads: a few threads beside the event loop, for work that would hold up every answer. In:
functions. Out: their results, in the order in which they were asked for.

Work that waits for a thread is dropped when the task that wants it ends. Work in a thread runs to
its end, and its result is dropped.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from gyre.server.bodies.schema import ApiError

Result = TypeVar("Result")


class WorkThreads:
    """So many threads, started when they are first needed."""

    def __init__(self, name: str, count: int, *, most_waiting: int) -> None:
        self._name = name
        self._count = count
        self._most_waiting = most_waiting
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._started = 0
        weakref.finalize(self, _end, self._jobs, count)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns. ApiError where too much of it waits already."""
        waiting = self._jobs.qsize()
        if waiting >= self._most_waiting:
            raise ApiError(
                429, f"the queue is full: {waiting} long prompts wait, and {waiting} may; try later"
            )
        job = _Job(work)
        self._jobs.put(job)
        if self._started < self._count:
            self._started += 1
            name = f"{self._name}-{self._started}"
            threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True).start()
        return await asyncio.wrap_future(job.future)


class _Job(Generic[Result]):
    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self.future: Future[Result] = Future()

    def do(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._work()
        except BaseException as error:  # noqa: BLE001  it belongs to who waits
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


def _serve(jobs: queue.SimpleQueue[_Job[Any] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.do()
        del job  # it may hold a long text


def _end(jobs: queue.SimpleQueue[_Job[Any] | None], count: int) -> None:
    for _ in range(count):
        jobs.put(None)
