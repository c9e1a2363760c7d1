"""Phase barrier: a phase change on all workers. In: a phase. Out: nothing, once every worker's
memory has been moved and measured; the measured bytes come as each worker's own `memory` events.
Implements the loop's PhaseGate. Of an engine over several ranks each has a device, and so a ledger:
all of them are asked, and one that does not answer costs its engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gyre.cluster.watchdog import HINT, Watchdog
from gyre.cluster.worker.rpc import CALLS, LOSSES, ask
from gyre.core.contracts import WorkerHandle
from gyre.core.errors import MemoryBudgetError, RankError
from gyre.core.events import Emit
from gyre.core.liveness import StallLimit
from gyre.core.records import DeviceHoldings, Phase

# phases in which the ranks work on a device and the engines have left it
RANKS_ALONE: tuple[Phase, ...] = ("score", "train")


class ClusterGate:
    """Each worker's object has `enter(phase, step, neighbor_bytes)`, which returns what it has on
    its device afterwards."""

    def __init__(
        self,
        ranks: Sequence[WorkerHandle],
        *,
        emit: Emit,
        deadline_s: float,
        hang_s: float,
        engines: Callable[[], Sequence[WorkerHandle]] = tuple,
        behind: Callable[[WorkerHandle], Sequence[WorkerHandle]] = lambda first: (),
        on_lost: Callable[[WorkerHandle, str], None] = lambda handle, cause: None,
        neighbors: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        """`ranks` must all be there. `engines()` are workers with an engine alone, which come and
        go, and `behind` returns an engine's other ranks. `on_lost` hears of an engine that broke or
        did not answer, or one of whose ranks did so; the others continue. `neighbors` are, by name,
        the workers on the same device: there one side leaves before the other comes, and each hears
        what the others have."""
        self._neighbors = neighbors or {}
        self._held: dict[str, DeviceHoldings] = {}  # by name, as last heard
        self._ranks = tuple(ranks)
        self._on_lost = on_lost
        self._engines = engines
        self._behind = behind
        self._emit = emit
        self._calls = StallLimit(key=CALLS, seconds=deadline_s)
        self._hang_s = hang_s
        self._watchdog = Watchdog(ranks, emit=emit, hang_s=hang_s)

    def note(self, name: str, holdings: DeviceHoldings) -> None:
        """Take what a worker says that it has, after its start."""
        self._held[name] = holdings

    async def enter(self, phase: Phase, *, step: int) -> None:
        """MemoryBudgetError of the first worker that could not, by its name; the others have moved
        theirs by then. RankError when a rank's worker broke or the ranks hang."""
        first_of = {
            handle: first for first in self._engines() for handle in (first, *self._behind(first))
        }
        engines = tuple(first_of)
        colocated = bool(self._neighbors)
        engines_first = colocated and phase in RANKS_ALONE
        if colocated:
            await self._look_at(self._ranks if engines_first else engines)
        alone: list[asyncio.Future[Any]] = []
        if engines_first:
            alone = self._ask(engines, phase, step)
            self._learn(engines, await asyncio.gather(*alone, return_exceptions=True))
        ranks = {
            rank.name: asyncio.wrap_future(
                rank.begin("enter", phase, step, self._neighbor_bytes(rank.name, engines))
            )
            for rank in self._ranks
        }
        if not colocated:
            alone = self._ask(engines, phase, step)
        try:
            await self._watchdog.settle(f"phase {phase} of step {step}", ranks, self._calls)
        except BaseException:  # a decision on the ranks waits for no engine
            for call in alone:
                call.cancel()
            await asyncio.gather(*alone, return_exceptions=True)
            raise
        self._learn(self._ranks, [call.exception() or call.result() for call in ranks.values()])
        if colocated and not engines_first:
            alone = self._ask(engines, phase, step)
        answers = await asyncio.gather(*alone, return_exceptions=True)
        found = [*(call.exception() or call.result() for call in ranks.values()), *answers]
        held = {}
        for handle, result in zip([*self._ranks, *engines], found, strict=True):
            if isinstance(result, LOSSES):
                cause = f"could not enter phase {phase} of step {step}: {result}"
                self._note_loss(handle, cause, result, engine=first_of.get(handle))
            elif isinstance(result, MemoryBudgetError):
                told = f"{handle.name} ({handle.place}): {result.message}"
                raise MemoryBudgetError(told, hint=result.hint) from result
            elif isinstance(result, BaseException):
                raise result
            else:
                held[handle.name] = result.component_bytes
        self._learn(engines, answers)
        self._emit("cluster.memory", phase=phase, step=step, device_bytes=held)

    async def _look_at(self, handles: Sequence[WorkerHandle]) -> None:
        """Ask workers what they have now: work of the last phase may have left more than they had
        when they entered it. One that is lost is found by its `enter`."""
        deadline_s = self._calls.seconds
        calls = (
            ask(handle, "holdings", deadline_s=deadline_s, hang_s=self._hang_s)
            for handle in handles
        )
        self._learn(handles, await asyncio.gather(*calls, return_exceptions=True))

    def _ask(
        self, engines: Sequence[WorkerHandle], phase: Phase, step: int
    ) -> list[asyncio.Future[Any]]:
        deadline_s = self._calls.seconds
        return [
            asyncio.ensure_future(
                ask(
                    engine,
                    "enter",
                    phase,
                    step,
                    self._neighbor_bytes(engine.name, engines),
                    deadline_s=deadline_s,
                    stacks=True,
                    hang_s=self._hang_s,
                )
            )
            for engine in engines
        ]

    def _neighbor_bytes(self, name: str, engines: Sequence[WorkerHandle]) -> int | None:
        """Return what others on the device of a worker have there; None where it has its own."""
        if name not in self._neighbors:
            return None
        here = {handle.name for handle in (*self._ranks, *engines)} & self._neighbors[name]
        return sum(self._held[other].process_bytes for other in here if other in self._held)

    def _learn(self, handles: Sequence[WorkerHandle], answers: Sequence[Any]) -> None:
        for handle, answer in zip(handles, answers, strict=True):
            if isinstance(answer, DeviceHoldings):
                self._held[handle.name] = answer

    def _note_loss(
        self, handle: WorkerHandle, cause: str, error: BaseException, *, engine: WorkerHandle | None
    ) -> None:
        if engine is not None:
            named = cause if handle is engine else f"{handle.name} ({handle.place}) {cause}"
            self._on_lost(engine, named)
            return
        raise RankError(f"{handle.name} ({handle.place}) {cause}", hint=HINT) from error
