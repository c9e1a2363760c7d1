"""Ranks of a trainer register what each has, in processes of their own, and an engine's process
reads the version whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gyre.weights.transports.addresses import host_id
from gyre.weights.transports.opened import Reading
from gyre.weights.transports.publish import join_parts
from part_cases import open_shards, shared_folder
from part_ranks import publish_from_trainer
from rank_pool import RankPool

NUM_RANKS = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(NUM_RANKS)
    yield pool
    pool.close()


@pytest.mark.parametrize("layout", ["zero0", "zero3"])
def test_a_trained_version_arrives_from_its_ranks(ranks: RankPool, layout: str) -> None:
    with shared_folder() as folder:
        told = ranks.run(publish_from_trainer, layout=layout, folder=str(folder))
        parts, (version, *_), (whole, *_) = zip(*told, strict=True)
        assert version == 1
        sizes = [part.part.size_bytes for part in parts]
        assert max(sizes) - min(sizes) < 4096, "each rank writes its half"
        offer = join_parts(version, 0, parts)
        with open_shards(offer, Reading(host_id=host_id(folder), folder=folder)) as tensors:
            assert tensors.keys() == whole.keys()
            for name, values in whole.items():
                assert torch.equal(tensors[name], torch.from_numpy(values)), name
