"""Engine replica: one engine of a pool, from its start to its loss. In: requests to send, a
handle. Out: calls in order, news until nothing is unanswered.

States: `up` takes work; `fresh` is started and waits for the current weights; `lost` is gone for
good. An engine that is started again is a new replica, so what arrives late from the earlier one
does not concern it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from gyre.cluster.engine_pool.probe import Probe, PulseProbe
from gyre.cluster.worker.endpoints import POLL_S, News
from gyre.cluster.worker.rpc import CALLS, HANGS, arrive, ask, read_stacks
from gyre.core.contracts import WorkerHandle
from gyre.core.liveness import LastProgress, decide
from gyre.core.records import Request


class EngineReplica:
    """One engine of the pool. `on_news` gets what the engine reports, `on_lost` why it is lost;
    neither raises."""

    def __init__(
        self,
        handle: WorkerHandle,
        *,
        vital: bool,
        state: Literal["up", "fresh"],
        deadline_s: float,
        hang_s: float,
        guest: bool = False,
        on_news: Callable[[EngineReplica, News], None],
        on_lost: Callable[[EngineReplica, str], None],
    ) -> None:
        self.name = handle.name
        self.handle = handle
        self.vital = vital
        self.state: Literal["up", "fresh", "lost"] = state
        self.guest = guest  # started elsewhere
        self.leaves = False  # it is asked to end what it has, and nothing more
        self.unanswered: set[str] = set()
        self.taken: set[str] = set()  # of these, what it said it admitted; kept when it is lost
        self.prepared: int | None = None  # the version that waits for its commit
        self.catching_up = False  # a task brings it to the current weights
        self.watched = False
        health = Probe(handle, "engine.health")
        stats = Probe(handle, "engine.stats")
        self.probes = (health, stats, PulseProbe(handle))
        self._progress = LastProgress([self.name], time.monotonic())
        self._deadline_s = deadline_s
        self._hang_s = hang_s
        self._on_news = on_news
        self._on_lost = on_lost
        self._pump: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def takes_work(self) -> bool:
        return self.state == "up" and not self.leaves

    def send(self, requests: Sequence[Request]) -> None:
        """Give requests to the engine, together and at once: what is asked later finds them
        there."""
        if not self.unanswered:  # an idle engine makes no progress, and need not
            self._progress = LastProgress([self.name], time.monotonic())
        self.unanswered |= {request.request_id for request in requests}
        sent = self.handle.begin("engine.submit", tuple(requests))
        task = asyncio.create_task(self._confirm(sent))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._pump is None or self._pump.done():
            # along with the requests, which are there before it: calls begin in their order
            self._pump = asyncio.create_task(self._poll())

    async def ask(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        limits = {"deadline_s": deadline_s or self._deadline_s, "key": "" if deadline_s else CALLS}
        return await ask(self.handle, method, *args, **limits, stacks=True, hang_s=self._hang_s)

    @property
    def still_s(self) -> float:
        """Return how long its requests have made no progress; 0 while it has none."""
        return time.monotonic() - self._progress.changed_s[self.name] if self.unanswered else 0.0

    def note_ended(self, request_id: str) -> None:
        """Note that nothing follows of a request."""
        self.unanswered.discard(request_id)
        self.taken.discard(request_id)

    def lose(self) -> None:
        """Expect nothing of it from here on."""
        self.state, self.prepared = "lost", None
        self.unanswered.clear()

    async def close(self) -> None:
        tasks = [*self._tasks, *([self._pump] if self._pump is not None else [])]
        for task in (*tasks, *self.probes):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _confirm(self, sent: Future[Any]) -> None:
        try:
            limit_s = POLL_S + self._hang_s
            taken = await arrive(sent, self.handle, "engine.submit", limit_s, key=HANGS)
        except Exception as error:  # noqa: BLE001
            # whatever it was, it is unknown which requests it has
            self._on_lost(self, str(error))
        else:
            self.taken |= self.unanswered.intersection(taken)  # some may have ended already

    async def _poll(self) -> None:
        """Wait for the engine's news, each time by a deadline. Ends when every request is
        answered."""
        limit_s = POLL_S + self._hang_s
        while self.unanswered and self.state != "lost":
            try:
                news = await ask(
                    self.handle, "engine.poll", deadline_s=limit_s, key=HANGS, stacks=True
                )
            except Exception as error:  # noqa: BLE001
                # whatever it was, what it had to tell is not known any more
                self._on_lost(self, str(error))
                return
            self._on_news(self, news)
            now_s = time.monotonic()
            self._progress.observe({self.name: news.progress}, now_s)
            if self.unanswered and decide(now_s, self._progress.changed_s, self._hang_s).has_failed:
                self._on_lost(
                    self,
                    f"no progress of the engine for {self._hang_s:g} "
                    f"s\n{await read_stacks(self.handle)}",
                )
