"""Publishing: what ranks register is the version, each number once, or it is not joined."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.cluster.worker.frames import decode, encode
from gyre.core.errors import InputError, SnapshotError
from gyre.core.offers import FolderTensors
from gyre.distributed.layout import BoxRun, find_gap
from gyre.models.layout import model_layout
from gyre.observability.spans import ActivityClock
from gyre.weights.manifest import find_faults
from gyre.weights.receive import carry
from gyre.weights.shards import row_layout
from gyre.weights.transports.addresses import host_id
from gyre.weights.transports.opened import Reading
from gyre.weights.transports.publish import join_parts, publish_part
from layout_cases import numbered, spec_of
from offers import offer_of
from part_cases import open_shards, shard_offer, shared_folder, stores_of, whole_tensors


@settings(deadline=None, max_examples=15)
@given(
    num_tensor_ranks=st.sampled_from([1, 2, 4]),
    num_shards=st.integers(1, 3),
    spare_ranks=st.integers(0, 1),
)
def test_shards_of_any_layout_are_registered_without_a_gather(
    num_tensor_ranks, num_shards, spare_ranks
):
    """Each rank writes what it owns; ranks of another copy write nothing."""
    spec = spec_of(num_heads=4, num_kv_heads=2, vocab_size=13)
    whole, model = numbered(spec), model_layout(spec, num_tensor_ranks)
    layout = replace(row_layout(model.local_shapes, num_ranks=num_shards), table=model)
    num_ranks = layout.num_holders + spare_ranks
    with shared_folder() as folder, stores_of(folder, num_ranks) as stores:
        parts = []
        for rank, store in enumerate(stores):
            holder = rank % layout.num_holders
            offer = shard_offer(layout, whole, holder, version=4, epoch=2)
            parts.append(publish_part(offer, rank=rank, num_ranks=num_ranks, store=store))
        offer = join_parts(4, 2, parts[::-1])
        for entry in offer.manifest.entries:
            runs = [BoxRun(start=s.start, stop=s.stop, columns=s.columns) for s in entry.segments]
            assert find_gap(entry.shape, runs) is None
        with open_shards(offer, Reading(host_id=host_id(folder), folder=folder)) as tensors:
            for name, tensor in whole.items():
                assert torch.equal(tensors[name], tensor.bfloat16())
            assert find_faults(offer.manifest, dict(tensors)) == []
        assert sum(part.part.size_bytes > 0 for part in parts) == layout.num_holders


def published(folder, num_ranks=2):
    with stores_of(folder, num_ranks) as stores:
        return [
            publish_part(offer_of(1, whole_tensors(1)), rank=rank, num_ranks=num_ranks, store=store)
            for rank, store in enumerate(stores)
        ]


def test_parts_that_are_not_one_version_are_not_joined():
    with shared_folder() as folder:
        first, second = published(folder)
    last = next(entry for entry in first.entries if entry.segments)
    short = replace(last.segments[0], stop=last.segments[0].stop - 1)
    cut = tuple(replace(e, segments=(short,)) if e is last else e for e in first.entries)
    for parts, what in (
        ([first], "embed|big"),
        ([], "parts are of ranks"),
        ([first, first], r"ranks \[0, 0\]"),
        ([first, replace(second, version=2)], "rank 1 has version 2 of epoch 0"),
        ([first, replace(second, epoch=1)], "rank 1 has version 1 of epoch 1"),
        ([first, replace(second, entries=second.entries[1:])], "different tensors"),
        ([replace(first, entries=cut), second], f"{last.name}: "),
    ):
        with pytest.raises(SnapshotError, match=what):
            join_parts(1, 0, parts)
    assert join_parts(1, 0, [second, first]).version == 1


def test_parts_and_their_offer_cross_to_other_processes():
    with shared_folder() as folder:
        parts = published(folder)
    assert decode(encode(parts)) == parts
    offer = join_parts(1, 0, parts)
    crossed = decode(encode(offer))
    assert (crossed.manifest, crossed.source) == (offer.manifest, offer.source)
    assert asyncio.run(carry(offer)) is offer


def test_tensors_elsewhere_cannot_be_registered():
    offer = replace(offer_of(1, whole_tensors(1)), source=FolderTensors(folder="/x"))
    refused = pytest.raises(InputError, match="not in this process")
    with shared_folder() as folder, stores_of(folder, 1) as (store,), refused:
        publish_part(offer, rank=0, num_ranks=1, store=store)


@pytest.mark.parametrize("rounds", [True, False])
def test_what_is_laid_out_and_written_is_told_with_its_bytes(rounds):
    """Shards of float32 are rounded on their way; whole tensors are of the version's format."""
    spec, told = spec_of(num_heads=4, num_kv_heads=2, vocab_size=13), []
    whole, model = numbered(spec), model_layout(spec, 1)
    layout = replace(row_layout(model.local_shapes, num_ranks=1), table=model)
    offer = shard_offer(layout, whole, 0, version=4, epoch=2)
    if not rounds:
        offer = offer_of(4, whole, epoch=2)
    activities = ActivityClock(lambda kind, /, **fields: told.append(fields))
    with shared_folder() as folder, stores_of(folder, 1) as (store,):
        part = publish_part(offer, rank=0, num_ranks=1, store=store, activities=activities)
    size = sum(entry.size_bytes for entry in part.entries)
    assert [(row["activity"], row["size_bytes"]) for row in told] == [
        ("convert", size if rounds else 0),
        ("register", part.part.size_bytes),
    ]
    assert all(row["seconds"] > 0 for row in told)
