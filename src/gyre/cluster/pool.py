"""Engine pool: many engines as one. In: Requests. Out: their streams, whichever engine answers. Implements
RolloutEngine and EngineLifecycle. Callers: loop, through wire.

    submit ──▶ desk: routed by outstanding tokens ──▶ member.send ──▶ engine ──▶ news ──▶ book ──▶ stream
                            ▲                                           │ lost
                            └──────── again, from what has come ◀───────┘

An engine that is lost costs its own requests only: the others go on with them. It is started again where that is
possible, and takes work once it has the weights that the others have. An engine beside a trainer rank is vital: with it
the rank is gone, so every stream ends with RankError and the run restarts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gyre.cluster.desk import Desk
from gyre.cluster.host import WorkerFault
from gyre.cluster.member import Member
from gyre.cluster.seats import add_stats
from gyre.cluster.streams import PoolStream
from gyre.cluster.trainers import VersionTensors
from gyre.core.contracts import Cluster, CommitPolicy, WorkerHandle
from gyre.core.errors import GyreError, RankError, WorkerLost
from gyre.core.records import EngineStats, Health, Manifest, Partial, Request

STOP_S = 10.0  # on top of an engine's own deadline, for its answer to arrive
Revive = Callable[[str], Awaitable[WorkerHandle]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    call_deadline_s: float
    hang_s: float
    progress_tokens: int
    max_restarts: int = 0  # of each engine


class EnginePool:
    """`engines` are workers whose object has an EngineSeat as `engine`; those in `vital` hold a trainer rank too.
    `revive(name)` starts a lost engine's worker again; without it a lost engine stays lost."""

    def __init__(
        self,
        cluster: Cluster,
        engines: Sequence[WorkerHandle],
        *,
        settings: PoolSettings,
        emit: Callable[..., None],
        vital: frozenset[str] = frozenset(),
        revive: Revive | None = None,
        version: int = 0,
    ) -> None:
        self._cluster, self._settings, self._emit, self._revive = cluster, settings, emit, revive
        self._desk = Desk(self._find_engines, self.abort, progress_tokens=settings.progress_tokens, emit=emit)
        self._members = [
            Member(
                handle,
                vital=handle.name in vital,
                deadline_s=settings.call_deadline_s,
                hang_s=settings.hang_s,
                on_news=self._desk.take_news,
                on_lost=self._lose,
            )
            for handle in engines
        ]
        self._version = version
        self._offered: tuple[Manifest, Mapping[str, Any]] | None = None
        self._published: tuple[Manifest, Mapping[str, Any]] | None = None
        self._broken: RankError | None = None
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._returns: set[asyncio.Task[None]] = set()

    @property
    def handles(self) -> list[WorkerHandle]:
        """Of the engines that are there."""
        return [member.handle for member in self._members if member.state != "lost"]

    # RolloutEngine ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> PoolStream:
        """Enqueue at once. What is submitted in one turn of the event loop is routed together, in order."""
        self._watch_all()
        return self._desk.submit(request)

    async def abort(self, request_id: str) -> None:
        self._desk.route()
        live = self._desk.find(request_id)
        if live is None:
            return
        if live.member is None:
            self._desk.end(live, "abort", "aborted by its owner")
        else:
            await live.member.ask("engine.abort", request_id)

    async def interrupt(self, *, deadline_s: float) -> Mapping[str, tuple[Partial, ...]]:
        self._desk.route()
        found = self._desk.end_waiting("interrupted", "")
        members, wait_s = self._present(), deadline_s + STOP_S
        calls = [member.ask("engine.interrupt", deadline_s, deadline_s=wait_s) for member in members]
        for part in await self._gather(calls, members):
            found |= part
        return found

    async def stats(self) -> EngineStats:
        parts = await self._each("engine.stats")
        total = add_stats(parts, refused=self._desk.refused, version=self._version)
        return replace(total, waiting=total.waiting + self._desk.num_waiting)

    async def health(self) -> Health:
        """Well as long as one engine is; the reason names those that are not."""
        if self._broken is not None:
            return Health(ok=False, reason=self._broken.message)
        members = self._present()
        found = dict(zip((m.name for m in members), await self._each("engine.health"), strict=False))
        reasons = {m.name: "lost" if m.name not in found else found[m.name].reason for m in self._members}
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
        return Health(ok=any(health.ok for health in found.values()), reason=why)

    async def drain(self, *, deadline_s: float) -> None:
        await self._desk.drain(deadline_s)

    # EngineLifecycle -------------------------------------------------------------------------------------------------

    async def start(self, *, dummy: bool) -> None:
        self._watch_all()
        await self._each("engine.start", dummy)

    async def prepare(self, manifest: Manifest, source: Mapping[str, Any]) -> None:
        """Every engine receives the version: from the trainer rank beside it, or a copy."""
        members = self._present()
        await self._gather([self._prepare(member, manifest, source) for member in members], members)
        self._offered = (manifest, source)

    async def commit(self, version: int, *, policy: CommitPolicy) -> None:
        """Engines that came back after `prepare` follow by themselves, and take no work before."""
        members = self._present()
        if self._offered is not None and self._offered[0].version == version:
            ready = [member for member in members if member.prepared == version]
            late = [member for member in members if member.prepared != version]
        else:
            ready, late = members, []
        await self._gather([member.ask("engine.commit", version, policy) for member in ready], ready)
        self._version, self._published = version, self._offered or self._published
        self._offered = None
        for member in ready:
            member.state, member.prepared = ("lost" if member.state == "lost" else "up"), None
        for member in late:
            member.state = "fresh"
            self._come_back(self._catch_up(member))
        self._desk.route()

    async def rollback(self) -> None:
        self._offered = None
        for member in self._present():
            member.prepared = None
        await self._each("engine.rollback")

    async def terminate(self) -> None:
        self._desk.route()
        self._desk.end_waiting("abort", "the engine was terminated")
        self._offered = None
        await self._each("engine.terminate")

    async def close(self) -> None:
        """Stop looking after the engines. Streams that are open end with an error."""
        tasks = [*self._watches.values(), *self._returns]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self._members:
            await member.close()
        self._desk.break_off(RankError("the engine pool was closed", hint="nothing to do: the run is ending"))

    # Losses and returns ----------------------------------------------------------------------------------------------

    def _find_engines(self) -> Sequence[Member] | RankError | None:
        """Who takes work; or the error that ends every request; or None while an engine is on its way back."""
        if self._broken is not None:
            return self._broken
        up = [member for member in self._members if member.state == "up"]
        if up or any(member.state == "fresh" for member in self._members):
            return up or (None if self._returns else ())
        if self._returns:
            return None
        return RankError("every engine is lost", hint="events.jsonl says why each was; look for engine.lost")

    def _watch_all(self) -> None:
        for member in self._members:
            if member.name not in self._watches and member.state != "lost":
                self._watches[member.name] = asyncio.create_task(self._watch(member, member.handle))

    async def _watch(self, member: Member, handle: WorkerHandle) -> None:
        """Waits for: the worker's end, which may never come; ended by `close`."""
        cause = await self._cluster.watch(handle)
        if member.handle is handle:
            self._lose(member, cause)

    def _lose(self, member: Member, cause: str) -> None:
        """Take an engine's requests from it. Called once for each loss, whoever noticed it first."""
        if member.state == "lost":
            return
        member.state, member.prepared = "lost", None
        member.unanswered.clear()
        lives = self._desk.held_by(member)
        place = member.handle.place
        self._emit("engine.lost", engine=member.name, place=place, cause=cause, requests=len(lives))
        if member.vital:
            self._break_off(
                RankError(
                    f"worker {member.name} ({place}), with a trainer rank and an engine, is lost: {cause}",
                    hint="cluster.max_restarts lets the run restart from its newest snapshot",
                )
            )
            return
        self._desk.take_back(lives)
        self._come_back(self._restart(member))
        self._desk.route()

    def _break_off(self, error: RankError) -> None:
        self._broken = self._broken or error
        self._desk.break_off(self._broken)

    def _come_back(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._returns.add(task)

        def done(finished: asyncio.Task[None]) -> None:
            self._returns.discard(finished)
            if not finished.cancelled():
                self._desk.route()

        task.add_done_callback(done)

    async def _restart(self, member: Member) -> None:
        """Start a lost engine's worker again, as often as is allowed, and bring it to the current weights."""
        watch = self._watches.pop(member.name, None)
        if watch is not None:
            watch.cancel()
        await self._cluster.stop(member.handle)
        while self._revive is not None and member.restarts < self._settings.max_restarts:
            member.restarts += 1
            try:
                member.handle = await self._revive(member.name)
                await member.ask("engine.start", True)  # on dummy weights it refuses work until a commit
            except (GyreError, WorkerFault) as error:
                self._emit("engine.restart_failed", engine=member.name, number=member.restarts, error=str(error))
                continue
            member.state = "fresh"
            self._emit("engine.restarted", engine=member.name, number=member.restarts, place=member.handle.place)
            self._watch_all()
            await self._catch_up(member)
            return
        self._emit("engine.restarts_exhausted", engine=member.name, restarts=member.restarts)

    async def _catch_up(self, member: Member) -> None:
        """Give a fresh engine the version that the others answer with. One whose tensors are gone by now gets the next
        version with the others."""
        while member.state == "fresh" and self._published is not None:
            manifest, source = self._published
            try:
                await self._prepare(member, manifest, source)
                await member.ask("engine.commit", manifest.version, "drain")
            except WorkerLost as error:
                self._lose(member, error.message)
                return
            except GyreError as error:
                self._emit(
                    "engine.waits_for_weights", engine=member.name, version=manifest.version, reason=error.message
                )
                return
            if manifest.version == self._version:
                member.state, member.prepared = "up", None
                self._emit("engine.rejoined", engine=member.name, version=manifest.version)

    # Fan-out ---------------------------------------------------------------------------------------------------------

    def _present(self) -> list[Member]:
        if self._broken is not None:
            raise self._broken
        return [member for member in self._members if member.state != "lost"]

    async def _prepare(self, member: Member, manifest: Manifest, source: Mapping[str, Any]) -> None:
        if isinstance(source, VersionTensors):
            if member.name in source.homes:
                await member.ask("engine.prepare_own", manifest.version)
                member.prepared = manifest.version
                return
            source = await asyncio.to_thread(source.fetch_all)
            manifest = replace(manifest, shared=False)
        await member.ask("engine.prepare", manifest, self._cluster.share(source))
        member.prepared = manifest.version

    async def _each(self, method: str, *args: Any) -> list[Any]:
        """Ask every engine that is there."""
        members = self._present()
        return await self._gather([member.ask(method, *args) for member in members], members)

    async def _gather(self, calls: Sequence[Awaitable[Any]], members: Sequence[Member]) -> list[Any]:
        """All answers. The loss of an engine that the others can do without is no error; any other is raised, the first
        one, when all calls have ended."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            while open_ := [task for task in tasks if not task.done()]:
                await asyncio.wait(open_, return_when=asyncio.FIRST_COMPLETED)
                self._note_losses(tasks, members)
        finally:
            for task in tasks:
                task.cancel()
        errors = [error for task in tasks if (error := task.exception()) is not None]
        for error in errors:
            if not isinstance(error, WorkerLost):
                raise error
        return [task.result() for task in tasks if task.exception() is None]

    def _note_losses(self, tasks: Sequence[asyncio.Future[Any]], members: Sequence[Member]) -> None:
        """Raise as soon as a vital engine is lost: the others may wait for its rank."""
        for task, member in zip(tasks, members, strict=True):
            error = task.exception() if task.done() and not task.cancelled() else None
            if isinstance(error, WorkerLost):
                self._lose(member, error.message)
            elif isinstance(error, WorkerFault) and member.vital:
                self._lose(member, str(error))
        if self._broken is not None:
            raise self._broken
