"""Part layouts and plans: every number of every segment moves once, in buckets of bounded size."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.records import Segment, TensorEntry
from gyre.distributed.layout import BoxRun
from gyre.models.layout import model_layout
from gyre.weights.manifest import shard_entries
from gyre.weights.shards import row_layout
from gyre.weights.transports.part_layout import (
    dtype_of,
    owners_in_turn,
    part_bytes,
    place_part,
    plan_reads,
)
from gyre.weights.transports.publish import cut_evenly
from layout_cases import spec_of


@st.composite
def manifests(draw) -> tuple[tuple[TensorEntry, ...], int]:
    """Entries of a model's tensors over shard and tensor ranks, in a dtype of any size."""
    dtype = draw(st.sampled_from(["bfloat16", "float32", "float64", "uint8"]))
    num_tensor, num_shards = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4))
    model = model_layout(spec_of(num_heads=4, num_kv_heads=2, vocab_size=13), num_tensor)
    layout = replace(row_layout(model.local_shapes, num_ranks=num_shards), table=model)
    entry = TensorEntry(name="", dtype=dtype, shape=(), size_bytes=0, segments=())
    return shard_entries(layout, dtype_of(entry)), layout.num_holders


def numbers_of(entry: TensorEntry, run: BoxRun) -> np.ndarray:
    """The indices of a run's numbers in the whole tensor."""
    index = np.arange(math.prod(entry.shape)).reshape(entry.shape)
    held = index if run.columns is None else index[:, slice(*run.columns)]
    return held.reshape(-1)[run.start : run.stop]


@settings(deadline=None, max_examples=60)
@given(manifests())
def test_segments_lie_apart_on_lines_of_64_bytes_in_the_manifests_order(case):
    entries, num_owners = case
    for owner in range(num_owners):
        placed, at = place_part(entries, owner), 0
        for one in placed:
            assert one.start % 64 == 0 and at <= one.start < at + 64
            count = one.segment.stop - one.segment.start
            assert one.stop - one.start == count * dtype_of(one.entry).itemsize
            assert one.segment.owner == owner
            at = one.stop
        assert part_bytes(placed) == at
        listed = [(e.name, s) for e in entries for s in e.segments if s.owner == owner]
        assert [(one.entry.name, one.segment) for one in placed] == listed


@settings(deadline=None, max_examples=60)
@given(manifests(), st.integers(64, 3000), st.data())
def test_every_number_moves_once_in_bounded_buckets(case, bucket_bytes, data):
    entries, num_owners = case
    owners = data.draw(st.permutations(range(num_owners)))
    moved = {entry.name: np.zeros(math.prod(entry.shape), int) for entry in entries}
    at = [0] * num_owners
    plan = plan_reads(entries, owners=owners, bucket_bytes=bucket_bytes)
    first_of_each = dict.fromkeys(bucket.owner for bucket in plan)
    assert list(first_of_each) == [owner for owner in owners if owner in first_of_each]
    for bucket in plan:
        assert 0 < bucket.size_bytes <= bucket_bytes
        end = 0
        for one in bucket.stretches:
            assert one.start % 64 == one.at % 64 == 0, "numbers of any dtype are at a line"
            assert one.start >= at[bucket.owner], "a part is read from its start to its end"
            assert one.at >= end and one.start < one.stop
            at[bucket.owner], end = one.stop, one.end
        for piece in bucket.pieces:
            (held,) = [one for one in bucket.stretches if one.start <= piece.at < one.stop]
            assert piece.start - held.at == piece.at - held.start and piece.stop <= held.end
            entry, placed = piece.placed.entry, piece.placed
            assert placed.segment.owner == bucket.owner
            size = dtype_of(entry).itemsize
            assert piece.stop - piece.start == (piece.run.stop - piece.run.start) * size
            first = (piece.at - placed.start) // size
            assert piece.run.start == placed.segment.start + first
            moved[entry.name][numbers_of(entry, piece.run)] += 1
    assert all((counts == 1).all() for counts in moved.values())


@given(st.integers(1, 12), st.integers(1, 12))
def test_readers_in_step_ask_different_owners(num_owners, num_readers):
    orders = [
        owners_in_turn(num_owners, reader=reader, num_readers=num_readers)
        for reader in range(num_readers)
    ]
    for order in orders:
        assert sorted(order) == list(range(num_owners))
    most_readers = -(-num_readers // num_owners)
    for asked in zip(*orders, strict=True):
        assert max(asked.count(owner) for owner in asked) <= most_readers
    if num_owners == num_readers:
        assert [order[0] for order in orders] == list(range(num_owners)), "its own device first"


@given(st.lists(st.integers(0, 5000).map(lambda n: n * 8), max_size=12), st.integers(1, 6))
def test_ranks_cut_whole_tensors_evenly(sizes, num_ranks):
    cuts = cut_evenly(sizes, num_ranks)
    for index, size in enumerate(sizes):
        runs = [(low, high) for low, high in (cut[index] for cut in cuts) if low < high]
        assert [low for low, _ in runs] == [0, *(high for _, high in runs)][: len(runs)]
        assert (runs[-1][1] if runs else 0) == size
        assert all(low % 64 == 0 for low, _ in runs)
    for cut in cuts:
        assert abs(sum(high - low for low, high in cut) - sum(sizes) / num_ranks) <= 128


def test_a_whole_tensor_is_known_as_one():
    entry = TensorEntry(name="a", dtype="float32", shape=(4,), size_bytes=16, segments=())
    one = replace(entry, segments=(Segment(start=0, stop=4),))
    two = replace(entry, segments=(Segment(start=0, stop=2), Segment(start=2, stop=4, owner=1)))
    assert place_part([one], 0)[0].is_whole and not place_part([two], 0)[0].is_whole
