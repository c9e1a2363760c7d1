"""NativeEngine: the engine's three contracts on one object. In: Requests, manifests, moves. Out:
TokenChunks. Implements RolloutEngine, EngineLifecycle and MemoryTenant out of the parts of this
room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

import torch

from gyre.core.contracts import CommitPolicy
from gyre.core.errors import InputError
from gyre.core.events import Emit
from gyre.core.records import (
    Component,
    EngineStats,
    Health,
    Manifest,
    Partial,
    Request,
    Tier,
    TokenChunk,
    Usage,
)
from gyre.engine.config import EngineConfig, plan_engine, plan_rates, scoring_bytes
from gyre.engine.frontend.admission import Load, RequestLimits, find_overload, find_refusal
from gyre.engine.frontend.async_frontend import Admitted, AsyncFrontend, CycleBroke, by_deadline
from gyre.engine.frontend.token_stream import TokenStream
from gyre.engine.kv_cache.host_pool import HostKv
from gyre.engine.kv_cache.pool import KvPool
from gyre.engine.memory import KV, KV_HOST, WEIGHTS, EngineMemory
from gyre.engine.runners.select import choose_runner
from gyre.engine.scheduler.core import Decodes, EngineCore
from gyre.engine.scheduler.sequence import WITHDRAWN
from gyre.engine.scheduler.state import Counters, SchedulerState
from gyre.engine.weights import EngineWeights
from gyre.models.decoder import Decoder
from gyre.observability.refusals import Refusals


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = plan_engine(config, device_type=device.type)
        self._decoder, self._config, self._tokenizer = decoder, config, tokenizer
        self._emit, self._clock, self._device, self._dtype = emit, clock, device, dtype
        self._weights = EngineWeights(
            decoder, shared=shared_weights, version=version, device=device, emit=emit
        )
        self._memory = EngineMemory(
            decoder, config, shared_weights=shared_weights, device=device, dtype=dtype
        )
        self._desk = AsyncFrontend(
            compute=compute, burst=self._burst, blocked=self._why_blocked, emit=emit, clock=clock
        )
        self._limits = RequestLimits(
            vocab_size=decoder.spec.vocab_size,
            context_tokens=decoder.spec.context_tokens,
            cache_tokens=self._memory.num_pages * config.page_tokens,
            can_decode=tokenizer is not None,
            most_completions=config.max_running + config.max_queued,
            eos_ids=decoder.spec.eos_ids if tokenizer is None else tokenizer.eos_ids,
        )
        self._most = Load(
            completions=config.max_running + config.max_queued,
            tokens=self._limits.cache_tokens + config.max_queued_tokens,
        )
        self._cycle: EngineCore | None = None  # None while not started
        self._terminating = False
        self._refusals = Refusals(emit)

    @property
    def cache_tokens(self) -> int:
        """Tokens whose KV fits. The last token that a completion chooses needs none."""
        return self._limits.cache_tokens

    # -- RolloutEngine

    def submit(self, request: Request) -> TokenStream:
        """Enqueue at once and return the stream. Must be called on a running event loop. A request
        for an impossible number of completions gets one answer, its refusal."""
        n, most = request.sampling.n, self._limits.most_completions
        stream = TokenStream(
            request.request_id, n if isinstance(n, int) and 1 <= n <= most else 1, self.abort
        )
        reason = self._why_refuse(request)
        if reason is None:
            deadline_at = None if request.deadline_s is None else self._clock() + request.deadline_s
            self._desk.accept(Admitted(request=request, deadline_at=deadline_at), stream)
        else:
            self._refusals.note(str(request.request_id), reason)
            for index in stream.unfinished:
                stream.push(TokenChunk.end(request.request_id, index, "refused", reason))
        return stream

    async def abort(self, request_id: str) -> None:
        cycle = self._cycle
        if (
            cycle is not None
            and self._desk.knows(request_id)
            and not self._desk.withdraw(request_id)
        ):
            with suppress(CycleBroke):  # then everyone is answered
                await self._desk.between_steps(
                    self._add, lambda: ((), cycle.abort(request_id, WITHDRAWN))
                )

    async def interrupt(self, *, deadline_s: float) -> Mapping[str, tuple[Partial, ...]]:
        """Nothing is in flight in an engine that failed: everyone was answered "abort" then."""
        cycle = self._cycle
        if cycle is None:
            return {}
        work = asyncio.ensure_future(self._interrupt(cycle))
        return await by_deadline(work, deadline_s, "the compute thread to finish its step")

    async def stats(self) -> EngineStats:
        roster = None if self._cycle is None else self._cycle.roster
        counters = Counters() if roster is None else roster.counters
        running = 0 if roster is None else roster.rows.num_active
        return EngineStats(
            running=running,
            waiting=max(0, self._desk.load.completions - running),
            prompt_tokens=counters.prompt_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            swaps_out=counters.swaps_out,
            swaps_in=counters.swaps_in,
            recomputed_tokens=counters.recomputed_tokens,
            host_pages_used=0 if roster is None else roster.slots.num_slots - roster.slots.num_free,
            host_pages_total=self._memory.num_slots,
            refused=self._refusals.total,
            steps=counters.steps,
            pages_used=0 if roster is None else roster.pages.num_used,
            pages_total=self._memory.num_pages,
            version=self._weights.version,
        )

    async def health(self) -> Health:
        reason = self._why_blocked()
        return Health(ok=reason is None, reason=reason or "")

    async def drain(self, *, deadline_s: float) -> None:
        await self._desk.wait_until(self._desk.is_drained, deadline_s)

    # -- EngineLifecycle

    async def start(self, *, dummy: bool) -> None:
        """Allocate KV. With `dummy` no work is taken until a commit; shared weights are left as
        they are."""
        await self._desk.at_rest(lambda: self._start(dummy))

    async def prepare(self, manifest: Manifest, source: Mapping[str, Any]) -> None:
        self._need_started("prepare")
        await self._desk.on_compute(lambda: self._weights.prepare(manifest, source))

    async def commit(self, version: int, *, policy: CommitPolicy) -> None:
        """drain: requests in flight end first, later ones wait. keep_prefix: those in flight are
        computed again under the new version. continue: they go on with the KV that they have. The
        latter two change between two steps."""
        self._need_started("commit")
        if not self._weights.is_prepared(version):
            if version == self._weights.version and not self._weights.is_dummy:
                return  # committed before
            raise InputError(
                f"version {version} is not prepared", hint="call prepare with its manifest first"
            )
        if policy != "drain":
            await self._desk.on_compute(lambda: self._commit(version, policy))
            return
        with self._desk.hold():
            await self._desk.wait_until(self._desk.is_drained_inside, self._config.drain_deadline_s)
            await self._desk.on_compute(lambda: self._commit(version, policy))

    async def rollback(self) -> None:
        await self._desk.on_compute(self._weights.rollback)

    async def terminate(self) -> None:
        """Free everything. Requests in flight end with finish "abort". `start` makes it whole
        again."""
        cycle = self._cycle
        if cycle is None or self._terminating:
            return
        self._terminating = True
        try:
            why = "the engine was terminated"
            with suppress(CycleBroke):  # then everyone is answered
                await self._desk.between_steps(
                    self._add, lambda: ((), cycle.abort_all(why)), held_too=True
                )
            await self._desk.at_rest(self._terminate)
        finally:
            self._terminating = False

    # -- MemoryTenant (on the compute thread)

    def components(self) -> Sequence[Component]:
        return self._memory.components()

    def move(self, names: Sequence[str], tier: Tier) -> None:
        """Move components in order. KV that goes to "none" is computed again by whoever runs;
        weights that come back from "none" are dummies until a commit."""
        self._memory.refuse_unknown(names)
        for name in names:
            before = self._memory.tier(name)
            cycle = None if self._desk.failure else self._cycle
            if cycle is not None:
                with self._desk.watch():
                    cycle.quiesce()
                    if name == KV and tier == "none" and before != "none":
                        cycle.forget_kv("engine.kv left for tier none")
            self._memory.move(name, tier)
            if name == KV_HOST and before != tier and cycle is not None:
                with self._desk.watch():
                    cycle.change_host(
                        self._memory.host,
                        0 if self._memory.host is None else self._memory.num_slots,
                    )
            if name == WEIGHTS and before == "none" and tier == "device":
                self._weights.forget()  # they are zeros
        self._desk.poke_from_compute()

    def measure(self) -> Mapping[str, Usage]:
        return self._memory.measure()

    # -- on the event loop

    async def _interrupt(self, cycle: EngineCore) -> Mapping[str, tuple[Partial, ...]]:
        try:
            return await self._desk.between_steps(self._add, cycle.interrupt, held_too=True)
        except CycleBroke:  # then everyone is answered
            return {}

    # -- on the compute thread

    def _start(self, dummy: bool) -> None:
        if self._cycle is not None and not self._desk.failure:
            if self._weights.is_dummy == dummy:
                return
            raise InputError(
                "the engine runs already", hint="terminate it before starting it another way"
            )
        if not self._weights.shared and self._memory.tier(WEIGHTS) == "none" and not dummy:
            raise InputError(
                "the engine's weights were freed", hint="start(dummy=True), then prepare and commit"
            )
        tiers = {component.name: component.tier for component in self._memory.components()}
        try:
            if not self._weights.shared and tiers[WEIGHTS] == "none":
                self._memory.move(WEIGHTS, "device")
            cycle = self._make_cycle(self._memory.provide_kv(), self._memory.provide_host())
            if dummy:
                self._weights.make_dummy()
        except BaseException:  # what it took for a start that did not come about goes back
            for name, tier in tiers.items():
                if tier == "none" and self._memory.tier(name) != "none":
                    self._memory.move(name, "none")
            raise
        self._cycle = cycle
        self._desk.mend()
        self._emit(
            "engine.started",
            dummy=dummy,
            version=self._weights.version,
            pages=self._memory.num_pages,
            scoring_bytes=scoring_bytes(self._config, vocab_size=self._limits.vocab_size),
        )

    def _make_cycle(self, pool: KvPool, host: HostKv | None) -> EngineCore:
        config, spec = self._config, self._decoder.spec
        rates = plan_rates(
            config,
            page_bytes=self._memory.page_bytes,
            flops_per_token=spec.flops_per_token(0),
            device_type=self._device.type,
        )
        roster = SchedulerState(
            max_running=config.max_running,
            num_pages=self._memory.num_pages,
            page_tokens=config.page_tokens,
            prefix_cache=config.prefix_cache,
            emit=self._emit,
            window=spec.widest_view,
            num_slots=0 if host is None else host.num_slots,
            rates=rates,
            score_bytes=config.prompt_logprob_bytes,
        )
        return EngineCore(
            roster,
            choose_runner(
                self._decoder, pool, config, capture=self._memory.provide_capture(), emit=self._emit
            ),
            token_budget=config.token_budget,
            version=self._weights.version,
            eos_ids=self._limits.eos_ids,
            tokenizer=self._tokenizer,
            clock=self._clock,
            depth=1 if config.overlap else 0,
            host=host,
        )

    def _commit(self, version: int, policy: CommitPolicy) -> None:
        cycle = self._need_started("commit")
        self._desk.refuse_broken()
        with self._desk.watch():
            cycle.quiesce()
        self._weights.commit(version)
        keep = policy == "keep_prefix"
        with self._desk.watch():
            cycle.change_version(version, recompute=keep, keep_cached=keep)
        self._emit("engine.committed", version=version, policy=policy, shared=self._weights.shared)

    def _terminate(self) -> None:
        self._cycle = None
        self._desk.mend()
        self._weights.rollback()
        self._memory.move(KV, "none")
        self._memory.move(KV_HOST, "none")
        if not self._weights.shared:
            self._memory.move(WEIGHTS, "none")
        self._emit("engine.terminated", version=self._weights.version)

    def _add(self, batch: Sequence[Admitted]) -> list[TokenChunk]:
        assert self._cycle is not None or not batch, (
            "terminate answers every request before the cycle goes"
        )
        if self._cycle is None:
            return []
        return [
            chunk
            for admitted in batch
            for chunk in self._cycle.add(admitted.request, admitted.deadline_at)
        ]

    def _burst(self, batch: Sequence[Admitted]) -> list[TokenChunk]:
        """Take in the batch and run steps until something comes out, somebody waits, or enough were
        run."""
        cycle = self._cycle
        if cycle is None:
            return []
        chunks = self._add(batch)
        for _ in range(self._config.burst_steps):
            chunks += cycle.expire()
            if cycle.is_idle:
                break
            if self._why_blocked() is not None:
                chunks += cycle.flush()
                break
            chunks += cycle.step()
            if chunks or self._desk.in_a_hurry:
                break
        return chunks

    # -- reasons

    def _why_refuse(self, request: Request) -> str | None:
        if self._terminating:
            return "the engine is being terminated"
        if blocked := self._why_blocked():
            return blocked
        if reason := find_refusal(request, self._limits):
            return reason
        if self._desk.knows(request.request_id):
            return f"request id '{request.request_id}' is in flight already"
        return find_overload(request, self._desk.load, self._most)

    def _why_blocked(self) -> str | None:
        """Return why no step can run now, or None."""
        if self._desk.failure:
            return f"the engine failed: {self._desk.failure}; terminate and start it again"
        if self._cycle is None:
            return "the engine is not started"
        if self._weights.is_dummy:
            return "the engine runs on dummy weights; prepare and commit a version first"
        if not self._weights.present:
            return "the weights are not on the device; move them there first"
        if self._memory.tier(KV) != "device":
            return f"engine.kv is on tier '{self._memory.tier(KV)}'; move it to the device first"
        return None

    def _need_started(self, what: str) -> EngineCore:
        if self._cycle is None:
            raise InputError(f"{what} needs a started engine", hint="call start first")
        return self._cycle
