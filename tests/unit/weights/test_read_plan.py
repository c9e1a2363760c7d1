"""A plan is used again for the next version of the same layout, and for nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gyre.distributed.layout import whole_model
from gyre.distributed.process_group import alone
from gyre.weights.manifest import make_manifest
from gyre.weights.read_plan import ReadPlan
from gyre.weights.registered import ReadOver
from gyre.weights.tensor_part import TensorPart
from gyre.weights.transports.addresses import host_id
from gyre.weights.transports.opened import PartOpener, Reading
from part_cases import SHAPES, register, shared_folder, silent, stores_of, whole_tensors


def entries_of(seed: int):
    return make_manifest(seed, whole_tensors(seed), shared=False, checksums=True).entries


def test_a_plan_fits_all_but_other_checksums() -> None:
    own, entries = whole_tensors(0), entries_of(1)
    layout: dict[str, Any] = {"broadcast": [False], "bucket_bytes": 128, "held": None}
    plan = ReadPlan(entries, own, **layout)
    assert entries_of(2) != entries and plan.fits(entries_of(2), own, **layout)
    moved = {**own, "big": own["big"].clone()}
    other = (*entries[:-1], replace(entries[-1], shape=(80, 4)))
    held = TensorPart(table=whole_model(SHAPES), group=alone(torch.device("cpu")))
    assert not plan.fits(entries, moved, **layout)
    assert not plan.fits(other, own, **layout)
    for change in ({"bucket_bytes": 192}, {"broadcast": [True]}, {"held": held}):
        assert not plan.fits(entries, own, **{**layout, **change})


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
