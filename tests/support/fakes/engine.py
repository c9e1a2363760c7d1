"""Scripted engine: recites completions token by token. In: Requests. Out: TokenChunks with honest
versions. Implements RolloutEngine, EngineLifecycle and MemoryTenant.

All completions advance in rounds of one token each, so that order is a pure function of what was
submitted. `Faults` says what should go wrong.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fakes.config import FakeEngineConfig
from fakes.recital import Recital
from fakes.script import Script
from fakes.tenant import FakeComponents
from gyre.core.chunks import TokenStream
from gyre.core.contracts import CommitPolicy, EngineAbilities
from gyre.core.errors import DeadlineError, InputError
from gyre.core.events import Emit
from gyre.core.offers import Offer
from gyre.core.records import (
    Component,
    EngineStats,
    Finish,
    Health,
    Partial,
    Request,
    Tier,
    Usage,
)
from gyre.weights.manifest import verify_manifest
from gyre.weights.protocol import Prepared, ReceiverState, RolledBack, SwapBegan, SwapDone

SIZES_BYTES = {"engine.weights": 4096, "engine.kv": 16384}
POLL_S = 0.001
NOT_STARTED = "the engine is not started"
DUMMY = "the engine runs on dummy weights; prepare and commit a version first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong on purpose."""

    refuse: Callable[[Request], str] | None = None  # a reason to refuse, or "" to run it
    stalled: frozenset[str] = frozenset()  # request ids that never get a token
    crash_after_tokens: int = 0  # it fails once, after so many tokens in all; 0 never
    fail_prepare: bool = False  # prepare raises, with nothing changed


