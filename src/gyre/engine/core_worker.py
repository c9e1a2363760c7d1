"""CoreWorker: the compute thread's half of the engine. In: journal entries, versions, moves. Out:
TokenChunks. It owns the core, the weights and the memory, and knows nothing of streams.

Every method except `why_blocked` and `need_started` runs on the compute thread. An error in work on
the core breaks it: `failure` says so at once, so that nothing queued behind touches it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from gyre.core.contracts import CommitPolicy
from gyre.core.errors import EngineRefused, GyreError, InputError, RankError
from gyre.core.events import Emit
from gyre.core.offers import Offer
from gyre.core.records import Phase, Tier, TokenChunk
from gyre.engine.config import EngineConfig, plan_rates, scoring_bytes
from gyre.engine.kv_cache.host_pool import HostKv
from gyre.engine.kv_cache.pool import KvPool
from gyre.engine.memory import KV, KV_HOST, WEIGHTS, EngineMemory
from gyre.engine.runners.select import choose_runner
from gyre.engine.scheduler.core import Decodes, EngineCore, Partials
from gyre.engine.scheduler.journal import (
    Commit,
    Entry,
    Flush,
    JournalWriter,
    MoveComponent,
    Recapture,
    Start,
    Steps,
)
from gyre.engine.scheduler.state import SchedulerState
from gyre.engine.weights import EngineWeights
from gyre.models.decoder import Decoder


class CoreFailed(EngineRefused):
    """Work on the core raised, now or before. The engine must be restarted."""

    def __init__(self, failure: str) -> None:
        super().__init__(f"the engine failed: {failure}", hint="terminate and start it again")


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of entries."""

    chunks: list[TokenChunk]
    partials: Partials = field(default_factory=dict)  # of what an Interrupt ended


class FollowingRanks(Protocol):
    """Ranks that play what this one plays (engine.tensor_group)."""

    def begin(self) -> None: ...

    def send(self, entry: Entry) -> None: ...

    def prepare(self, offer: Offer, *, reverts: bool) -> None: ...

    def rollback(self) -> None: ...

    def entered(self, phase: Phase, step: int) -> None: ...

    def end(self, error: Exception | None) -> Exception | None: ...


