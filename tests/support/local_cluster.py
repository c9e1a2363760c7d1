"""Local cluster: workers as threads of this process, each with an event loop of its own. In:
RoleSpecs. Out: handles. Implements Cluster. For tests and for looking at a role in a debugger: no
devices, no environments, no isolation.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any, Literal

from gyre.cluster.worker.rpc import STARTS, arrive, refuse_mounts
from gyre.cluster.worker.server import OnEvent, WorkerServer, settle_reply
from gyre.core.contracts import WorkerHandle
from gyre.core.errors import WorkerLost
from gyre.core.records import RoleSpec

JOIN_S = 5.0


class LocalHandle:
    """One thread. `kill` makes it look like a process that died."""

    def __init__(self, spec: RoleSpec, on_event: OnEvent) -> None:
        self.name = spec.name
        self.place = f"this process, pid {os.getpid()}, thread {spec.name}"
        self._host, self._on_event = WorkerServer(spec), on_event
        self._loop = asyncio.new_event_loop()
        self._waiting: set[Future[Any]] = set()
        self._lock = threading.Lock()  # over `gone` and `_waiting`: any thread may call, and kill
        self.gone: Future[str] = Future()
        self.gone.set_running_or_notify_cancel()  # whoever stops waiting for it does not end it
        self._thread = threading.Thread(target=self._run, name=spec.name, daemon=True)
        self._thread.start()

    def begin(self, method: str, *args: Any) -> Future[Any]:
        return self._begin(self._host.ask(method, args))

    def build(self) -> Future[Any]:
        return self._begin(self._host.build())

    def look(self, what: Literal["pulse", "stacks"]) -> Future[Any]:
        out: Future[Any] = Future()
        if self.gone.done():
            out.set_exception(self._lost())
        else:
            out.set_result(self._host.look(what))
        return out

    def kill(self, cause: str) -> None:
        """From here on nothing is answered. Work that runs in other threads of the worker is not
        stopped."""
        with self._lock:
            if self.gone.done():
                return
            self.gone.set_result(cause)
            waiting = list(self._waiting)
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(self._lost())
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=JOIN_S))
        self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        out: Future[Any] = Future()
        out.set_running_or_notify_cancel()

        def settle(reply: Future[Any]) -> None:
            with self._lock:
                self._waiting.discard(out)
            with suppress(InvalidStateError, CancelledError):  # the worker was killed meanwhile
                settle_reply(out, reply.result(), self.name, self._on_event)

        with self._lock:
            if gone := self.gone.done():
                work.close()
            else:
                self._waiting.add(out)
                sent = asyncio.run_coroutine_threadsafe(work, self._loop)
        if gone:
            out.set_exception(self._lost())
        else:
            sent.add_done_callback(settle)
        return out

    def _lost(self) -> WorkerLost:
        return WorkerLost(f"worker {self.name} ({self.place}) is gone: {self.gone.result()}")


class LocalCluster:
    """Threads as workers."""

    def __init__(self, *, on_event: OnEvent) -> None:
        self._on_event = on_event
        self.handles: dict[str, LocalHandle] = {}

    async def start(self, spec: RoleSpec) -> WorkerHandle:
        refuse_mounts(spec)
        handle = LocalHandle(spec, self._on_event)
        try:
            await arrive(handle.build(), handle, "build", spec.deadline_s, key=STARTS)
        except BaseException:
            handle.kill("its builder failed")
            raise
        self.handles[spec.name] = handle
        return handle

    async def stop(self, handle: WorkerHandle) -> None:
        assert isinstance(handle, LocalHandle)
        handle.kill("stopped")

    async def watch(self, handle: WorkerHandle) -> str:
        assert isinstance(handle, LocalHandle)
        return await asyncio.wrap_future(handle.gone)

    def share(self, value: Any) -> Any:
        return value

    async def close(self) -> None:
        for handle in self.handles.values():
            handle.kill("the cluster was closed")
