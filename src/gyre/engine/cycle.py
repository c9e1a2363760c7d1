"""Cycle: choose, run, settle. In: admitted requests. Out: TokenChunks. Everything here runs on the compute thread and
between two steps nothing else touches the roster. Caller: native.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from gyre.core.records import Partial, Request, TokenChunk
from gyre.engine import requests
from gyre.engine.roster import Roster
from gyre.engine.runner import Runner
from gyre.engine.scheduler import schedule
from gyre.engine.settle import TextStop, end_complete_partials, end_request, settle

SPARE_TOKENS = 4  # decoded beyond the longest stop string, so that its first character never lies at the window's edge


class Decodes(Protocol):
    """What the engine asks of a tokenizer."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def make_text_stop(tokenizer: Decodes | None) -> TextStop:
    """Look for stop strings in the text of the last tokens only: a token holds at least a byte, and what earlier
    tokens completed ended the completion then. Keeps no state, so preemption and continuation cannot upset it."""

    def text_stop(sequence: requests.Sequence, tokens: np.ndarray) -> bool:
        assert tokenizer is not None, "admission refuses stop strings without a tokenizer"
        stops = sequence.request.sampling.stop
        window = max(len(stop.encode()) for stop in stops) + SPARE_TOKENS
        text = tokenizer.decode(tokens[-window:].tolist())
        return any(stop in text for stop in stops)

    return text_stop


class Cycle:
    """The engine's inside: a roster, a runner and the version that they run."""

    def __init__(
        self,
        roster: Roster,
        runner: Runner,
        *,
        token_budget: int,
        version: int,
        eos_ids: tuple[int, ...],
        tokenizer: Decodes | None,
        clock: Callable[[], float],
    ) -> None:
        self.roster, self.runner, self.version = roster, runner, version
        self._token_budget, self._eos_ids, self._clock = token_budget, eos_ids, clock
        self._text_stop = make_text_stop(tokenizer)
        self._deadlines: dict[str, float] = {}
        self._arrivals = 0

    @property
    def is_idle(self) -> bool:
        return not self.roster.requests

    def add(self, request: Request, deadline_at: float | None) -> list[TokenChunk]:
        """Enter a request. Returns the answers of completions whose given beginning was whole already."""
        self._arrivals += 1
        sequences = requests.sequences_of(request, arrival=self._arrivals, eos_ids=self._eos_ids)
        self.roster.enqueue(sequences)
        if deadline_at is not None:
            self._deadlines[request.request_id] = deadline_at
        return end_complete_partials(self.roster, sequences, version=self.version, text_stop=self._text_stop)

    def step(self) -> list[TokenChunk]:
        """One iteration; nothing to do gives no chunks."""
        step = schedule(self.roster, token_budget=self._token_budget, version=self.version)
        if step is None:
            return []
        sampled = self.runner.run(self.roster.rows, step)
        chunks = settle(self.roster, step, sampled, version=self.version, text_stop=self._text_stop)
        if self.roster.tainted:
            self.runner.pool.zero_pages(np.concatenate(self.roster.tainted))
            self.roster.tainted.clear()
        return chunks

    def expire(self) -> list[TokenChunk]:
        """End requests that are past their deadline."""
        if not self._deadlines:
            return []
        now, chunks = self._clock(), []
        self._deadlines = {
            request_id: at for request_id, at in self._deadlines.items() if request_id in self.roster.requests
        }
        for request_id, at in list(self._deadlines.items()):
            if now >= at:
                chunks += end_request(
                    self.roster, request_id, "deadline", "the request's deadline passed", version=self.version
                )[0]
                self.roster.emit("engine.deadline", request_id=request_id)
                del self._deadlines[request_id]
        return chunks

    def abort(self, request_id: str, reason: str) -> list[TokenChunk]:
        return end_request(self.roster, request_id, "abort", reason, version=self.version)[0]

    def abort_all(self, reason: str) -> list[TokenChunk]:
        return [chunk for request_id in list(self.roster.requests) for chunk in self.abort(request_id, reason)]

    def interrupt(self) -> tuple[dict[str, tuple[Partial, ...]], list[TokenChunk]]:
        """End everything, and return what each request had."""
        partials: dict[str, tuple[Partial, ...]] = {}
        chunks: list[TokenChunk] = []
        for request_id in list(self.roster.requests):
            ended, had = end_request(self.roster, request_id, "interrupted", "interrupt", version=self.version)
            chunks += ended
            partials[request_id] = tuple(sorted(had, key=lambda partial: partial.index))
        return partials, chunks

    def forget_kv(self, reason: str) -> None:
        """The pages' contents are about to go: whoever runs computes again, and nothing stays cached."""
        self._preempt_all(reason)
        dropped = self.roster.pages.drop_cached()
        self.roster.emit("engine.prefix_cleared", pages=dropped, reason=reason)

    def change_version(self, version: int, *, recompute: bool, keep_cached: bool) -> None:
        """From the next step on tokens are chosen by `version`. Running sequences keep their KV unless `recompute`;
        KV of mixed versions is never cached. Cached pages of other versions can never match again."""
        if recompute:
            self._preempt_all("new weights")
        self.version = version
        self.roster.rows.kv_version_R[:] = -1
        if not keep_cached:
            dropped = self.roster.pages.drop_cached(keep_version=version)
            self.roster.emit("engine.prefix_cleared", pages=dropped, reason="new weights")

    def _preempt_all(self, reason: str) -> None:
        for row in self.roster.active_rows().tolist():
            self.roster.preempt(row, reason=reason, version=self.version)
