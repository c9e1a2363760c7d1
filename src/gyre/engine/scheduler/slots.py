"""Input batch: the state of running sequences as arrays, one row each, so that a step touches all
of them at once.

In: sequences that start or stop running. Out: arrays indexed by row. Pure (numpy). 2-D arrays are
indexed by absolute position: entry t belongs to token t as the target.

A step that is launched counts at once in `length_R` and `computed_R`; the values of the tokens that
it chooses come later and are counted in `known_R`. With nothing in flight known and length are
equal.
"""

# R rows, W widest sequence, P pages per sequence, S stop ids

from __future__ import annotations

import heapq

import numpy as np

from gyre.core.rounding import ceil_div
from gyre.engine.scheduler.sequence import GeneratedTokens, Sequence

NO_STOP = -1


class InputBatch:
    """`max_running` rows. A free row has sequences[row] None and active False."""

    def __init__(self, max_running: int, page_tokens: int) -> None:
        self.max_running = max_running
        self.page_tokens = page_tokens
        self.sequences: list[Sequence | None] = [None] * max_running
        # a heap: the lowest row first, whatever was taken and left before
        self._free = list(range(max_running))
        self.revision = 0  # changes whenever a row is taken or left
        self._stays = 0
        # unique number of the row's allocation; 0 while the row is free
        self.generation_R = np.zeros(max_running, dtype=np.int64)
        self.active_R = np.zeros(max_running, dtype=bool)
        self.decoding_R = np.zeros(max_running, dtype=bool)
        self.prompt_R = np.zeros(max_running, dtype=np.int64)  # prompt tokens
        # prompt and chosen tokens, those in flight too
        self.length_R = np.zeros(max_running, dtype=np.int64)
        # of these, tokens whose values the host has
        self.known_R = np.zeros(max_running, dtype=np.int64)
        # tokens whose KV is in pages, or will be: in flight
        self.computed_R = np.zeros(max_running, dtype=np.int64)
        self.limit_R = np.zeros(max_running, dtype=np.int64)  # prompt + max_tokens
        # length at which the next chunk goes out
        self.chunk_due_R = np.zeros(max_running, dtype=np.int64)
        # places of the table in use, from the first on
        self.pages_R = np.zeros(max_running, dtype=np.int64)
        # of these, given back already: out of every window
        self.first_R = np.zeros(max_running, dtype=np.int64)
        self.kv_version_R = np.full(max_running, -1, dtype=np.int64)  # of all its KV; -1 when mixed
        self.priority_R = np.zeros(max_running, dtype=np.int64)
        self.arrival_R = np.zeros(max_running, dtype=np.int64)
        self.key_R = np.zeros(max_running, dtype=np.uint64)
        self.temperature_R = np.zeros(max_running, dtype=np.float32)
        self.top_p_R = np.zeros(max_running, dtype=np.float64)
        self.min_p_R = np.zeros(max_running, dtype=np.float64)
        self.top_k_R = np.zeros(max_running, dtype=np.int64)
        self.truncated_R = np.zeros(max_running, dtype=bool)
        self.shaped_R = np.zeros(max_running, dtype=bool)  # asks for bias, penalties or min_tokens
        # alternatives returned beside each chosen token
        self.num_top_R = np.zeros(max_running, dtype=np.int64)
        # asks for prompt log-probs, not yet looked over
        self.scored_R = np.zeros(max_running, dtype=bool)
        self.text_stop_R = np.zeros(max_running, dtype=bool)
        self.stops_RS = np.full((max_running, 1), NO_STOP, dtype=np.int32)
        self.table_RP = np.zeros((max_running, 1), dtype=np.int32)
        self.tokens_RW = np.zeros((max_running, 0), dtype=np.int32)
        self.logprobs_RW = np.zeros((max_running, 0), dtype=np.float32)
        self.raw_RW = np.zeros((max_running, 0), dtype=np.float32)
        self.versions_RW = np.zeros((max_running, 0), dtype=np.int32)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_active(self) -> int:
        return self.max_running - len(self._free)

    def take(self, sequence: Sequence) -> int:
        """Give the sequence a row and load what it knows. Its KV and pages start empty."""
        row = heapq.heappop(self._free)
        self.revision += 1
        request, sampling, known = (
            sequence.request,
            sequence.request.sampling,
            sequence.known_tokens(),
        )
        prompt, length = len(request.tokens), len(known)
        self._widen(prompt + sampling.max_tokens, len(sequence.stop_ids))
        self.sequences[row], sequence.row = sequence, row
        self.active_R[row], self.decoding_R[row] = True, False
        self._stays += 1
        self.generation_R[row] = self._stays
        self.prompt_R[row], self.computed_R[row] = prompt, 0
        self.length_R[row] = self.known_R[row] = length
        self.limit_R[row] = prompt + sampling.max_tokens
        self.chunk_due_R[row] = (
            prompt + sequence.emitted + (request.chunk_tokens or sampling.max_tokens + 1)
        )
        self.pages_R[row], self.first_R[row], self.kv_version_R[row] = 0, 0, -1
        self.priority_R[row], self.arrival_R[row] = request.priority, sequence.arrival
        self.key_R[row] = sequence.key
        self.temperature_R[row], self.top_k_R[row] = sampling.temperature, sampling.top_k
        self.top_p_R[row], self.min_p_R[row] = sampling.top_p, sampling.min_p
        self.truncated_R[row], self.text_stop_R[row] = sequence.truncates, bool(sampling.stop)
        self.shaped_R[row], self.num_top_R[row] = sampling.shapes_logits, sampling.top_logprobs
        self.scored_R[row] = sequence.prompt_store is not None
        self.stops_RS[row] = NO_STOP
        self.stops_RS[row, : len(sequence.stop_ids)] = sequence.stop_ids
        self.table_RP[row] = 0
        self.tokens_RW[row, :length] = known
        self.logprobs_RW[row, prompt:length] = sequence.chosen.logprobs
        self.raw_RW[row, prompt:length] = sequence.chosen.raw_logprobs
        self.versions_RW[row, prompt:length] = sequence.chosen.versions
        return row

    def has_rules(self, row_N: np.ndarray) -> np.ndarray:
        """Return which rows choose by more than a temperature. Every runner lets the others keep
        what its kernel chooses, so that no neighbor's rules change a bit of theirs."""
        return self.truncated_R[row_N] | self.shaped_R[row_N] | (self.num_top_R[row_N] > 0)

    def leave(self, row: int) -> Sequence:
        """Free the row; what it chose moves to its sequence. Its pages must be gone."""
        sequence = self.sequence_at(row)
        assert self.pages_R[row] == 0, row
        chosen = self.chosen(row)
        sequence.chosen = GeneratedTokens(
            tokens=chosen.tokens.copy(),
            logprobs=chosen.logprobs.copy(),
            raw_logprobs=chosen.raw_logprobs.copy(),
            versions=chosen.versions.copy(),
        )
        self.sequences[row], sequence.row = None, None
        self.active_R[row] = self.decoding_R[row] = False
        self.generation_R[row] = 0
        self.revision += 1
        heapq.heappush(self._free, row)
        return sequence

    def sequence_at(self, row: int) -> Sequence:
        sequence = self.sequences[row]
        assert sequence is not None, row
        return sequence

    def chosen(self, row: int) -> GeneratedTokens:
        """Return views of what the row has chosen and the host knows; copy what must outlive the
        next step."""
        span = slice(int(self.prompt_R[row]), int(self.known_R[row]))
        return GeneratedTokens(
            tokens=self.tokens_RW[row, span],
            logprobs=self.logprobs_RW[row, span],
            raw_logprobs=self.raw_RW[row, span],
            versions=self.versions_RW[row, span],
        )

    def pages_of(self, row: int) -> np.ndarray:
        """Return the pages that the row holds."""
        return self.table_RP[row, self.first_R[row] : self.pages_R[row]]

    def add_pages(self, row: int, pages: np.ndarray) -> None:
        held = int(self.pages_R[row])
        self.table_RP[row, held : held + len(pages)] = pages
        self.pages_R[row] = held + len(pages)

    def _widen(self, width: int, num_stops: int) -> None:
        """Grow the 2-D arrays geometrically; existing contents stay."""
        if width > self.tokens_RW.shape[1]:
            extra = max(width, 2 * self.tokens_RW.shape[1]) - self.tokens_RW.shape[1]
            for name in ("tokens_RW", "logprobs_RW", "raw_RW", "versions_RW"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, extra))))
            pages = ceil_div(self.tokens_RW.shape[1], self.page_tokens)
            self.table_RP = np.pad(self.table_RP, ((0, 0), (0, pages - self.table_RP.shape[1])))
        if num_stops > self.stops_RS.shape[1]:
            extra = num_stops - self.stops_RS.shape[1]
            self.stops_RS = np.pad(self.stops_RS, ((0, 0), (0, extra)), constant_values=NO_STOP)
