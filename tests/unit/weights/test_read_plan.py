"""A plan is used again for the next version of the same layout, and for nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gyre.distributed.layout import whole_model
from gyre.distributed.process_group import RankGroup, alone
from gyre.models.layout import model_layout
from gyre.weights.manifest import make_manifest, shard_entries
from gyre.weights.read_plan import ReadPlan
from gyre.weights.registered import ReadOver
from gyre.weights.shards import row_layout
from gyre.weights.tensor_part import TensorPart
from gyre.weights.transports.addresses import host_id
from gyre.weights.transports.opened import PartOpener, Reading
from layout_cases import spec_of
from part_cases import SHAPES, register, shared_folder, silent, stores_of, whole_tensors

SPEC = spec_of(num_heads=4, num_kv_heads=2, vocab_size=13)


def entries_of(seed: int):
    return make_manifest(seed, whole_tensors(seed), shared=False, checksums=True).entries


def test_a_plan_fits_all_but_other_checksums() -> None:
    own, entries = whole_tensors(0), entries_of(1)
    layout: dict[str, Any] = {
        "broadcast": [False],
        "bucket_bytes": 128,
        "by_rows": False,
        "held": None,
    }
    plan = ReadPlan(entries, own, **layout)
    assert entries_of(2) != entries and plan.fits(entries_of(2), own, **layout)
    moved = {**own, "big": own["big"].clone()}
    other = (*entries[:-1], replace(entries[-1], shape=(80, 4)))
    held = TensorPart(table=whole_model(SHAPES), group=alone(torch.device("cpu")))
    assert not plan.fits(entries, moved, **layout)
    assert not plan.fits(other, own, **layout)
    changes = {"bucket_bytes": 192, "broadcast": [True], "by_rows": True, "held": held}
    for change in ({name: value} for name, value in changes.items()):
        assert not plan.fits(entries, own, **{**layout, **change})


def owners_asked(*, rank: int, broadcast: bool) -> list[int]:
    """The owners of the first buckets that a tensor rank reads, of three that registered rows."""
    model = model_layout(SPEC, 2)
    layout = row_layout(SPEC.parameter_shapes(), num_ranks=3)
    group = RankGroup(name="test", rank=rank, size=2, device=torch.device("cpu"))
    held = TensorPart(table=model, group=group)
    own = {name: torch.zeros(shape) for name, shape in model.local_shapes.items()}
    plan = ReadPlan(
        shard_entries(layout, torch.float32),
        own,
        broadcast=[broadcast] * 3,
        bucket_bytes=256,
        by_rows=False,
        held=held,
    )
    return [bucket.read.owner for bucket in plan.buckets[:4]]


def test_tensor_ranks_begin_with_different_owners_but_of_what_is_broadcast() -> None:
    """A broadcast comes to all readers at once: each waits for it, so they take one order."""
    assert owners_asked(rank=0, broadcast=False) == [0, 1, 2, 0]
    assert owners_asked(rank=1, broadcast=False) == [1, 2, 0, 1]
    for rank in range(2):
        assert owners_asked(rank=rank, broadcast=True) == [0, 1, 2, 0]


def test_versions_arrive_by_a_kept_plan_and_after_the_tensors_have_moved() -> None:
    own = whole_tensors(0)
    with shared_folder() as folder, stores_of(folder, 2) as stores:
        opener, plans = PartOpener(Reading(host_id=host_id(folder), folder=folder)), []
        for version in range(1, 5):
            if version == 3:
                own = whole_tensors(0)  # at other addresses
            offer = register(stores, whole_tensors(version), version=version)
            swap = ReadOver(offer, own, parts=opener, emit=silent, bucket_bytes=128)
            swap.run()
            swap.settle()
            plans.append(opener.plan)
            assert all(torch.equal(own[n], t) for n, t in whole_tensors(version).items())
        assert plans[0] is plans[1] and plans[2] is plans[3] and plans[1] is not plans[2]
        opener.close()
        assert opener.plan is None
