"""Preemption: takes row and pages from a running sequence, and gives them back. Its KV goes to host
memory or is computed again (`swap.choose_preemption`). In: the state, a row or a waiting sequence.
Out: its accounts, and page moves for the next step. Pure but for the state's `emit`.
"""

from __future__ import annotations

from dataclasses import replace

from gyre.engine.scheduler.sequence import Sequence, State
from gyre.engine.scheduler.state import SchedulerState
from gyre.engine.scheduler.swap import Preemption, Swapped, choose_preemption


def choose(state: SchedulerState, row: int) -> Preemption:
    """Decide how to preempt the row now: swap or recompute."""
    computed = int(state.rows.computed_R[row])
    return choose_preemption(
        computed_tokens=computed,
        num_pages=state.num_pages_for(computed) - int(state.rows.first_R[row]),
        slots=state.slots,
        rates=state.rates,
    )


def preempt(
    state: SchedulerState, row: int, *, reason: str, version: int, must_recompute: bool = False
) -> None:
    """Take row and pages back; the sequence waits. Cached pages may survive. Nothing of the row may
    be in flight."""
    rows = state.rows
    assert rows.known_R[row] == rows.length_R[row], row
    sequence, computed = rows.sequence_at(row), int(rows.computed_R[row])
    choice = choose(state, row)
    swap = choice.way == "swap" and not must_recompute
    state.remember(row, version)
    if swap:
        _swap_out(state, row, sequence)
    sequence.lost_tokens = 0 if swap else computed
    state.vacate(row)
    sequence.enter(State.SWAPPED if swap else State.PREEMPTED)
    state.wait(sequence)
    state.counters.preemptions += 1
    state.emit(
        "engine.preempted",
        request_id=sequence.request.request_id,
        index=sequence.index,
        way="swap" if swap else "recompute",
        why="its KV is void" if must_recompute else choice.why,
        reason=reason,
        computed_tokens=computed,
        size_bytes=choice.size_bytes,
        swap_s=choice.swap_s,
        recompute_s=choice.recompute_s,
    )


def resume(state: SchedulerState, sequence: Sequence) -> int:
    """Give a swapped sequence a row and its KV back; nothing is computed again. Pages that still
    hold what they held are shared, the others come from host memory."""
    rows, swapped = state.rows, sequence.swapped
    assert swapped is not None
    row = rows.take(sequence)
    sequence.enter(State.DECODING if swapped.decoding else State.PREFILLING)
    held = state.pages.still_hold(swapped.pages, swapped.stamps)
    state.pages.share(swapped.pages[held])
    taken = state.pages.take(num_pages_to_resume(state, sequence) - int(held.sum()))
    missing = len(held) - int(held.sum())
    pages = swapped.pages.copy()
    pages[~held] = taken[:missing]
    rows.first_R[row] = rows.pages_R[row] = swapped.first
    rows.add_pages(row, pages)
    rows.add_pages(row, taken[missing:])
    state.moves.bring_in(swapped.slots[~held], pages[~held])
    rows.computed_R[row], rows.kv_version_R[row] = swapped.computed, swapped.kv_version
    rows.decoding_R[row] = swapped.decoding
    if not swapped.decoding:
        state.prefilling.append(row)
    state.drop_swapped(sequence)
    state.counters.swaps_in += 1
    state.emit(
        "engine.resumed",
        request_id=sequence.request.request_id,
        index=sequence.index,
        computed_tokens=swapped.computed,
        pages=len(held),
        shared_pages=int(held.sum()),
    )
    return row


def num_pages_to_resume(state: SchedulerState, sequence: Sequence) -> int:
    """Return how many pages a swapped sequence needs to go on: a decoding one has room for its next
    token's KV."""
    assert sequence.swapped is not None
    if sequence.swapped.decoding:
        return state.num_pages_for(sequence.swapped.computed + 1) - sequence.swapped.first
    return state.num_pages_for(len(sequence.request.tokens) + len(sequence.chosen.tokens))


def void_swapped(state: SchedulerState, reason: str) -> None:
    """Discard swapped KV in host memory; its sequences recompute."""
    for sequence in state.queue:
        if sequence.swapped is not None:
            sequence.lost_tokens = sequence.swapped.computed
            sequence.enter(State.PREEMPTED)
            state.drop_swapped(sequence)
            state.emit(
                "engine.swap_voided",
                request_id=sequence.request.request_id,
                index=sequence.index,
                computed_tokens=sequence.lost_tokens,
                reason=reason,
            )


def mix_versions(state: SchedulerState) -> None:
    """Mark KV that stays in use under new weights as of mixed versions. It is never cached."""
    state.rows.kv_version_R[:] = -1
    for sequence in state.queue:
        if sequence.swapped is not None:
            sequence.swapped = replace(sequence.swapped, kv_version=-1)


def _swap_out(state: SchedulerState, row: int, sequence: Sequence) -> None:
    rows, computed, first = (
        state.rows,
        int(state.rows.computed_R[row]),
        int(state.rows.first_R[row]),
    )
    pages = rows.pages_of(row)[: state.num_pages_for(computed) - first].copy()
    slots = state.slots.take(len(pages))
    state.moves.take_out(pages, slots)
    sequence.swapped = Swapped(
        slots=slots,
        pages=pages,
        stamps=state.pages.stamps(pages),
        computed=computed,
        first=first,
        decoding=bool(rows.decoding_R[row]),
        kv_version=int(rows.kv_version_R[row]),
    )
    state.counters.swaps_out += 1
