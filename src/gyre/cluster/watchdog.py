"""Watchdog: who holds up a call to all ranks. In: the ranks' handles, calls under way. Out: nothing
when they have ended, RankError with all stacks when they hang.

A call hangs when none of its unfinished ranks makes progress for as long as its kind allows. It
also hangs when a rank's process answers nothing for `hang_s`: its looks have a thread of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from gyre.cluster.worker.rpc import HANGS, LOOK_S, LOSSES, arrive, read_stacks
from gyre.core.contracts import WorkerHandle
from gyre.core.errors import RankError, WorkerLate, WorkerLost
from gyre.core.events import Emit
from gyre.core.liveness import LastProgress, StallLimit, Verdict, decide

GRACE_S = 8.0  # how long the other ranks have to say what they saw, once one has failed
HINT = (
    "cluster.max_restarts lets the run restart from its newest snapshot; events.jsonl has "
    "what came before"
)


class Watchdog:
    """`handles` by rank."""

    def __init__(
        self,
        handles: Sequence[WorkerHandle],
        *,
        emit: Emit,
        hang_s: float,
        look_s: float = LOOK_S,
    ) -> None:
        self._handles = tuple(handles)
        self._emit = emit
        self._look_s = look_s
        self.hang = StallLimit(key=HANGS, seconds=hang_s)

    async def settle(
        self,
        what: str,
        calls: Mapping[str, asyncio.Future[Any]],
        stall_limit: StallLimit,
        *,
        grace_s: float | None = None,
    ) -> None:
        """Return when all calls, by worker, have ended; with `grace_s`, so long after one has
        failed. RankError when they hang. Those that are open then are cancelled. Waits for: the
        calls, watched."""
        guard = asyncio.create_task(self.guard(what, calls, stall_limit))
        try:
            while open_ := [call for call in calls.values() if not call.done()]:
                if grace_s is not None and any(
                    call.exception() for call in calls.values() if call not in open_
                ):
                    await asyncio.wait(open_, timeout=grace_s)
                    return
                await asyncio.wait([*open_, guard], return_when=asyncio.FIRST_COMPLETED)
                if guard.done():
                    guard.result()
        finally:
            for task in (guard, *calls.values()):
                task.cancel()
            await asyncio.gather(guard, *calls.values(), return_exceptions=True)

    async def guard(
        self, what: str, calls: Mapping[str, asyncio.Future[Any]], stall_limit: StallLimit
    ) -> NoReturn:
        """Raise when the calls hang. Waits for: looks, each with a deadline."""
        began_s, looks = time.monotonic(), 0
        work, answers = LastProgress(calls, began_s), LastProgress(calls, began_s)
        while True:
            await asyncio.sleep(self._look_s)
            counts, looks = await self._look(calls), looks + 1
            now_s = time.monotonic()
            work.observe(counts, now_s)
            answers.observe(dict.fromkeys(counts, looks), now_s)
            busy = [name for name, call in calls.items() if not call.done()]
            worked_s = {name: work.changed_s[name] for name in busy}
            answered_s = {name: answers.changed_s[name] for name in busy}
            if (verdict := decide(now_s, worked_s, stall_limit.seconds, together=True)).has_failed:
                raise await self._describe(what, verdict, stall_limit)
            if (verdict := decide(now_s, answered_s, self.hang.seconds)).has_failed:
                raise await self._describe(what, verdict, self.hang)

    async def _look(self, calls: Mapping[str, asyncio.Future[Any]]) -> dict[str, int]:
        async def one(handle: WorkerHandle) -> int | None:
            try:
                return await arrive(handle.look("pulse"), handle, "pulse", LOOK_S)
            except LOSSES:
                return None

        busy = [
            handle
            for handle in self._handles
            if handle.name in calls and not calls[handle.name].done()
        ]
        counts = await asyncio.gather(*(one(handle) for handle in busy))
        return {
            handle.name: count
            for handle, count in zip(busy, counts, strict=True)
            if count is not None
        }

    async def _describe(self, what: str, verdict: Verdict, stall_limit: StallLimit) -> RankError:
        """Return the error for a hang, with what every rank is at."""
        texts = await asyncio.gather(*(read_stacks(handle) for handle in self._handles))
        stacks = {handle.name: text for handle, text in zip(self._handles, texts, strict=True)}
        rank, first = next(
            (rank, one) for rank, one in enumerate(self._handles) if one.name in verdict.still_s
        )
        silent = [name for name, text in stacks.items() if text.startswith("no stacks")]
        about = (
            f"{', '.join(silent)} answers nothing"
            if silent
            else "all ranks that are at it stand still"
        )
        self._emit("rank.hung", what=what, still_s=dict(verdict.still_s), stacks=stacks)
        told = "\n\n".join(f"== {name}\n{text}" for name, text in stacks.items())
        return RankError(
            f"{what} hangs: {verdict.reason}; {about} (rank {rank} is {first.name}, "
            f"{first.place})\n\n{told}",
            hint=f"{stall_limit.key} = {stall_limit.seconds:g} is how long a rank may stand still "
            f"there. {HINT}",
        )


def find_cause(errors: Mapping[int, BaseException]) -> tuple[int, BaseException]:
    """Return the rank to blame and its error. A rank that is gone comes first, then one with an
    error of its own. Then come one that saw another fail, and one that has not answered. The lowest
    rank wins among equals."""

    def order(item: tuple[int, BaseException]) -> tuple[int, int]:
        rank, error = item
        if isinstance(error, WorkerLost):
            return 0, rank
        if isinstance(error, WorkerLate):
            return 3, rank
        return (2 if isinstance(error, RankError) else 1), rank

    return min(errors.items(), key=order)
