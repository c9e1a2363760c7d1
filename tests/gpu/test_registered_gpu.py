"""Registered versions between a trainer and an engine on a GPU, through page-locked shared memory."""

from __future__ import annotations

import pytest
import torch

from gyre.core.errors import SnapshotError
from gyre.weights.registered import SPARE_BYTES, ReadOver
from gyre.weights.transports.addresses import host_id
from gyre.weights.transports.opened import PartOpener, Reading
from part_cases import (
    open_shards,
    register,
    shared_folder,
    stores_of,
    whole_tensors,
    with_wrong_checksum,
)

pytestmark = pytest.mark.gpu


def on_gpu(tensors):
    return {name: tensor.cuda() for name, tensor in tensors.items()}


def same(found, expected) -> bool:
    return all(torch.equal(found[name].cpu(), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("room", ["on the device", "nowhere"])
def test_versions_go_from_gpu_to_gpu_and_are_undone(sharded, room):
    own = on_gpu(whole_tensors(0))
    kept = []
    with shared_folder() as folder, stores_of(folder, 2, pin=True) as stores:
        reading = Reading(host_id=host_id(folder), folder=folder, pin=True)
        opener = PartOpener(reading)
        for version in range(1, 6):
            dtype = torch.float32 if sharded else torch.bfloat16
            whole = on_gpu(whole_tensors(version, dtype))
            offer = register(stores, whole, version=version, sharded=sharded)
            expected = {name: tensor.cpu().bfloat16() for name, tensor in whole.items()}
            with open_shards(offer, reading) as tensors:
                assert same(tensors, expected)
            before = {name: tensor.cpu() for name, tensor in own.items()}
            swap = ReadOver(
                offer,
                own,
                parts=opener,
                emit=lambda kind, **fields: kept.append(fields["undo_from"]),
                bucket_bytes=256,
                free_bytes=lambda device: SPARE_BYTES << 4 if room == "on the device" else 0,
            )
            swap.run()
            assert same(own, expected)
            swap.undo()
            assert same(own, before)
            swap.run()
            swap.settle()
            assert same(own, expected)
        opener.close()
    last = ["host"] * 2 + ["publisher"] * 8
    assert kept == (["device"] * 10 if room == "on the device" else last)


@pytest.mark.parametrize("bucket_bytes", [256, 64 << 20])
def test_a_wrong_checksum_is_found_on_the_device_and_undone(bucket_bytes):
    before = whole_tensors(1)
    own = on_gpu(before)
    with shared_folder() as folder, stores_of(folder, 2, pin=True) as stores:
        offer = register(stores, on_gpu(whole_tensors(2)), version=2)
        swap = ReadOver(
            with_wrong_checksum(offer, "norm"),
            own,
            parts=PartOpener(Reading(host_id=host_id(folder), folder=folder, pin=True)),
            emit=lambda kind, **fields: None,
            bucket_bytes=bucket_bytes,
        )
        with pytest.raises(SnapshotError, match="norm does not match its checksum"):
            swap.run()
        assert not same(own, before)
        swap.undo()
        assert same(own, before)
        swap.settle()


def test_slots_are_page_locked_while_they_are_mapped():
    with shared_folder() as folder, stores_of(folder, 1, pin=True) as stores:
        offer = register(stores, on_gpu(whole_tensors(1)), version=1)
        opener = PartOpener(Reading(host_id=host_id(folder), folder=folder, pin=True))
        with opener.open_parts(offer) as (part,):
            bytes_N = part.reader.view(0, 64)
            assert bytes_N.is_pinned()
        opener.close()
        assert not bytes_N.is_pinned()
