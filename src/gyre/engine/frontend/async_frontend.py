"""Front desk: the event loop's side of the engine. In: admitted requests. Out: their streams, fed
by a pump.

One pump task runs bursts on the compute thread as long as a request is unanswered. Requests
accepted without an await between them reach the cycle together, in order, so such a run is
deterministic. Streams and what is incoming are touched on the event loop's thread only, the cycle
on the compute thread only.

Whatever raises in work on the cycle breaks it: `failure` says so at once, on the compute thread, so
that nothing queued behind touches it; the event loop answers everyone as soon as it hears of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from gyre.core.errors import DeadlineError, EngineRefused
from gyre.core.events import Emit
from gyre.core.records import Finish, Request, TokenChunk
from gyre.engine.frontend.admission import Load, given_tokens
from gyre.engine.frontend.token_stream import TokenStream
from gyre.engine.scheduler.sequence import LATE, WITHDRAWN

Result = TypeVar("Result")
LOOK_AGAIN_S = 0.05  # while nothing can run, for the deadlines of those that wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request that will be answered."""

    request: Request
    deadline_at: float | None  # by the engine's clock

    def is_late(self, now: float) -> bool:
        return self.deadline_at is not None and now >= self.deadline_at


class CycleBroke(EngineRefused):
    """Work on the cycle raised, now or before. Everyone who waited is answered; only a restart
    heals."""

    def __init__(self, failure: str) -> None:
        super().__init__(f"the engine failed: {failure}", hint="terminate and start it again")


