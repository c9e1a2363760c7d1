"""RequestRouter: the pool's requests, from submit to their last chunk. In: Requests, engines' news.
Out: streams; requests sent to the engine that the balancer chooses, again from what has come when
it is lost.

A request that was asked to end is never sent again, nor is one past its deadline: when its engine
is lost before it said so, it ends here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from gyre.cluster.engine_pool.load_balancer import LoadBalancer, PlacedRequest
from gyre.cluster.engine_pool.replica import EngineReplica
from gyre.cluster.engine_pool.request_log import RequestLog
from gyre.cluster.worker.endpoints import News
from gyre.core.chunks import TokenStream
from gyre.core.errors import DeadlineError
from gyre.core.events import Emit
from gyre.core.records import Finish, Request, TokenChunk
from gyre.observability.refusals import Refusals

MOST_COMPLETIONS = 4096  # of one request
NO_ENGINE = "no engine takes work: none is started and has weights"


@dataclass(slots=True, kw_only=True, eq=False)
class Live:
    """A request with completions that are not answered."""

    book: RequestLog
    stream: TokenStream
    submitted_s: float
    member: EngineReplica | None = None  # None while it waits for an engine
    placed: PlacedRequest | None = None  # what it counts for at its engine
    ending: tuple[Finish, str] | None = None  # how and why it was asked to end
    timer: asyncio.TimerHandle | None = None  # at its deadline
    is_late: bool = False  # its deadline has passed
    is_resumed: bool = False  # an engine that is lost had admitted it
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # all completions are answered

    @property
    def request_id(self) -> str:
        return self.book.request.request_id


class RequestRouter:
    """`find_engines()` gives those that take work, or why requests wait or end."""

    def __init__(
        self,
        find_engines: Callable[[], Sequence[EngineReplica] | BaseException | None],
        abort: Callable[[str], Awaitable[None]],
        *,
        balancer: LoadBalancer,
        call_or_break: Callable[..., None],
        on_broken: Callable[[EngineReplica, str], None],
        progress_tokens: int,
        max_waiting: int | None,
        emit: Emit,
    ) -> None:
        """`find_engines`: an empty sequence refuses, an error is raised to the readers, None lets
        requests wait, at most `max_waiting` completions. `call_or_break(work, *args)` runs what the
        event loop calls, and breaks the pool where that raises. `on_broken` takes an engine that
        ended requests without a call to abort them."""
        self._find_engines = find_engines
        self._abort = abort
        self._emit = emit
        self._call_or_break = call_or_break
        self._on_broken = on_broken
        self.balancer = balancer
        self._progress_tokens = progress_tokens
        self._max_waiting = max_waiting
        self._live: dict[str, Live] = {}
        self._incoming: list[Live] = []
        self._held: list[Live] = []  # came while `holding`; no engine has had them
        self._holds = 0
        self._refusals = Refusals(
            lambda kind, **fields: call_or_break(lambda: emit(kind, **fields))
        )

    @property
    def refused(self) -> int:
        """Requests that were refused here."""
        return self._refusals.total

    @property
    def num_waiting(self) -> int:
        """Completions that no engine has."""
        return sum(len(live.book.open) for live in [*self._incoming, *self._held])

    def find(self, request_id: str) -> Live | None:
        return self._live.get(request_id)

    def submit(self, request: Request) -> TokenStream:
        """Enqueue at once. What is submitted in one turn of the event loop is routed together, in
        order."""
        stream = TokenStream(request, MOST_COMPLETIONS, self._abort)
        if reason := self._why_refuse(request):
            self._refusals.note(request.request_id, reason)
            stream.refuse(reason)
            return stream
        loop = asyncio.get_running_loop()
        book = RequestLog(request, progress_tokens=self._progress_tokens)
        live = Live(book=book, stream=stream, submitted_s=loop.time())
        self._live[request.request_id] = live
        if request.deadline_s is not None:
            live.timer = loop.call_later(
                request.deadline_s, self._call_or_break, self._expire, live
            )
        if self._holds:
            self._held.append(live)
            return stream
        if not self._incoming:
            loop.call_soon(self._call_or_break, self.route)
        self._incoming.append(live)
        return stream

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Let requests that come wait, at most `max_waiting` completions, until the block ends.
        Those that came before are still sent, also again when their engine is lost."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self._incoming, self._held = [*self._incoming, *self._held], []
                self._call_or_break(self.route)

    def route(self) -> None:
        """Send what is waiting, each request to the engine that the balancer chooses."""
        engines = self._find_engines() if self._incoming else None
        if engines is None:
            return
        waiting, self._incoming = self._incoming, []
        if isinstance(engines, BaseException) or not engines:
            for live in waiting:
                self.end(
                    live,
                    "refused",
                    NO_ENGINE,
                    error=engines if isinstance(engines, BaseException) else None,
                )
            return
        up = {member.name: member for member in engines}
        now_s = asyncio.get_running_loop().time()
        requests = [
            live.book.for_engine(waited_s=now_s - live.submitted_s, resumed=live.is_resumed)
            for live in waiting
        ]
        # with one engine there is nothing to choose, and thousands of requests need no sum
        is_asked = len(up) > 1 and not self.balancer.estimates
        outstanding = self.outstanding_tokens(up) if is_asked else dict.fromkeys(up, 0)
        all_placed = self.balancer.place(requests, engines, outstanding=outstanding, now_s=now_s)
        sends: dict[str, list[Request]] = {}
        for live, request, placed in zip(waiting, requests, all_placed, strict=True):
            live.member, live.placed = placed.engine.member, placed
            if request.traced:
                live.stream.note_sent(live.member.name, time.monotonic())
            sends.setdefault(live.member.name, []).append(request)
        for name, batch in sends.items():
            up[name].send(batch)

    def take_news(self, member: EngineReplica, news: News) -> None:
        """Pass on an engine's news. News of a lost engine is dropped."""
        if member.state == "lost":
            return
        for chunk in news.chunks:
            live = self._live.get(chunk.request_id)
            if live is None or live.member is not member:
                continue
            if chunk.finish == "abort" and live.ending is None:
                self._on_broken(member, chunk.reason)
                return
            ends = chunk.finish is not None and live.book.is_open(chunk.index)
            for told in live.book.take(chunk):
                live.stream.push(told)
            if live.placed is not None:
                self._note_progress(live, live.placed, chunk, ends=ends)
            if not live.stream.unfinished:
                self._forget(live)
        for request_id in news.ended:
            member.note_ended(request_id)
            live = self._live.get(request_id)
            if live is not None and live.member is member:
                self._forget(live)
                live.stream.end()

    def take_back(self, member: EngineReplica) -> list[Live]:
        """Take the requests of an engine that is lost. Those that are not answered wholly and not
        asked to end are routed again from what has come of them; they are returned. Those past
        their deadline end now: no other engine would have time for them."""
        again = []
        for live in [live for live in self._live.values() if live.member is member]:
            live.member = None
            self._leave(live)
            live.stream.note_lost(time.monotonic())
            if live.ending is not None or not live.book.open:
                self.end(live, *(live.ending or ("abort", "")))
                continue
            if live.is_late:
                self._end_late(live, "its engine was lost")
                continue
            live.is_resumed |= live.request_id in member.taken
            again.append(live)
            self._incoming.append(live)
        return again

    def begin_end(self, lives: Sequence[Live], finish: Finish, reason: str) -> None:
        """Begin to end requests: those that no engine has end now, the others when their engine
        says so or is lost."""
        for live in lives:
            if live.ending is None:
                live.ending = (finish, reason)
            if live.member is None:
                self.end(live, *live.ending)

    def all(self) -> list[Live]:
        return list(self._live.values())

    def end(
        self, live: Live, finish: Finish, reason: str, *, error: BaseException | None = None
    ) -> None:
        """Answer a request that no engine has."""
        if finish == "refused" and error is None:
            self._refusals.note(live.request_id, reason)
        if error is None:
            for index in live.book.open:
                for told in live.book.take(TokenChunk.end(live.request_id, index, finish, reason)):
                    live.stream.push(told)
        self._forget(live)
        live.stream.end(error)

    def break_off(self, error: BaseException) -> None:
        """Give the error to every reader."""
        for live in self.all():
            self._forget(live)
            live.stream.end(error)

    async def until_gone(self, lives: Sequence[Live], deadline_s: float) -> None:
        """Wait for the last answer to these, by the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                for live in lives:
                    await live.gone.wait()
        except TimeoutError:
            late = sum(not live.gone.is_set() for live in lives)
            raise DeadlineError(
                f"waited {deadline_s:g} s for {late} requests in flight",
                hint="raise the deadline, or interrupt or abort",
            ) from None

    async def drain(self, deadline_s: float) -> None:
        """Wait for the last answer to any, by the deadline."""
        end_s = asyncio.get_running_loop().time() + deadline_s
        while self._live:
            await self.until_gone(self.all(), end_s - asyncio.get_running_loop().time())

    def _expire(self, live: Live) -> None:
        """End a request whose deadline has come, if no engine has it. An engine knows by itself,
        unless it stands still: then the request ends once that engine is lost."""
        live.timer, live.is_late = None, True
        if live.member is None:
            self._end_late(live, "no engine took it")

    def _end_late(self, live: Live, why: str) -> None:
        self._emit("engine.deadline", request_id=live.request_id)
        self.end(live, "deadline", f"the request's deadline passed: {why}")

    def outstanding_tokens(self, up: Mapping[str, EngineReplica]) -> dict[str, int]:
        """Return the tokens that each engine has still to compute at most."""
        outstanding = dict.fromkeys(up, 0)
        for live in self._live.values():
            if live.member is not None and up.get(live.member.name) is live.member:
                outstanding[live.member.name] += live.book.outstanding_tokens
        return outstanding

    def _note_progress(
        self, live: Live, placed: PlacedRequest, chunk: TokenChunk, *, ends: bool
    ) -> None:
        if ends:
            tokens = live.book.tokens_of(chunk.index)
            self.balancer.end_one(placed, tokens, is_whole=chunk.finish in ("stop", "length"))
        elif placed.prompt_work:
            self.balancer.begin(placed)

    def _leave(self, live: Live) -> None:
        if live.placed is not None:
            self.balancer.release(live.placed)
            live.placed = None

    def _forget(self, live: Live) -> None:
        self._live.pop(live.request_id, None)
        self._leave(live)
        if live in self._incoming:
            self._incoming.remove(live)
        if live in self._held:
            self._held.remove(live)
        if live.timer is not None:
            live.timer.cancel()
        live.gone.set()

    def _why_refuse(self, request: Request) -> str:
        """Return what the books cannot hold; the engines refuse the rest."""
        n = request.sampling.n
        if request.request_id in self._live:
            return f"request id '{request.request_id}' is in flight already"
        if not isinstance(n, int) or not 1 <= n <= MOST_COMPLETIONS:
            return f"sampling.n = {n!r}: need a whole number from 1 to {MOST_COMPLETIONS}"
        deadline_s = request.deadline_s
        if deadline_s is not None and not (
            isinstance(deadline_s, int | float) and math.isfinite(deadline_s)
        ):
            return f"deadline_s = {deadline_s!r}: need None or a finite number"
        most = self._max_waiting
        waits = self._holds > 0 or self._find_engines() is None
        if most is not None and waits and self.num_waiting + n > most:
            return f"{self.num_waiting} completions wait for an engine: at most {most} may"
        return ""
