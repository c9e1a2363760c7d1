"""SchedulerState: who waits, who runs, who holds which page; the moves between them keep the
accounts. In: sequences. Out: rows and pages given and taken back. Pure but for `emit` and `clock`.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from gyre.core.events import Emit
from gyre.engine.kv_cache.page_allocator import NULL_PAGE, Pages
from gyre.engine.kv_cache.prefix_cache import extend_keys, root_key
from gyre.engine.kv_cache.prompt_logprobs import keep_known, load_known, usable_pages
from gyre.engine.scheduler.sequence import Sequence, State
from gyre.engine.scheduler.slots import InputBatch
from gyre.engine.scheduler.swap import NO_SWAP, HostSlots, PageMoves, SwapRates


@dataclass(slots=True)
class Counters:
    """Since start; feeds EngineStats."""

    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    swaps_out: int = 0  # of these, sequences whose KV went to host memory
    swaps_in: int = 0
    recomputed_tokens: int = 0
    steps: int = 0


class SchedulerState:
    """Keep each unanswered sequence in exactly one place: the queue, a leader's followers or a
    row. The queue is where a sequence waits for a row and KV pages."""

    def __init__(
        self,
        *,
        max_running: int,
        num_pages: int,
        page_tokens: int,
        prefix_cache: bool,
        emit: Emit,
        num_slots: int = 0,
        rates: SwapRates = NO_SWAP,
        score_bytes: int = 0,
        window: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock  # stamps when a completion began; nothing is decided by it
        # tokens that the widest layer looks back at; None: some layer looks at all
        self.window = window
        self.page_tokens = page_tokens
        self.prefix_cache = prefix_cache
        self.emit = emit
        self.rates = rates
        self.rows = InputBatch(max_running, page_tokens)
        self.pages = Pages(num_pages, score_bytes=score_bytes)
        self.slots = HostSlots(num_slots)
        self.moves = PageMoves()
        self.queue: list[Sequence] = []  # by rank
        self.prefilling: list[int] = []  # rows, in the order in which they started
        self.requests: dict[str, list[Sequence]] = {}  # unanswered completions of each request
        # pages given back with unsound KV; the core zeroes them
        self.tainted: list[np.ndarray] = []
        self.counters = Counters()

    # -- questions

    def decoding_rows(self) -> np.ndarray:
        """Rows that can choose another token. Those whose last one is in flight only wait for
        it."""
        return np.flatnonzero(self.rows.decoding_R & (self.rows.length_R < self.rows.limit_R))

    def active_rows(self) -> np.ndarray:
        return np.flatnonzero(self.rows.active_R)

    def find_hits(self, sequence: Sequence, version: int) -> np.ndarray:
        """Return cached pages for the sequence's beginning. The last known token is always left to
        compute."""
        if not self.prefix_cache:
            return np.empty(0, np.int32)
        known = sequence.known_tokens()
        self._extend_keys(sequence, known, (len(known) - 1) // self.page_tokens, version)
        hits = self.pages.find(sequence.keys[: (len(known) - 1) // self.page_tokens])
        if sequence.prompt_store is None:
            return hits
        sequence.prompt_store = sequence.prompt_store.under(version)
        load_known(
            sequence.prompt_store,
            sequence.keys,
            self.pages.prefix.scores,
            self.page_tokens,
            version,
        )
        usable = usable_pages(sequence.prompt_store, len(hits), self.page_tokens)
        sequence.hits_given_up = len(hits) - usable
        return hits[:usable]

    # -- moves

    def enqueue(self, sequences: list[Sequence]) -> None:
        """Enter the completions of one new request. Those without a beginning of their own share
        one prefill."""
        request_id = sequences[0].request.request_id
        assert request_id not in self.requests, request_id
        self.requests[request_id] = list(sequences)
        fresh = [sequence for sequence in sequences if len(sequence.chosen.tokens) == 0]
        if fresh:
            fresh[0].followers = fresh[1:]
            self.wait(fresh[0])
        for sequence in sequences:
            if len(sequence.chosen.tokens):
                self.wait(sequence)

    def wait(self, sequence: Sequence) -> None:
        bisect.insort(self.queue, sequence, key=lambda waiting: waiting.rank)

    def start(self, sequence: Sequence, hits: np.ndarray, version: int) -> int:
        """Give a row and pages for everything known; cached pages are shared and count as
        computed."""
        rows, was_preempted = self.rows, sequence.state is State.PREEMPTED
        row = rows.take(sequence)
        sequence.enter(State.PREFILLING)
        if sequence.prompt_store is not None:
            sequence.prompt_store = sequence.prompt_store.under(version)
        if sequence.hits_given_up:
            self.emit(
                "engine.hits_recomputed",
                request_id=sequence.request.request_id,
                index=sequence.index,
                pages=sequence.hits_given_up,
                reason="their prompt log-probs are not kept",
            )
            sequence.hits_given_up = 0
        needed = self.num_pages_for(int(rows.length_R[row]))
        self.pages.share(hits, found=True)
        rows.add_pages(row, hits)
        rows.add_pages(row, self.pages.take(needed - len(hits)))
        rows.computed_R[row] = len(hits) * self.page_tokens
        rows.kv_version_R[row] = version
        self.prefilling.append(row)
        if was_preempted:
            self.counters.recomputed_tokens += max(
                0, sequence.lost_tokens - len(hits) * self.page_tokens
            )
        else:
            sequence.started_s = self.clock()
            sequence.cached_tokens = len(hits) * self.page_tokens
            self.counters.prompt_tokens += len(sequence.request.tokens)
            self.counters.prefix_hit_tokens += len(hits) * self.page_tokens
        return row

    def fork(self, leader: int, sequence: Sequence) -> tuple[int, tuple[int, int] | None]:
        """Start a sibling on the leader's prompt pages. Return its row and the (from, to) page to
        copy, if any."""
        rows, prompt = self.rows, len(sequence.request.tokens)
        assert rows.first_R[leader] == 0, "a prompt keeps its pages until it is computed"
        row = rows.take(sequence)
        sequence.enter(State.DECODING)
        full = prompt // self.page_tokens
        shared = rows.pages_of(leader)[:full]
        self.pages.share(shared)
        rows.add_pages(row, shared)
        copy = None
        if prompt % self.page_tokens:
            tail = self.pages.take(1)
            copy = (int(rows.pages_of(leader)[full]), int(tail[0]))
            rows.add_pages(row, tail)
        rows.computed_R[row] = prompt
        sequence.prompt_store = rows.sequence_at(leader).prompt_store  # of one prompt
        rows.kv_version_R[row] = rows.kv_version_R[leader]
        sequence.started_s = rows.sequence_at(leader).started_s  # when their prompt began
        self.counters.prompt_tokens += prompt
        self.counters.prefix_hit_tokens += prompt
        return row, copy

    def retire(self, sequence: Sequence, *, version: int, keep_pages: bool = True) -> None:
        """Take everything back from a sequence that has its answer; its full pages stay cached when
        `keep_pages`."""
        if sequence.row is not None:
            row = sequence.row
            if keep_pages:
                self.remember(row, version)
            else:
                self.pages.disown(self.rows.pages_of(row))
                self.tainted.append(self.pages.only_used_once(self.rows.pages_of(row)))
            self.vacate(row)
        if sequence.swapped is not None:
            self.drop_swapped(sequence)
        sequence.enter(State.FINISHED)
        siblings = self.requests[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self.requests[sequence.request.request_id]

    def withdraw(self, request_id: str) -> list[Sequence]:
        """Take a whole request out of the queue and its leaders. Those that run stay in their rows
        until retired."""
        sequences = list(self.requests.get(request_id, ()))
        for sequence in sequences:
            sequence.followers = []
        self.queue = [waiting for waiting in self.queue if waiting.request.request_id != request_id]
        return sequences

    def release_followers(self, leader: Sequence, started: int) -> None:
        """Let followers beyond the first `started` wait on their own: the leader's prompt is
        computed."""
        rest, leader.followers = leader.followers[started:], []
        if rest:
            rest[0].followers = rest[1:]
            self.wait(rest[0])

    def remember(self, row: int, version: int) -> None:
        """Enter the row's full pages into the prefix cache, if all of its KV is of the current
        version: pages whose tokens are known and whose KV is written or will be before any later
        step reads it."""
        rows = self.rows
        if not self.prefix_cache or rows.kv_version_R[row] != version:
            return
        sequence = rows.sequence_at(row)
        blocks = int(min(rows.computed_R[row], rows.known_R[row])) // self.page_tokens
        self._extend_keys(sequence, rows.tokens_RW[row], blocks, version)
        first = int(rows.first_R[row])
        self.pages.remember(
            sequence.keys[first:blocks], rows.pages_of(row)[: max(0, blocks - first)], version
        )
        if sequence.prompt_store is not None:
            keep_known(
                sequence.prompt_store,
                sequence.keys[:blocks],
                self.pages.prefix,
                self.page_tokens,
                version,
            )

    def num_pages_for(self, num_tokens: int) -> int:
        # not a call: asked for every row and step
        return -(-num_tokens // self.page_tokens)

    def give_unseen(self, decoding: np.ndarray) -> None:
        """Take back pages that no later token sees, when every layer has a window; the null page
        takes their places."""
        if self.window is None:
            return
        rows = self.rows
        unseen = np.maximum(0, rows.computed_R[decoding] - self.window + 1) // self.page_tokens
        for row, first in zip(decoding.tolist(), unseen.tolist(), strict=True):
            begin = int(rows.first_R[row])
            if first > begin:
                self.pages.give(rows.table_RP[row, begin:first].copy())
                rows.table_RP[row, begin:first] = NULL_PAGE
                rows.first_R[row] = first

    def drop_swapped(self, sequence: Sequence) -> None:
        """Give back the slots of its KV in host memory."""
        assert sequence.swapped is not None
        self.slots.give(sequence.swapped.slots)
        sequence.swapped = None

    def vacate(self, row: int) -> None:
        """Free the row and pages of a sequence."""
        self.pages.give(self.rows.pages_of(row))
        self.rows.pages_R[row] = self.rows.first_R[row] = 0
        if not self.rows.decoding_R[row]:
            self.prefilling.remove(row)
        self.rows.leave(row)

    # -- accounts

    def check(self) -> None:
        """Assert that no page and no sequence is lost or held twice. For tests, after any move."""
        rows = self.rows
        active = self.active_rows().tolist()
        self.pages.check(rows.pages_of(row) for row in active)
        self.slots.check(
            waiting.swapped.slots for waiting in self.queue if waiting.swapped is not None
        )
        assert all(
            (waiting.swapped is not None) == (waiting.state is State.SWAPPED)
            for waiting in self.queue
        )
        places = list(self._places())
        assert len(places) == len(set(map(id, places))), "a sequence is in two places"
        unanswered = [sequence for siblings in self.requests.values() for sequence in siblings]
        assert set(map(id, places)) == set(map(id, unanswered)), (
            "a sequence is nowhere, or answered and still here"
        )
        assert self.queue == sorted(self.queue, key=lambda waiting: waiting.rank)
        assert sorted([*self.prefilling, *np.flatnonzero(rows.decoding_R).tolist()]) == active
        for row in active:
            assert rows.computed_R[row] <= min(
                rows.length_R[row], rows.pages_R[row] * self.page_tokens
            ), row
            assert rows.known_R[row] <= rows.length_R[row] <= rows.limit_R[row], row
            assert rows.known_R[row] < rows.limit_R[row], row
            assert rows.generation_R[row] > 0, row

    def _places(self) -> Iterator[Sequence]:
        running = [self.rows.sequence_at(int(row)) for row in self.active_rows()]
        for sequence in [*self.queue, *running]:
            yield sequence
            yield from sequence.followers

    def _extend_keys(
        self, sequence: Sequence, tokens: np.ndarray, blocks: int, version: int
    ) -> None:
        root = root_key(version, sequence.request.tenant_salt)
        if sequence.keys_root != root:
            sequence.keys, sequence.keys_root = [], root
        extend_keys(sequence.keys, root, tokens, self.page_tokens, blocks)
