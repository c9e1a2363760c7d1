"""Preemption: takes row and pages from a running sequence, and gives them back. Its KV goes to host
memory or is computed again (`swap.choose_preemption`). In: the roster, a row or a waiting sequence.
Out: the roster's accounts, and page moves for the next step. Pure but for the roster's `emit`.
"""

from __future__ import annotations

from dataclasses import replace

from gyre.engine.scheduler.sequence import Sequence, State
from gyre.engine.scheduler.state import SchedulerState
from gyre.engine.scheduler.swap import Preemption, Swapped, choose_preemption


def choose(roster: SchedulerState, row: int) -> Preemption:
    """How the row would be preempted now."""
    computed = int(roster.rows.computed_R[row])
    return choose_preemption(
        computed_tokens=computed,
        num_pages=roster.num_pages_for(computed) - int(roster.rows.first_R[row]),
        slots=roster.slots,
        rates=roster.rates,
    )


def preempt(
    roster: SchedulerState, row: int, *, reason: str, version: int, must_recompute: bool = False
) -> None:
    """Take row and pages back; the sequence waits. Cached pages may survive. Nothing of the row may
    be in flight."""
    rows = roster.rows
    assert rows.known_R[row] == rows.length_R[row], row
    sequence, computed = rows.sequence_at(row), int(rows.computed_R[row])
    choice = choose(roster, row)
    swap = choice.way == "swap" and not must_recompute
    roster.remember(row, version)
    if swap:
        _swap_out(roster, row, sequence)
    sequence.lost_tokens = 0 if swap else computed
    roster.vacate(row)
    sequence.enter(State.SWAPPED if swap else State.PREEMPTED)
    roster.wait(sequence)
    roster.counters.preemptions += 1
    roster.emit(
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


def resume(roster: SchedulerState, sequence: Sequence) -> int:
    """Give a swapped sequence a row and its KV back; nothing is computed again. Pages that still
    hold what they held are shared, the others come from host memory."""
    rows, swapped = roster.rows, sequence.swapped
    assert swapped is not None
    row = rows.take(sequence)
    sequence.enter(State.DECODING if swapped.decoding else State.PREFILLING)
    held = roster.pages.still_hold(swapped.pages, swapped.stamps)
    roster.pages.share(swapped.pages[held])
    taken = roster.pages.take(num_pages_to_resume(roster, sequence) - int(held.sum()))
    missing = len(held) - int(held.sum())
    pages = swapped.pages.copy()
    pages[~held] = taken[:missing]
    rows.first_R[row] = rows.pages_R[row] = swapped.first
    rows.add_pages(row, pages)
    rows.add_pages(row, taken[missing:])
    roster.moves.bring_in(swapped.slots[~held], pages[~held])
    rows.computed_R[row], rows.kv_version_R[row] = swapped.computed, swapped.kv_version
    rows.decoding_R[row] = swapped.decoding
    if not swapped.decoding:
        roster.prefilling.append(row)
    roster.drop_swapped(sequence)
    roster.counters.swaps_in += 1
    roster.emit(
        "engine.resumed",
        request_id=sequence.request.request_id,
        index=sequence.index,
        computed_tokens=swapped.computed,
        pages=len(held),
        shared_pages=int(held.sum()),
    )
    return row


def num_pages_to_resume(roster: SchedulerState, sequence: Sequence) -> int:
    """Return how many pages a swapped sequence needs to go on: a decoding one has room for its next
    token's KV."""
    assert sequence.swapped is not None
    if sequence.swapped.decoding:
        return roster.num_pages_for(sequence.swapped.computed + 1) - sequence.swapped.first
    return roster.num_pages_for(len(sequence.request.tokens) + len(sequence.chosen.tokens))


def void_swapped(roster: SchedulerState, reason: str) -> None:
    """What lies in host memory is of no use any more: whoever it belongs to computes again."""
    for sequence in roster.queue:
        if sequence.swapped is not None:
            sequence.lost_tokens = sequence.swapped.computed
            sequence.enter(State.PREEMPTED)
            roster.drop_swapped(sequence)
            roster.emit(
                "engine.swap_voided",
                request_id=sequence.request.request_id,
                index=sequence.index,
                computed_tokens=sequence.lost_tokens,
                reason=reason,
            )


def mix_versions(roster: SchedulerState) -> None:
    """New weights came: KV that goes on being used is of mixed versions from now on, and is never
    cached."""
    roster.rows.kv_version_R[:] = -1
    for sequence in roster.queue:
        if sequence.swapped is not None:
            sequence.swapped = replace(sequence.swapped, kv_version=-1)


def _swap_out(roster: SchedulerState, row: int, sequence: Sequence) -> None:
    rows, computed, first = (
        roster.rows,
        int(roster.rows.computed_R[row]),
        int(roster.rows.first_R[row]),
    )
    pages = rows.pages_of(row)[: roster.num_pages_for(computed) - first].copy()
    slots = roster.slots.take(len(pages))
    roster.moves.take_out(pages, slots)
    sequence.swapped = Swapped(
        slots=slots,
        pages=pages,
        stamps=roster.pages.stamps(pages),
        computed=computed,
        first=first,
        decoding=bool(rows.decoding_R[row]),
        kv_version=int(rows.kv_version_R[row]),
    )
    roster.counters.swaps_out += 1
