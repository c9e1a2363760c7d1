"""Engine pool: many engines as one. In: Requests. Out: their streams, whichever engine answers.

Past 500 lines: it implements RolloutEngine and EngineLifecycle over one state of its engines.

An engine that is lost costs its own requests only: the others go on with them. It is started again
where that is possible, and takes work once it has the weights that the others have. An engine
beside a trainer rank is vital: with it the rank is gone, so every stream ends with RankError and
the run restarts. A guest was started elsewhere, and comes and goes: it is not started again, and
what it cannot do costs itself alone. A fault in the pool itself, such as a full disk under the
events, ends every stream with that fault.

    submit ──▶ router, load balancer ──▶ replica ──▶ engine ──▶ request log ──▶ stream
                      ▲                                │ lost
                      └── again, from what has come ◀──┘
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gyre.cluster.engine_pool.ejection import EjectionPolicy
from gyre.cluster.engine_pool.load_balancer import LoadBalancer
from gyre.cluster.engine_pool.probe import find_status
from gyre.cluster.engine_pool.replica import EngineReplica
from gyre.cluster.engine_pool.restarts import RestartPolicy, restart_wait_s
from gyre.cluster.engine_pool.router import Live, RequestRouter
from gyre.cluster.engine_pool.routing import RoutingPolicy
from gyre.cluster.watchdog import GRACE_S, Watchdog, find_cause
from gyre.cluster.worker.endpoints import add_stats
from gyre.cluster.worker.rpc import CALLS, LOSSES
from gyre.cluster.worker.server import WorkerFault
from gyre.core.chunks import TokenStream
from gyre.core.contracts import (
    Cluster,
    CommitPolicy,
    EngineAbilities,
    WorkerHandle,
    join_abilities,
)
from gyre.core.errors import DeadlineError, GyreError, RankError
from gyre.core.events import Emit
from gyre.core.liveness import StallLimit
from gyre.core.offers import Offer
from gyre.core.records import EngineStats, Health, Partial, ReplicaStatus, Request
from gyre.weights.protocol import Prepared, ReceiverState, RolledBack, SwapBegan, SwapDone

STOP_S = 10.0  # on top of an engine's own deadline, for its answer to arrive
# on top of the deadline of an engine beside a rank: its watchdog is to judge first, with all stacks
WATCH_S = 10.0
Revive = Callable[[str], Awaitable[WorkerHandle]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    call_deadline_s: float
    hang_s: float
    progress_tokens: int
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    # completions that wait while no engine takes work; None sets no limit
    max_waiting: int | None = None
    stall_s: float = 10.0  # without progress of its requests, after which an engine is not ready
    probe_s: float = 2.0  # longest wait for an engine's answer about itself
    routing: RoutingPolicy = "least_tokens"
    ejection: EjectionPolicy | None = None  # None ejects no engine


class EnginePool:
    """Route requests over `engines`: workers whose object has an EngineEndpoint as `engine`.

    Those in `vital` hold a trainer rank too. `revive(name)` starts a lost engine's worker again;
    without it a lost engine stays lost. `starts_with_weights`: such a worker has the weights of
    a version by itself, as one that reads them from a folder; it joins at once if that is the
    pool's. `other_ranks`: by the name of a vital engine, workers without which it is lost.
    """

    def __init__(
        self,
        cluster: Cluster,
        engines: Sequence[WorkerHandle],
        *,
        settings: PoolSettings,
        emit: Emit,
        vital: frozenset[str] = frozenset(),
        revive: Revive | None = None,
        starts_with_weights: bool = False,
        version: int = 0,
        other_ranks: Mapping[str, Sequence[WorkerHandle]] | None = None,
    ) -> None:
        self._other_ranks = other_ranks or {}
        self._cluster = cluster
        self._settings = settings
        self._emit = emit
        self._revive = revive
        self._starts_with_weights = starts_with_weights
        self._vital = vital
        ranks = [handle for handle in engines if handle.name in vital]
        self._watchdog = Watchdog(ranks, emit=emit, hang_s=settings.hang_s)
        self.balancer = LoadBalancer(
            settings.routing,
            [handle.name for handle in engines],
            ejection=settings.ejection,
            seed=secrets.randbits(128),
            emit=emit,
        )
        self.router = RequestRouter(
            self._find_engines,
            self.abort,
            balancer=self.balancer,
            call_or_break=self._call_or_break,
            on_broken=self._lose,
            progress_tokens=settings.progress_tokens,
            max_waiting=settings.max_waiting,
            emit=emit,
        )
        # the newest process of each engine
        self.members = {handle.name: self._make_member(handle, "up") for handle in engines}
        self._restarts: defaultdict[str, list[float]] = defaultdict(list)  # when each began
        self._state = ReceiverState(version=version)  # of the engines together
        self._offered: Offer | None = None
        self._published: Offer | None = None
        self._broken: Exception | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self.returns: set[asyncio.Task[None]] = set()
        self._has_had_guests = False
        self._calls: set[asyncio.Future[Any]] = set()  # that engines have not answered

    @property
    def handles(self) -> list[WorkerHandle]:
        """Return the handles of the engines that are not lost, without guests."""
        members = [member for member in self.members.values() if not member.guest]
        return [member.handle for member in members if member.state != "lost"]

    @property
    def version(self) -> int:
        """Return the version that the engines answer with."""
        return self._state.version

    def lose(self, handle: WorkerHandle, cause: str) -> None:
        """Take an engine as lost that another part of the run found so."""
        member = self.members.get(handle.name)
        if member is not None and member.handle is handle:
            self._lose(member, cause)

    async def add(self, handle: WorkerHandle) -> None:
        """Take in a guest, an engine on dummy weights. It gets work once it has the pool's version.
        GyreError or WorkerFault where it cannot start."""
        member = self._make_member(handle, "fresh", guest=True)
        await member.ask("engine.start", True)
        self._has_had_guests = True
        self.balancer.add(handle.name)
        if self.balancer.estimates:
            self.balancer.learn(member, await member.ask("engine.stats"))
        self.members[handle.name] = member
        self._watch_all()
        await self._catch_up(member)

    async def remove(self, handle: WorkerHandle, *, deadline_s: float) -> None:
        """Let a guest go. It gets no new requests; those that it has not answered by the deadline
        go on elsewhere, from what has come of them. The caller hangs up."""
        member = self.members.get(handle.name)
        if member is None or member.handle is not handle or member.state == "lost":
            return
        member.leaves = True
        lives = [live for live in self.router.all() if live.member is member]
        with suppress(DeadlineError):  # it is the answer: the rest goes elsewhere
            await self.router.until_gone(lives, deadline_s)
        if member.state != "lost":
            member.lose()
            self._call_or_break(self._requeue, member)
            await member.close()
            self.members.pop(handle.name)
            self._call_or_break(self.router.route)

    # RolloutEngine
    # ----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> TokenStream:
        """Enqueue at once. What is submitted in one turn of the event loop is routed together, in
        order."""
        self._watch_all()
        return self.router.submit(request)

    async def abort(self, request_id: str) -> None:
        """End a request, and return when it has its answer."""
        self._call_or_break(self.router.route)
        live = self.router.find(request_id)
        if live is None:
            return
        member = live.member
        self.router.begin_end([live], "abort", "aborted by its owner")
        if member is not None:
            await self._gather({member: member.ask("engine.abort", request_id)})
            await self.router.until_gone([live], self._settings.call_deadline_s)

    async def interrupt(self, *, deadline_s: float) -> Mapping[str, tuple[Partial, ...]]:
        """Interrupt every engine. Partial answers of engines that are lost meanwhile count as far
        as they had arrived."""
        self._call_or_break(self.router.route)
        members, lives, end_s = (
            self._present(),
            self.router.all(),
            asyncio.get_running_loop().time() + deadline_s,
        )
        self.router.begin_end(lives, "interrupted", "")
        wait_s = deadline_s + STOP_S
        parts = await self._gather(
            {
                member: member.ask("engine.interrupt", deadline_s, deadline_s=wait_s)
                for member in members
            }
        )
        await self.router.until_gone(
            lives, max(0.0, end_s - asyncio.get_running_loop().time()) + STOP_S
        )
        told = {
            request_id: partials for part in parts.values() for request_id, partials in part.items()
        }
        cut = [live for live in lives if live.member is None and live.request_id not in told]
        return told | {live.request_id: live.book.for_engine().partials for live in cut}

    async def stats(self) -> EngineStats:
        parts = await self._each("engine.stats")
        total = add_stats(list(parts.values()), refused=self.router.refused, version=self.version)
        return replace(total, waiting=total.waiting + self.router.num_waiting)

    async def abilities(self) -> EngineAbilities:
        """Return what all engines that answer can do: any of them may get a request."""
        return join_abilities(list((await self._each("engine.abilities")).values()))

    async def health(self) -> Health:
        """Well as long as one engine is; the reason names those that are not."""
        if self._broken is not None:
            return Health(ok=False, reason=str(self._broken))
        found = await self.inspect()
        why = "; ".join(f"{one.name}: {one.reason}" for one in found if one.reason)
        return Health(ok=any(one.state == "ready" for one in found), reason=why)

    async def inspect(self) -> tuple[ReplicaStatus, ...]:
        """Return what each engine says of itself within probe_s. One that is late is not lost. Of a
        broken pool none is ready, whatever it would say."""
        members, now_s = list(self.members.values()), asyncio.get_running_loop().time()
        if (broken := self._broken) is not None:
            return tuple(
                ReplicaStatus(
                    name=member.name,
                    state="lost" if member.state == "lost" else "unwell",
                    reason=str(broken),
                    routing=self.balancer.stats(member, now_s),
                )
                for member in members
            )
        answers = await asyncio.gather(*(self._probe(member) for member in members))
        now_s = asyncio.get_running_loop().time()
        up = [member for member in members if member.state == "up"]
        self._call_or_break(self.balancer.look, up, now_s)
        load = self.router.outstanding_tokens(self.members)
        return tuple(
            find_status(
                member.name,
                member.state,
                health,
                stats,
                still_s=member.still_s,
                stall_s=self._settings.stall_s,
                probe_s=self._settings.probe_s,
                num_requests=len(member.unanswered),
                outstanding_tokens=load[member.name],
                routing=self.balancer.stats(member, now_s),
            )
            for member, (health, stats) in zip(members, answers, strict=True)
        )

    async def _probe(self, member: EngineReplica) -> tuple[Health | None, EngineStats | None]:
        if member.state == "lost":
            return None, None
        try:
            health, stats, pulse = await asyncio.gather(
                *(probe.ask(self._settings.probe_s) for probe in member.probes)
            )
        except LOSSES as error:
            self._lose(member, str(error))
            return None, None
        return None if pulse is None else health, stats

    async def drain(self, *, deadline_s: float) -> None:
        await self.router.drain(deadline_s)

    # EngineLifecycle
    # ----------------------------------------------------------------------------------------------

    async def start(self, *, dummy: bool) -> None:
        self._watch_all()
        calls = {member: member.ask("engine.start", dummy) for member in self._present()}
        await self._gather(calls, watched="start of the engines")
        if self.balancer.estimates:
            found = await self._each("engine.stats")
            for member in self._present():
                if (stats := found.get(member.name)) is not None:
                    self.balancer.learn(member, stats)

    async def prepare(self, offer: Offer, *, reverts: bool = False) -> None:
        """Let every engine prepare the version: from the trainer rank beside it, or as it is
        carried. One that is still catching up with the last version takes it after the commit."""
        assert not reverts, "the pool brings its engines back by itself"
        self._state.refuse_stale(offer.manifest)
        self._watch_all()
        members = [member for member in self._present() if not member.catching_up]
        is_away = any(member.name not in offer.homes for member in members)
        carried = await self._carry(offer) if is_away else None
        calls = {member: self._prepare(member, offer, carried) for member in members}
        await self._gather(calls, watched=f"receipt of version {offer.version}")
        self._offered = offer
        self._state = self._state.after(Prepared(epoch=offer.manifest.epoch, version=offer.version))

    async def commit(self, version: int, *, policy: CommitPolicy) -> None:
        """Engines that came back after `prepare` follow by themselves, and take no work before."""
        offer = self._offered if self._state.is_prepared(version) else None
        up = [member for member in self._present() if member.state == "up"]
        ready = (
            up
            if offer is None
            else [member for member in self._present() if member.prepared == version]
        )
        calls = {member: member.ask("engine.commit", version, policy) for member in ready}
        try:
            await self._gather(calls, watched=f"commit of version {version}")
        except Exception as error:
            if offer is not None and self._broken is None:
                cause = f"version {version} was not committed everywhere: {error}"
                await self._undo_commit(ready, cause)
            raise
        if offer is not None:
            self._call_or_break(self._tell_answered)
            self._state = self._state.after(SwapBegan(version=version)).after(SwapDone())
        self._published, self._offered = offer or self._published, None
        for member in self._present():
            if member in ready:
                if policy != "keep_prefix":
                    self.balancer.forget(member)
                self._join(member, version)
            elif offer is not None:
                member.state = "fresh"
                self._come_back(self._catch_up(member))
        self._call_or_break(self.router.route)

    async def rollback(self, *, deadline_s: float = STOP_S) -> None:
        self._offered, self._state = None, self._state.after(RolledBack())
        members = [member for member in self._present() if not member.catching_up]
        for member in members:
            member.prepared = None
        await self._gather(
            {member: member.ask("engine.rollback", deadline_s=deadline_s) for member in members}
        )

    def _tell_answered(self) -> None:
        """Tell which engines the rollouts of the version came from that now ends."""
        answered = self.balancer.take_answered()
        if self._has_had_guests:
            for name, count in sorted(answered.items()):
                told = {"version": self.version, "completions": count}
                self._emit("engine.answered", engine=name, **told)

    async def _undo_commit(self, members: Sequence[EngineReplica], cause: str) -> None:
        """Bring engines back to the pool's version, after a commit that failed on some. Those that
        have swapped take it again from where it was offered, or are started again."""
        # an engine rolls back after the commit that it may still be at
        await self.rollback(deadline_s=self._settings.call_deadline_s)
        found = await self._each("engine.stats")
        for member in members:
            stats = found.get(member.name)
            if member.vital or stats is None or stats.version == self.version:
                continue
            if reason := await self._revert(member):
                self._lose(member, f"it has version {stats.version}: {cause}; {reason}")

    async def _revert(self, member: EngineReplica) -> str:
        """Return why an engine cannot take the pool's version again, or ""."""
        offer = self._published
        if offer is None or offer.addressed is None:
            return "the last version is offered no more"
        try:
            await member.ask("engine.revert", offer)
        except (*LOSSES, GyreError) as error:
            return str(error)
        self._emit("engine.reverted", engine=member.name, version=offer.version)
        return ""

    async def terminate(self) -> None:
        """There is no version any more that an engine which comes back could catch up with."""
        self._call_or_break(self.router.route)
        members, lives = self._present(), self.router.all()
        self._offered = self._published = None
        self._state = self._state.after(RolledBack())
        self.router.begin_end(lives, "abort", "the engine was terminated")
        for member in members:
            self.balancer.forget(member)
        await self._gather({member: member.ask("engine.terminate") for member in members})
        await self.router.until_gone(lives, self._settings.call_deadline_s)

    async def close(self) -> None:
        """Stop looking after the engines. Streams that are open end with an error."""
        tasks = [*self._watches, *self.returns]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self.members.values():
            await member.close()
        self.router.break_off(
            RankError("the engine pool was closed", hint="nothing to do: the run is ending")
        )

    # Losses and returns
    # ----------------------------------------------------------------------------------------------

    def _make_member(
        self, handle: WorkerHandle, state: Literal["up", "fresh"], *, guest: bool = False
    ) -> EngineReplica:
        return EngineReplica(
            handle,
            guest=guest,
            vital=handle.name in self._vital,
            state=state,
            deadline_s=self._settings.call_deadline_s
            + (WATCH_S if handle.name in self._vital else 0.0),
            hang_s=self._settings.hang_s,
            on_news=lambda member, news: self._call_or_break(self.router.take_news, member, news),
            on_lost=self._lose,
        )

    def _find_engines(self) -> Sequence[EngineReplica] | BaseException | None:
        """Return the engines that take work, the error that ends every request, or None while an
        engine is being restarted."""
        if self._broken is not None:
            return self._broken
        up = [member for member in self.members.values() if member.takes_work]
        if up or self.returns:
            return up or None
        if any(member.state != "lost" for member in self.members.values()):
            if any(member.leaves for member in self.members.values()):
                return None
            offer = self._published
            if offer is None or offer.registered is None:
                return ()
            return RankError(
                f"no engine could read version {offer.version} where it is registered",
                hint="events.jsonl says why not (engine.waits_for_weights); cluster.max_restarts "
                "lets the run restart from its newest snapshot",
            )
        return RankError(
            "every engine is lost", hint="events.jsonl says why each was; look for engine.lost"
        )

    def _watch_all(self) -> None:
        for member in self.members.values():
            if not member.watched and member.state != "lost":
                member.watched = True
                self._keep(self._watches, self._watch(member))
                for other in self._other_ranks.get(member.name, ()):
                    self._keep(self._watches, self._watch_rank(member, other))

    async def _watch(self, member: EngineReplica) -> None:
        """Wait for the worker's end, which may never come; `close` ends the wait."""
        self._lose(member, await self._cluster.watch(member.handle))

    async def _watch_rank(self, member: EngineReplica, other: WorkerHandle) -> None:
        """Wait for the end of another rank of an engine, as `_watch` does for the first one's."""
        cause = await self._cluster.watch(other)
        self._lose(member, f"{other.name} ({other.place}), a rank of its engine, ended: {cause}")

    def _lose(self, member: EngineReplica, cause: str) -> None:
        """Take an engine's requests from it. Once for each life, by the first notice of its
        end."""
        if member.state != "lost":
            member.lose()
            self._call_or_break(self._take_loss, member, cause)

    def _take_loss(self, member: EngineReplica, cause: str) -> None:
        again, place = self.router.take_back(member), member.handle.place
        self.balancer.lose(member, asyncio.get_running_loop().time())
        self._emit("engine.lost", engine=member.name, place=place, cause=cause, requests=len(again))
        if member.vital:
            self._break_off(
                RankError(
                    f"worker {member.name} ({place}), with a trainer rank and an engine, is lost: "
                    f"{cause}",
                    hint="cluster.max_restarts lets the run restart from its newest snapshot",
                )
            )
            return
        self._tell_requeued(member, again)
        self._come_back(self._part_with(member) if member.guest else self._restart(member))
        self.router.route()

    def _requeue(self, member: EngineReplica) -> None:
        """Take the requests of an engine that leaves."""
        self._tell_requeued(member, self.router.take_back(member))
        self.balancer.lose(member, asyncio.get_running_loop().time())

    def _tell_requeued(self, member: EngineReplica, again: Sequence[Live]) -> None:
        for live in again:
            self._emit(
                "retry.request_requeued",
                request_id=live.request_id,
                engine=member.name,
                kept_tokens=live.book.num_tokens,
            )

    async def _part_with(self, member: EngineReplica) -> None:
        """End the link to a guest that is lost."""
        await member.close()
        await self._cluster.stop(member.handle)
        if self.members.get(member.name) is member:
            del self.members[member.name]

    def _call_or_break(self, work: Callable[..., None], *args: Any) -> None:
        """Call `work`. An error in it, such as a full disk under the events, breaks the pool: every
        reader and caller gets that error."""
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001  it is raised to all of them
            self._break_off(error)

    def _break_off(self, error: Exception) -> None:
        self._broken = self._broken or error
        self.router.break_off(self._broken)
        for call in self._calls:
            call.cancel()

    def _come_back(self, work: Coroutine[Any, Any, None]) -> None:
        self._keep(self.returns, work)

    def _keep(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        """Hold a task until it ends; one that breaks is a fault of the pool."""
        task = asyncio.create_task(work)
        tasks.add(task)

        def done(finished: asyncio.Task[None]) -> None:
            tasks.discard(finished)
            if finished.cancelled():
                return
            error = finished.exception()
            if isinstance(error, Exception):
                self._break_off(error)
            self._call_or_break(self.router.route)

        task.add_done_callback(done)

    async def _restart(self, lost: EngineReplica) -> None:
        """Start a lost engine's worker again, as often as is allowed, and bring it to the current
        weights."""
        name, began_s = lost.name, self._restarts[lost.name]
        await lost.close()
        await self._cluster.stop(lost.handle)
        policy = self._settings.restarts
        while (revive := self._revive) is not None:
            if (wait_s := restart_wait_s(began_s, time.monotonic(), policy)) is None:
                break
            await asyncio.sleep(wait_s)
            began_s.append(time.monotonic())
            number = len(began_s)
            try:
                member, version = await self._start_again(revive, name)
            except (GyreError, WorkerFault) as error:
                self._emit("engine.restart_failed", engine=name, number=number, error=str(error))
                continue
            self.members[name] = member
            self._emit("engine.restarted", engine=name, number=number, place=member.handle.place)
            self._watch_all()
            if version == self.version:
                self._join(member, self.version)
            else:
                await self._catch_up(member)
            return
        self._emit("engine.restarts_exhausted", engine=name, restarts=len(began_s))

    async def _start_again(self, revive: Revive, name: str) -> tuple[EngineReplica, int | None]:
        """Return a new life, and which version it has. On dummy weights it has none, and refuses
        work until a commit."""
        member, version = self._make_member(await revive(name), "fresh"), None
        try:
            await member.ask("engine.start", not self._starts_with_weights)
            if self._starts_with_weights or self.balancer.estimates:
                stats = await member.ask("engine.stats")
                version = stats.version if self._starts_with_weights else None
                self.balancer.learn(member, stats)
        except BaseException:
            await self._cluster.stop(member.handle)
            raise
        return member, version

    async def _catch_up(self, member: EngineReplica) -> None:
        """Give a fresh engine the version that the others answer with. One whose tensors are gone
        by now gets the next version with the others."""
        if member.catching_up:
            return  # the running task looks again at what the others have
        member.catching_up = True
        try:
            while member.state == "fresh" and (offer := self._published) is not None:
                reason = await self._try_offer(member, offer)
                if member.state != "fresh" or offer is not self._published:
                    continue
                if reason:
                    self._emit(
                        "engine.waits_for_weights",
                        engine=member.name,
                        version=offer.version,
                        reason=reason,
                    )
                    return
                self._join(member, offer.version)
        finally:
            member.catching_up = False

    def _join(self, member: EngineReplica, version: int) -> None:
        """Give work to an engine that has the current weights."""
        was_away = member.state == "fresh"
        member.state, member.prepared = "up", None
        if was_away:
            self.balancer.forget(member)
            self._call_or_break(
                lambda: self._emit("engine.rejoined", engine=member.name, version=version)
            )

    async def _try_offer(self, member: EngineReplica, offer: Offer) -> str:
        """Return why an engine could not take a version, or ""."""
        try:
            carried = None if member.name in offer.homes else await self._carry(offer)
        except GyreError as error:  # its owner is past that version, or gone itself
            return error.message
        try:
            await self._prepare(member, offer, carried)
            await member.ask("engine.commit", offer.version, "drain")
        except LOSSES as error:
            self._lose(member, str(error))
        except GyreError as error:
            return error.message
        return ""

    # Fan-out
    # ----------------------------------------------------------------------------------------------

    def _present(self) -> list[EngineReplica]:
        if self._broken is not None:
            raise self._broken
        return [member for member in self.members.values() if member.state != "lost"]

    async def _carry(self, offer: Offer) -> Any:
        """Return the offer for engines that no trainer rank is beside, sent once. Tensors of a
        worker are fetched; of a folder and of registered shards no byte is copied."""
        # here, since it imports torch: a server never comes by, as its weights are a folder
        from gyre.weights.receive import carry

        return self._cluster.share(await carry(offer))

    async def _prepare(self, member: EngineReplica, offer: Offer, carried: Any) -> None:
        if member.name in offer.homes:
            await member.ask("engine.prepare_own", offer.version)
        else:
            await member.ask("engine.prepare", carried)
        if member.state != "lost":
            member.prepared = offer.version

    async def _each(self, method: str, *args: Any) -> dict[str, Any]:
        """Ask every engine that is there."""
        return await self._gather({member: member.ask(method, *args) for member in self._present()})

    async def _gather(
        self, calls: Mapping[EngineReplica, Coroutine[Any, Any, Any]], *, watched: str = ""
    ) -> dict[str, Any]:
        """Return the answers by name. The loss of an engine that is not vital is not an error.

        After any other error the open calls may wait for the engine that failed. So they get
        GRACE_S, or nothing when the pool breaks. `watched` names the work of the ranks for the
        watchdog, which looks at them meanwhile.
        """
        answers: dict[str, Any] = {}
        own: list[BaseException] = []  # no losses, as they came

        async def one(member: EngineReplica, call: Coroutine[Any, Any, Any]) -> None:
            try:
                answers[member.name] = await call
            except LOSSES as error:
                self._lose(member, str(error))
            except Exception as error:  # noqa: BLE001  the one that began it is raised
                if member.guest and isinstance(error, GyreError | OSError):
                    self._lose(member, str(error))
                else:
                    own.append(error)

        tasks = {member: asyncio.create_task(one(member, call)) for member, call in calls.items()}
        guard = asyncio.create_task(self._guard(watched, tasks))
        self._calls |= set(tasks.values())
        open_ = set(tasks.values())
        try:
            while open_ and self._broken is None:
                done, open_ = await asyncio.wait(
                    open_, timeout=GRACE_S if own else None, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
        finally:
            self._calls -= set(tasks.values())
            for task in (guard, *open_):
                task.cancel()
            await asyncio.gather(guard, *open_, return_exceptions=True)
        if (error := find_first(own, self._broken)) is not None:
            raise error
        return answers

    async def _guard(self, watched: str, tasks: Mapping[EngineReplica, asyncio.Task[None]]) -> None:
        """Wait for ranks that hang in a call; the caller of that call ends the wait."""
        calls = {member.name: task for member, task in tasks.items() if member.vital}
        if not watched or not calls:
            return
        stall_limit = StallLimit(key=CALLS, seconds=self._settings.call_deadline_s)
        try:
            await self._watchdog.guard(watched, calls, stall_limit)
        except Exception as error:  # noqa: BLE001
            # a hang, or an error that hides one: the watch has ended
            self._break_off(error)


def find_first(own: Sequence[BaseException], broken: BaseException | None) -> BaseException | None:
    """Return the first cause among the engines' own errors, as they came, and that of the pool. An
    engine that only saw a rank fail is not the cause. Pure."""
    first = find_cause(dict(enumerate(own)))[1] if own else None
    return (
        broken if broken is not None and (first is None or isinstance(first, RankError)) else first
    )
