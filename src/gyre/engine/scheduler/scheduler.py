"""Scheduler: chooses what one step computes. In: the state, a token budget. Out: a Step, or None
when nothing can run. Pure: no torch, no clock.

Decoding rows come first, one token each; then prompts in progress, then the queue's head as long as
budget, rows and pages last. When a decoding row finds no page, the running sequence of lowest
priority, then least lost work, then latest arrival is preempted; what is swapped to host memory
loses no work. The queue's head blocks those behind it, so requests of one priority never starve.
"""

from __future__ import annotations

import numpy as np

from gyre.engine.scheduler.preemption import choose, num_pages_to_resume, preempt, resume
from gyre.engine.scheduler.sequence import State
from gyre.engine.scheduler.state import SchedulerState
from gyre.engine.scheduler.step import PrefillChunk, Step


def schedule(state: SchedulerState, *, token_budget: int, version: int) -> Step | None:
    """Decide the next step. Rows and pages it needs are taken; a launch and `postprocess.advance`
    must follow. With steps in flight, ask `must_preempt` first: who is preempted is decided on what
    the host knows."""
    decode_rows = _provide_decode_pages(state, version)
    assert len(decode_rows) <= token_budget
    chunks = _continue_prefills(state, token_budget - len(decode_rows))
    left = token_budget - len(decode_rows) - sum(chunk.count for chunk in chunks)
    started, restored_rows = _start_waiting(state, left, version)
    chunks += started
    decode_rows = np.concatenate([decode_rows, restored_rows])
    if not chunks and len(decode_rows) == 0:
        return None
    swap_out, swap_in = state.moves.collect()
    finished_rows, sample_chunks, copies = _finish_prompts(state, chunks)
    sample_rows = np.concatenate([decode_rows, np.asarray(finished_rows, dtype=np.int64)])
    return Step(
        decode_rows=decode_rows,
        chunks=tuple(chunks),
        sample_rows=sample_rows,
        sample_chunks=np.asarray(sample_chunks, dtype=np.int64),
        sample_positions=state.rows.length_R[sample_rows],
        sample_generations=state.rows.generation_R[sample_rows],
        restored_rows=restored_rows,
        version=version,
        swap_out=swap_out,
        swap_in=swap_in,
        copies=tuple(copies),
    )


def must_preempt(state: SchedulerState) -> bool:
    """Return whether the next step needs pages of a running sequence."""
    return len(_full_rows(state, state.decoding_rows())) > state.pages.num_available


def _full_rows(state: SchedulerState, decode_rows: np.ndarray) -> np.ndarray:
    """Return those that need another page for their next token."""
    rows = state.rows
    return decode_rows[
        rows.computed_R[decode_rows] == rows.pages_R[decode_rows] * state.page_tokens
    ]


def _provide_decode_pages(state: SchedulerState, version: int) -> np.ndarray:
    """Return the decoding rows, each with a page for its next token; preempts until that is so."""
    rows = state.rows
    while True:
        decode_rows = state.decoding_rows()
        full = _full_rows(state, decode_rows)
        if len(full) <= state.pages.num_available:
            break
        preempt(state, _choose_victim(state), reason="no free page", version=version)
    if len(full):
        rows.table_RP[full, rows.pages_R[full]] = state.pages.take(len(full))
        rows.pages_R[full] += 1
    return decode_rows


def _choose_victim(state: SchedulerState) -> int:
    """Lowest priority, then least lost work (none for what is swapped), then latest arrival."""
    active, rows = state.active_rows(), state.rows
    assert len(active) > 1, (
        "one sequence alone outgrew the cache; admission lets no such request in"
    )
    lost = np.asarray([choose(state, row).lost_tokens for row in active.tolist()])
    order = np.lexsort((-active, -rows.arrival_R[active], lost, rows.priority_R[active]))
    return int(active[order[0]])


def _continue_prefills(state: SchedulerState, budget: int) -> list[PrefillChunk]:
    chunks = []
    for row in state.prefilling:
        if budget == 0:
            break
        chunks.append(_cut(state, row, budget))
        budget -= chunks[-1].count
    return chunks


def _start_waiting(
    state: SchedulerState, budget: int, version: int
) -> tuple[list[PrefillChunk], np.ndarray]:
    """Start sequences from the head of the queue while budget, rows and KV pages last; the rest
    waits for a later step. Return the chunks of prompts, and the rows that were swapped out and
    decode at once."""
    chunks: list[PrefillChunk] = []
    restored: list[int] = []
    while budget > 0 and state.queue and state.rows.num_free:
        sequence = state.queue[0]
        hits = np.empty(0, np.int32)
        if sequence.swapped is not None:
            held = state.pages.still_hold(sequence.swapped.pages, sequence.swapped.stamps)
            shared, total = sequence.swapped.pages[held], num_pages_to_resume(state, sequence)
        else:
            shared = hits = state.find_hits(sequence, version)
            total = state.num_pages_for(len(sequence.request.tokens) + len(sequence.chosen.tokens))
        needed = total - len(shared) + state.pages.num_idle_among(shared)
        if needed + _headroom(state) > state.pages.num_available:
            break
        state.queue.pop(0)
        row = (
            state.start(sequence, hits, version)
            if sequence.swapped is None
            else resume(state, sequence)
        )
        if state.rows.decoding_R[row]:
            restored.append(row)
            budget -= 1
        else:
            chunks.append(_cut(state, row, budget))
            budget -= chunks[-1].count
    return chunks, np.asarray(restored, dtype=np.int64)


def _headroom(state: SchedulerState) -> int:
    """Return the pages that stay free for running sequences when another starts. That is one each,
    so that the start does not cause a preemption at once. It is 0 when nothing runs, so that
    whatever was admitted can run alone."""
    return state.rows.num_active


def _cut(state: SchedulerState, row: int, budget: int) -> PrefillChunk:
    start = int(state.rows.computed_R[row])
    return PrefillChunk(
        row=row, start=start, count=min(budget, int(state.rows.length_R[row]) - start)
    )


def _finish_prompts(
    state: SchedulerState, chunks: list[PrefillChunk]
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Find the rows whose known tokens end in this step, and fork their waiting siblings onto the
    same prompt."""
    rows, sample_rows, sample_chunks, copies = state.rows, [], [], []
    for position, chunk in enumerate(chunks):
        if chunk.start + chunk.count < rows.length_R[chunk.row]:
            continue
        leader = rows.sequence_at(chunk.row)
        leader.enter(State.DECODING)
        rows.decoding_R[chunk.row] = True
        state.prefilling.remove(chunk.row)
        sample_rows.append(chunk.row)
        started = 0
        for follower in leader.followers:
            if rows.num_free == 0 or state.pages.num_available < 1 + _headroom(state):
                break
            row, copy = state.fork(chunk.row, follower)
            rows.decoding_R[row] = True
            sample_rows.append(row)
            copies += [copy] if copy else []
            started += 1
        state.release_followers(leader, started)
        sample_chunks += [position] * (started + 1)
    return sample_rows, sample_chunks, copies
