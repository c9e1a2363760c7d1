"""Probe: asks an engine how it is, by a short deadline that never loses it. In: a handle, a method.
Out: the answer, or that none has come; the state of a replica in words.

A question that is not answered stays open, and is not asked again before its answer has come. So
an engine that has stopped collects no calls, however often it is looked at.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from gyre.core.contracts import WorkerHandle
from gyre.core.liveness import decide
from gyre.core.records import EngineStats, Health, ReplicaStatus, RoutingStats


class Probe:
    """One question to one engine process."""

    def __init__(self, handle: WorkerHandle, method: str) -> None:
        self._handle = handle
        self._method = method
        self._open: asyncio.Future[Any] | None = None

    def _begin(self) -> Future[Any]:
        return self._handle.begin(self._method)

    async def ask(self, deadline_s: float) -> Any:
        """Return the answer; None when it has not come by the deadline or is not expected any
        more. Raises what the call raised."""
        if self._open is None or self._open.done():
            self._open = asyncio.wrap_future(self._begin())
            # an error that no caller waits for any more is reported by the watch
            self._open.add_done_callback(lambda call: call.cancelled() or call.exception())
        call = self._open
        done, _ = await asyncio.wait({call}, timeout=deadline_s)
        return call.result() if done and not call.cancelled() else None

    def cancel(self) -> None:
        """Expect no answer any more."""
        if self._open is not None:
            self._open.cancel()


class PulseProbe(Probe):
    """Whether the process answers at all; of an engine over ranks, whether each rank's does."""

    def __init__(self, handle: WorkerHandle) -> None:
        super().__init__(handle, "pulse")

    def _begin(self) -> Future[Any]:
        return self._handle.look("pulse")


def find_status(
    name: str,
    state: str,
    health: Health | None,
    stats: EngineStats | None,
    *,
    still_s: float,
    stall_s: float,
    probe_s: float,
    num_requests: int,
    outstanding_tokens: int,
    routing: RoutingStats,
) -> ReplicaStatus:
    """Return what is known of a replica in `state` ("up", "fresh" or "lost"). `still_s`: how long
    its requests have made no progress; `probe_s`: how long it was waited for. Pure."""
    verdict = decide(still_s, {name: 0.0}, stall_s)
    if state == "lost":
        told, reason = "lost", "lost"
    elif health is None:
        told, reason = "unwell", f"it had not answered after {probe_s:g} s"
    elif not health.ok:
        told, reason = ("starting" if state == "fresh" else "unwell"), health.reason
    elif verdict.has_failed:
        told, reason = (
            "unwell",
            f"no progress for {still_s:.0f} s with {num_requests} requests under way",
        )
    else:
        told, reason = ("starting" if state == "fresh" else "ready"), health.reason
    if told == "starting" and not reason:
        reason = "it waits for the current weights"
    return ReplicaStatus(
        name=name,
        state=told,
        reason=reason,
        stats=None if told == "lost" else stats,
        outstanding_tokens=outstanding_tokens,
        routing=routing,
    )