class AsyncFrontend:
    """`burst(batch)` takes requests in, runs some steps and returns chunks; `blocked()` says why no
    step can run."""

    def __init__(
        self,
        *,
        compute: Executor,
        burst: Callable[[Sequence[Admitted]], list[TokenChunk]],
        blocked: Callable[[], str | None],
        emit: Emit,
        clock: Callable[[], float],
    ) -> None:
        self._compute, self._burst, self._blocked, self._emit, self._clock = (
            compute,
            burst,
            blocked,
            emit,
            clock,
        )
        self.load = Load(completions=0, tokens=0)  # unanswered
        self.failure = ""  # why the cycle broke; written on the compute thread
        self._unanswered_failure = False  # it broke, and nobody was told yet
        # somebody waits for the compute thread: a burst should end after its step
        self.in_a_hurry = False
        self._streams: dict[str, TokenStream] = {}  # unanswered requests
        self._tokens: dict[str, int] = {}  # given ones, of unanswered requests
        self._incoming: list[Admitted] = []  # not in the cycle yet
        self._held = False
        self._pump_task: asyncio.Task[None] | None = None
        self._poked: asyncio.Event | None = None
        self._waiters: list[tuple[asyncio.Future[None], Callable[[], bool]]] = []
        self._errands: set[asyncio.Task[Any]] = set()  # work between steps, with answers to deliver

    # -- requests

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    def knows(self, request_id: str) -> bool:
        return request_id in self._streams

    def accept(self, admitted: Admitted, stream: TokenStream) -> None:
        self._streams[stream.request_id] = stream
        self._tokens[stream.request_id] = given_tokens(admitted.request)
        self._incoming.append(admitted)
        self._count(completions=len(stream.unfinished), tokens=self._tokens[stream.request_id])
        self.poke()

    def withdraw(self, request_id: str) -> bool:
        """Answer a request "abort" that has not entered the cycle yet. False when it has."""
        return (
            self._end_incoming(
                lambda admitted: admitted.request.request_id == request_id, "abort", WITHDRAWN
            )
            > 0
        )

    def is_drained(self) -> bool:
        return not self._streams

    def is_drained_inside(self) -> bool:
        """Nothing is unanswered but what has not entered the cycle."""
        return len(self._streams) == len(self._incoming)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep what is incoming outside."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            self.poke()

    # -- work

    def on_compute(self, work: Callable[[], Result]) -> Awaitable[Result]:
        """Run on the compute thread, after the step that may be running."""
        self.in_a_hurry = True
        return asyncio.get_running_loop().run_in_executor(self._compute, work)

    async def between_steps(
        self,
        add: Callable[[Sequence[Admitted]], list[TokenChunk]],
        work: Callable[[], tuple[Result, list[TokenChunk]]],
        *,
        held_too: bool = False,
    ) -> Result:
        """Run work on the cycle with every accepted request in it (those held outside if asked),
        and deliver its chunks, also when the caller is cancelled: they may be other requests'.
        CycleBroke when it raises."""
        batch = self._take_incoming() if held_too or not self._held else []
        errand = asyncio.get_running_loop().create_task(self._run_between(add, work, batch))
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)
        return await asyncio.shield(errand)

    async def _run_between(
        self,
        add: Callable[[Sequence[Admitted]], list[TokenChunk]],
        work: Callable[[], tuple[Result, list[TokenChunk]]],
        batch: Sequence[Admitted],
    ) -> Result:
        def both() -> tuple[Result, list[TokenChunk]]:
            self.refuse_broken()
            with self.watch():
                added = add(batch)
                result, chunks = work()
                return result, added + chunks

        try:
            result, chunks = await self.on_compute(both)
        except Exception as error:
            self._answer_failure(error)
            raise
        self._deliver(chunks)
        return result

    async def at_rest(self, work: Callable[[], Result]) -> Result:
        """Run work that replaces the cycle: on the compute thread, with nobody waiting for one that
        broke."""
        while True:
            found = await self.on_compute(lambda: None if self._unanswered_failure else (work(),))
            if found is not None:
                return found[0]
            self._answer_failure(None)

    async def wait_until(self, is_done: Callable[[], bool], deadline_s: float) -> None:
        """Wait until `is_done`, looked at after each delivery."""
        if is_done():
            return
        entry = (asyncio.get_running_loop().create_future(), is_done)
        self._waiters.append(entry)
        try:
            await by_deadline(entry[0], deadline_s, f"{self.num_requests} requests in flight")
        finally:
            self._waiters.remove(entry)

    def poke(self) -> None:
        """Something changed: a request came, or steps can run again."""
        self.in_a_hurry = True
        if self._poked is not None:
            self._poked.set()
        if self._streams and (self._pump_task is None or self._pump_task.done()):
            self._pump_task = asyncio.get_running_loop().create_task(self._pump())

    def poke_from_compute(self) -> None:
        task = self._pump_task
        if task is not None and not task.done() and not task.get_loop().is_closed():
            task.get_loop().call_soon_threadsafe(self.poke)

    # -- failure

    @contextmanager
    def watch(self) -> Iterator[None]:
        """On the compute thread: what raises in here breaks the cycle."""
        try:
            yield
        except Exception as error:
            self._break(error)
            self.poke_from_compute()
            raise CycleBroke(self.failure) from error

    def refuse_broken(self) -> None:
        if self.failure:
            raise CycleBroke(self.failure)

    def mend(self) -> None:
        """On the compute thread, at rest: the broken cycle is gone."""
        assert not self._unanswered_failure
        self.failure = ""

    def _break(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        self._unanswered_failure = True

    def _answer_failure(self, error: Exception | None) -> None:
        """The cycle broke, or with `error` the way to it: answer everyone; no work until a
        restart."""
        if error is not None and not self.failure:
            self._break(error)
        if not self._unanswered_failure:
            return
        self._unanswered_failure = False
        unanswered = len(self._streams)
        self._incoming = []
        self._deliver(
            [
                TokenChunk.end(request_id, index, "abort", f"the engine failed: {self.failure}")
                for request_id, stream in list(self._streams.items())
                for index in stream.unfinished
            ]
        )
        self._emit("engine.failed", error=self.failure, unanswered=unanswered)

    async def _pump(self) -> None:
        """Waits for: the compute thread, or, when nothing can run, a poke. Woken by: accept, hold's
        end, moves. Ends: when every request is answered."""
        self._poked = asyncio.Event()
        while self._streams:
            self._poked.clear()
            if self._held:
                self._end_late(self._clock())
            batch = [] if self._held else self._take_incoming()
            self.in_a_hurry = False
            loop = asyncio.get_running_loop()
            try:
                chunks = await loop.run_in_executor(self._compute, self._watched_burst, batch)
            except Exception as error:  # noqa: BLE001
                # whatever broke, every request gets its answer
                self._answer_failure(error)
                return
            self._deliver(chunks)
            if not chunks and (self.is_drained_inside() or self._blocked() is not None):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._poked.wait(), LOOK_AGAIN_S)

    def _watched_burst(self, batch: Sequence[Admitted]) -> list[TokenChunk]:
        self.refuse_broken()
        with self.watch():
            return self._burst(batch)

    def _take_incoming(self) -> list[Admitted]:
        batch, self._incoming = self._incoming, []
        return batch

    def _end_late(self, now: float) -> None:
        self._end_incoming(lambda admitted: admitted.is_late(now), "deadline", LATE)

    def _end_incoming(self, is_due: Callable[[Admitted], bool], finish: Finish, reason: str) -> int:
        """Answer those that are due and have not entered the cycle. Returns how many."""
        due = [admitted for admitted in self._incoming if is_due(admitted)]
        self._incoming = [admitted for admitted in self._incoming if not is_due(admitted)]
        for admitted in due:
            name = admitted.request.request_id
            self._deliver(
                [
                    TokenChunk.end(name, index, finish, reason)
                    for index in self._streams[name].unfinished
                ]
            )
            if finish == "deadline":
                self._emit("engine.deadline", request_id=name)
        return len(due)

    def _count(self, *, completions: int = 0, tokens: int = 0) -> None:
        self.load = Load(
            completions=self.load.completions + completions, tokens=self.load.tokens + tokens
        )

    def _deliver(self, chunks: Sequence[TokenChunk]) -> None:
        for chunk in chunks:
            stream = self._streams[chunk.request_id]
            stream.push(chunk)
            if chunk.finish is not None:
                self._count(completions=-1)
            if not stream.unfinished:
                del self._streams[chunk.request_id]
                self._count(tokens=-self._tokens.pop(chunk.request_id))
        for future, is_done in self._waiters:
            if not future.done() and is_done():
                future.set_result(None)


async def by_deadline(work: asyncio.Future[Result], deadline_s: float, what: str) -> Result:
    """Wait for work that goes on by itself when the deadline passes."""
    done, _ = await asyncio.wait({work}, timeout=deadline_s)
    if not done:
        raise DeadlineError(
            f"the engine waited {deadline_s:g} s for {what}",
            hint="raise the deadline, or interrupt or abort",
        )
    return work.result()
