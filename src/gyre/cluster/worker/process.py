"""Worker process: the program that a process of ProcessCluster runs. In: the number of its socket
and its limits, then calls as frames. Out: a frame for each answer. It ends when the starter hangs
up, and with it all processes of its group.

The starter sends ("build", spec), ("ask", method, args) and ("look", what). The worker answers with
(kind, value, failure, events), of kind "reply" or "looked".

The main thread runs the event loop and calls the object, in the order of the frames. The reader
thread answers `look` itself, so that a busy object can be looked at.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn

from gyre.cluster.worker import frames
from gyre.cluster.worker.process_group import end_group, go_on_when_orphaned
from gyre.cluster.worker.server import Reply, WorkerServer, describe_failure
from gyre.core.errors import WorkerLost
from gyre.core.records import ProcessLimits

Work = Callable[..., Awaitable[Reply]]


def leave(cause: str) -> NoReturn:
    """End this process at once, with those that it started: its starter is gone."""
    if os.getpgrp() == os.getpid():
        end_group(os.getpid())
    os._exit(0)


class WorkerProcess:
    """The worker's end of the socket."""

    def __init__(
        self,
        link: socket.socket,
        *,
        builders: Mapping[str, Callable[..., Any]] | None = None,
        on_end: Callable[[str], None] = leave,
    ) -> None:
        """Refuse all but `builders`, by name, where they are given. `on_end` ends the process, once
        the starter has hung up or does not read."""
        self._link = link
        self._builders = builders
        self._on_end = on_end
        self._sending = threading.Lock()  # the event loop and the reader thread send
        self._server: WorkerServer | None = None
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self) -> None:
        """Serve until the process ends."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        self._loop.run_forever()

    def _read(self) -> None:
        """Take frames until the starter hangs up. That ends the process at once, since no
        reply could arrive."""
        while True:
            try:
                number, payload = frames.receive(self._link)
            except (WorkerLost, OSError) as error:
                self._on_end(str(error))
                return
            try:
                kind, *rest = frames.decode(payload)
            except frames.FrameError as error:
                self._reply(number, Reply(value=None, failure=describe_failure(error), events=()))
                continue
            if kind == "build":  # made here, so that a builder that hangs can be looked at
                self._server = WorkerServer(*rest, builders=self._builders)
            assert self._server is not None, "the first frame is the build"
            if kind == "look":
                self._send(number, "looked", self._server.look(*rest), None, ())
            else:
                work = self._server.build if kind == "build" else self._server.ask
                args = () if kind == "build" else rest
                self._loop.call_soon_threadsafe(self._begin, number, work, args)

    def _begin(self, number: int, work: Work, args: Sequence[Any]) -> None:
        task = self._loop.create_task(self._answer(number, work, args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, work: Work, args: Sequence[Any]) -> None:
        reply = await work(*args)
        try:
            self._reply(number, reply)
        except TypeError as error:  # what the method returned cannot be written
            failure = describe_failure(error)
            self._reply(number, Reply(value=None, failure=failure, events=reply.events))

    def _reply(self, number: int, reply: Reply) -> None:
        failure = reply.failure
        told = None if failure is None else (failure.error, failure.text, failure.trace)
        self._send(number, "reply", reply.value, told, reply.events)

    def _send(self, number: int, *message: Any) -> None:
        payload = frames.encode(list(message))
        with self._sending:
            try:
                frames.send(self._link, number, payload)
            except OSError as error:  # the starter hung up
                self._on_end(str(error))


def apply_limits(limits: ProcessLimits) -> None:
    """Bound this process and all that it starts. OSError for what the host does not allow."""
    if limits.cores:
        os.sched_setaffinity(0, limits.cores)
    if limits.data_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (limits.data_bytes, limits.data_bytes))


if __name__ == "__main__":
    go_on_when_orphaned()
    # before threads start, which keep the cores that they began with
    apply_limits(ProcessLimits(**json.loads(sys.argv[2])))
    WorkerProcess(socket.socket(fileno=int(sys.argv[1]))).run()
