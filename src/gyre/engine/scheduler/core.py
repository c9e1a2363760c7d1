"""EngineCore: schedule, launch, advance; fetch and commit tokens up to `depth` launches later. In:
journal entries. Out: TokenChunks. Everything here runs on the compute thread, and nothing else
touches the scheduler state between two steps. Decisions follow from entries alone: a clock is read
only to tell when completions began.

With depth 0 each step is committed at once. With depth 1 step n+1 is scheduled and launched before
the host reads what step n chose. The device runs launches in order. So a page that a commit frees
may be allocated at once, even if a step in flight still uses it for a finished completion.
Preemption, abort, interrupt, deadlines, new weights and moves need exact state. They first commit
everything in flight: `quiesce`.
"""

from __future__ import annotations

from collections import abc, deque
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from gyre.core.records import Finish, Partial, Request, TokenChunk
from gyre.engine.scheduler.journal import (
    Abort,
    Add,
    Commit,
    Entry,
    Expire,
    Flush,
    Interrupt,
    MoveComponent,
    Recapture,
    Start,
    Steps,
)
from gyre.engine.scheduler.postprocess import (
    BegunPrefill,
    TextStop,
    advance,
    begin_prefills,
    commit_tokens,
    end_complete_partials,
    end_prefills,
    end_request,
)
from gyre.engine.scheduler.preemption import mix_versions, preempt, void_swapped
from gyre.engine.scheduler.scheduler import must_preempt, schedule
from gyre.engine.scheduler.sequence import LATE, Sequence, sequences_of
from gyre.engine.scheduler.state import SchedulerState
from gyre.engine.scheduler.step import Flight, Step, StepRunner
from gyre.engine.scheduler.swap import HostSlots

# decoded beyond the longest stop string, so that its first character is never at the window's
# edge
SPARE_TOKENS = 4


Partials = abc.Mapping[str, tuple[Partial, ...]]  # by request id


