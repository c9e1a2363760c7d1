"""VllmEngine: vLLM behind the contract of a rollout engine. In: Requests, offers. Out: TokenChunks.
Implements RolloutEngine and EngineLifecycle.

Each completion is a request of vLLM. Those that arrive during a commit wait here, so that a
completion is of one version from its first token to its last. What vLLM cannot do is refused by
name (`VllmBuild.abilities`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gyre.core.chunks import TokenStream
from gyre.core.contracts import CommitPolicy, EngineAbilities, find_unable_commit
from gyre.core.errors import DeadlineError, InputError, RankError
from gyre.core.events import Emit
from gyre.core.offers import FolderTensors, Offer
from gyre.core.records import (
    EngineStats,
    Finish,
    Health,
    Manifest,
    Partial,
    Request,
)
from gyre.observability.refusals import Refusals
from gyre.sidecars.vllm.device_memory import ProcessBytes
from gyre.sidecars.vllm.host_tensors import encode_offer
from gyre.sidecars.vllm.llm import LlmProcess, VllmSettings
from gyre.sidecars.vllm.requests import (
    FINISHES,
    Growth,
    TokenLimits,
    find_refusal,
    sampling_arguments,
)
from gyre.sidecars.vllm.versions import VllmBuild
from gyre.weights.protocol import (
    Lost,
    Prepared,
    ReceiverState,
    RolledBack,
    SwapBegan,
    SwapDone,
    SwapFailed,
)

# of a device at most, that a start takes before weights and KV: context, NCCL, input buffers
BEGUN_BYTES = 1 << 30
LOOK_S = 0.005  # between two looks whether nothing is in flight


@dataclass(slots=True, kw_only=True)
class RequestInFlight:
    """A request that has no whole answer yet."""

    request: Request
    stream: TokenStream
    growths: dict[int, Growth]
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)  # completions that vLLM has
    timer: asyncio.TimerHandle | None = None


class VllmEngine:
    """vLLM as a rollout engine. `start` starts its processes, and `terminate` ends them."""

    def __init__(
        self,
        settings: VllmSettings,
        build: VllmBuild,
        limits: TokenLimits,
        *,
        emit: Emit,
        drain_deadline_s: float,
        version: int = 0,
    ) -> None:
        """`version` is that of the weights in the settings' folder."""
        self.limits = limits
        self._settings = settings
        self._emit = emit
        self._abilities = build.abilities()
        self._drain_deadline_s = drain_deadline_s
        self._initial_version = version
        self._begun_bytes = BEGUN_BYTES if build.device == "cuda" else 0
        self._state = ReceiverState(version=version, is_whole=False)
        self._process: LlmProcess | None = None
        self._begun: LlmProcess | None = None  # a start that waits for its memory
        self._is_parked = False
        self._flights: dict[str, RequestInFlight] = {}
        self._open = asyncio.Event()  # clear while a commit is under way
        self._open.set()
        self._refusals = Refusals(emit)
        self._prompt_tokens = self._hit_tokens = self._generated_tokens = 0

    # -- RolloutEngine

    def submit(self, request: Request) -> TokenStream:
        """Enqueue at once and return the stream. Must be called on a running event loop."""
        stream = TokenStream(request, self.limits.most_completions, self.abort)
        reason = self._why_refuse(request)
        if reason is not None:
            self._refusals.note(str(request.request_id), reason)
            stream.refuse(reason)
            return stream
        growths = {
            index: Growth(request, index, self.limits.eos_ids)
            for index in range(request.sampling.n)
        }
        flight = RequestInFlight(request=request, stream=stream, growths=growths)
        self._flights[request.request_id] = flight
        self._prompt_tokens += len(request.tokens)
        loop = asyncio.get_running_loop()
        if request.deadline_s is not None:
            if request.deadline_s <= 0:
                self._expire(flight)
                return stream
            flight.timer = loop.call_later(request.deadline_s, self._expire, flight)
        for index, growth in growths.items():
            if finish := growth.ended_before():
                self._pass_on(flight, index, finish)
            else:
                flight.tasks[index] = loop.create_task(self._complete(flight, index))
        return stream

    async def abort(self, request_id: str) -> None:
        if flight := self._flights.get(request_id):
            self._end(flight, "abort", "aborted by its owner")

    async def interrupt(self, *, deadline_s: float) -> Mapping[str, tuple[Partial, ...]]:
        flights = list(self._flights.values())
        for flight in flights:
            self._end(flight, "interrupted", "")
        await self._settle(flights, deadline_s)
        return {
            flight.request.request_id: tuple(growth.partial() for growth in flight.growths.values())
            for flight in flights
        }

    async def stats(self) -> EngineStats:
        """RankError once vLLM's processes have died, so that a pool that polls it replaces it."""
        process = self._process
        if process is not None and process.has_died:
            raise RankError("vLLM's engine process has died", hint="start the sidecar again")
        sent = sum(len(flight.sent) for flight in self._flights.values())
        unanswered = self._num_unanswered
        counters = None if process is None else process.counters
        pages = 0 if process is None else process.pages_total
        page_tokens = 0 if process is None else process.page_tokens
        return EngineStats(
            running=sent,
            waiting=unanswered - sent,
            prompt_tokens=self._prompt_tokens,
            prefix_hit_tokens=self._hit_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=0 if counters is None else counters.preemptions,
            refused=self._refusals.total,
            steps=0 if counters is None else counters.steps,
            pages_used=0 if counters is None else round(pages * counters.used_share),
            pages_total=pages,
            page_tokens=page_tokens,
            prefix_page_tokens=page_tokens if self._settings.prefix_cache else 0,
            version=self._state.version,
        )

    async def health(self) -> Health:
        reason = self._why_blocked()
        return Health(ok=reason is None, reason=reason or "")

    async def abilities(self) -> EngineAbilities:
        return self._abilities

    async def drain(self, *, deadline_s: float) -> None:
        await self._wait_until_idle(deadline_s, sent_only=False)

    # -- EngineLifecycle

    async def start(self, *, dummy: bool) -> None:
        """Start vLLM, which allocates weights and KV, unless it runs; without `dummy` load the
        folder's weights."""
        begun_s = time.monotonic()
        self._state = self._state.after(Lost())
        if self._process is None:
            process, self._begun = self._begun or LlmProcess(self._settings), None
            try:
                await process.start()
            except BaseException:
                await process.stop()
                raise
            self._process = process
        if not dummy:
            await self._load_folder()
        assert self._process is not None
        self._emit(
            "engine.started",
            dummy=dummy,
            version=self._state.version,
            pages=self._process.pages_total,
            scoring_bytes=0,
            seconds=round(time.monotonic() - begun_s, 3),
        )

    def begin_start(self) -> bool:
        """Start vLLM's processes as far as they take no memory for weights or KV; `start` resumes
        from there. Return False where vLLM runs already, or sizes KV by what is free."""
        if self._process is not None or self._begun is not None or not self._settings.kv_bytes:
            return False
        self._begun = LlmProcess(self._settings)
        self._begun.begin()
        return True

    async def wait_until_begun(self) -> None:
        """Wait until a start that is under way needs its memory."""
        if self._begun is not None:
            await self._begun.reached()

    async def prepare(self, offer: Offer, *, reverts: bool = False) -> None:
        process = self._need_started("prepare")
        manifest = offer.manifest
        self._state.refuse(manifest, reverts=reverts)
        prepared = Prepared(epoch=manifest.epoch, version=manifest.version)
        if self._state.prepared == prepared:
            return
        await self.rollback()
        await process.call_workers("gyre_prepare", encode_offer(offer))
        self._state = self._state.after(prepared)

    async def commit(self, version: int, *, policy: CommitPolicy) -> None:
        """Wait until what vLLM has in hand is answered, then load; what arrives meanwhile waits."""
        self._need_started("commit")
        if why := find_unable_commit(policy, self._abilities):
            raise InputError(why, hint="commit with policy 'drain'; interrupt first to be quick")
        if not self._state.is_prepared(version):
            if version == self._state.version and self._state.is_whole:
                return  # committed before
            raise InputError(
                f"version {version} is not prepared", hint="call prepare with its manifest first"
            )
        self._open.clear()
        try:
            await self._wait_until_idle(self._drain_deadline_s, sent_only=True)
            await self._swap(version)
        finally:
            self._open.set()
        self._emit("engine.committed", version=version, policy=policy, shared=False)

    async def rollback(self) -> None:
        self._state = self._state.after(RolledBack())
        if self._process is not None:
            await self._process.call_workers("gyre_rollback")

    async def terminate(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            await begun.stop()
        process, self._process = self._process, None
        if process is None:
            return
        self._is_parked = False
        flights = list(self._flights.values())
        for flight in flights:
            self._end(flight, "abort", "the engine was terminated")
        self._state = self._state.after(RolledBack()).after(Lost())
        await process.stop()
        self._emit("engine.terminated", version=self._state.version)

    async def park(self, level: int) -> None:
        """Give vLLM's device memory back and keep its processes; `wake` takes it again. Level 1
        keeps the weights in host memory, level 2 forgets them. Requests in flight are aborted."""
        levels = self._abilities.sleep_levels
        if level not in levels:
            takes = f"levels {', '.join(map(str, levels))}" if levels else "none"
            raise InputError(
                f"{self._abilities.engine} cannot be parked at sleep level {level}; it takes "
                f"{takes}",
                hint="terminate it instead: a start takes its memory anew",
            )
        process = self._need_started("park")
        for flight in list(self._flights.values()):
            self._end(flight, "abort", "the engine was parked")
        await process.sleep(level)
        self._is_parked = True
        if level > 1:
            self._state = self._state.after(RolledBack()).after(Lost())

    async def wake(self) -> None:
        """Take the memory again after `park`."""
        await self._need_started("wake").wake_up()
        self._is_parked = False

    @property
    def begun_bytes(self) -> int:
        """Return what a start that waits for its memory may have on the device at most."""
        return 0 if self._begun is None else self._begun_bytes

    async def device_bytes(self) -> list[ProcessBytes]:
        """Return what each of vLLM's processes has on its device; nothing where it is not started,
        or has died: `stats` says so to its owner."""
        process = self._process
        if process is None or process.has_died:
            return []
        try:
            return await process.device_bytes()
        except RankError:
            if process.has_died:
                return []
            raise

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @property
    def is_parked(self) -> bool:
        return self._is_parked

    # -- one completion

    async def _complete(self, flight: RequestInFlight, index: int) -> None:
        """Ask vLLM for one completion, and pass on its tokens."""
        await self._open.wait()
        process, growth = self._process, flight.growths[index]
        assert process is not None
        name = f"{flight.request.request_id}/{index}"
        growth.version = self._state.version
        flight.sent.add(index)
        try:
            async for output in self._generate(process.llm, flight.request, growth, name):
                self._take(flight, index, output)
        except asyncio.CancelledError:
            # vLLM may have the request before its generator knows
            with suppress(Exception):  # one that died has it no more
                await process.llm.abort(name)
            raise
        except Exception as error:  # noqa: BLE001  whatever broke, the completion gets its answer
            process.note(error)
            self._fail(flight, index, error)
        finally:
            flight.sent.discard(index)

    def _generate(self, llm: Any, request: Request, growth: Growth, name: str) -> Any:
        from vllm.sampling_params import (  # pyright: ignore[reportMissingImports]
            RequestOutputKind,
            SamplingParams,
        )

        arguments = sampling_arguments(
            request, growth.index, begun_tokens=growth.begun_tokens, eos_ids=self.limits.eos_ids
        )
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": growth.prompt}
        if request.tenant_salt:
            prompt["cache_salt"] = request.tenant_salt
        return llm.generate(prompt, params, name)

    def _take(self, flight: RequestInFlight, index: int, output: Any) -> None:
        told = output.outputs[0]
        finish = None
        if told.finish_reason is not None:
            if told.finish_reason not in FINISHES:
                raise RankError(f"vLLM ended a completion by '{told.finish_reason}'")
            finish = FINISHES[told.finish_reason]
        tokens = list(told.token_ids)
        logprobs = [] if told.logprobs is None else told.logprobs.logprobs
        flight.growths[index].add(tokens, list(logprobs), finish)
        self._generated_tokens += len(tokens)
        if finish is not None:
            self._hit_tokens += output.num_cached_tokens or 0
        self._pass_on(flight, index, finish)

    def _fail(self, flight: RequestInFlight, index: int, error: Exception) -> None:
        """Abort a completion whose answer was invalid, or that vLLM broke on."""
        if index not in flight.stream.unfinished:
            return
        text = f"vLLM failed on it: {type(error).__name__}: {error}"
        self._emit("engine.completion_failed", request_id=flight.request.request_id, error=text)
        self._pass_on(flight, index, "abort", text)

    def _pass_on(
        self, flight: RequestInFlight, index: int, finish: Finish | None, reason: str = ""
    ) -> None:
        for chunk in flight.growths[index].take(finish, reason):
            flight.stream.push(chunk)
        if not flight.stream.unfinished:
            self._flights.pop(flight.request.request_id, None)
            if flight.timer is not None:
                flight.timer.cancel()

    def _end(self, flight: RequestInFlight, finish: Finish, reason: str) -> None:
        """Answer what is left of a request with what it has, and let vLLM forget it."""
        for index in flight.stream.unfinished:
            self._pass_on(flight, index, finish, reason)
            if task := flight.tasks.get(index):
                task.cancel()

    def _expire(self, flight: RequestInFlight) -> None:
        self._emit("engine.deadline", request_id=flight.request.request_id)
        self._end(flight, "deadline", f"no answer within {flight.request.deadline_s:g} s")

    # -- waits and weights

    async def _settle(self, flights: list[RequestInFlight], deadline_s: float) -> None:
        """Wait until vLLM has dropped all that is ended."""
        tasks = [task for flight in flights for task in flight.tasks.values()]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=deadline_s)
        if late:
            raise DeadlineError(
                f"vLLM had not forgotten {len(late)} completions after {deadline_s:g} s",
                hint="look at its log; the sidecar can be started again",
            )

    async def _wait_until_idle(self, deadline_s: float, *, sent_only: bool) -> None:
        """Wait until no request is in flight; `sent_only` leaves those out that wait here."""
        until_s = time.monotonic() + deadline_s
        while any(flight.sent or not sent_only for flight in self._flights.values()):
            if time.monotonic() >= until_s:
                raise DeadlineError(
                    f"{self._num_unanswered} completions were in flight after {deadline_s:g} s",
                    hint="interrupt the engine first, or raise engine.drain_deadline_s",
                )
            await asyncio.sleep(LOOK_S)

    async def _swap(self, version: int) -> None:
        """Load the prepared version. After an error the last one is loaded again."""
        process = self._need_started("commit")
        last, begun = self._state, self._state.after(SwapBegan(version=version))
        self._state = begun
        try:
            await process.pause()
            await process.call_workers("gyre_commit", version)
            await process.resume()
        except BaseException:
            self._state = begun.after(SwapFailed(undone=False))
            self._emit("weights.commit_failed", version=version, serving=last.version)
            if last.is_whole:
                await process.call_workers("gyre_restore")
                await process.resume()
                self._state = begun.after(SwapFailed(undone=True))
            raise
        self._state = begun.after(SwapDone())

    async def _load_folder(self) -> None:
        process = self._need_started("start")
        epoch, version = self._state.epoch, self._initial_version
        offer = Offer(
            manifest=Manifest(version=version, entries=(), shared=False, epoch=epoch),
            source=FolderTensors(folder=self._settings.folder),
        )
        await process.call_workers("gyre_prepare", encode_offer(offer))
        await process.pause()
        await process.call_workers("gyre_commit", version)
        await process.resume()
        self._state = ReceiverState(version=version, epoch=epoch)

    # -- reasons

    @property
    def _num_unanswered(self) -> int:
        return sum(len(flight.stream.unfinished) for flight in self._flights.values())

    def _need_started(self, what: str) -> LlmProcess:
        if self._process is None:
            raise InputError(f"{what}: the engine is not started", hint="call start first")
        return self._process

    def _why_blocked(self) -> str | None:
        if self._process is None:
            return "the engine is not started"
        if self._process.has_died:
            return "vLLM's engine process has died"
        if self._is_parked:
            return "the engine is parked"
        if not self._state.is_whole:
            return "the engine runs on dummy weights; prepare and commit a version first"
        return None

    def _why_refuse(self, request: Request) -> str | None:
        if blocked := self._why_blocked():
            return blocked
        if request.request_id in self._flights:
            return f"request id '{request.request_id}' is in flight already"
        return find_refusal(request, self.limits, self._abilities, unanswered=self._num_unanswered)
