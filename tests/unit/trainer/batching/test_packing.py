"""Packing: nothing lost or repeated, chunks within bounds, pairs together, ranks in step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.trainer.batching.packing import PackItem, make_atoms, pack, split_updates

lengths = st.lists(st.integers(1, 40), max_size=60)


@given(
    lengths=lengths, num_ranks=st.integers(1, 5), capacity=st.integers(1, 64), paired=st.booleans()
)
def test_every_sequence_once_and_chunks_within_bounds(lengths, num_ranks, capacity, paired):
    if paired:
        lengths = lengths[: len(lengths) // 2 * 2]
    atoms = make_atoms(lengths, [i // 2 if paired else -1 for i in range(len(lengths))])
    plan = pack(atoms, num_ranks=num_ranks, tokens_per_chunk=capacity)
    placed = [index for chunks in plan.ranks for chunk in chunks for index in chunk]
    assert sorted(placed) == list(range(len(lengths)))
    assert len({len(chunks) for chunks in plan.ranks}) == 1
    of_index = {index: atom for atom in atoms for index in atom.members}
    oversized = 0
    for chunk in (chunk for chunks in plan.ranks for chunk in chunks):
        size = sum(lengths[index] for index in chunk)
        if size > capacity:
            assert {of_index[index] for index in chunk} == {of_index[chunk[0]]}
            oversized += 1
        for index in chunk:
            assert set(of_index[index].members) <= set(chunk)
    assert oversized == plan.num_oversized


@given(lengths=lengths, capacity=st.integers(40, 200))
def test_best_fit_wastes_little(lengths, capacity):
    """Any two chunks of one rank hold more than one chunk's worth: otherwise best fit would have
    joined them."""
    plan = pack(make_atoms(lengths, [-1] * len(lengths)), num_ranks=1, tokens_per_chunk=capacity)
    sizes = sorted(sum(lengths[index] for index in chunk) for chunk in plan.ranks[0])
    if len(sizes) > 1:
        assert sizes[0] + sizes[1] > capacity


@given(lengths=lengths, num_ranks=st.integers(1, 6))
def test_dealing_balances_ranks(lengths, num_ranks):
    """Serpentine dealing of a sorted list: ranks differ by at most about the longest sequence."""
    plan = pack(
        make_atoms(lengths, [-1] * len(lengths)), num_ranks=num_ranks, tokens_per_chunk=10_000
    )
    loads = [sum(lengths[index] for chunk in chunks for index in chunk) for chunks in plan.ranks]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_order_of_equal_lengths_is_fixed():
    atoms = make_atoms([5] * 20, [-1] * 20)
    assert pack(atoms, num_ranks=2, tokens_per_chunk=16) == pack(
        atoms[::-1], num_ranks=2, tokens_per_chunk=16
    )


def test_a_pair_that_comes_twice_is_two_atoms():
    atoms = make_atoms([3, 4, 3, 4], [7, 7, 7, 7])
    assert atoms == (PackItem(members=(0, 1), num_tokens=7), PackItem(members=(2, 3), num_tokens=7))


@given(
    count=st.integers(0, 50),
    per_update=st.integers(0, 20),
    seed=st.integers(0, 2**62),
    paired=st.booleans(),
)
def test_updates_deal_every_atom_once_and_evenly(count, per_update, seed, paired):
    count = count // 2 * 2 if paired else count
    atoms = make_atoms([1] * count, [i // 2 if paired else -1 for i in range(count)])
    updates = split_updates(atoms, per_update, seed)
    assert sorted(i for update in updates for atom in update for i in atom.members) == list(
        range(count)
    )
    assert updates == split_updates(atoms, per_update, seed)
    if per_update and updates:
        sizes = [sum(len(atom.members) for atom in update) for update in updates]
        assert max(sizes) - min(sizes) <= (2 if paired else 1)
        assert max(sizes) <= max(per_update + paired, 2 if paired else 1)


def test_known_best_fit():
    """7, 6, 5, 4, 3 into 10: best fit closes 7 + 3 and 6 + 4."""
    plan = pack(make_atoms([7, 6, 5, 4, 3], [-1] * 5), num_ranks=1, tokens_per_chunk=10)
    assert [set(chunk) for chunk in plan.ranks[0]] == [{0, 4}, {1, 3}, {2}]


def sets(plan) -> list[list[set[int]]]:
    return [[set(chunk) for chunk in chunks] for chunks in plan.ranks]


def packed(lengths: list[int], *, num_ranks: int = 1, tokens_per_chunk: int = 100):
    return pack(
        make_atoms(lengths, [-1] * len(lengths)),
        num_ranks=num_ranks,
        tokens_per_chunk=tokens_per_chunk,
    )


def test_pairs_count_from_zero_and_what_has_no_pair_is_alone():
    atoms = make_atoms([3, 4, 5, 6, 7], [-1, 0, -1, 0, 1])
    assert [atom.members for atom in atoms] == [(0,), (1, 3), (2,), (4,)]
    assert [atom.num_tokens for atom in atoms] == [3, 10, 5, 7]


def test_a_batch_with_room_for_all_keeps_its_order():
    atoms = make_atoms([1] * 12, [-1] * 12)
    for room in (0, 12, 13):
        assert split_updates(atoms, room, seed=3) == (atoms,)
    assert len(split_updates(atoms, 11, seed=3)) == 2


def test_dealing_goes_there_and_back():
    plan = packed([90, 80, 70, 60, 50, 40, 30, 20, 10], num_ranks=2, tokens_per_chunk=1000)
    assert sets(plan) == [[{0, 3, 4, 7, 8}], [{1, 2, 5, 6}]]
    plan = packed([90, 80, 70, 60, 50, 40, 30, 20, 10], num_ranks=3, tokens_per_chunk=1000)
    assert sets(plan) == [[{0, 5, 6}], [{1, 4, 7}], [{2, 3, 8}]]


def test_the_last_token_of_room_is_used():
    assert sets(packed([9, 1], tokens_per_chunk=10)) == [[{0, 1}]]


def test_ranks_are_kept_in_step_by_halving_before_empty_chunks():
    """Rank 0 gets 9, 4 and 2 and needs two chunks; rank 1 gets 5 and 4, which fit one: it is
    halved."""
    assert sets(packed([9, 5, 4, 4, 2], num_ranks=2, tokens_per_chunk=9)) == [
        [{0}, {3, 4}],
        [{1}, {2}],
    ]
    assert sets(packed([9, 5], num_ranks=2, tokens_per_chunk=9)) == [[{0}], [{1}]]


def test_halving_takes_every_other_sequence():
    """9 fills most of a chunk, so that rank 0 needs two; the four of rank 1 are parted evenly."""
    plan = packed([9, 2, 2, 2, 2, 2, 2, 2], num_ranks=2, tokens_per_chunk=10)
    assert sets(plan)[1] == [{1, 5}, {2, 6}]


def test_where_nothing_can_be_halved_a_chunk_stays_empty():
    assert sets(packed([9], num_ranks=2, tokens_per_chunk=9)) == [[{0}], [set()]]


@pytest.mark.parametrize(
    ("lengths", "halved"),
    [
        ([10, 10, 6, 6, 6, 3], [{1}, {2}, {5}]),  # 10 is the largest chunk and one sequence
        ([7, 7, 6, 6, 6, 4, 2, 2], [{1, 6}, {2}, {5}]),  # 7 + 2 stays, 6 + 4 is halved
        ([6, 6, 6, 6, 6, 4, 4, 4], [{1}, {2, 6}, {5}]),  # of two equal ones the first
    ],
)
def test_the_largest_chunk_of_several_sequences_is_halved(lengths, halved):
    """Rank 0 needs three chunks of 10 tokens, rank 1 would do with two."""
    first, second = sets(packed(lengths, num_ranks=2, tokens_per_chunk=10))
    assert len(first) == 3 and second == halved


def test_no_rank_and_no_room_are_refused():
    with pytest.raises(AssertionError):
        packed([1], num_ranks=0)
    with pytest.raises(AssertionError):
        packed([1], tokens_per_chunk=0)
