"""Following rank: an engine's rank behind the first, in its own process. In: the stream of rank 0,
phases that the driver wants entered. Out: a phase is entered here once rank 0's word of it has been
played, and the memory of this rank's device proved.

The compute thread plays what rank 0 plays, from the start to the end. So the driver's questions are
answered beside it: it waits for rank 0 while a phase changes. Components move by rank 0's entries
alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from gyre.core.errors import GyreError, MemoryBudgetError, RankError, WorkerLate, WorkerLost
from gyre.core.records import Component, Phase, Tier, Usage
from gyre.distributed.process_group import RankGroup
from gyre.engine.core_worker import CoreWorker
from gyre.engine.memory import EngineMemory
from gyre.engine.scheduler.journal import Start
from gyre.engine.tensor_group import EnteredPhase, EntryStream, Message, follow

Result = TypeVar("Result")


class FollowedMemory:
    """MemoryTenant of what this rank holds. It moves where rank 0's entries say, and only there."""

    def __init__(self, memory: EngineMemory, rank: int) -> None:
        self._memory = memory
        self._rank = rank

    def components(self) -> Sequence[Component]:
        return self._memory.components()

    def measure(self) -> Mapping[str, Usage]:
        return self._memory.measure()

    def move(self, names: Sequence[str], tier: Tier) -> None:
        """RankError: this rank's ledger wants a move that rank 0 did not make."""
        raise RankError(
            f"rank {self._rank} of the engine would move {', '.join(names)} to {tier}, which rank "
            "0 did not",
            hint="give the devices of all ranks the same room",
        )


class FollowingRank:
    """One rank, from the start of its engine to the end. For the event loop that runs."""

    def __init__(
        self, stream: EntryStream, worker: CoreWorker, group: RankGroup, compute: Executor
    ) -> None:
        """Begin to play. The wait for rank 0 in one phase change is at most the group's timeout."""
        self._rank = group.rank
        self._timeout_s = group.timeout_s
        self.memory = FollowedMemory(worker.memory, group.rank)
        self._has_started = False
        self._entered: tuple[Phase, int] | None = None  # the phase and step that rank 0 is in
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        playing = partial(follow, stream, worker, group, played=self._hear)
        self._following = self._loop.run_in_executor(compute, playing)
        self._following.add_done_callback(self._note_end)

    async def until_started(self) -> None:
        """Wait for the first core; its graphs are captured then. Raises what ended the wait."""
        while not self._has_started:
            self._refuse_ended()
            await self._next()

    async def enter(self, phase: Phase, step: int, prove: Callable[[], Result]) -> Result:
        """Return what `prove` does, once rank 0 has entered the phase. WorkerLate after the group's
        timeout, WorkerLost when this rank has ended."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._entered != (phase, step):
                    self._refuse_ended()
                    await self._next()
        except TimeoutError:
            raise WorkerLate(
                f"rank {self._rank} of the engine has waited {self._timeout_s:g} s for rank 0 to "
                f"enter phase {phase} of step {step}, or has not done what rank 0 asked of it",
                hint="look at both processes; parallel.timeout_s is how long a rank waits",
            ) from None
        self._entered = None  # a phase may be entered again in its step
        return await self.ask(prove)

    async def ask(self, work: Callable[[], Result]) -> Result:
        """Do work beside the compute thread, which belongs to rank 0."""
        return await asyncio.to_thread(work)

    async def _next(self) -> None:
        await self._news.wait()
        self._news.clear()

    def _hear(self, message: Message) -> None:
        """Take note of what has been played. On the compute thread."""
        if isinstance(message, Start | EnteredPhase) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note, message)

    def _note(self, message: Start | EnteredPhase) -> None:
        if isinstance(message, EnteredPhase):
            self._entered = message.phase, message.step
        else:
            self._has_started = True
        self._news.set()

    def _note_end(self, following: asyncio.Future[None]) -> None:
        """Wake who waits. Rank 0 hears of an error by the failure detector, and names it."""
        if not following.cancelled():
            following.exception()
        self._news.set()

    def _refuse_ended(self) -> None:
        """Raise why this rank plays no more, if it has ended."""
        if not self._following.done():
            return
        error = self._following.exception()
        if isinstance(error, MemoryBudgetError):
            raise MemoryBudgetError(
                f"rank {self._rank} of the engine: {error.message}", hint=error.hint
            ) from error
        if isinstance(error, GyreError) and not isinstance(error, RankError):
            raise error
        why = "rank 0 has ended" if error is None else f"{type(error).__name__}: {error}"
        raise WorkerLost(f"rank {self._rank} of the engine follows no more: {why}") from error
