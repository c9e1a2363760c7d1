"""Waiting: for a worker's answer, by a deadline. In: a handle, a method, a deadline. Out: the answer, or the error that
names the worker. Callers: every file of the room that asks workers."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from gyre.cluster.host import WorkerFault
from gyre.core.contracts import WorkerHandle
from gyre.core.errors import WorkerLate, WorkerLost

LOSSES = (WorkerLost, WorkerLate, WorkerFault)  # after one of these nobody knows what state the worker is in


async def ask(handle: WorkerHandle, method: str, *args: Any, deadline_s: float) -> Any:
    """The answer. WorkerLate past the deadline; the worker may still be at it."""
    return await arrive(handle.begin(method, *args), handle, method, deadline_s)


async def arrive(future: Future[Any], handle: WorkerHandle, what: str, deadline_s: float) -> Any:
    """Wait for an answer that was begun."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), deadline_s)
    except TimeoutError:
        raise _late(handle, what, deadline_s) from None


def arrive_now(future: Future[Any], handle: WorkerHandle, what: str, deadline_s: float) -> Any:
    """The same for a caller that may block, which must not be the thread that delivers answers."""
    try:
        return future.result(deadline_s)
    except FutureTimeout:
        raise _late(handle, what, deadline_s) from None


def _late(handle: WorkerHandle, what: str, deadline_s: float) -> WorkerLate:
    return WorkerLate(
        f"worker {handle.name} ({handle.place}) had not answered '{what}' after {deadline_s:g} s",
        hint="look at that process; cluster.call_deadline_s allows more time",
    )
