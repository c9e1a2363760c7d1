"""Process cluster: workers as processes of this host, each behind a unix socket. In: RoleSpecs.
Out: handles. Implements Cluster.

Calls cross by `worker/link.py`. A worker may run in another environment's Python. Of the packages
here it then sees gyre alone. A worker that crashes takes no other with it; one whose starter is
gone ends by itself. The processes that a worker starts are of its group, and end with it. A worker
that joined from elsewhere is adopted: it is called, watched and stopped like the others, but not
started here.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gyre.cluster.worker.link import LinkHandle
from gyre.cluster.worker.process_group import end_group
from gyre.cluster.worker.rpc import STARTS, arrive, refuse_mounts
from gyre.cluster.worker.server import OnEvent
from gyre.core.contracts import WorkerHandle
from gyre.core.errors import ConfigError
from gyre.core.records import RoleSpec
from gyre.distributed.environment import show_gyre_alone, variables_for

LEAVE_S = 3.0  # for a worker to end after its socket was closed
STOP_S = 20.0  # longest wait for a killed worker to be gone
LOOK_S = 0.01  # between two looks whether it is gone
PROGRAM = "gyre.cluster.worker.process"


class ProcessHandle(LinkHandle):
    """One process behind a unix socket."""

    def __init__(self, spec: RoleSpec, environment: Mapping[str, str], on_event: OnEvent) -> None:
        """Start the process. ConfigError where its interpreter cannot be started."""
        link, theirs = socket.socketpair()
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
            link.close()
            raise ConfigError(
                f"worker {spec.name} cannot be started by {interpreter}: {error.strerror}",
                hint="give the path of a Python as the role's interpreter",
            ) from error
        finally:
            theirs.close()
        self._ending = threading.Lock()  # one thread at a time waits for the end
        place = f"this host, pid {self._process.pid}"
        super().__init__(spec, link, place=place, on_event=on_event)

    def stop(self) -> bool:
        """End the process, and return whether it is gone. Blocks."""
        super().stop()
        return self._wait() is not None

    def _describe_end(self) -> str:
        return describe_end(self._wait())

    def _wait(self) -> int | None:
        """Return the exit code of a worker that has hung up; kills one that stays, and what is left
        of the processes that it started."""
        with self._ending, suppress(subprocess.TimeoutExpired):
            if self._process.returncode is None:
                self._wait_for_end(LEAVE_S)
                end_group(self._process.pid)
            return self._process.wait(STOP_S)
        return None

    def _wait_for_end(self, limit_s: float) -> None:
        """Wait until the process has ended, and leave it unreaped: its number stays its own."""
        until_s = time.monotonic() + limit_s
        seen = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, self._process.pid, seen) is None and time.monotonic() < until_s:
            time.sleep(LOOK_S)


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
        self._taken: dict[LinkHandle, tuple[str, ...]] = {}
        self._package: tempfile.TemporaryDirectory[str] | None = None

    async def start(self, spec: RoleSpec) -> WorkerHandle:
        refuse_mounts(spec)
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
        await self._built(handle, spec)
        return handle

    async def adopt(self, handle: LinkHandle, spec: RoleSpec) -> None:
        """Take in a worker that joined from elsewhere, and wait until it has built its object."""
        self._taken[handle] = ()
        await self._built(handle, spec)

    async def _built(self, handle: LinkHandle, spec: RoleSpec) -> None:
        try:
            await arrive(handle.built, handle, "build", spec.deadline_s, key=STARTS)
        except BaseException:
            await self.stop(handle)
            raise

    async def stop(self, handle: WorkerHandle) -> None:
        assert isinstance(handle, LinkHandle)
        if handle not in self._taken:
            return
        if await asyncio.to_thread(handle.stop):
            self._taken.pop(handle, None)
        else:  # it keeps its devices
            self._on_event(handle.name, "warn.worker_not_gone", place=handle.place, waited_s=STOP_S)

    async def watch(self, handle: WorkerHandle) -> str:
        assert isinstance(handle, LinkHandle)
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
