"""RPC: waits for a worker's answer, by a deadline. In: a handle, a method, a deadline. Out: the
answer, or the error that names the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from gyre.cluster.worker.server import WorkerFault
from gyre.core.contracts import WorkerHandle
from gyre.core.errors import ConfigError, WorkerLate, WorkerLost
from gyre.core.liveness import decide
from gyre.core.records import RoleSpec

# after one of these the worker's state is unknown
LOSSES = (WorkerLost, WorkerLate, WorkerFault)
# keys of deadlines
CALLS, STARTS, HANGS = "cluster.call_deadline_s", "cluster.start_deadline_s", "cluster.hang_s"
LOOK_S = 1.0  # between two looks at a worker, and longest wait for the answer to one
STACKS_S = 5.0  # longest wait for a worker's stacks


def refuse_mounts(spec: RoleSpec) -> None:
    """Raise ConfigError for a role that names mounts: workers here see their host's own files."""
    if not spec.mounts:
        return
    told = ", ".join(f"{mount.host_path} at {mount.place}" for mount in spec.mounts)
    raise ConfigError(
        f"worker {spec.name} is to have mounts ({told}), and workers that are processes of a host "
        "take none: they see its files as they are",
        hint="leave mounts out, and name files by their paths on the host",
    )


async def ask(
    handle: WorkerHandle,
    method: str,
    *args: Any,
    deadline_s: float,
    key: str = CALLS,
    stacks: bool = False,
    hang_s: float | None = None,
) -> Any:
    """Return the answer. WorkerLate past the deadline, or once the process has answered no look for
    `hang_s`. With `stacks` it says what the worker is at, which may still go on. `key` of the
    config sets the deadline, unless it is empty."""
    arriving = arrive(handle.begin(method, *args), handle, method, deadline_s, key=key)
    try:
        if hang_s is None:
            return await arriving
        return await _arrive_alive(arriving, handle, method, hang_s)
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


async def _arrive_alive(
    arriving: Coroutine[Any, Any, Any], handle: WorkerHandle, what: str, hang_s: float
) -> Any:
    """Wait for an answer while the process answers looks, which a thread of its own does."""
    # time of looks, not of the clock: this process may have stood still itself
    waiting, missed_s = asyncio.ensure_future(arriving), 0.0
    try:
        while not decide(missed_s, {handle.name: 0.0}, hang_s).has_failed:
            await asyncio.wait([waiting], timeout=LOOK_S)
            if waiting.done():
                return waiting.result()
            try:
                await arrive(handle.look("pulse"), handle, "pulse", LOOK_S)
                missed_s = 0.0
            except LOSSES:
                missed_s += 2 * LOOK_S
        raise WorkerLate(
            f"worker {handle.name} ({handle.place}) answers nothing for {hang_s:g} s, and was "
            f"asked for '{what}'",
            hint=f"look at that process; a higher {HANGS} allows more time",
        )
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def read_stacks(handle: WorkerHandle) -> str:
    """Return what every thread of the worker is at, for people; or "no stacks" and why."""
    try:
        return await arrive(handle.look("stacks"), handle, "stacks", STACKS_S)
    except LOSSES as error:
        return f"no stacks: {error}"
