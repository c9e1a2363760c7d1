"""AsyncFrontend: the event loop's half of the engine. In: accepted requests. Out: their streams,
fed by a pump. It decides by its clock which requests are past a deadline, and passes entries to the
core.

One pump task runs bursts on the compute thread while a request is unanswered. Requests accepted
without an await between them reach the core together, in order, so such a run is deterministic.
Only the event loop's thread touches streams and incoming requests. Only the compute thread touches
the core. When the core fails, every request is answered as soon as the event loop learns of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from gyre.core.chunks import TokenStream
from gyre.core.errors import DeadlineError
from gyre.core.events import Emit
from gyre.core.records import Finish, Request, TokenChunk
from gyre.engine.core_worker import CoreWorker, Played
from gyre.engine.frontend.admission import Load, given_tokens
from gyre.engine.scheduler.core import Partials
from gyre.engine.scheduler.journal import Abort, Add, Entry, Expire, Interrupt
from gyre.engine.scheduler.sequence import LATE, WITHDRAWN

Result = TypeVar("Result")
LOOK_AGAIN_S = 0.05  # while nothing can run, for the deadlines of those that wait


class AsyncFrontend:
    """Streams of a core's requests."""

    def __init__(
        self, worker: CoreWorker, *, compute: Executor, emit: Emit, clock: Callable[[], float]
    ) -> None:
        self.load = Load(completions=0, tokens=0)  # unanswered
        self.is_holding = False  # what is incoming stays outside
        self._worker = worker
        self._compute = compute
        self._emit = emit
        self._clock = clock
        self._streams: dict[str, TokenStream] = {}  # unanswered requests
        self._tokens: dict[str, int] = {}  # given ones, of unanswered requests
        self._deadlines: dict[str, float] = {}  # by the clock, of unanswered requests
        self._incoming: list[Request] = []  # not in the core yet
        self._pump_task: asyncio.Task[None] | None = None
        self._poked: asyncio.Event | None = None
        self._waiters: list[tuple[asyncio.Future[None], Callable[[], bool]]] = []
        self._errands: set[asyncio.Task[Any]] = set()  # work between steps, with answers to deliver

    # -- requests

    def knows(self, request_id: str) -> bool:
        return request_id in self._streams

    def accept(self, request: Request, stream: TokenStream) -> None:
        """Enqueue a request that will be answered; its time runs from now."""
        name = request.request_id
        self._streams[name] = stream
        self._tokens[name] = given_tokens(request)
        if request.deadline_s is not None:
            self._deadlines[name] = self._clock() + request.deadline_s
        self._incoming.append(request)
        self._count(completions=len(stream.unfinished), tokens=self._tokens[name])
        self.poke()

    async def abort(self, request_id: str) -> None:
        """Answer a request "abort", wherever it is. Unknown ids are passed over."""
        if request_id not in self._streams:
            return
        if not self._end_incoming([request_id], "abort", WITHDRAWN):
            await self.play(Abort(request_ids=(request_id,), reason=WITHDRAWN))

    async def abort_all(self, reason: str) -> None:
        """Answer every request "abort", those held outside too."""
        await self.play(Abort(request_ids=tuple(self._streams), reason=reason), held_too=True)

    def is_drained(self) -> bool:
        return not self._streams

    def is_drained_inside(self) -> bool:
        """Return whether every unanswered request is still outside the core."""
        return len(self._streams) == len(self._incoming)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep what is incoming outside."""
        self.is_holding = True
        try:
            yield
        finally:
            self.is_holding = False
            self.poke()

    # -- work

    def on_compute(self, work: Callable[..., Result], *args: Any) -> Awaitable[Result]:
        """Run on the compute thread, after the step that may be running."""
        self._worker.in_a_hurry = True
        return asyncio.get_running_loop().run_in_executor(self._compute, work, *args)

    async def play(self, entry: Abort | Interrupt, *, held_too: bool = False) -> Partials:
        """Play an entry behind every accepted request (those held outside if asked), and deliver
        what comes out, also when the caller is cancelled: it may be other requests'. CoreFailed
        when the core breaks."""
        entries = [*(self._take_incoming() if held_too or not self.is_holding else []), entry]
        errand = asyncio.get_running_loop().create_task(self._play(entries))
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)
        return await asyncio.shield(errand)

    async def _play(self, entries: Sequence[Entry]) -> Partials:
        try:
            played = await self.on_compute(self._worker.play, entries)
        except Exception as error:
            self._answer_failure(error)
            raise
        self._deliver(played.chunks)
        return played.partials

    async def at_rest(self, work: Callable[..., None], *args: Any) -> None:
        """Run work that replaces the core on the compute thread, once no caller waits for a failed
        one."""

        def try_work() -> bool:
            if self._worker.must_answer:
                return False
            work(*args)
            return True

        while not await self.on_compute(try_work):
            self._answer_failure(None)

    async def wait_until(self, is_done: Callable[[], bool], deadline_s: float) -> None:
        """Wait until `is_done`, looked at after each delivery."""
        if is_done():
            return
        entry = (asyncio.get_running_loop().create_future(), is_done)
        self._waiters.append(entry)
        try:
            await by_deadline(entry[0], deadline_s, f"{len(self._streams)} requests in flight")
        finally:
            self._waiters.remove(entry)

    def poke(self) -> None:
        """Wake the pump: a request arrived, or steps can run again."""
        self._worker.in_a_hurry = True
        if self._poked is not None:
            self._poked.set()
        if self._streams and (self._pump_task is None or self._pump_task.done()):
            self._pump_task = asyncio.get_running_loop().create_task(self._pump())

    def poke_from_compute(self) -> None:
        task = self._pump_task
        if task is not None and not task.done() and not task.get_loop().is_closed():
            task.get_loop().call_soon_threadsafe(self.poke)

    # -- failure

    def _answer_failure(self, error: Exception | None) -> None:
        """Answer everyone: the core broke, or with `error` the way to it. No work until a
        restart."""
        worker = self._worker
        if error is not None and not worker.failure:
            worker.break_core(error)
        if not worker.must_answer:
            return
        worker.must_answer = False
        unanswered = len(self._streams)
        self._incoming = []
        self._deliver(
            [
                TokenChunk.end(request_id, index, "abort", f"the engine failed: {worker.failure}")
                for request_id, stream in list(self._streams.items())
                for index in stream.unfinished
            ]
        )
        self._emit("engine.failed", error=worker.failure, unanswered=unanswered)

    # -- the pump

    async def _pump(self) -> None:
        """Wait for the compute thread, or, when nothing can run, a poke. Woken by: accept, hold's
        end, moves. Ends: when every request is answered."""
        self._poked = asyncio.Event()
        while self._streams:
            self._poked.clear()
            entries = self._next_entries()
            self._worker.in_a_hurry = False
            try:
                played = await self._burst(entries)
            except Exception as error:  # noqa: BLE001
                # whatever broke, every request gets its answer
                self._answer_failure(error)
                return
            self._deliver(played.chunks)
            is_idle = self.is_drained_inside() or self._worker.why_blocked() is not None
            if not played.chunks and is_idle:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._poked.wait(), LOOK_AGAIN_S)

    def _next_entries(self) -> list[Entry]:
        """Return the entries that the core plays before its next steps: new and late requests."""
        late = self._find_late()
        if self.is_holding:
            self._end_incoming(late, "deadline", LATE)
            late = [name for name in late if name in self._streams]
        entries: list[Entry] = [] if self.is_holding else [*self._take_incoming()]
        if late:
            entries.append(Expire(request_ids=tuple(late)))
        return entries

    async def _burst(self, entries: Sequence[Entry]) -> Played:
        """Run a burst, which should end when the next deadline passes."""
        loop = asyncio.get_running_loop()
        burst = loop.run_in_executor(self._compute, self._worker.burst, entries)
        if not self._deadlines:
            return await burst
        wait_s = max(0.0, min(self._deadlines.values()) - self._clock())
        timer = loop.call_later(wait_s, self._hurry)
        try:
            return await burst
        finally:
            timer.cancel()

    def _hurry(self) -> None:
        self._worker.in_a_hurry = True

    def _find_late(self) -> list[str]:
        if not self._deadlines:
            return []
        now = self._clock()
        return [name for name, deadline_at in self._deadlines.items() if now >= deadline_at]

    def _take_incoming(self) -> list[Add]:
        requests, self._incoming = self._incoming, []
        return [Add.of(request) for request in requests]

    def _end_incoming(self, names: Sequence[str], finish: Finish, reason: str) -> bool:
        """Answer those of the named that have not entered the core. Returns whether there were
        any."""
        ended = [one.request_id for one in self._incoming if one.request_id in names]
        self._incoming = [one for one in self._incoming if one.request_id not in names]
        for name in ended:
            self._deliver(
                [
                    TokenChunk.end(name, index, finish, reason)
                    for index in self._streams[name].unfinished
                ]
            )
            if finish == "deadline":
                self._emit("engine.deadline", request_id=name)
        return bool(ended)

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
                self._deadlines.pop(chunk.request_id, None)
                self._count(tokens=-self._tokens.pop(chunk.request_id))
        for future, is_done in self._waiters:
            if not future.done() and is_done():
                future.set_result(None)


async def by_deadline(work: asyncio.Future[Result], deadline_s: float, what: str) -> Result:
    """Wait for work until a deadline. The work itself is not canceled."""
    done, _ = await asyncio.wait({work}, timeout=deadline_s)
    if not done:
        raise DeadlineError(
            f"the engine waited {deadline_s:g} s for {what}",
            hint="raise the deadline, or interrupt or abort",
        )
    return work.result()
