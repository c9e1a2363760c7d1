"""RPC: waits for a worker's answer, by a deadline. In: a handle, a method, a deadline. Out: the
answer, or the error that names the worker."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from gyre.cluster.worker.server import WorkerFault
from gyre.core.contracts import WorkerHandle
from gyre.core.errors import WorkerLate, WorkerLost

# after one of these nobody knows what state the worker is in
LOSSES = (WorkerLost, WorkerLate, WorkerFault)
# keys of deadlines
CALLS, STARTS, HANGS = "cluster.call_deadline_s", "cluster.start_deadline_s", "cluster.hang_s"
STACKS_S = 5.0  # longest wait for a worker's stacks


async def ask(
    handle: WorkerHandle,
    method: str,
    *args: Any,
    deadline_s: float,
    key: str = CALLS,
    stacks: bool = False,
) -> Any:
    """Return the answer. WorkerLate past the deadline, with `stacks` saying what the worker is at:
    it may still go on. `key` of the config sets the deadline, unless it is empty."""
    try:
        return await arrive(handle.begin(method, *args), handle, method, deadline_s, key=key)
    except WorkerLate as error:
        if not stacks:
            raise
        raise WorkerLate(f"{error.message}\n{await read_stacks(handle)}", hint=error.hint) from None


async def arrive(
    future: Future[Any], handle: WorkerHandle, what: str, deadline_s: float, *, key: str = CALLS
) -> Any:
    """Wait for the answer to a call that was sent."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), deadline_s)
    except TimeoutError:
        raise WorkerLate(
            f"worker {handle.name} ({handle.place}) had not answered '{what}' after "
            f"{deadline_s:g} s",
            hint="look at that process" + (f"; a higher {key} allows more time" if key else ""),
        ) from None


async def read_stacks(handle: WorkerHandle) -> str:
    """Return what every thread of the worker is at, for people; or "no stacks" and why."""
    try:
        return await arrive(handle.look("stacks"), handle, "stacks", STACKS_S)
    except LOSSES as error:
        return f"no stacks: {error}"
