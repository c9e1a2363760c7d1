"""NativeEngine: the engine's three contracts on one object. In: Requests, manifests, moves. Out:
TokenChunks. Implements RolloutEngine, EngineLifecycle and MemoryTenant by two halves: an
AsyncFrontend on the event loop and a CoreWorker on the compute thread. What passes from one to the
other is journal entries.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from gyre.core.chunks import TokenStream
from gyre.core.contracts import CommitPolicy, EngineAbilities
from gyre.core.errors import InputError
from gyre.core.events import Emit
from gyre.core.offers import Offer
from gyre.core.records import (
    Component,
    EngineStats,
    Health,
    Partial,
    Request,
    Tier,
    Usage,
)
from gyre.engine.config import EngineConfig, plan_engine
from gyre.engine.core_worker import CoreFailed, CoreWorker, FollowingRanks
from gyre.engine.frontend.admission import Load, RequestLimits, find_overload, find_refusal
from gyre.engine.frontend.async_frontend import AsyncFrontend, by_deadline
from gyre.engine.scheduler.core import Decodes, EngineCore
from gyre.engine.scheduler.journal import Interrupt
from gyre.engine.scheduler.state import Counters
from gyre.models.decoder import Decoder
from gyre.observability.refusals import Refusals
from gyre.weights.transports.opened import Reading


class NativeEngine:
    """Tokens in, tokens out, on a given decoder. `shared_weights` says that the decoder is the
    trainer's own."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        tokenizer: Decodes | None = None,
        *,
        compute: Executor,
        emit: Emit,
        device: torch.device,
        dtype: torch.dtype,
        version: int = 0,
        shared_weights: bool = True,
        journal_folder: Path | None = None,
        followers: FollowingRanks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = plan_engine(config, device_type=device.type)
        eos_ids = decoder.spec.eos_ids if tokenizer is None else tokenizer.eos_ids
        self._config = config
        self.worker = CoreWorker(
            decoder,
            config,
            tokenizer,
            emit=emit,
            device=device,
            dtype=dtype,
            version=version,
            shared_weights=shared_weights,
            eos_ids=eos_ids,
            journal_folder=journal_folder if config.journal else None,
            followers=followers,
        )
        self.frontend = AsyncFrontend(self.worker, compute=compute, emit=emit, clock=clock)
        self.limits = RequestLimits(
            vocab_size=decoder.whole_spec.vocab_size,
            context_tokens=decoder.spec.context_tokens,
            cache_tokens=self.worker.memory.num_pages * config.page_tokens,
            can_decode=tokenizer is not None,
            most_completions=config.max_running + config.max_queued,
            eos_ids=eos_ids,
        )
        self._most = Load(
            completions=config.max_running + config.max_queued,
            tokens=self.limits.cache_tokens + config.max_queued_tokens,
        )
        self._terminating = False
        self._refusals = Refusals(emit)

    @property
    def core(self) -> EngineCore | None:
        """The core that decides now; None while not started."""
        return self.worker.core

    @property
    def failure(self) -> str:
        """Return the error that the core failed with, or an empty string."""
        return self.worker.failure

    @property
    def cache_tokens(self) -> int:
        """Tokens whose KV fits. The last token that a completion chooses needs none."""
        return self.limits.cache_tokens

    # -- RolloutEngine

    def submit(self, request: Request) -> TokenStream:
        """Enqueue at once and return the stream. Must be called on a running event loop."""
        stream = TokenStream(request, self.limits.most_completions, self.abort)
        reason = self._why_refuse(request)
        if reason is None:
            self.frontend.accept(request, stream)
        else:
            self._refusals.note(str(request.request_id), reason)
            stream.refuse(reason)
        return stream

    async def abort(self, request_id: str) -> None:
        with suppress(CoreFailed):  # then everyone is answered
            await self.frontend.abort(request_id)

    async def interrupt(self, *, deadline_s: float) -> Mapping[str, tuple[Partial, ...]]:
        """Return nothing if the engine failed: every request was answered "abort" then."""
        if self.core is None:
            return {}
        work = asyncio.ensure_future(self._interrupt())
        return await by_deadline(work, deadline_s, "the compute thread to finish its step")

    async def stats(self) -> EngineStats:
        worker = self.worker
        state = None if worker.core is None else worker.core.state
        counters = Counters() if state is None else state.counters
        running = 0 if state is None else state.rows.num_active
        return EngineStats(
            running=running,
            waiting=max(0, self.frontend.load.completions - running),
            prompt_tokens=counters.prompt_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            swaps_out=counters.swaps_out,
            swaps_in=counters.swaps_in,
            recomputed_tokens=counters.recomputed_tokens,
            host_pages_used=0 if state is None else state.slots.num_slots - state.slots.num_free,
            host_pages_total=worker.memory.num_slots,
            refused=self._refusals.total,
            steps=counters.steps,
            pages_used=0 if state is None else state.pages.num_used,
            pages_total=worker.memory.num_pages,
            page_tokens=self._config.page_tokens,
            prefix_page_tokens=self._config.page_tokens if self._config.prefix_cache else 0,
            version=worker.weights.version,
        )

    async def health(self) -> Health:
        reason = self.worker.why_blocked()
        return Health(ok=reason is None, reason=reason or "")

    async def abilities(self) -> EngineAbilities:
        return EngineAbilities(
            engine="the native engine",
            stop_strings=self.limits.can_decode,
            sources=self.worker.weights.sources,
        )

    async def drain(self, *, deadline_s: float) -> None:
        await self.frontend.wait_until(self.frontend.is_drained, deadline_s)

    def read_parts(self, reading: Reading) -> None:
        """Say how registered versions are read, if not from this host's shared memory alone."""
        self.worker.weights.read_parts(reading)

    # -- EngineLifecycle

    async def start(self, *, dummy: bool) -> None:
        """Allocate KV. With `dummy` no work is taken until a commit; shared weights are left as
        they are."""
        await self.frontend.at_rest(self.worker.start, dummy)

    async def prepare(self, offer: Offer, *, reverts: bool = False) -> None:
        self.worker.need_started("prepare")
        try:
            await self.frontend.on_compute(partial(self.worker.prepare, offer, reverts=reverts))
        except CoreFailed:
            self.frontend.poke()  # the waiting callers are answered
            raise

    async def commit(self, version: int, *, policy: CommitPolicy) -> None:
        """drain: requests in flight end first, later ones wait. keep_prefix: those in flight are
        computed again under the new version. continue: they go on with the KV that they have. The
        latter two change between two steps."""
        worker, frontend = self.worker, self.frontend
        worker.need_started("commit")
        if not worker.weights.state.is_prepared(version):
            if version == worker.weights.version and not worker.weights.is_dummy:
                return  # committed before
            raise InputError(
                f"version {version} is not prepared", hint="call prepare with its manifest first"
            )
        if policy != "drain":
            await self._commit(version, policy)
            return
        with frontend.hold():
            await frontend.wait_until(frontend.is_drained_inside, self._config.drain_deadline_s)
            await self._commit(version, policy)

    async def rollback(self) -> None:
        await self.frontend.on_compute(self.worker.rollback)

    async def terminate(self) -> None:
        """Free everything. Requests in flight end with finish "abort". `start` makes it whole
        again."""
        if self.core is None or self._terminating:
            return
        self._terminating = True
        try:
            with suppress(CoreFailed):  # then everyone is answered
                await self.frontend.abort_all("the engine was terminated")
            await self.frontend.at_rest(self.worker.terminate)
        finally:
            self._terminating = False

    # -- MemoryTenant (on the compute thread)

    def components(self) -> Sequence[Component]:
        return self.worker.memory.components()

    def move(self, names: Sequence[str], tier: Tier) -> None:
        """Move components in order. Sequences recompute KV that goes to "none". Weights that return
        from "none" are dummies until a commit."""
        try:
            self.worker.move(names, tier)
        finally:
            self.frontend.poke_from_compute()

    def measure(self) -> Mapping[str, Usage]:
        return self.worker.memory.measure()

    # -- on the event loop

    async def _interrupt(self) -> Mapping[str, tuple[Partial, ...]]:
        try:
            return await self.frontend.play(Interrupt(), held_too=True)
        except CoreFailed:  # then everyone is answered
            return {}

    async def _commit(self, version: int, policy: CommitPolicy) -> None:
        try:
            await self.frontend.on_compute(self.worker.commit, version, policy)
        except CoreFailed:
            self.frontend.poke()  # the waiting callers are answered
            raise

    # -- reasons

    def _why_refuse(self, request: Request) -> str | None:
        if self._terminating:
            return "the engine is being terminated"
        if blocked := self.worker.why_blocked():
            return blocked
        if reason := find_refusal(request, self.limits):
            return reason
        if self.frontend.knows(request.request_id):
            return f"request id '{request.request_id}' is in flight already"
        return find_overload(request, self.frontend.load, self._most)
