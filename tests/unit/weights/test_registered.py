"""Registered versions over an engine's numbers, from publishers of any layout in buckets of any
size: whole, or undone to the bit."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.errors import SnapshotError
from gyre.models.layout import model_layout
from gyre.weights.registered import SPARE_BYTES, ReadOver, choose_undo
from gyre.weights.shards import row_layout
from gyre.weights.transports.addresses import host_id
from gyre.weights.transports.opened import PartOpener, Reading
from gyre.weights.transports.publish import join_parts, publish_part
from layout_cases import numbered, spec_of
from offers import FailAt, Fault
from part_cases import (
    register,
    shard_offer,
    shared_folder,
    silent,
    stores_of,
    whole_tensors,
    with_wrong_checksum,
)


def opener_of(folder) -> PartOpener:
    return PartOpener(Reading(host_id=host_id(folder), folder=folder))


def copies(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(found, expected) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@settings(deadline=None, max_examples=20)
@given(
    num_tensor_ranks=st.sampled_from([1, 2, 4]),
    num_shards=st.integers(1, 3),
    bucket_bytes=st.integers(64, 2000),
    kept_bytes=st.sampled_from([1, 512, 1 << 30]),
)
def test_any_layout_arrives_and_is_undone(num_tensor_ranks, num_shards, bucket_bytes, kept_bytes):
    spec = spec_of(num_heads=4, num_kv_heads=2, vocab_size=13)
    whole, model = numbered(spec), model_layout(spec, num_tensor_ranks)
    layout = replace(row_layout(model.local_shapes, num_ranks=num_shards), table=model)
    expected = {name: tensor.bfloat16() for name, tensor in whole.items()}
    own = {name: torch.full_like(tensor, -1.0) for name, tensor in expected.items()}
    before = copies(own)
    told = []
    with (
        shared_folder() as folder,
        stores_of(folder, layout.num_holders) as stores,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("gyre.weights.landed.KEPT_BYTES", kept_bytes)
        parts = [
            publish_part(
                shard_offer(layout, whole, rank, version=4),
                rank=rank,
                num_ranks=layout.num_holders,
                store=store,
            )
            for rank, store in enumerate(stores)
        ]
        swap = ReadOver(
            join_parts(4, 0, parts),
            own,
            parts=opener_of(folder),
            emit=lambda kind, **fields: told.append((kind, fields)),
            bucket_bytes=bucket_bytes,
        )
        swap.run()
        assert same(own, expected)
        swap.undo()
        assert same(own, before)
        swap.run()
        swap.settle()
    assert same(own, expected)
    assert [kind for kind, _ in told] == ["weights.read"] * 2
    assert told[0][1]["version"] == 4
    assert told[0][1]["size_bytes"] >= sum(tensor.nbytes for tensor in own.values())


@settings(deadline=None, max_examples=15)
@given(
    counts=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    num_ranks=st.integers(1, 3),
    bucket_bytes=st.integers(64, 400),
)
def test_dtypes_may_be_mixed(counts, num_ranks, bucket_bytes):
    dtypes = (torch.bfloat16, torch.float32, torch.uint8, torch.float64, torch.int16)
    new = {
        f"t{index}": torch.arange(count).to(dtypes[index % len(dtypes)]) + 1
        for index, count in enumerate(counts)
    }
    own = {name: torch.zeros_like(tensor) for name, tensor in new.items()}
    with shared_folder() as folder, stores_of(folder, num_ranks) as stores:
        offer = register(stores, new, version=1)
        swap = ReadOver(offer, own, parts=opener_of(folder), emit=silent, bucket_bytes=bucket_bytes)
        swap.run()
        assert same(own, new)
        swap.undo()
        assert not any(tensor.any() for tensor in own.values())
        swap.settle()


@pytest.fixture
def folder():
    with shared_folder() as found:
        yield found


def test_wrong_bytes_are_found_before_a_cpu_engine_changes(folder):
    own = whole_tensors(1)
    with stores_of(folder, 2) as stores:
        offer = with_wrong_checksum(register(stores, whole_tensors(2), version=2), "norm")
        with pytest.raises(SnapshotError, match="norm of version 2"):
            ReadOver(offer, own, parts=opener_of(folder), emit=silent)
    assert same(own, whole_tensors(1))


def test_bytes_that_change_after_prepare_are_undone(folder):
    """As when the publisher has gone on by two versions."""
    own = whole_tensors(1)
    with stores_of(folder, 2) as stores:
        offer = register(stores, whole_tensors(2), version=2)
        swap = ReadOver(offer, own, parts=opener_of(folder), emit=silent)
        for version in (3, 4):
            register(stores, whole_tensors(version), version=version)
        with pytest.raises(SnapshotError, match="overwritten"):
            swap.run()
        assert not same(own, whole_tensors(1))
        swap.undo()
        assert same(own, whole_tensors(1))
        swap.settle()


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.booleans())
def test_the_last_version_is_kept_where_there_is_room(size_bytes, free_bytes, has_last):
    found = choose_undo(size_bytes=size_bytes, free_bytes=free_bytes, has_last=has_last)
    assert (found == "device") == (free_bytes - size_bytes >= SPARE_BYTES)
    assert (found == "publisher") <= has_last


@pytest.fixture
def crowded(folder):
    """An engine whose device has no room for a second set of weights, and its publishers."""
    own, told, parts = whole_tensors(0), [], opener_of(folder)

    def prepare(offer):
        return ReadOver(
            offer,
            own,
            parts=parts,
            emit=lambda kind, **fields: told.append(fields["undo_from"]),
            free_bytes=lambda device: 0,
        )

    with stores_of(folder, 2) as stores:
        yield own, told, prepare, lambda v: register(stores, whole_tensors(v), version=v)


def test_without_room_the_publisher_keeps_the_last_version(crowded):
    own, told, prepare, publish = crowded
    for version in (1, 2):
        swap = prepare(publish(version))
        swap.run()
        swap.settle()
    assert told == ["host", "publisher"], "nobody had published what the engine began with"
    swap = prepare(publish(3))
    swap.run()
    swap.undo()
    assert same(own, whole_tensors(2)) and told[-1] == "publisher"
    for number in range(1, 30):
        try:
            with FailAt(number, torn=True):
                swap.run()
        except Fault:
            swap.undo()
            assert same(own, whole_tensors(2)), number
        else:
            swap.undo()
    swap.run()
    swap.settle()
    assert same(own, whole_tensors(3))


def test_an_engine_with_other_numbers_keeps_them_itself(crowded):
    """What it took last is not what it has: it was loaded from elsewhere since."""
    own, told, prepare, publish = crowded
    first = prepare(publish(1))
    first.run()
    first.settle()
    given_up = prepare(publish(2))
    given_up.settle()
    own["norm"] += 1.0
    before = copies(own)
    swap = prepare(publish(3))
    swap.run()
    swap.undo()
    assert same(own, before) and told == ["host", "host"]


def test_a_prepared_version_outlives_its_publishers_files(folder):
    """They are mapped: another publisher of the same names changes nothing."""
    own, parts, told = whole_tensors(0), opener_of(folder), []

    def prepare(offer):
        return ReadOver(
            offer,
            own,
            parts=parts,
            emit=lambda kind, **fields: told.append(fields["undo_from"]),
            free_bytes=lambda device: 0,
        )

    with stores_of(folder, 2) as stores:
        first = prepare(register(stores, whole_tensors(1), version=1))
        first.run()
        first.settle()
        second = prepare(register(stores, whole_tensors(2), version=2))
    with stores_of(folder, 2) as stores:
        third = register(stores, whole_tensors(3), version=3, epoch=1)
        second.run()
        assert same(own, whole_tensors(2)) and told == ["host", "host"]
        second.undo()
        assert same(own, whole_tensors(1))
        second.run()
        second.settle()
        last = prepare(third)
        last.run()
        last.settle()
        assert same(own, whole_tensors(3))


def test_a_publisher_that_is_past_the_last_version_is_not_counted_on(crowded):
    own, told, prepare, publish = crowded
    first = prepare(publish(1))
    first.run()
    first.settle()
    publish(2)
    swap = prepare(publish(3))  # in the slot of version 1
    swap.run()
    swap.undo()
    assert same(own, whole_tensors(1)) and told == ["host", "host"]


def test_slots_stay_mapped_from_version_to_version(folder):
    opener, own = opener_of(folder), whole_tensors(1)
    with stores_of(folder, 2) as stores:
        seen = []
        for version in range(2, 6):
            offer = register(stores, whole_tensors(version), version=version)
            swap = ReadOver(offer, own, parts=opener, emit=silent)
            swap.run()
            with opener.open_parts(offer) as parts:
                seen.append([part.reader.view(0, 1).data_ptr() for part in parts])
            swap.settle()
            assert same(own, whole_tensors(version))
        assert seen[:2] == seen[2:] and seen[0] != seen[1]
    with stores_of(folder, 2) as stores:  # other files of the same names
        offer = register(stores, whole_tensors(9), version=9)
        swap = ReadOver(offer, own, parts=opener, emit=silent)
        swap.run()
        swap.settle()
    assert same(own, whole_tensors(9))
    opener.close()


def test_after_an_error_no_further_bucket_is_read(folder, monkeypatch) -> None:
    """What the thread has begun ends; the buckets behind it would each have a deadline to wait."""
    has_failed, begun = threading.Event(), list[int]()

    class Slow:
        """Reads the first bucket at once, and the second only when the swap has failed."""

        def view(self, start: int, stop: int) -> None:
            return None

        lends_bytes = 0

        def read(self, stretches: object, out_N: object, *, next_stretches: object = ()) -> None:
            begun.append(len(begun))
            if len(begun) > 1:
                assert has_failed.wait(20.0), "the swap goes on"
                time.sleep(0.2)  # it is on its way out

        def check(self) -> None: ...

        def close(self) -> None: ...

    def fail(*given: object, **settings: object) -> None:
        has_failed.set()
        raise Fault

    own = whole_tensors(0)
    with stores_of(folder, 1) as stores:
        offer = register(stores, whole_tensors(1), version=1)
        opener = opener_of(folder)
        monkeypatch.setattr(
            "gyre.weights.transports.opened.SharedMemoryPart", lambda *a, **k: Slow()
        )
        swap = ReadOver(offer, own, parts=opener, emit=silent, bucket_bytes=64)
        monkeypatch.setattr(torch, "_foreach_copy_", fail)
        with pytest.raises(Fault):
            swap.run()
        swap.settle()
    assert len(begun) <= 2
