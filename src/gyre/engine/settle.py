"""Settle: books what a step computed and chose, and finds who is finished. In: the roster, the Step, the Sampled. Out:
TokenChunks to hand out. Pure. Also ends requests for reasons from outside (abort, deadline, interrupt). Caller: cycle.
"""

# N rows that chose a token

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gyre.core.records import Finish, Partial, TokenChunk
from gyre.engine.requests import Chosen, Sequence, make_chunk, make_partial
from gyre.engine.roster import Roster
from gyre.engine.scheduler import Step

# (sequence, tokens chosen so far) → whether the last token completed one of its stop strings
TextStop = Callable[[Sequence, np.ndarray], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What the sampler chose for `Step.sample_rows`, on the host."""

    tokens: np.ndarray  # int32 [N]
    logprobs: np.ndarray  # float32 [N], after temperature and truncation
    raw_logprobs: np.ndarray  # float32 [N]
    supports: dict[int, np.ndarray]  # place in sample_rows → int32 ids that truncation left, for rows that truncate


def settle(roster: Roster, step: Step, sampled: Sampled, *, version: int, text_stop: TextStop) -> list[TokenChunk]:
    """Book one step and return the chunks that are due. Finished sequences give back rows and pages."""
    rows, counters = roster.rows, roster.counters
    counters.steps += 1
    counters.generated_tokens += len(sampled.tokens)
    rows.computed_R[step.decode_rows] += 1
    for chunk in step.chunks:
        rows.computed_R[chunk.row] += chunk.count
        if rows.decoding_R[chunk.row]:
            roster.remember(chunk.row, version)  # others with the same prompt may share it from now on
    _append(roster, step.sample_rows, sampled, version)
    return _hand_out(roster, step.sample_rows, sampled, version, text_stop)


def _append(roster: Roster, rows_N: np.ndarray, sampled: Sampled, version: int) -> None:
    rows = roster.rows
    at_N = rows.length_R[rows_N]
    rows.tokens_RW[rows_N, at_N] = sampled.tokens
    rows.logprobs_RW[rows_N, at_N] = sampled.logprobs
    rows.raw_RW[rows_N, at_N] = sampled.raw_logprobs
    rows.versions_RW[rows_N, at_N] = version
    rows.length_R[rows_N] = at_N + 1
    for place, ids in sampled.supports.items():
        rows.sequence_at(int(rows_N[place])).supports.append(ids)


def _hand_out(
    roster: Roster, rows_N: np.ndarray, sampled: Sampled, version: int, text_stop: TextStop
) -> list[TokenChunk]:
    rows = roster.rows
    stop_N = (rows.stops_RS[rows_N] == sampled.tokens[:, None]).any(axis=1)
    for place in np.flatnonzero(rows.text_stop_R[rows_N] & ~stop_N).tolist():
        row = int(rows_N[place])
        stop_N[place] = text_stop(rows.sequence_at(row), rows.chosen(row).tokens)
    broken_N = ~np.isfinite(sampled.raw_logprobs)
    length_N = rows.length_R[rows_N]
    finished_N = stop_N | broken_N | (length_N >= rows.limit_R[rows_N])
    chunks = []
    for place in np.flatnonzero(finished_N | (length_N >= rows.chunk_due_R[rows_N])).tolist():
        row = int(rows_N[place])
        sequence = rows.sequence_at(row)
        if broken_N[place]:
            chunks.append(_end_broken(roster, sequence, version))
        elif finished_N[place]:
            chunks.append(make_chunk(sequence, rows.chosen(row), "stop" if stop_N[place] else "length"))
            roster.retire(sequence, version=version)
        else:
            chunks.append(make_chunk(sequence, rows.chosen(row), None))
            rows.chunk_due_R[row] = rows.length_R[row] + sequence.request.chunk_tokens
    return chunks


def _end_broken(roster: Roster, sequence: Sequence, version: int) -> TokenChunk:
    """The model gave non-finite logits: answer without the last token, and keep its KV from being shared."""
    assert sequence.row is not None
    chosen = roster.rows.chosen(sequence.row)
    sound = Chosen(
        tokens=chosen.tokens[:-1],
        logprobs=chosen.logprobs[:-1],
        raw_logprobs=chosen.raw_logprobs[:-1],
        versions=chosen.versions[:-1],
    )
    del sequence.supports[len(sound.tokens) :]
    roster.emit("engine.nonfinite", request_id=sequence.request.request_id, index=sequence.index, version=version)
    chunk = make_chunk(sequence, sound, "abort", "the model gave non-finite logits")
    roster.retire(sequence, version=version, keep_pages=False)
    return chunk


def end_request(
    roster: Roster, request_id: str, finish: Finish, reason: str, *, version: int
) -> tuple[list[TokenChunk], list[Partial]]:
    """End all unanswered completions of a request, wherever they are. Unknown ids give nothing."""
    chunks, partials = [], []
    for sequence in roster.withdraw(request_id):
        chosen = sequence.chosen if sequence.row is None else roster.rows.chosen(sequence.row)
        partials.append(make_partial(sequence, chosen))
        chunks.append(make_chunk(sequence, chosen, finish, reason))
        roster.retire(sequence, version=version)
    return chunks, partials


def end_complete_partials(
    roster: Roster, sequences: list[Sequence], *, version: int, text_stop: TextStop
) -> list[TokenChunk]:
    """Answer completions whose given beginning is already a whole answer; they never run."""
    chunks = []
    for sequence in sequences:
        tokens = sequence.chosen.tokens
        if len(tokens) == 0:
            continue
        stopped = int(tokens[-1]) in sequence.stop_ids or (
            bool(sequence.request.sampling.stop) and text_stop(sequence, tokens)
        )
        if stopped or len(tokens) >= sequence.request.sampling.max_tokens:
            roster.queue.remove(sequence)
            chunks.append(make_chunk(sequence, sequence.chosen, "stop" if stopped else "length"))
            roster.retire(sequence, version=version)
    return chunks
