"""Gate: a phase change on all workers. In: a phase. Out: nothing, once every worker's memory has been moved and
measured; the measured bytes come as each worker's own `memory` events. Implements the loop's PhaseGate. Caller: loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gyre.cluster.host import WorkerFault
from gyre.cluster.waiting import ask
from gyre.core.contracts import WorkerHandle
from gyre.core.errors import DeadlineError, RankError
from gyre.core.records import Phase


class ClusterGate:
    """Each worker's object has `enter(phase, step)`, which returns the bytes on its device afterwards. `handles` is
    asked anew each time: engine workers come and go."""

    def __init__(
        self, handles: Callable[[], Sequence[WorkerHandle]], *, emit: Callable[..., None], deadline_s: float
    ) -> None:
        self._handles, self._emit, self._deadline_s = handles, emit, deadline_s

    async def enter(self, phase: Phase, *, step: int) -> None:
        """MemoryBudgetError of the first worker that could not; the others have moved theirs by then.
        RankError when one broke or did not answer."""
        handles = self._handles()
        found = await asyncio.gather(
            *(ask(handle, "enter", phase, step, deadline_s=self._deadline_s) for handle in handles),
            return_exceptions=True,
        )
        for handle, result in zip(handles, found, strict=True):
            if isinstance(result, WorkerFault | DeadlineError):
                raise RankError(
                    f"{handle.name} ({handle.place}) could not enter phase {phase} of step {step}: {result}",
                    hint="cluster.max_restarts lets the run restart from its newest snapshot",
                ) from result
            if isinstance(result, BaseException):
                raise result
        held = {handle.name: bytes_ for handle, bytes_ in zip(handles, found, strict=True)}
        self._emit("cluster.memory", phase=phase, step=step, device_bytes=held)
