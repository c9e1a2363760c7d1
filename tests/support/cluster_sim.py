"""A cluster of engines that do nothing by themselves: every answer, loss and notice of one comes
when a test says so. In: engine names, what is answered at once. Out: handles whose calls a test
looks at and answers. Callers: tests of the pool's races."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gyre.cluster.worker.endpoints import News
from gyre.core.errors import InputError, WorkerLost
from gyre.core.offers import Offer
from gyre.core.records import EngineStats, Finish, Health, Request, TokenChunk
from gyre.core.seeds import derive_seed

VOCAB = 48


def token_at(request: Request, index: int, place: int) -> int:
    """What every engine answers: a function of the request alone."""
    return derive_seed(request.seed, index, place) % VOCAB


def chunk(
    request: Request, index: int, start: int, stop: int, version: int, finish: Finish | None = None
) -> TokenChunk:
    tokens = np.array([token_at(request, index, place) for place in range(start, stop)], np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    return TokenChunk(
        request_id=request.request_id,
        index=index,
        tokens=tokens,
        logprobs=zeros,
        raw_logprobs=zeros,
        versions=np.full(len(tokens), version, np.int32),
        finish=finish,
    )


@dataclass(eq=False)
class Call:
    method: str
    args: tuple[Any, ...]
    asked_version: int  # the pool's, when it was asked
    future: Future[Any] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()


class SimEngine:
    """One life of an engine, as a handle. A call is performed when a test says so, or at once where
    `at_once(method)` is true."""

    def __init__(
        self, name: str, pool_version: Callable[[], int], at_once: Callable[[str], bool]
    ) -> None:
        self.name, self.place = name, f"sim {name}"
        self._pool_version, self._at_once = pool_version, at_once
        self.open: list[Call] = []
        self.done: list[Call] = []
        self.gone: Future[str] = Future()
        self.gone.set_running_or_notify_cancel()
        self.cause = ""  # of its death
        self.version: int | None = None
        self.prepared: int | None = None
        # places of the open completions
        self.running: dict[str, tuple[Request, dict[int, int]]] = {}
        self.news: tuple[list[TokenChunk], list[str]] = ([], [])
        self.steps = 0
        self.page_tokens, self.num_pages = 0, 0  # of its prefix cache
        self.is_full = False  # it refuses every request
        self.stale: list[str] = []  # requests that came while it held older weights than the pool

    # WorkerHandle

    def begin(self, method: str, *args: Any) -> Future[Any]:
        call = Call(method, args, self._pool_version())
        if self.cause:
            call.future.set_exception(self.lost_error())
            return call.future
        self.open.append(call)
        self.serve()
        return call.future

    def look(self, what: str) -> Future[Any]:
        found: Future[Any] = Future()
        found.set_result("stacks of " + self.name)
        return found

    # what a test does

    def asked(self, method: str) -> list[Call]:
        return [call for call in self.open if call.method == method]

    def serve(self) -> None:
        """A call that waits, such as a poll, does not hold up those that come after it."""
        while ready := [call for call in self.open if self._at_once(call.method)]:
            self.perform(ready[0])

    def perform(self, call: Call | None = None) -> None:
        """Do and answer a call, the oldest one unless another is named."""
        call = call or self.open[0]
        self.open.remove(call)
        self.done.append(call)
        try:
            value = getattr(self, "_" + call.method.partition(".")[2])(call, *call.args)
        except Exception as error:  # noqa: BLE001  what a worker raises
            call.future.set_exception(error)
        else:
            call.future.set_result(value)

    def die(self, cause: str = "it died", *, noticed: bool = True) -> None:
        """From here on nothing is answered; without `noticed` the watch has not heard of it yet."""
        if not self.cause:
            self.cause = cause
            for call in self.open:
                call.future.set_exception(self.lost_error())
            self.open.clear()
        if noticed and not self.gone.done():
            self.gone.set_result(self.cause)

    def step(self, count: int = 1) -> None:
        """So many tokens for every open completion."""
        self.steps += 1
        for request, places in list(self.running.values()):
            for index, place in list(places.items()):
                stop = min(place + count, request.sampling.max_tokens)
                ends = stop == request.sampling.max_tokens
                self._tell(request, index, stop, "length" if ends else None)

    def _tell(self, request: Request, index: int, stop: int, finish: Finish | None) -> None:
        places = self.running[request.request_id][1]
        assert self.version is not None
        self.news[0].append(chunk(request, index, places[index], stop, self.version, finish))
        places[index] = stop
        if finish is not None:
            del places[index]
            if not places:
                del self.running[request.request_id]
                self.news[1].append(request.request_id)

    def lost_error(self) -> WorkerLost:
        return WorkerLost(f"worker {self.name} is gone: {self.cause}")

    # the engine's seat

    def _start(self, call: Call, dummy: bool) -> None:
        pass

    def _prepare(self, call: Call, offer: Offer) -> None:
        self.prepared = offer.version

    def _revert(self, call: Call, offer: Any) -> None:
        self.version, self.prepared = offer.version, None

    def _commit(self, call: Call, version: int, policy: str) -> None:
        if self.prepared != version and self.version != version:
            raise InputError(f"version {version} is not prepared")
        self.version, self.prepared = version, None

    def _rollback(self, call: Call) -> None:
        self.prepared = None

    def _submit(self, call: Call, requests: tuple[Request, ...]) -> tuple[str, ...]:
        for request in requests:
            if self.version is None or self.version < call.asked_version:
                self.stale.append(request.request_id)
                self.version = self.version or 0
            begun = {partial.index: len(partial.tokens) for partial in request.partials}
            for partial in request.partials:
                wanted = [
                    token_at(request, partial.index, place) for place in range(len(partial.tokens))
                ]
                assert partial.tokens.tolist() == wanted
            self.running[request.request_id] = (
                request,
                {index: begun.get(index, 0) for index in range(request.sampling.n)},
            )
            if self.is_full:
                self.end_request(request.request_id, "refused")
        return tuple(one.request_id for one in requests if one.request_id in self.running)

    def _poll(self, call: Call) -> News:
        (chunks, ended), self.news = self.news, ([], [])
        return News(chunks=tuple(chunks), ended=tuple(ended), progress=self.steps)

    def _abort(self, call: Call, request_id: str) -> None:
        self.end_request(request_id, "abort")

    def _interrupt(self, call: Call, deadline_s: float) -> dict[str, Any]:
        for request_id in list(self.running):
            self.end_request(request_id, "interrupted")
        return {}

    def _terminate(self, call: Call) -> None:
        for request_id in list(self.running):
            self.end_request(request_id, "abort")
        self.version = self.prepared = None

    def end_request(self, request_id: str, finish: Finish) -> None:
        if request_id in self.running:
            request, places = self.running[request_id]
            for index, place in list(places.items()):
                self._tell(request, index, place, finish)

    def _stats(self, call: Call) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=0,
            prompt_tokens=0,
            prefix_hit_tokens=0,
            generated_tokens=0,
            preemptions=0,
            refused=0,
            steps=self.steps,
            pages_used=0,
            pages_total=self.num_pages,
            prefix_page_tokens=self.page_tokens,
            version=self.version or 0,
        )

    def _health(self, call: Call) -> Health:
        return Health(
            ok=self.version is not None,
            reason="" if self.version is not None else f"{self.name} is on dummies",
        )


class SimCluster:
    """`held` are methods that wait for the test; every other one is answered at once."""

    def __init__(
        self,
        *,
        held: tuple[str, ...] = ("engine.poll",),
        page_tokens: int = 0,
        num_pages: int = 0,
    ) -> None:
        self.held = set(held)
        self.page_tokens, self.num_pages = page_tokens, num_pages  # of each prefix cache
        self.lives: dict[str, list[SimEngine]] = {}
        self.pool_version: Callable[[], int] = lambda: 0
        self.starts_at: int | None = None  # version of an engine that is started again

    def make(self, name: str) -> SimEngine:
        engine = SimEngine(
            name, lambda: self.pool_version(), lambda method: method not in self.held
        )
        engine.page_tokens, engine.num_pages = self.page_tokens, self.num_pages
        self.lives.setdefault(name, []).append(engine)
        return engine

    async def revive(self, name: str) -> SimEngine:
        await asyncio.sleep(0)
        engine = self.make(name)
        engine.version = self.starts_at
        return engine

    def newest(self, name: str) -> SimEngine:
        return self.lives[name][-1]

    async def stop(self, handle: SimEngine) -> None:
        handle.die("it was stopped")

    async def watch(self, handle: SimEngine) -> str:
        return await asyncio.wrap_future(handle.gone)

    def share(self, value: Any) -> Any:
        return value
