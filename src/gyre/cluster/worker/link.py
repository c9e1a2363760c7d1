"""Link: a worker's handle over a connected stream socket. In: a RoleSpec, calls. Out: answers.

What crosses the socket is plain values, arrays and records (`frames.py`). So neither side can make
the other run code. The event loop that made the handle reads its answers. A call is sent at once,
by its caller. What does not fit into the socket waits in a thread, so that a call never waits for
a worker that does not read.
"""

from __future__ import annotations

import asyncio
import queue
import select
import socket
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Literal

from gyre.cluster.worker import frames
from gyre.cluster.worker.server import CallFailure, OnEvent, Reply, WorkerFault, settle_reply
from gyre.core.errors import WorkerLost
from gyre.core.records import RoleSpec

HANG_UP_S = 3.0  # for the event loop to see that the link has ended
WRITABLE_MS = 1000.0  # between two looks at a socket that is full


class LinkHandle:
    """A worker behind a socket. Any thread may call it; the event loop that made it reads its
    answers."""

    def __init__(
        self,
        spec: RoleSpec,
        link: socket.socket,
        *,
        place: str,
        on_event: OnEvent,
        most_bytes: int = frames.UNBOUNDED,
    ) -> None:
        """Let the worker build its object: `built` is its answer. A frame of more than `most_bytes`
        ends the link."""
        self.name = spec.name
        self.place = place
        self._on_event = on_event
        self._link = link
        self.gone: Future[str] = Future()
        self.gone.set_running_or_notify_cancel()  # a caller that stops waiting does not end it
        self._stopped = ""
        self._number = 0
        self._waiting: dict[int, Future[Any]] = {}
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_unsent = 0  # entries of the outbox, that of the writer's hand included
        # over the five above: frames go out in the order of their numbers
        self._lock = threading.Lock()
        self._inbox = frames.Inbox(most_bytes)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._link.fileno(), self._read)
        threading.Thread(target=self._write, name=f"{spec.name}_write", daemon=True).start()
        self.built = self._send("build", spec)

    def begin(self, method: str, *args: Any) -> Future[Any]:
        return self._send("ask", method, args)

    def look(self, what: Literal["pulse", "stacks"]) -> Future[Any]:
        return self._send("look", what)

    def stop(self) -> bool:
        """Hang up, and return whether the worker is gone. Blocks."""
        with self._lock:
            self._stopped = self._stopped or "it was stopped"
        with suppress(OSError):  # hung up already
            self._link.shutdown(socket.SHUT_RDWR)  # ends a write to a worker that does not read
        with suppress(TimeoutError):  # the event loop may have ended
            self.gone.result(HANG_UP_S)
        return True

    def _describe_end(self) -> str:
        """Return how a worker that has hung up ended. Blocks where that takes time."""
        return "it hung up, or the network between was silent for too long"

    def _send(self, *message: Any) -> Future[Any]:
        payload = frames.encode(list(message))  # TypeError before a number is taken
        out: Future[Any] = Future()
        out.set_running_or_notify_cancel()
        with self._lock:
            if self.gone.done() or self._stopped:
                out.set_exception(self._lost())
                return out
            self._number += 1
            self._waiting[self._number] = out
            rest = frames.framed(self._number, payload)
            if not self._num_unsent:
                rest = self._send_now(rest)
            if rest:
                self._num_unsent += 1
                self._outbox.put(rest)
        return out

    def _send_now(self, data: bytes) -> bytes:
        """Send what the socket takes without a wait; return the rest."""
        try:
            return data[self._link.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return data
        except OSError:  # `_read` sees the end, and fails what waits
            return b""

    def _write(self) -> None:
        """Send what is in the outbox, until the worker has hung up."""
        while (data := self._outbox.get()) is not None:
            with suppress(OSError):  # `_read` sees the end, and fails what waits
                self._send_whole(data)
            with self._lock:
                self._num_unsent -= 1

    def _send_whole(self, data: bytes) -> None:
        """Send all of it. The socket may be one that does not wait: uvloop makes it so, where its
        loop reads it."""
        rest, writable = memoryview(data), select.poll()
        try:
            writable.register(self._link, select.POLLOUT)
        except ValueError as error:  # no file: it was closed since the data was taken
            raise OSError("the link is closed") from error
        while rest:
            try:
                rest = rest[self._link.send(rest) :]
            except BlockingIOError:
                writable.poll(WRITABLE_MS)  # ends at once where the worker has hung up

    def _read(self) -> None:
        """Give each answer that is there to who waits for it."""
        try:
            data = self._link.recv(frames.PIECE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._link.fileno())
            # the end of a process may take seconds
            threading.Thread(target=self._end, name=f"{self.name}_end", daemon=True).start()
            return
        try:
            for number, payload in self._inbox.take(data):
                with self._lock:
                    out = self._waiting.pop(number, None)
                if out is not None:  # else nothing was asked by that number
                    self._settle(out, payload)
        except frames.FrameError as error:
            with self._lock:
                self._stopped = self._stopped or str(error)
            with suppress(OSError):  # hung up already
                self._link.shutdown(socket.SHUT_RDWR)  # its end is read next

    def _end(self) -> None:
        """Fail what waits for a worker that has hung up."""
        cause = self._stopped or self._describe_end()
        with self._lock:
            self.gone.set_result(cause)
            waiting, self._waiting = self._waiting, {}
        self._outbox.put(None)
        for out in waiting.values():
            with suppress(InvalidStateError):
                out.set_exception(self._lost())
        self._link.close()

    def _settle(self, out: Future[Any], payload: bytes) -> None:
        try:
            kind, value, failed, events = frames.decode(payload)
        except (frames.FrameError, TypeError, ValueError) as error:  # not four values, too
            out.set_exception(WorkerFault(f"worker {self.name} ({self.place}): {error}"))
            return
        if kind == "looked":
            out.set_result(value)
            return
        failure = None
        if failed is not None:
            error, text, trace = failed
            failure = CallFailure(error=error, text=text, trace=trace)
        reply = Reply(value=value, failure=failure, events=events)
        settle_reply(out, reply, self.name, self._on_event)

    def _lost(self) -> WorkerLost:
        cause = self.gone.result() if self.gone.done() else self._stopped
        return WorkerLost(f"worker {self.name} ({self.place}) is gone: {cause}")
