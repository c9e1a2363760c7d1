"""Postprocess: accounts for a step in two parts. In: the state, the Step, its sampled tokens. Out:
TokenChunks to deliver. Pure but for the times of prefills and first tokens.

`advance`, as soon as the step is launched, counts what needs no token values. `commit_tokens`, when
the values are on the host, writes them where the step said and finds finished sequences. Steps may
be launched in between, with sequences that `commit_tokens` then finishes. Their surplus tokens are
dropped at commit, by the row's generation. Also ends requests for external reasons (abort,
deadline, interrupt), with nothing in flight.
"""

# N rows that chose a token

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from gyre.core.records import Finish, Partial, PrefillTiming, TokenChunk
from gyre.engine.scheduler.sequence import GeneratedTokens, Sequence, make_chunk, make_partial
from gyre.engine.scheduler.state import SchedulerState
from gyre.engine.scheduler.step import SampledTokens, Step

# (sequence, tokens chosen so far) → whether the last token completed one of its stop strings
TextStop = Callable[[Sequence, np.ndarray], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunPrefill:
    """A piece of a traced completion's known tokens, in a step whose results are not there yet."""

    sequence: Sequence
    start: int
    num_tokens: int
    launched_s: float


def begin_prefills(state: SchedulerState, step: Step) -> list[BegunPrefill]:
    """Return the step's pieces that are timed: those of traced requests. The step is about to be
    launched."""
    traced = [
        (chunk, sequence)
        for chunk in step.chunks
        if (sequence := state.rows.sequence_at(chunk.row)).request.traced
    ]
    now_s = state.clock() if traced else 0.0
    return [
        BegunPrefill(sequence=sequence, start=chunk.start, num_tokens=chunk.count, launched_s=now_s)
        for chunk, sequence in traced
    ]


def end_prefills(state: SchedulerState, begun: Seq[BegunPrefill]) -> None:
    """Note when the results of these were on the host: now."""
    now_s = state.clock() if begun else 0.0
    for piece in begun:
        piece.sequence.prefills.append(
            PrefillTiming(
                start=piece.start,
                num_tokens=piece.num_tokens,
                launched_s=piece.launched_s,
                ended_s=now_s,
            )
        )


def advance(state: SchedulerState, step: Step) -> None:
    """Count a launched step: KV that it will have written, and a place for each token that it will
    have chosen."""
    rows = state.rows
    rows.computed_R[step.decode_rows] += 1
    for chunk in step.chunks:
        rows.computed_R[chunk.row] += chunk.count
    rows.length_R[step.sample_rows] += 1
    state.counters.steps += 1


def commit_tokens(
    state: SchedulerState, step: Step, sampled: SampledTokens, *, text_stop: TextStop
) -> list[TokenChunk]:
    """Write the tokens of a launched step and return the chunks that are due. Finished sequences
    free their rows and pages. A step launched meanwhile may still read and write those pages. Their
    next owner uses them in a later step, and the device works in order."""
    live_N = state.rows.generation_R[step.sample_rows] == step.sample_generations
    for piece in sampled.pieces:
        piece.prompt_store.enter(piece, step.version)
    _remember_prompts(state, step, live_N)
    places_N = np.flatnonzero(live_N)
    if len(places_N) < len(live_N):
        sampled = _select(sampled, places_N)
    rows_N = step.sample_rows[places_N]
    state.counters.generated_tokens += len(rows_N)
    _write(state, rows_N, step.sample_positions[places_N], sampled, step.version)
    _time_first_tokens(state, rows_N[places_N >= len(step.decode_rows)])
    chunks = _hand_out(state, rows_N, sampled, step.version, text_stop)
    state.give_unseen(rows_N[state.rows.decoding_R[rows_N]])
    return chunks


def _remember_prompts(state: SchedulerState, step: Step, live_N: np.ndarray) -> None:
    """Others with the same prompt may share it from now on. A fork shares its leader's pages: once
    is enough."""
    leaders = np.unique(step.sample_chunks, return_index=True)[1] + len(step.decode_rows)
    for place in leaders[live_N[leaders]].tolist():
        state.remember(int(step.sample_rows[place]), step.version)


def _time_first_tokens(state: SchedulerState, rows: np.ndarray) -> None:
    """Note the time for rows whose prompt was finished by the step."""
    now_s = state.clock() if len(rows) else 0.0
    for row in rows.tolist():
        sequence = state.rows.sequence_at(row)
        if sequence.first_token_s is None:  # not one that resumes after a preemption
            sequence.first_token_s = now_s


def _select(sampled: SampledTokens, places: np.ndarray) -> SampledTokens:
    new_place = {int(old): new for new, old in enumerate(places)}
    return SampledTokens(
        tokens=sampled.tokens[places],
        logprobs=sampled.logprobs[places],
        raw_logprobs=sampled.raw_logprobs[places],
        supports={
            new_place[place]: ids for place, ids in sampled.supports.items() if place in new_place
        },
        top_logprobs={
            new_place[place]: top
            for place, top in sampled.top_logprobs.items()
            if place in new_place
        },
    )


def _write(
    state: SchedulerState,
    rows_N: np.ndarray,
    at_N: np.ndarray,
    sampled: SampledTokens,
    version: int,
) -> None:
    rows = state.rows
    assert (rows.known_R[rows_N] == at_N).all(), "flights are committed in order"
    rows.tokens_RW[rows_N, at_N] = sampled.tokens
    rows.logprobs_RW[rows_N, at_N] = sampled.logprobs
    rows.raw_RW[rows_N, at_N] = sampled.raw_logprobs
    rows.versions_RW[rows_N, at_N] = version
    rows.known_R[rows_N] = at_N + 1
    for place, ids in sampled.supports.items():
        rows.sequence_at(int(rows_N[place])).supports.append(ids)
    for place, (ids, logprobs) in sampled.top_logprobs.items():
        row = int(rows_N[place])
        best = int(rows.num_top_R[row])
        rows.sequence_at(row).top_logprobs.append((ids[:best], logprobs[:best]))


def _hand_out(
    state: SchedulerState,
    rows_N: np.ndarray,
    sampled: SampledTokens,
    version: int,
    text_stop: TextStop,
) -> list[TokenChunk]:
    rows = state.rows
    stop_N = (rows.stops_RS[rows_N] == sampled.tokens[:, None]).any(axis=1)
    for place in np.flatnonzero(rows.text_stop_R[rows_N] & ~stop_N).tolist():
        row = int(rows_N[place])
        stop_N[place] = _stops_in_text(rows.sequence_at(row), rows.chosen(row).tokens, text_stop)
    broken_N = ~(np.isfinite(sampled.raw_logprobs) & np.isfinite(sampled.logprobs))
    # once, when the first token is chosen
    for place in np.flatnonzero(rows.scored_R[rows_N]).tolist():
        broken_N[place] |= _has_unsound_prompt(rows.sequence_at(int(rows_N[place])))
        rows.scored_R[rows_N[place]] = False
    known_N = rows.known_R[rows_N]
    finished_N = stop_N | broken_N | (known_N >= rows.limit_R[rows_N])
    chunks = []
    for place in np.flatnonzero(finished_N | (known_N >= rows.chunk_due_R[rows_N])).tolist():
        row = int(rows_N[place])
        sequence = rows.sequence_at(row)
        if broken_N[place]:
            chunks.append(_end_broken(state, sequence, version))
        elif finished_N[place]:
            chunks.append(
                make_chunk(sequence, rows.chosen(row), "stop" if stop_N[place] else "length")
            )
            state.retire(sequence, version=version)
        else:
            chunks.append(make_chunk(sequence, rows.chosen(row), None))
            rows.chunk_due_R[row] = rows.known_R[row] + sequence.request.chunk_tokens
    return chunks


def _stops_in_text(sequence: Sequence, tokens: np.ndarray, text_stop: TextStop) -> bool:
    sampling = sequence.request.sampling
    return bool(sampling.stop) and len(tokens) > sampling.min_tokens and text_stop(sequence, tokens)


def _has_unsound_prompt(sequence: Sequence) -> bool:
    return sequence.prompt_store is not None and not sequence.prompt_store.is_sound


def _end_broken(state: SchedulerState, sequence: Sequence, version: int) -> TokenChunk:
    """Answer a sequence whose logits are not finite without its last token, and keep its KV from
    being shared."""
    assert sequence.row is not None
    chosen = state.rows.chosen(sequence.row)
    sound = GeneratedTokens(
        tokens=chosen.tokens[:-1],
        logprobs=chosen.logprobs[:-1],
        raw_logprobs=chosen.raw_logprobs[:-1],
        versions=chosen.versions[:-1],
    )
    del sequence.supports[len(sound.tokens) :]
    del sequence.top_logprobs[len(sound.tokens) - sequence.top_from :]
    if _has_unsound_prompt(sequence):
        sequence.prompt_store = None
    state.emit(
        "engine.nonfinite",
        request_id=sequence.request.request_id,
        index=sequence.index,
        version=version,
    )
    chunk = make_chunk(sequence, sound, "abort", "the model gave non-finite logits")
    state.retire(sequence, version=version, keep_pages=False)
    return chunk


def end_request(
    state: SchedulerState, request_id: str, finish: Finish, reason: str, *, version: int
) -> tuple[list[TokenChunk], list[Partial]]:
    """End all unanswered completions of a request, wherever they are. Unknown ids give nothing."""
    chunks, partials = [], []
    for sequence in state.withdraw(request_id):
        chosen = sequence.chosen if sequence.row is None else state.rows.chosen(sequence.row)
        partials.append(make_partial(sequence, chosen))
        chunks.append(make_chunk(sequence, chosen, finish, reason))
        state.retire(sequence, version=version)
    return chunks, partials


def end_complete_partials(
    state: SchedulerState, sequences: list[Sequence], *, version: int, text_stop: TextStop
) -> list[TokenChunk]:
    """Answer completions whose given beginning is already a whole answer; they never run."""
    chunks = []
    for sequence in sequences:
        tokens = sequence.chosen.tokens
        if len(tokens) == 0:
            continue
        banned = len(tokens) <= sequence.request.sampling.min_tokens
        stopped = not banned and (
            int(tokens[-1]) in sequence.stop_ids or _stops_in_text(sequence, tokens, text_stop)
        )
        if stopped or len(tokens) >= sequence.request.sampling.max_tokens:
            state.queue.remove(sequence)
            chunks.append(make_chunk(sequence, sequence.chosen, "stop" if stopped else "length"))
            state.retire(sequence, version=version)
    return chunks
