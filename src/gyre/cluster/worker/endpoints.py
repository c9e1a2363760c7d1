"""Endpoints: an engine, as a worker offers it to calls from outside. In: calls by plain values and
records. Out: records. It lives in the worker; `trainer_endpoint.py` has a trainer rank's. Also what
both sides need to know of the answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gyre.core.contracts import CommitPolicy, EngineAbilities
from gyre.core.errors import GyreError, WorkerLost
from gyre.core.offers import Offer
from gyre.core.records import EngineStats, Health, Partial, Request, TokenChunk, Usage
from gyre.observability.spans import ActivityClock, RunningActivity

if TYPE_CHECKING:
    from gyre.cluster.worker.trainer_endpoint import TrainerEndpoint

POLL_S = 0.5  # longest time that a poll waits for something to tell


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What an engine has done since the last poll."""

    chunks: tuple[TokenChunk, ...]
    ended: tuple[str, ...]  # requests of which nothing follows
    progress: int  # grows while the engine works


class EngineEndpoint:
    """One engine. What it streams is kept until the next poll."""

    def __init__(
        self,
        engine: Any,
        *,
        trainer: TrainerEndpoint | None = None,
        ticks: Callable[[], int] = lambda: 0,
        on_commit: Callable[[int, int], None] = lambda epoch, version: None,
        activities: ActivityClock | None = None,
        held_bytes: Callable[[], Awaitable[int]] | None = None,
        lost: Callable[[], str] = lambda: "",
    ) -> None:
        """`engine` is a RolloutEngine and an EngineLifecycle; `trainer` the rank in this process,
        if there is one. `ticks` grows within a step, so that a first one which compiles its kernels
        is seen to go on. `on_commit` hears the epoch and version that the engine serves from now
        on. `held_bytes` returns what it has on its device. `lost` returns why the engine must be
        started anew, in another process; its requests have no answer then."""
        self.engine = engine
        self._trainer = trainer
        self._ticks = ticks
        # calls that are the engine's own
        self.abort = engine.abort
        self.stats = engine.stats
        self.rollback = engine.rollback
        self._activities = activities or ActivityClock()
        self._held_bytes = held_bytes
        self._lost = lost
        self._rollout: RunningActivity | None = None  # while requests are unanswered
        self._unanswered: set[str] = set()
        self._on_commit = on_commit
        self._epoch = 0  # of what was prepared last
        self._update_bytes = 0
        self._chunks: list[TokenChunk] = []
        self._ended: list[str] = []
        self._told: asyncio.Event | None = None
        self._readers: set[asyncio.Task[None]] = set()

    async def submit(self, requests: Sequence[Request]) -> tuple[str, ...]:
        """Take requests in together, in order. Return those that are admitted: what is refused is
        answered by then, and a poll returns how."""
        if not self._unanswered:
            self._rollout = self._activities.begin("rollout")
        streams = [self.engine.submit(request) for request in requests]  # no await between
        self._unanswered |= {request.request_id for request in requests}
        for request, stream in zip(requests, streams, strict=True):
            reader = asyncio.create_task(self._read(request, stream))
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
        pairs = zip(requests, streams, strict=True)
        return tuple(request.request_id for request, stream in pairs if stream.unfinished)

    async def poll(self) -> News:
        """Return what came since the last poll; waits a moment for something. One poller at a
        time."""
        self._told = asyncio.Event()
        if not self._chunks and not self._ended:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), POLL_S)
        self._raise_loss()  # before "abort" is reported of requests that can resume elsewhere
        chunks, self._chunks = tuple(self._chunks), []
        ended, self._ended = tuple(self._ended), []
        steps = (await self.engine.stats()).steps
        return News(chunks=chunks, ended=ended, progress=steps + self._ticks())

    async def health(self) -> Health:
        self._raise_loss()  # an idle engine is not polled
        return await self.engine.health()

    async def interrupt(self, deadline_s: float) -> Mapping[str, tuple[Partial, ...]]:
        return await self.engine.interrupt(deadline_s=deadline_s)

    async def abilities(self) -> EngineAbilities:
        return await self.engine.abilities()

    async def start(self, dummy: bool) -> None:
        timing = self._activities.timing("dummy_start" if dummy else "start")
        with timing as starting, self._losing():
            await self.engine.start(dummy=dummy)
            if self._held_bytes is not None:
                starting.size_bytes = await self._held_bytes()

    async def terminate(self) -> None:
        before = None if self._held_bytes is None else await self._held_bytes()
        with self._activities.timing("terminate") as ending:
            await self.engine.terminate()
            if before is not None and self._held_bytes is not None:
                ending.size_bytes = before - await self._held_bytes()

    async def prepare_own(self, version: int) -> None:
        """Take the version that the trainer rank in this process has registered."""
        assert self._trainer is not None, "this worker has no trainer rank"
        await self.prepare(self._trainer.offer(version))

    async def prepare(self, offer: Offer) -> None:
        with self._activities.timing("update"), self._losing():
            await self.engine.prepare(offer)
        self._epoch = offer.manifest.epoch
        self._update_bytes = sum(entry.size_bytes for entry in offer.manifest.entries)

    async def revert(self, offer: Offer) -> None:
        """Serve the version before the last commit again, which is still where it was offered."""
        with self._activities.timing("update"), self._losing():
            await self.engine.prepare(offer, reverts=True)
            await self.engine.commit(offer.version, policy="drain")
        self._on_commit(offer.manifest.epoch, offer.version)

    async def commit(self, version: int, policy: CommitPolicy) -> None:
        with self._activities.timing("update") as update, self._losing():
            await self.engine.commit(version, policy=policy)
            update.size_bytes = self._update_bytes
        self._on_commit(self._epoch, version)

    def _raise_loss(self) -> None:
        if cause := self._lost():
            raise WorkerLost(cause)

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Name the loss of a rank where a call fails by it."""
        try:
            yield
        except GyreError:
            self._raise_loss()
            raise

    async def _read(self, request: Request, stream: Any) -> None:
        open_ = set(range(request.sampling.n)) if isinstance(request.sampling.n, int) else set()
        try:
            async for chunk in stream:
                if chunk.finish is not None:
                    open_.discard(chunk.index)
                self._chunks.append(chunk)
                self._tell()
        except Exception as error:  # noqa: BLE001  whatever broke, every completion gets its answer
            why = f"its stream broke: {type(error).__name__}: {error}"
            self._chunks += [
                TokenChunk.end(request.request_id, index, "abort", why) for index in sorted(open_)
            ]
        self._ended.append(request.request_id)
        self._unanswered.discard(request.request_id)
        if not self._unanswered and self._rollout is not None:
            self._rollout.end()
            self._rollout = None
        self._tell()

    def _tell(self) -> None:
        if self._told is not None:
            self._told.set()


def add_usage(parts: Sequence[Mapping[str, Usage]]) -> dict[str, Usage]:
    """Bytes of the same components over several workers."""
    return {
        name: Usage(
            device_bytes=sum(part[name].device_bytes for part in parts),
            host_bytes=sum(part[name].host_bytes for part in parts),
            disk_bytes=sum(part[name].disk_bytes for part in parts),
        )
        for name in dict.fromkeys(name for part in parts for name in part)
    }


def add_stats(parts: Sequence[EngineStats], *, refused: int, version: int) -> EngineStats:
    """Counters and gauges of several engines together, whose pages are of one size."""
    own = ("refused", "version", "page_tokens", "prefix_page_tokens")
    names = [name for name in EngineStats.__dataclass_fields__ if name not in own]
    sums = {name: int(np.sum([getattr(part, name) for part in parts])) for name in names}
    return EngineStats(
        **sums,
        refused=refused + sum(part.refused for part in parts),
        version=version,
        page_tokens=max((part.page_tokens for part in parts), default=0),
        prefix_page_tokens=max((part.prefix_page_tokens for part in parts), default=0),
    )