class Decodes(Protocol):
    """What the engine asks of a tokenizer."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def decode(self, ids: abc.Sequence[int]) -> str: ...


class HostPages(Protocol):
    """KV pages of swapped sequences, in host memory. Copies are queued on the device, in order,
    between steps."""

    def copy_out(self, pages: np.ndarray, slots: np.ndarray) -> None: ...

    def copy_in(self, slots: np.ndarray, pages: np.ndarray) -> None: ...


def make_text_stop(tokenizer: Decodes | None) -> TextStop:
    """Look for stop strings in the text of the last tokens only: a token holds at least a byte, and
    what earlier tokens completed ended the completion then, unless min_tokens forbade it: then only
    what the last token completed counts. Keeps no state, so preemption and continuation cannot
    upset it."""

    def text_stop(sequence: Sequence, tokens: np.ndarray) -> bool:
        assert tokenizer is not None, "admission refuses stop strings without a tokenizer"
        stops = sequence.request.sampling.stop
        window = max(len(stop.encode()) for stop in stops) + SPARE_TOKENS
        text = tokenizer.decode(tokens[-window:].tolist())
        if sequence.request.sampling.min_tokens == 0:
            return any(stop in text for stop in stops)
        before = tokenizer.decode(tokens[-window:-1].tolist())
        old = next(
            (at for at, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before)
        )
        return any(text.rfind(stop) + len(stop) > old for stop in stops if stop in text)

    return text_stop


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightStep:
    """A launched step whose tokens are not committed yet."""

    step: Step
    flight: Flight
    prefills: abc.Sequence[BegunPrefill]  # of traced requests


class EngineCore:
    """The engine's inside: a scheduler state, a runner and the version that they run."""

    def __init__(
        self,
        state: SchedulerState,
        runner: StepRunner,
        *,
        token_budget: int,
        version: int,
        eos_ids: tuple[int, ...],
        tokenizer: Decodes | None,
        depth: int = 0,
        host: HostPages | None = None,
    ) -> None:
        self.state = state
        self.runner = runner
        self.version = version
        self.host = host
        self._token_budget = token_budget
        self._eos_ids = eos_ids
        self._depth = depth
        self._text_stop = make_text_stop(tokenizer)
        self._arrivals = 0
        self._in_flight: deque[InFlightStep] = deque()
        self._out: list[TokenChunk] = []  # chunks that were not taken yet, in order

    @property
    def is_idle(self) -> bool:
        return not self.state.requests and not self._out

    @property
    def num_in_flight(self) -> int:
        """Steps that are launched and not committed."""
        return len(self._in_flight)

    def play(
        self, entry: Entry, host: HostPages | None = None
    ) -> tuple[Partials, list[TokenChunk]]:
        """Apply one input. `host` is the pool that a MoveComponent brings. Returns the partials of
        an Interrupt, and the chunks that are due."""
        match entry:
            case Add():
                return {}, self.add(entry.whole())
            case Abort(request_ids=request_ids, reason=reason):
                return {}, self.abort(request_ids, reason)
            case Expire(request_ids=request_ids):
                return {}, self.expire(request_ids)
            case Interrupt():
                return self.interrupt()
            case Flush():
                return {}, self.flush()
            case Commit(version=version, policy=policy):
                keep = policy == "keep_prefix"
                self.change_version(version, recompute=keep, keep_cached=keep)
                return {}, self._take_out()
            case MoveComponent(component=component, tier=tier):
                if entry.forgets_kv:
                    self.forget_kv(f"{component} left for tier {tier}")
                if entry.num_slots is not None:
                    self.change_host(host, entry.num_slots)
                return {}, self.flush()
            case Recapture():
                self.runner.recapture()
                return {}, []
            case Steps(count=count):
                return {}, [chunk for _ in range(count) for chunk in self.step()]
            case Start():
                raise AssertionError("a Start makes a new core")

    def add(self, request: Request) -> list[TokenChunk]:
        """Enter a request. Returns the answers of completions whose given beginning was whole
        already."""
        self._arrivals += 1
        # Admission takes numpy's whole numbers too: they would wrap in sums, and a seed's draws go
        # by its type.
        seed, priority, chunk_tokens = (
            int(request.seed),
            int(request.priority),
            int(request.chunk_tokens),
        )
        request = replace(request, seed=seed, priority=priority, chunk_tokens=chunk_tokens)
        sequences = sequences_of(request, arrival=self._arrivals, eos_ids=self._eos_ids)
        self.state.enqueue(sequences)
        self._out += end_complete_partials(
            self.state, sequences, version=self.version, text_stop=self._text_stop
        )
        return self._take_out()

    def step(self) -> list[TokenChunk]:
        """Launch one step, and commit those beyond the depth; with none to launch, commit the
        oldest."""
        if self._in_flight and must_preempt(self.state):
            self.quiesce()
        step = schedule(self.state, token_budget=self._token_budget, version=self.version)
        if step is not None:
            self._swap(step)
            prefills = begin_prefills(self.state, step)
            flight = self.runner.launch(self.state.rows, step)
            self._in_flight.append(InFlightStep(step=step, flight=flight, prefills=prefills))
            advance(self.state, step)
        if self._in_flight and (step is None or len(self._in_flight) > self._depth):
            self._commit_oldest()
        return self._take_out()

    def quiesce(self) -> None:
        """Commit everything in flight. The chunks are kept for the next call that returns some."""
        while self._in_flight:
            self._commit_oldest()

    def flush(self) -> list[TokenChunk]:
        """Commit everything in flight and return what is due."""
        self.quiesce()
        return self._take_out()

    def expire(self, request_ids: abc.Sequence[str]) -> list[TokenChunk]:
        """End requests that are past their deadline by the clock of the entry's writer."""
        for request_id in request_ids:
            if self._end(request_id, "deadline", LATE):
                self.state.emit("engine.deadline", request_id=request_id)
        return self._take_out()

    def abort(self, request_ids: abc.Sequence[str], reason: str) -> list[TokenChunk]:
        """End requests. Unknown ids are passed over: they are answered already."""
        for request_id in request_ids:
            self._end(request_id, "abort", reason)
        return self._take_out()

    def interrupt(self) -> tuple[Partials, list[TokenChunk]]:
        """End everything, and return what each request had."""
        self.quiesce()
        partials: dict[str, tuple[Partial, ...]] = {}
        for request_id in list(self.state.requests):
            had = self._end(request_id, "interrupted", "interrupt")
            partials[request_id] = tuple(sorted(had, key=lambda partial: partial.index))
        return partials, self._take_out()

    def forget_kv(self, reason: str) -> None:
        """Prepare for the loss of the pages' contents: running sequences recompute, and the cache
        is emptied."""
        self.quiesce()
        self._preempt_all(reason)
        void_swapped(self.state, reason)
        dropped = self.state.pages.drop_cached()
        self.state.emit("engine.prefix_cleared", pages=dropped, reason=reason)

    def change_host(self, host: HostPages | None, num_slots: int) -> None:
        """Forget what was in the host pool, which came or goes."""
        self.quiesce()
        void_swapped(self.state, "engine.kv_host moved")
        self.host, self.state.slots = host, HostSlots(num_slots)

    def change_version(self, version: int, *, recompute: bool, keep_cached: bool) -> None:
        """Choose tokens by `version` from the next step on. Running and swapped sequences keep
        their KV unless `recompute`; KV of mixed versions is never cached. Cached pages of other
        versions can never match again."""
        self.quiesce()
        if recompute:
            self._preempt_all("new weights")
            void_swapped(self.state, "new weights")
        self.version = version
        mix_versions(self.state)
        if not keep_cached:
            dropped = self.state.pages.drop_cached(keep_version=version)
            self.state.emit("engine.prefix_cleared", pages=dropped, reason="new weights")

    def _commit_oldest(self) -> None:
        oldest = self._in_flight.popleft()
        sampled = oldest.flight.fetch()
        end_prefills(self.state, oldest.prefills)
        self._out += commit_tokens(self.state, oldest.step, sampled, text_stop=self._text_stop)
        if self.state.tainted:
            self.runner.pool.zero_pages(np.concatenate(self.state.tainted))
            self.state.tainted.clear()
        if not self.state.requests:
            self._in_flight.clear()  # all that is left is surplus; no request waits for it

    def _end(self, request_id: str, finish: Finish, reason: str) -> list[Partial]:
        """End one request, if it is still unanswered once everything in flight is committed."""
        if request_id not in self.state.requests:
            return []
        self.quiesce()
        chunks, partials = end_request(self.state, request_id, finish, reason, version=self.version)
        self._out += chunks
        return partials

    def _take_out(self) -> list[TokenChunk]:
        chunks, self._out = self._out, []
        return chunks

    def _preempt_all(self, reason: str) -> None:
        for row in self.state.active_rows().tolist():
            preempt(self.state, row, reason=reason, version=self.version, must_recompute=True)

    def _swap(self, step: Step) -> None:
        if step.swap_out is None and step.swap_in is None:
            return
        assert self.host is not None, "there are no slots without a host pool"
        if step.swap_out is not None:
            self.host.copy_out(*step.swap_out)
        if step.swap_in is not None:
            self.host.copy_in(*step.swap_in)
