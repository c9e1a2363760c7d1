"""Phase barrier: a phase change on all workers. In: a phase. Out: nothing, once every worker's
memory has been moved and measured; the measured bytes come as each worker's own `memory` events.
Implements the loop's PhaseGate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gyre.cluster.watchdog import HINT, Watchdog
from gyre.cluster.worker.rpc import CALLS, LOSSES, ask
from gyre.core.contracts import WorkerHandle
from gyre.core.errors import RankError
from gyre.core.events import Emit
from gyre.core.liveness import StallLimit
from gyre.core.records import Phase


class ClusterGate:
    """Each worker's object has `enter(phase, step)`, which returns the bytes on its device
    afterwards."""

    def __init__(
        self,
        ranks: Sequence[WorkerHandle],
        *,
        emit: Emit,
        deadline_s: float,
        hang_s: float,
        engines: Callable[[], Sequence[WorkerHandle]] = tuple,
        on_lost: Callable[[WorkerHandle, str], None] = lambda handle, cause: None,
    ) -> None:
        """`ranks` must all be there. `engines()` are workers with an engine alone, which come and
        go: `on_lost` hears of one that broke or did not answer, and the others go on."""
        self._ranks, self._engines, self._on_lost = tuple(ranks), engines, on_lost
        self._emit, self._calls = emit, StallLimit(key=CALLS, seconds=deadline_s)
        self._watchdog = Watchdog(ranks, emit=emit, hang_s=hang_s)

    async def enter(self, phase: Phase, *, step: int) -> None:
        """MemoryBudgetError of the first worker that could not; the others have moved theirs by
        then. RankError when a rank's worker broke or the ranks hang."""
        ranks = {
            rank.name: asyncio.wrap_future(rank.begin("enter", phase, step)) for rank in self._ranks
        }
        engines = self._engines()
        deadline_s = self._calls.seconds
        asked = (
            ask(engine, "enter", phase, step, deadline_s=deadline_s, stacks=True)
            for engine in engines
        )
        alone = [asyncio.ensure_future(call) for call in asked]
        try:
            await self._watchdog.settle(f"phase {phase} of step {step}", ranks, self._calls)
        except BaseException:  # a verdict on the ranks waits for no engine
            for call in alone:
                call.cancel()
            await asyncio.gather(*alone, return_exceptions=True)
            raise
        answers = await asyncio.gather(*alone, return_exceptions=True)
        found = [*(call.exception() or call.result() for call in ranks.values()), *answers]
        held = {}
        for handle, result in zip([*self._ranks, *engines], found, strict=True):
            if isinstance(result, LOSSES):
                self._note_loss(
                    handle, f"could not enter phase {phase} of step {step}: {result}", result
                )
            elif isinstance(result, BaseException):
                raise result
            else:
                held[handle.name] = result
        self._emit("cluster.memory", phase=phase, step=step, device_bytes=held)

    def _note_loss(self, handle: WorkerHandle, cause: str, error: BaseException) -> None:
        if handle not in self._ranks:
            self._on_lost(handle, cause)
            return
        raise RankError(f"{handle.name} ({handle.place}) {cause}", hint=HINT) from error