class ScriptedEngine:
    """An engine without a model."""

    def __init__(
        self,
        script: Script,
        *,
        emit: Emit,
        config: FakeEngineConfig | None = None,
        faults: Faults | None = None,
        version: int = 0,
        eos_ids: Sequence[int] = (),
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """`decode` is needed by requests with stop strings; without it they are refused."""
        self._script, self._emit, self._decode = script, emit, decode
        self._config, self.faults = config or FakeEngineConfig(), faults or Faults()
        self._state, self._eos_ids = ReceiverState(version=version), frozenset(eos_ids)
        self._not_ready = NOT_STARTED
        self._crash = ""
        self._crash_at_tokens = self.faults.crash_after_tokens
        self._admitting = True
        self.live: list[Recital] = []  # in order of priority and arrival
        self._streams: dict[str, TokenStream] = {}  # of requests that are not answered wholly
        self._rounds: asyncio.Task[None] | None = None
        self._counts: Counter[str] = Counter()
        self.memory = FakeComponents(SIZES_BYTES)

    # RolloutEngine
    # ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> TokenStream:
        stream = TokenStream(request, max(1, request.sampling.n), self.abort)
        reason = self._find_refusal(request)
        if reason:
            self._counts["refused"] += 1
            self._emit("engine.refused", request_id=request.request_id, reason=reason, count=1)
            for index in range(max(1, request.sampling.n)):
                recital = Recital(request, index, script=(), logprob=0.0, submitted_s=0.0)
                stream.push(recital.cut("refused", reason))
            return stream
        self._streams[request.request_id] = stream
        self._counts["prompt_tokens"] += len(request.tokens)
        now_s = asyncio.get_running_loop().time()
        for index in range(request.sampling.n):
            script = tuple(self._script(request, index, self._state.version))
            self.live.append(
                Recital(
                    request, index, script=script, logprob=self._config.logprob, submitted_s=now_s
                )
            )
        self.live.sort(key=lambda recital: -recital.request.priority)
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.get_running_loop().create_task(self._run_rounds())
        return stream

    async def abort(self, request_id: str) -> None:
        self._end(
            [r for r in self.live if r.request.request_id == request_id],
            "abort",
            "aborted by its owner",
        )

    async def interrupt(self, *, deadline_s: float) -> Mapping[str, tuple[Partial, ...]]:
        found: dict[str, tuple[Partial, ...]] = {}
        for recital in sorted(self.live, key=lambda r: r.index):
            request_id = recital.request.request_id
            found[request_id] = (*found.get(request_id, ()), recital.partial())
        self._end(list(self.live), "interrupted", "")
        return found

    async def stats(self) -> EngineStats:
        running = sum(recital.running for recital in self.live)
        return EngineStats(
            running=running,
            waiting=len(self.live) - running,
            prompt_tokens=self._counts["prompt_tokens"],
            prefix_hit_tokens=0,
            generated_tokens=self._counts["generated_tokens"],
            preemptions=0,
            refused=self._counts["refused"],
            steps=self._counts["steps"],
            pages_used=running,
            pages_total=self._config.max_running,
            version=self._state.version,
        )

    async def abilities(self) -> EngineAbilities:
        return EngineAbilities(
            engine="the scripted engine",
            stop_strings=self._decode is not None,
            sources=("LocalTensors",),
        )

    async def health(self) -> Health:
        reason = self._find_block()
        return Health(ok=not reason, reason=reason)

    async def drain(self, *, deadline_s: float) -> None:
        await self._wait(lambda: not self.live, deadline_s, "the fake engine's queue to drain")

    # EngineLifecycle
    # -------------------------------------------------------------------------------------------------

    async def start(self, *, dummy: bool) -> None:
        wanted = DUMMY if dummy else ""
        if self._not_ready != NOT_STARTED and not self._crash:
            if self._not_ready != wanted:
                raise InputError(
                    "the engine runs already", hint="terminate it before starting it another way"
                )
            return
        if not dummy and not self.memory.contents("engine.weights"):
            raise InputError(
                "the engine's weights were freed", hint="start(dummy=True), then prepare and commit"
            )
        self.memory.move(tuple(SIZES_BYTES), "device")
        self._crash, self._not_ready = "", wanted

    async def prepare(self, offer: Offer, *, reverts: bool = False) -> None:
        manifest = offer.manifest
        self._need_started("prepare")
        if self.faults.fail_prepare:
            self._emit(
                "engine.waits_for_weights",
                engine="fake",
                version=manifest.version,
                reason="as told",
            )
            raise RuntimeError(f"the fake engine was told not to take version {manifest.version}")
        self._state.refuse(manifest, reverts=reverts)
        verify_manifest(manifest, offer.source.tensors)  # type: ignore[union-attr]
        self._state = self._state.after(Prepared(epoch=manifest.epoch, version=manifest.version))

    async def commit(self, version: int, *, policy: CommitPolicy) -> None:
        self._need_started("commit")
        state = self._state
        if state.prepared is None and version == state.version and not self._not_ready:
            return
        if not state.is_prepared(version):
            raise InputError(
                f"version {version} is not prepared", hint=f"prepared: {state.prepared}"
            )
        if policy == "drain":
            self._admitting = False
            try:
                await self._wait(
                    lambda: not any(recital.running for recital in self.live),
                    self._config.drain_deadline_s,
                    f"running requests to end before version {version}",
                )
            finally:
                self._admitting = True
        self._state = self._state.after(SwapBegan(version=version)).after(SwapDone())
        self._not_ready = ""

    async def rollback(self) -> None:
        self._state = self._state.after(RolledBack())

    async def terminate(self) -> None:
        self._end(list(self.live), "abort", "the engine was terminated")
        self._state = self._state.after(RolledBack())
        self._crash, self._not_ready = "", NOT_STARTED
        self.memory.move(tuple(SIZES_BYTES), "none")

    # MemoryTenant
    # ----------------------------------------------------------------------------------------------------

    def components(self) -> Sequence[Component]:
        return self.memory.components()

    def move(self, names: Sequence[str], tier: Tier) -> None:
        """While a component is away no completion advances; weights that were destroyed come back
        as dummies."""
        self.memory.move(names, tier)
        if tier == "none" and "engine.weights" in names and not self._not_ready:
            self._not_ready = DUMMY

    def measure(self) -> Mapping[str, Usage]:
        return self.memory.measure()

    # Rounds
    # ----------------------------------------------------------------------------------------------------------

    async def _run_rounds(self) -> None:
        """Give one token to each running completion, again and again, while there are any."""
        while self.live:
            self._admit()
            try:
                moved = self._round(asyncio.get_running_loop().time())
            except Exception as error:  # noqa: BLE001 - whatever broke, every request gets its answer
                self._fail(error)
                return
            self._counts["steps"] += 1
            await asyncio.sleep(
                self._config.token_delay_s if moved else max(self._config.token_delay_s, POLL_S)
            )

    def _admit(self) -> None:
        """Let waiting completions run while there is room, unless a commit waits for those that
        run."""
        waiting = [recital for recital in self.live if not recital.running]
        room = self._config.max_running - (len(self.live) - len(waiting))
        for recital in waiting[:room] if self._admitting else ():
            recital.running = True

    def _round(self, now_s: float) -> bool:
        """Advance each completion that may; say whether any did."""
        moved, blocked = False, bool(self._find_block())
        for recital in list(self.live):
            deadline_s = recital.request.deadline_s
            if deadline_s is not None and now_s - recital.submitted_s >= deadline_s:
                self._end([recital], "deadline", f"past its deadline of {deadline_s:g} s")
            elif (
                recital.running
                and not blocked
                and recital.request.request_id not in self.faults.stalled
            ):
                moved = True
                before = recital.num_tokens
                finish = recital.advance(self._state.version, self._eos_ids, self._decode)
                self._counts["generated_tokens"] += recital.num_tokens - before
                if finish:
                    self._end([recital], finish, "")
                elif recital.is_chunk_full():
                    self._streams[recital.request.request_id].push(recital.cut(None, ""))
        if 0 < self._crash_at_tokens <= self._counts["generated_tokens"]:
            self._crash_at_tokens = 0
            raise RuntimeError("the fake engine was told to fail")
        return moved

    def _end(self, recitals: Sequence[Recital], finish: Finish, reason: str) -> None:
        for recital in recitals:
            self.live.remove(recital)
            stream = self._streams[recital.request.request_id]
            stream.push(recital.cut(finish, reason))
            if not stream.unfinished:
                del self._streams[recital.request.request_id]

    def _fail(self, error: Exception) -> None:
        """Answer everyone; no work until a restart."""
        self._crash = f"the engine failed: {type(error).__name__}: {error}"
        self._emit("engine.failed", error=self._crash, unanswered=len(self._streams))
        self._end(list(self.live), "abort", self._crash)

    async def _wait(self, done: Callable[[], bool], deadline_s: float, what: str) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while not done():
            if loop.time() - started_s >= deadline_s:
                waiting = sorted({recital.request.request_id for recital in self.live})
                raise DeadlineError(
                    f"waited {deadline_s:g} s for {what}; in flight: {', '.join(waiting)}",
                    hint="interrupt the engine, or allow more time",
                )
            await asyncio.sleep(POLL_S)

    def _need_started(self, what: str) -> None:
        if self._not_ready == NOT_STARTED:
            raise InputError(f"{what} needs a started engine", hint="call start first")

    def _find_block(self) -> str:
        """Why no completion can advance now, or ""."""
        away = [name for name in SIZES_BYTES if not self.memory.on_device(name)]
        if self._crash or self._not_ready or not away:
            return self._crash or self._not_ready
        return f"{' and '.join(away)} not on the device; move them there first"

    def _find_refusal(self, request: Request) -> str:
        sampling, size = request.sampling, len(request.tokens)
        if blocked := self._find_block():
            return blocked
        if request.request_id in self._streams:
            return f"request_id '{request.request_id}' is in flight already"
        if sampling.n < 1 or sampling.max_tokens < 1:
            return f"n = {sampling.n}, max_tokens = {sampling.max_tokens}: need at least 1 of each"
        if size == 0 or size + sampling.max_tokens > self._config.context_tokens:
            return (
                f"{size} prompt tokens and max_tokens = {sampling.max_tokens}: context is "
                f"{self._config.context_tokens}"
            )
        if request.grammar is not None:
            return "grammars are not supported"
        if sampling.stop and self._decode is None:
            return "stop strings need a tokenizer, and this engine has none"
        return self.faults.refuse(request) if self.faults.refuse else ""
