"""Process cluster: workers as processes of this host, each behind a unix socket. In: RoleSpecs.
Out: handles. Implements Cluster.

A worker may run in another environment's Python. Of the packages here it then sees gyre alone.
The processes that a worker starts are of its group, and end with it.

What crosses the socket is plain values, arrays and records (`worker/frames.py`). So neither side
can make the other run code. A worker that crashes takes nobody with it; one whose starter is gone
ends by itself. The event loop that started a worker reads its answers. A call is sent at once, by
its caller. What does not fit into the socket waits in a thread, so that a call never waits
for a worker that does not read.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from gyre.cluster.worker import frames
from gyre.cluster.worker.rpc import STARTS, arrive
from gyre.cluster.worker.server import CallFailure, OnEvent, Reply, WorkerFault, settle_reply
from gyre.core.contracts import WorkerHandle
from gyre.core.errors import ConfigError, WorkerLost
from gyre.core.records import RoleSpec
from gyre.distributed.interpreters import show_gyre_alone, variables_for

LEAVE_S = 3.0  # for a worker to end after its socket was closed
STOP_S = 20.0  # longest wait for a killed worker to be gone
LOOK_S = 0.01  # between two looks whether it is gone
PROGRAM = "gyre.cluster.worker.process"


class ProcessHandle:
    """One process. Any thread may call it; the event loop that made it reads its answers."""

    def __init__(self, spec: RoleSpec, environment: Mapping[str, str], on_event: OnEvent) -> None:
        """Start the process. ConfigError where its interpreter cannot be started."""
        self.name, self._on_event = spec.name, on_event
        self._link, theirs = socket.socketpair()
        interpreter = spec.interpreter or sys.executable
        limits = json.dumps(asdict(spec.limits))
        try:
            self._process = subprocess.Popen(
                # -P: no Python of the folder where the server was started is imported
                [interpreter, "-P", "-m", PROGRAM, str(theirs.fileno()), limits],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                # Ctrl-C in a terminal is for the starter, which then stops it; what it starts
                # itself can be ended with it
                start_new_session=True,
            )
        except OSError as error:
            self._link.close()
            raise ConfigError(
                f"worker {spec.name} cannot be started by {interpreter}: {error.strerror}",
                hint="give the path of a Python as the role's interpreter",
            ) from error
        finally:
            theirs.close()
        self.place = f"this host, pid {self._process.pid}"
        self.gone: Future[str] = Future()
        self.gone.set_running_or_notify_cancel()  # whoever stops waiting for it does not end it
        self._stopped = ""
        self._number = 0
        self._waiting: dict[int, Future[Any]] = {}
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_unsent = 0  # entries of the outbox, that of the writer's hand included
        # over the five above: frames go out in the order of their numbers
        self._lock = threading.Lock()
        self._ending = threading.Lock()  # one thread at a time waits for the end
        self._inbox = frames.Inbox()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._link.fileno(), self._read)
        threading.Thread(target=self._write, name=f"{spec.name}_write", daemon=True).start()
        self.built = self._send("build", spec)

    def begin(self, method: str, *args: Any) -> Future[Any]:
        return self._send("ask", method, args)

    def look(self, what: Literal["pulse", "stacks"]) -> Future[Any]:
        return self._send("look", what)

    def stop(self) -> bool:
        """End the process, and return whether it is gone. Blocks."""
        with self._lock:
            self._stopped = self._stopped or "it was stopped"
        with suppress(OSError):  # hung up already
            self._link.shutdown(socket.SHUT_RDWR)  # ends a write to a worker that does not read
        return self._wait() is not None

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
                self._link.sendall(data)
            with self._lock:
                self._num_unsent -= 1

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
        for number, payload in self._inbox.take(data):
            with self._lock:
                out = self._waiting.pop(number, None)
            if out is not None:  # else nothing was asked by that number
                self._settle(out, payload)

    def _end(self) -> None:
        """Fail what waits for a worker that has hung up."""
        cause = self._stopped or describe_end(self._wait())
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

    def _wait(self) -> int | None:
        """Return the exit code of a worker that has hung up; kills one that stays, and what is left
        of the processes that it started."""
        with self._ending, suppress(subprocess.TimeoutExpired):
            if self._process.returncode is None:
                self._wait_for_end(LEAVE_S)
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait(STOP_S)
        return None

    def _wait_for_end(self, limit_s: float) -> None:
        """Wait until the process has ended, and leave it unreaped: its number stays its own."""
        until_s = time.monotonic() + limit_s
        seen = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, self._process.pid, seen) is None and time.monotonic() < until_s:
            time.sleep(LOOK_S)

    def _lost(self) -> WorkerLost:
        cause = self.gone.result() if self.gone.done() else self._stopped
        return WorkerLost(f"worker {self.name} ({self.place}) is gone: {cause}")


def describe_end(exit_code: int | None) -> str:
    """Return in words how a process ended. Pure."""
    if exit_code is None:
        return "it hung up and does not end"
    if exit_code < 0:
        return f"it was ended by {signal.Signals(-exit_code).name}"
    return f"it ended with exit code {exit_code}"


class ProcessCluster:
    """Processes of this host as workers."""

    def __init__(self, *, gpus: int, on_event: OnEvent) -> None:
        """Give the first `gpus` devices that this process sees to workers that ask for them."""
        self._on_event = on_event
        self._gpus = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), gpus)
        self._taken: dict[ProcessHandle, tuple[str, ...]] = {}
        self._package: tempfile.TemporaryDirectory[str] | None = None

    async def start(self, spec: RoleSpec) -> WorkerHandle:
        wanted = math.ceil(spec.gpus)
        if any(number >= len(self._gpus) for number in spec.devices):
            raise ConfigError(
                f"worker {spec.name} names GPU {max(spec.devices)}, and this host has "
                f"{len(self._gpus)}",
                hint="start fewer workers, or on a host with more GPUs",
            )
        taken = {gpu for gpus in self._taken.values() for gpu in gpus}
        free = [gpu for gpu in self._gpus if gpu not in taken]
        if wanted > len(free):
            raise ConfigError(
                f"worker {spec.name} needs {wanted} of {len(self._gpus)} GPUs, and "
                f"{len(free)} are free",
                hint="start fewer workers, or on a host with more GPUs",
            )
        own = free[:wanted]
        seen = [self._gpus[number] for number in spec.devices]
        environment = self._environment(spec, ",".join([*own, *seen]))
        handle = ProcessHandle(spec, environment, self._on_event)
        self._taken[handle] = tuple(own)
        try:
            await arrive(handle.built, handle, "build", spec.deadline_s, key=STARTS)
        except BaseException:
            await self.stop(handle)
            raise
        return handle

    async def stop(self, handle: WorkerHandle) -> None:
        assert isinstance(handle, ProcessHandle)
        if handle not in self._taken:
            return
        if await asyncio.to_thread(handle.stop):
            self._taken.pop(handle, None)
        else:  # it keeps its devices
            self._on_event(handle.name, "warn.worker_not_gone", place=handle.place, waited_s=STOP_S)

    async def watch(self, handle: WorkerHandle) -> str:
        assert isinstance(handle, ProcessHandle)
        return await asyncio.wrap_future(handle.gone)

    def share(self, value: Any) -> Any:
        return value

    async def close(self) -> None:
        await asyncio.gather(*(self.stop(handle) for handle in list(self._taken)))
        if self._package is not None:
            self._package.cleanup()
            self._package = None

    def _environment(self, spec: RoleSpec, devices: str) -> dict[str, str]:
        """Return a worker's environment variables; it sees the GPUs that `devices` lists."""
        found = dict(os.environ)
        if spec.interpreter:
            if self._package is None:
                self._package = tempfile.TemporaryDirectory(prefix="gyre-package-")
                show_gyre_alone(Path(self._package.name))
            found = variables_for(Path(self._package.name), found)
        return {**found, "CUDA_VISIBLE_DEVICES": devices, **spec.environment}


def visible_devices(given: str | None, count: int) -> tuple[str, ...]:
    """Return the names of the first `count` devices, as CUDA_VISIBLE_DEVICES = `given` lists them.
    Pure."""
    names = [str(number) for number in range(count)] if given is None else given.split(",")
    return tuple(name.strip() for name in names[:count])
