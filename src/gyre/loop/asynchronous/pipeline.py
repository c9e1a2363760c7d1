"""Pipeline: the collector's task, and what joins it to the learner. In: a function that rolls out
one collection, groups of an earlier attempt. Out: collections in order, each once.

    collector (a task)  ──roll_out──▶ collections, complete ──take──▶ learner (the caller)
            ▲                                                             │
            └───────────────── credits: want, hold, release ◀─────────────┘

The credits bound the collections that wait. With a lead of 0 the collector works only while the
learner waits for it: the synchronous order. Waits:

    collector   a credit, or the end of a hold   from the learner, or `close`, which cancels it.
    take        the collection                   from the collector; it ends by rollout.deadline_s.
    at_rest     the end of a collection          likewise.

An error of the collector is raised by the learner's next wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from gyre.core.events import Emit
from gyre.loop.asynchronous.collection import Collection, CollectionRecord
from gyre.loop.asynchronous.credits import Credits
from gyre.loop.collect import InFlightGroup, carry_over
from gyre.loop.refill import StepRollouts
from gyre.loop.scoring import Scoring
from gyre.loop.stopping import StepUnfinished, StopRequest
from gyre.observability.overlap import IdleTime


class Pipeline:
    """Runs collections ahead of the learner, as far as its credits go."""

    def __init__(
        self,
        roll_out: Callable[[Collection], Awaitable[StepRollouts]],
        *,
        open_scoring: Callable[[], Scoring],
        drop_stale: Callable[[Sequence[InFlightGroup], int], list[InFlightGroup]],
        credits: Credits,
        size: int,
        stop: StopRequest,
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`drop_stale` returns the carried groups that a step keeps; `size` is the number of
        completions per prompt."""
        self._roll_out = roll_out
        self._open_scoring = open_scoring
        self._drop_stale = drop_stale
        self._credits = credits
        self._size = size
        self._stop = stop
        self._emit = emit
        self._live: list[Collection] = []  # started and not trained on, in order: at most 2 + lead
        self._carried: list[InFlightGroup] = []  # what the next one begins with
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._has_raised = False  # the learner knows the collector's error
        self._collector_idle = IdleTime(clock)
        self._learner_idle = IdleTime(clock)

    # -- from one attempt to the next

    def restore(
        self, collected: Sequence[CollectionRecord], in_flight: Sequence[InFlightGroup]
    ) -> None:
        """Go on with the collections of an earlier attempt; call it in the event loop."""
        for record in collected:
            scoring = self._open_scoring()
            self._live.append(Collection.restored(record, scoring, size=self._size))
        self._carried = list(in_flight)

    def state(self) -> tuple[list[CollectionRecord], list[InFlightGroup]]:
        """Return what `restore` takes: complete collections that others follow, and the groups of
        the newest one."""
        if not self._live:
            return [], list(self._carried)
        *earlier, newest = self._live
        newest.note_begun()
        return [collection.record() for collection in earlier], list(newest.groups)

    @property
    def in_flight(self) -> list[InFlightGroup]:
        """Groups of the newest collection that is not trained on."""
        return list(self._live[-1].groups if self._live else self._carried)

    @property
    def is_empty(self) -> bool:
        """Return whether no collection waits or is under way."""
        return not self._live

    # -- the collector

    def start(self) -> None:
        """Start the collector's task. It waits until the learner wants a step."""
        self._task = asyncio.create_task(self._collect(), name="collector")
        self._task.add_done_callback(lambda _: self._changed.set())

    async def halt(self) -> None:
        """Break off the collection under way: its groups keep the tokens that they have. An error
        that no wait has raised is an event."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        (error,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(error, Exception) and not self._has_raised:
            self._emit("warn.collector_failed", error=f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """End the task and every question to the rewards."""
        await self.halt()
        for collection in self._live:
            await collection.scoring.close()

    async def _collect(self) -> None:
        while True:
            with self._collector_idle.waiting():
                await self._until(self._may_begin)
            collection = self._begin()
            collection.complete(await self._roll_out(collection))
            self._change(self._credits.end())

    def _may_begin(self) -> bool:
        asked = self._stop.is_asked and self._credits.collected >= self._credits.wanted
        return self._credits.may_begin and not asked

    def _begin(self) -> Collection:
        step = self._credits.collected + 1
        self._change(self._credits.begin())
        if self._live:  # what it has not finished resumes here
            self._carry(self._live[-1])
        groups, self._carried = self._drop_stale(self._carried, step), []
        scoring = self._open_scoring()
        collection = Collection(step=step, groups=groups, scoring=scoring, size=self._size)
        self._live.append(collection)
        return collection

    def _carry(self, collection: Collection) -> None:
        collection.note_scores()
        for group in collection.carried:
            carry_over(group)
        self._carried += collection.carried
        collection.groups, collection.carried = list(collection.whole), []

    # -- the learner

    async def take(self, step: int) -> Collection:
        """Return the collection of this step once its rollouts are complete. It stays in `state`
        until `trained`."""
        assert self._task is not None, "start comes first"
        self._change(self._credits.want(step))
        with self._learner_idle.waiting():
            await self._until(lambda: self._credits.has(step), of_collector=True)
        assert self._live[0].step == step, (self._live[0].step, step)
        return self._live[0]

    def trained(self, step: int) -> None:
        """Forget a collection: from here on it counts as trained on."""
        collection = self._live.pop(0)
        assert collection.step == step, (collection.step, step)
        if not self._live:
            self._carry(collection)

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """Keep the engine free of rollouts: wait for those under way, and begin none. A stop breaks
        them off at once, as they run ahead of the step that it lets end."""
        self._change(self._credits.hold())
        try:
            with self._learner_idle.waiting():
                try:
                    resting = self._until(lambda: self._credits.is_at_rest, of_collector=True)
                    await self._stop.within(resting, at_once=True)
                except StepUnfinished:
                    await self.halt()
            yield
        finally:
            self._change(self._credits.release())

    def take_idle(self) -> dict[str, float]:
        """Return the seconds that each has waited since the last call."""
        return {
            "collector_idle_s": self._collector_idle.take_seconds(),
            "learner_idle_s": self._learner_idle.take_seconds(),
        }

    # -- both

    def _change(self, credits: Credits) -> None:
        self._credits = credits
        self._changed.set()

    async def _until(self, holds: Callable[[], bool], *, of_collector: bool = False) -> None:
        """Wait until a condition holds. One that the collector fulfils raises its error."""
        while not holds():
            task = self._task
            if of_collector and task is not None and task.done():
                self._has_raised = True
                await task
                raise AssertionError("the collector ended without an error")
            self._changed.clear()
            await self._changed.wait()
