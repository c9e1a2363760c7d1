"""Desk: the pool's requests, from submit to their last chunk. In: Requests, engines' news. Out: streams; requests sent
to the engine with the least outstanding tokens, again from what has come when it is lost. Caller: cluster.pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from gyre.cluster.book import Book
from gyre.cluster.member import Member
from gyre.cluster.routing import assign, cost_tokens
from gyre.cluster.seats import News
from gyre.cluster.streams import PoolStream
from gyre.core.errors import DeadlineError, RankError
from gyre.core.records import Finish, Partial, Request, TokenChunk

MOST_COMPLETIONS = 4096  # of one request
NO_ENGINE = "no engine takes work: none is started and has weights"


@dataclass(slots=True, kw_only=True)
class Live:
    """A request that is not answered wholly."""

    book: Book
    stream: PoolStream
    submitted_s: float
    member: Member | None = None  # None while it waits for an engine

    @property
    def request_id(self) -> str:
        return self.book.request.request_id


class Desk:
    """`find_engines()` gives those that take work, or why requests wait or end."""

    def __init__(
        self,
        find_engines: Callable[[], Sequence[Member] | RankError | None],
        abort: Callable[[str], Awaitable[None]],
        *,
        progress_tokens: int,
        emit: Callable[..., None],
    ) -> None:
        """`find_engines`: an empty sequence refuses, an error is raised to the readers, None lets requests wait."""
        self._find_engines, self._abort, self._emit = find_engines, abort, emit
        self._progress_tokens = progress_tokens
        self._live: dict[str, Live] = {}
        self._incoming: list[Live] = []
        self._empty: asyncio.Event | None = None
        self.refused = 0

    @property
    def num_waiting(self) -> int:
        """Completions that no engine has."""
        return sum(len(live.book.open) for live in self._incoming)

    def find(self, request_id: str) -> Live | None:
        return self._live.get(request_id)

    def submit(self, request: Request) -> PoolStream:
        """Enqueue at once. What is submitted in one turn of the event loop is routed together, in order."""
        stream = PoolStream(request.request_id, self._abort)
        if reason := self._why_refuse(request):
            self._note_refusal(request.request_id, reason)
            stream.push(TokenChunk.end(request.request_id, 0, "refused", reason))
            stream.end()
            return stream
        loop = asyncio.get_running_loop()
        book = Book(request, progress_tokens=self._progress_tokens)
        live = Live(book=book, stream=stream, submitted_s=loop.time())
        self._live[request.request_id] = live
        if not self._incoming:
            loop.call_soon(self.route)
        self._incoming.append(live)
        return stream

    def route(self) -> None:
        """Send what is waiting, each request to the engine with the least outstanding tokens."""
        engines = self._find_engines() if self._incoming else None
        if engines is None:
            return
        waiting, self._incoming = self._incoming, []
        if isinstance(engines, RankError) or not engines:
            for live in waiting:
                self.end(live, "refused", NO_ENGINE, error=engines if isinstance(engines, RankError) else None)
            return
        up = {member.name: member for member in engines}
        now_s = asyncio.get_running_loop().time()
        requests = [live.book.for_engine(waited_s=now_s - live.submitted_s) for live in waiting]
        chosen = assign([cost_tokens(request) for request in requests], self._outstanding(up))
        sends: dict[str, list[Request]] = {}
        for live, request, name in zip(waiting, requests, chosen, strict=True):
            live.member = up[name]
            sends.setdefault(name, []).append(request)
        for name, batch in sends.items():
            up[name].send(batch)

    def take_news(self, member: Member, news: News) -> None:
        for chunk in news.chunks:
            live = self._live.get(chunk.request_id)
            if live is None or live.member is not member:
                continue
            for told in live.book.take(chunk):
                live.stream.push(told)
        for request_id in news.ended:
            member.unanswered.discard(request_id)
            live = self._live.get(request_id)
            if live is not None and live.member is member:
                self._forget(live)
                live.stream.end()

    def held_by(self, member: Member) -> list[Live]:
        return [live for live in self._live.values() if live.member is member]

    def take_back(self, lives: Sequence[Live]) -> None:
        """Requests of an engine that is lost; they are routed again from what has come of them."""
        for live in lives:
            engine, live.member = live.member, None
            assert engine is not None
            kept = live.book.num_tokens
            self._emit("retry.request_requeued", request_id=live.request_id, engine=engine.name, kept_tokens=kept)
            self._incoming.append(live)

    def end_waiting(self, finish: Finish, reason: str) -> dict[str, tuple[Partial, ...]]:
        """Answer every request that no engine has; return what each had."""
        waiting = list(self._incoming)
        found = {live.request_id: live.book.for_engine().partials for live in waiting}
        for live in waiting:
            self.end(live, finish, reason)
        return found

    def end(self, live: Live, finish: Finish, reason: str, *, error: BaseException | None = None) -> None:
        """Answer a request that no engine has."""
        if finish == "refused" and error is None:
            self._note_refusal(live.request_id, reason)
        if error is None:
            for index in live.book.open:
                for told in live.book.take(TokenChunk.end(live.request_id, index, finish, reason)):
                    live.stream.push(told)
        self._forget(live)
        live.stream.end(error)

    def break_off(self, error: RankError) -> None:
        """Every reader gets the error."""
        for live in list(self._live.values()):
            self._forget(live)
            live.stream.end(error)

    async def drain(self, deadline_s: float) -> None:
        """Waits for: the last answer, by the deadline."""
        if not self._live:
            return
        self._empty = asyncio.Event()
        try:
            await asyncio.wait_for(self._empty.wait(), deadline_s)
        except TimeoutError:
            raise DeadlineError(
                f"waited {deadline_s:g} s for {len(self._live)} requests in flight",
                hint="raise the deadline, or interrupt or abort",
            ) from None

    def _outstanding(self, up: Mapping[str, Member]) -> dict[str, int]:
        outstanding = dict.fromkeys(up, 0)
        for live in self._live.values():
            if live.member is not None and live.member.name in up:
                outstanding[live.member.name] += live.book.outstanding_tokens
        return outstanding

    def _forget(self, live: Live) -> None:
        self._live.pop(live.request_id, None)
        if live in self._incoming:
            self._incoming.remove(live)
        if not self._live and self._empty is not None:
            self._empty.set()

    def _note_refusal(self, request_id: str, reason: str) -> None:
        self.refused += 1
        self._emit("engine.refused", request_id=request_id, reason=reason)

    def _why_refuse(self, request: Request) -> str:
        """What the books cannot hold; the engines refuse the rest."""
        n = request.sampling.n
        if request.request_id in self._live:
            return f"request id '{request.request_id}' is in flight already"
        if not isinstance(n, int) or not 1 <= n <= MOST_COMPLETIONS:
            return f"sampling.n = {n!r}: need a whole number from 1 to {MOST_COMPLETIONS}"
        return ""
