"""Fork server: the loop that forks children, watches, kills and reaps them. In: StartChild and
Kill, one kind of child. Out: one Ended per child, sent when it is reaped.

    poll ──▶ client: StartChild, Kill; a hang-up ends every descendant and the server
         ──▶ pidfd of a child: reap it, end what it left behind, send Ended
         ──▶ files that a child asked to watch
         ──▶ time: `look` of a child, which may name the limit that it is over.

Both users run this loop in processes of their own, never in a common one. Reward workers are the
user's code with the user's environment (rewards.pool.worker). Sandboxed programs are untrusted, and
every fork of their server has its memory (rewards.sandbox.server). Standard library only.
"""

from __future__ import annotations

import gc
import math
import os
import select
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from gyre.rewards.fork_server import processes
from gyre.rewards.fork_server.connection import Connection, Ended, Kill, StartChild

Handler = Callable[[int], object]  # of the events of select.poll
_RETRY_S = 0.05  # between two passes over orphans


class Child:
    """One process of a fork server. A subclass is a kind of child."""

    name = -1
    pid = -1
    kill_reason: str | None = None
    look_s = math.inf  # CLOCK_MONOTONIC of the next `look`

    def fork(self) -> int:
        """Fork, as os.fork does."""
        return os.fork()

    def become(self, server: ForkServer) -> None:
        """Do the child's work, in the child. The process exits with status 1 if it returns."""
        raise NotImplementedError

    def attach(self, server: ForkServer) -> None:
        """Close what is the child's own and watch it, in the server, after the fork."""
        raise NotImplementedError

    def look(self, server: ForkServer, now_s: float) -> str | None:
        """Name the reason to kill the child, or set `look_s` anew."""
        raise NotImplementedError

    def finish(self, server: ForkServer, exit_code: int) -> Ended:
        """Release what watched the child, which is reaped; say how it ended."""
        return Ended(self.name, exit_code, self.kill_reason, {})

    def abandon(self) -> None:
        """Clean up after the child when the client has gone."""


class ForkServer:
    """Serves one client until it hangs up.

    `make_child` takes an order and its files. What a child leaves behind is killed `grace_s` after
    its end. With 0 it is killed before Ended is sent, and one child runs at a time.
    """

    def __init__(
        self,
        client: Connection,
        make_child: Callable[[Any, list[int]], Child],
        *,
        grace_s: float = 0.0,
    ) -> None:
        self._client = client
        self._make_child = make_child
        self._grace_s = grace_s
        self._children: dict[int, Child] = {}  # by name
        self._orphans_s = math.inf  # when to end what children left behind
        self._poll = select.poll()
        self._handlers: dict[int, Handler] = {}
        self.watch(client.fileno(), self._receive)

    def run(self) -> NoReturn:
        """Serve. Ends with the process."""
        gc.collect()
        gc.disable()  # a collection in a fork would copy the pages of all objects
        gc.freeze()
        while True:
            for fd, events in self._poll.poll(self._timeout_ms()):
                handler = self._handlers.get(fd)
                if handler is not None:  # else an earlier one of this round has unwatched it
                    handler(events)
            now_s = time.monotonic()
            for child in self._children.values():
                if now_s >= child.look_s and child.kill_reason is None:
                    self._kill(child, child.look(self, now_s))
            if now_s >= self._orphans_s:
                kept = [child.pid for child in self._children.values()]
                none_left = processes.end_orphans(kept)
                self._orphans_s = math.inf if none_left else now_s + _RETRY_S

    def watch(self, fd: int, handler: Handler) -> None:
        """Call `handler` with the poll events whenever `fd` can be read or has hung up."""
        self._handlers[fd] = handler
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching a file, if it is watched."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def close_files(self) -> None:
        """Close all files of the server, in a child."""
        for fd in self._handlers:
            os.close(fd)

    def end(self) -> NoReturn:
        """End every descendant, then the server."""
        for child in self._children.values():
            processes.kill_group(child.pid)
        processes.end_descendants()
        for child in self._children.values():
            child.abandon()
        os._exit(0)

    def _timeout_ms(self) -> float | None:
        """Time until a child or an orphan is due; None waits for files only."""
        due_s = self._orphans_s
        for child in self._children.values():
            due_s = min(due_s, child.look_s)
        return None if due_s == math.inf else max(0.0, due_s - time.monotonic()) * 1000

    def _receive(self, _events: int) -> None:
        """Carry out one order."""
        received = self._client.receive()
        if received is None:
            self.end()
        order, files = received
        if isinstance(order, StartChild):
            self._start(order, files)
        elif isinstance(order, Kill) and order.name in self._children:
            self._kill(self._children[order.name], order.reason)

    def _start(self, order: StartChild, files: list[int]) -> None:
        assert self._grace_s or not self._children, "one child at a time"
        child = self._make_child(order.request, files)
        child.name = order.name
        child.pid = child.fork()
        if child.pid == 0:
            try:
                child.become(self)
            finally:
                os._exit(1)  # a fork must never return into the server's loop
        self._children[child.name] = child
        pidfd = os.pidfd_open(child.pid)
        self.watch(pidfd, partial(self._reap, child, pidfd))
        child.attach(self)

    def _kill(self, child: Child, reason: str | None) -> None:
        """Kill a child with what is in its process group, if there is a reason."""
        if reason is not None and child.kill_reason is None:
            child.kill_reason = reason
            child.look_s = math.inf
            processes.kill_group(child.pid)

    def _reap(self, child: Child, pidfd: int, _events: int) -> None:
        """Collect a child that has ended, and send how."""
        self.unwatch(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(child.pid, 0)
        del self._children[child.name]
        if self._grace_s:
            self._orphans_s = time.monotonic() + self._grace_s
        else:
            processes.end_descendants()
        self._client.send(child.finish(self, os.waitstatus_to_exitcode(status)))