class CoreWorker:
    """One core after another, each from a start to its end, with weights and memory that stay."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        tokenizer: Decodes | None,
        *,
        emit: Emit,
        device: torch.device,
        dtype: torch.dtype,
        version: int,
        shared_weights: bool,
        eos_ids: tuple[int, ...],
        journal_folder: Path | None = None,
        followers: FollowingRanks | None = None,
    ) -> None:
        self.core: EngineCore | None = None  # None while not started
        self.failure = ""  # why the core broke
        self.must_answer = False  # it broke, and this is not reported yet
        self.in_a_hurry = False  # a caller waits for this thread: a burst should end after its step
        self.weights = EngineWeights(
            decoder, shared=shared_weights, version=version, device=device, emit=emit
        )
        self.memory = EngineMemory(
            decoder, config, shared_weights=shared_weights, device=device, dtype=dtype
        )
        self.decoder = decoder
        self._config = config
        self._tokenizer = tokenizer
        self.emit = emit
        self._device = device
        self._eos_ids = eos_ids
        self._followers = followers
        self._journal = None if journal_folder is None else JournalWriter(journal_folder)
        self._chunks: list[TokenChunk] = []  # came out between two bursts; the next one takes them

    # -- questions, from any thread

    def why_blocked(self) -> str | None:
        """Return why no step can run now, or None."""
        if self.failure:
            return f"the engine failed: {self.failure}; terminate and start it again"
        if self.core is None:
            return "the engine is not started"
        if self.weights.is_dummy:
            return "the engine runs on dummy weights; prepare and commit a version first"
        if not self.weights.present:
            return "the weights are not on the device; move them there first"
        if self.memory.tier(KV) != "device":
            return f"engine.kv is on tier '{self.memory.tier(KV)}'; move it to the device first"
        return None

    def need_started(self, what: str) -> EngineCore:
        if self.core is None:
            raise InputError(f"{what} needs a started engine", hint="call start first")
        return self.core

    # -- entries

    def play(self, entries: Sequence[Entry]) -> Played:
        """Apply inputs between two steps. CoreFailed when one raises, or the core broke before."""
        self._refuse_broken()
        with self._watch():
            partials = self._play_all(entries)
            return Played(chunks=self._take_chunks(), partials=partials)

    def burst(self, entries: Sequence[Entry]) -> Played:
        """Apply inputs and run steps until chunks are due, a caller waits, or the burst is full."""
        self._refuse_broken()
        core = self.core
        if core is None:
            assert not entries, "terminate answers every request before the core goes"
            return Played(chunks=[])
        with self._watch():
            self._play_all(entries)
            self._run_steps(core)
            return Played(chunks=self._take_chunks())

    def _run_steps(self, core: EngineCore) -> None:
        count, is_blocked = 0, False
        try:
            while count < self._config.burst_steps and not core.is_idle:
                is_blocked = self.why_blocked() is not None
                if is_blocked:
                    break
                if count == 0 and core.runner.has_moved():
                    self._play(Recapture())
                self._lead(Steps(count=1))
                count += 1
                self._chunks += core.step()
                if self._chunks or self.in_a_hurry:
                    break
        finally:
            if count:
                self._record(Steps(count=count))
        if is_blocked:
            self._flush()

    def _play_all(self, entries: Sequence[Entry]) -> Partials:
        partials: Partials = {}
        for entry in entries:
            partials = self._play(entry) or partials
        return partials

    def _play(self, entry: Entry, host: HostKv | None = None, *, leads: bool = True) -> Partials:
        if self.core is None:
            return {}
        if leads:
            self._lead(entry)
        self._record(entry)
        partials, chunks = self.core.play(entry, host)
        self._chunks += chunks
        return partials

    def _flush(self) -> None:
        if self.core is not None and self.core.num_in_flight:
            self._play(Flush())

    def _take_chunks(self) -> list[TokenChunk]:
        chunks, self._chunks = self._chunks, []
        return chunks

    def _lead(self, entry: Entry) -> None:
        """Let the followers play an entry, before this rank does."""
        if self._followers is not None and not self.failure:
            self._followers.send(entry)

    def _record(self, entry: Entry) -> None:
        if self._journal is not None:
            self._journal.write(entry)

    # -- failure

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """Mark the core as failed if the block raises."""
        try:
            yield
        except Exception as error:
            self.break_core(self._end_life(error))
            raise CoreFailed(self.failure) from error

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Mark the core as failed if another rank is lost in the block. What the ranks refuse, they
        refuse alike, and serve on."""
        try:
            yield
        except Exception as error:
            refused = isinstance(error, GyreError) and not isinstance(error, RankError)
            if self._followers is None or refused:
                raise
            self.break_core(self._end_life(error))
            raise CoreFailed(self.failure) from error

    def _end_life(self, error: Exception) -> Exception:
        """Return the error, or of several ranks one that names the rank at fault."""
        if self._followers is None:
            return error
        return self._followers.end(error) or error

    def _refuse_broken(self) -> None:
        if self.failure:
            raise CoreFailed(self.failure)

    def break_core(self, error: Exception) -> None:
        """Take no work until a restart, whatever the error was."""
        self.failure = f"{type(error).__name__}: {error}"
        self.must_answer = True
        self._chunks = []  # everyone is answered with the failure instead
        if self._journal is not None:
            self._journal.flush()

    def _mend(self) -> None:
        """Clear the failure once the failed core is gone and every request is answered."""
        assert not self.must_answer
        self.failure = ""

    # -- life cycle

    def start(self, dummy: bool) -> None:
        """Allocate KV and make a core. What a start that fails took is given back."""
        if self.core is not None and not self.failure:
            if self.weights.is_dummy == dummy:
                return
            raise InputError(
                "the engine runs already", hint="terminate it before starting it another way"
            )
        if not self.weights.shared and self.memory.tier(WEIGHTS) == "none" and not dummy:
            raise InputError(
                "the engine's weights were freed", hint="start(dummy=True), then prepare and commit"
            )
        begun_s = time.monotonic()
        tiers = {component.name: component.tier for component in self.memory.components()}
        try:
            if not self.weights.shared and tiers[WEIGHTS] == "none":
                self.memory.move(WEIGHTS, "device")
            pool, host = self.memory.provide_kv(), self.memory.provide_host()
            with self._starting(entry := self.describe_start(dummy)):
                core = self._make_core(pool, host)
            if dummy:
                self.weights.make_dummy()
        except BaseException:  # what it took for a start that did not come about goes back
            for name, tier in tiers.items():
                if tier == "none" and self.memory.tier(name) != "none":
                    self.memory.move(name, "none")
            raise
        self.core = core
        self._mend()
        self._record(entry)
        self.emit(
            "engine.started",
            dummy=dummy,
            version=self.weights.version,
            pages=self.memory.num_pages,
            scoring_bytes=scoring_bytes(
                self._config, vocab_size=self.decoder.whole_spec.vocab_size
            ),
            seconds=time.monotonic() - begun_s,
        )

    @contextmanager
    def _starting(self, entry: Start) -> Iterator[None]:
        """Let the followers make their cores in the block, too: ranks capture graphs together."""
        if self._followers is None:
            yield
            return
        self._followers.begin()
        try:
            self._followers.send(entry)
            yield
        except Exception as error:
            raise self._end_life(error) from error

    def describe_start(self, dummy: bool) -> Start:
        """Return the entry of a core that starts now."""
        return Start(
            # a run's config has more keys, which decide nothing here
            settings=self._config.model_dump(mode="json", include=set(EngineConfig.model_fields)),
            num_pages=self.memory.num_pages,
            num_slots=self.memory.num_slots,
            version=self.weights.version,
            eos_ids=self._eos_ids,
            dummy=dummy,
        )

    def prepare(self, offer: Offer, *, reverts: bool = False) -> None:
        """Receive a version beside the running one, on every rank."""
        self.need_started("prepare")
        if self._followers is None:
            self.weights.prepare(offer, reverts=reverts)
            return
        self._refuse_broken()
        with self._together():
            self._followers.prepare(offer, reverts=reverts)
            self.weights.prepare(offer, reverts=reverts)

    def rollback(self) -> None:
        """Forget a prepared version, on every rank."""
        if self._followers is not None and self.core is not None and not self.failure:
            with self._together():
                self._followers.rollback()
        self.weights.rollback()

    def commit(self, version: int, policy: CommitPolicy) -> None:
        """Swap to a prepared version between two steps: on every rank, or on none."""
        self.need_started("commit")
        self._refuse_broken()
        with self._watch():
            self._flush()
        entry = Commit(version=version, policy=policy)
        with self._together():
            self._lead(entry)
            with self.weights.swapping(version):
                self.emit(
                    "engine.committed", version=version, policy=policy, shared=self.weights.shared
                )
                with self._watch():  # the last step: where it fails, the core is broken as well
                    self._play(entry, leads=False)

    def terminate(self) -> None:
        """Free everything; everyone is answered."""
        if self._followers is not None:
            self._followers.end(None)
        self.core = None
        self._mend()
        self.weights.rollback()
        self.memory.move(KV, "none")
        self.memory.move(KV_HOST, "none")
        if not self.weights.shared:
            self.memory.move(WEIGHTS, "none")
        if self._journal is not None:
            self._journal.flush()
        self.emit("engine.terminated", version=self.weights.version)

    def move(self, names: Sequence[str], tier: Tier) -> None:
        """Move components in order. Sequences recompute KV that goes to "none". Weights that return
        from "none" are dummies until a commit."""
        self.memory.refuse_unknown(names)
        for name in names:
            before = self.memory.tier(name)
            works = self.core is not None and not self.failure
            if name == WEIGHTS or self.core is None:  # no journal entry reaches the followers
                with self._together():
                    self._lead(MoveComponent(component=name, tier=tier))
            if works:
                with self._watch():
                    self._flush()
                    if name == KV:
                        forgets = tier == "none" and before != "none"
                        self._play(MoveComponent(component=name, tier=tier, forgets_kv=forgets))
            self.memory.move(name, tier)
            if name == KV_HOST and before != tier and works:
                num_slots = 0 if self.memory.host is None else self.memory.num_slots
                with self._watch():
                    self._play(
                        MoveComponent(component=name, tier=tier, num_slots=num_slots),
                        self.memory.host,
                    )
            if name == WEIGHTS and before == "none" and tier == "device":
                self.weights.forget()  # they are zeros

    def entered(self, phase: Phase, step: int) -> None:
        """Tell the followers that this rank's memory is where a phase needs it. Their own is, too,
        once they have played what was sent before."""
        if self._followers is None or self.failure:
            return
        with self._together():
            self._followers.entered(phase, step)

    def _make_core(self, pool: KvPool, host: HostKv | None) -> EngineCore:
        config, spec = self._config, self.decoder.spec
        rates = plan_rates(
            config,
            page_bytes=self.memory.page_bytes,
            flops_per_token=spec.flops_per_token(0),
            device_type=self._device.type,
        )
        state = SchedulerState(
            max_running=config.max_running,
            num_pages=self.memory.num_pages,
            page_tokens=config.page_tokens,
            prefix_cache=config.prefix_cache,
            emit=self.emit,
            window=spec.widest_view,
            num_slots=0 if host is None else host.num_slots,
            rates=rates,
            score_bytes=config.prompt_logprob_bytes,
        )
        return EngineCore(
            state,
            choose_runner(
                self.decoder, pool, config, capture=self.memory.provide_capture(), emit=self.emit
            ),
            token_budget=config.token_budget,
            version=self.weights.version,
            eos_ids=self._eos_ids,
            tokenizer=self._tokenizer,
            depth=1 if config.overlap else 0,
            host=host,
        )
