"""Packing: which sequences share a micro-batch. In: lengths and pair ids. Out: a PackPlan of
micro-batches per rank. Pure.

Follows Kimi k1.5 and DeepSeek-R1: sort globally by length, deal to ranks, best-fit into
micro-batches of a fixed token capacity, then equalize their number over ranks. The unit is a
PackItem: one sequence, or both of a preference pair, since a pair's loss needs both at once.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from gyre.core.rounding import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class PackItem:
    """Sequences that are never split over two micro-batches."""

    members: tuple[int, ...]  # indices into the batch
    num_tokens: int  # of all members


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """Micro-batches as indices into the batch: ranks[rank][micro_batch]. An empty one keeps the
    number equal over ranks."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    tokens_per_chunk: int
    num_oversized: int  # chunks that hold one atom longer than tokens_per_chunk


def make_atoms(lengths: Sequence[int], pair_ids: Sequence[int]) -> tuple[PackItem, ...]:
    """Group indices into items, in order of first appearance. A pair id of -1 marks a single
    sequence. A pair id that repeats after two siblings starts another pair, as when a small data
    set wraps around within one batch."""
    assert len(lengths) == len(pair_ids)
    atoms: list[list[int]] = []
    unpaired: dict[int, list[int]] = {}
    for index, pair_id in enumerate(pair_ids):
        if pair_id in unpaired:
            unpaired.pop(pair_id).append(index)
            continue
        atoms.append([index])
        if pair_id >= 0:
            unpaired[pair_id] = atoms[-1]
    return tuple(PackItem(members=tuple(m), num_tokens=sum(lengths[i] for i in m)) for m in atoms)


def split_updates(
    atoms: Sequence[PackItem], sequences_per_update: int, seed: int
) -> tuple[tuple[PackItem, ...], ...]:
    """Deal the items into optimizer updates of about `sequences_per_update` at most, nearly equal
    in size.

    With 0, or when all fit, there is one update in the given order; otherwise the order is drawn
    from `seed`.
    """
    num_sequences = sum(len(atom.members) for atom in atoms)
    if not atoms:
        return ()
    if sequences_per_update == 0 or num_sequences <= sequences_per_update:
        return (tuple(atoms),)
    num_updates = min(len(atoms), ceil_div(num_sequences, sequences_per_update))
    order = list(atoms)
    random.Random(seed).shuffle(order)
    bounds = [len(order) * u // num_updates for u in range(num_updates + 1)]
    return tuple(tuple(order[start:stop]) for start, stop in itertools.pairwise(bounds))


def pack(atoms: Sequence[PackItem], *, num_ranks: int, tokens_per_chunk: int) -> PackPlan:
    """Place every item once. Micro-batches hold at most `tokens_per_chunk`, except one that holds a
    single longer item."""
    assert num_ranks > 0 and tokens_per_chunk > 0
    ordered = sorted(atoms, key=lambda atom: (-atom.num_tokens, atom.members))
    bins = [_best_fit(dealt, tokens_per_chunk) for dealt in _deal(ordered, num_ranks)]
    most = max(len(chunks) for chunks in bins)
    ranks = tuple(tuple(_members(chunk) for chunk in _equalize(chunks, most)) for chunks in bins)
    oversized = sum(atom.num_tokens > tokens_per_chunk for atom in atoms)
    return PackPlan(ranks=ranks, tokens_per_chunk=tokens_per_chunk, num_oversized=oversized)


def _deal(ordered: Sequence[PackItem], num_ranks: int) -> list[list[PackItem]]:
    """Deal the longest first, in alternating directions (0 1 2 2 1 0 …), which balances the tokens
    per rank."""
    hands: list[list[PackItem]] = [[] for _ in range(num_ranks)]
    for position, atom in enumerate(ordered):
        lap, seat = divmod(position, num_ranks)
        hands[seat if lap % 2 == 0 else num_ranks - 1 - seat].append(atom)
    return hands


def _best_fit(ordered: Sequence[PackItem], capacity: int) -> list[list[PackItem]]:
    """Put each item into the fullest micro-batch with enough capacity; open a new one when none
    has."""
    chunks: list[list[PackItem]] = []
    room: list[tuple[int, int]] = []  # (free tokens, chunk), ascending
    for atom in ordered:
        at = bisect.bisect_left(room, (atom.num_tokens, -1))
        if at == len(room):
            chunks.append([atom])
            free, chunk = capacity - atom.num_tokens, len(chunks) - 1
        else:
            free, chunk = room.pop(at)
            chunks[chunk].append(atom)
            free -= atom.num_tokens
        if free > 0:
            bisect.insort(room, (free, chunk))
    return chunks


def _equalize(chunks: list[list[PackItem]], count: int) -> list[list[PackItem]]:
    """Raise the number of micro-batches to `count`. Halves the largest ones, and adds empty ones
    where none can be halved."""
    chunks = list(chunks)
    while len(chunks) < count:
        divisible = [c for c, chunk in enumerate(chunks) if len(chunk) > 1]
        if not divisible:
            chunks.append([])
            continue
        largest = max(divisible, key=lambda c: (sum(atom.num_tokens for atom in chunks[c]), -c))
        chunk = chunks[largest]
        chunks[largest] = chunk[0::2]
        chunks.append(chunk[1::2])
    return chunks


def _members(chunk: Sequence[PackItem]) -> tuple[int, ...]:
    return tuple(index for atom in chunk for index in atom.members)
