"""Replicas of shards of tensor ranks' parts: all three axes of the mesh at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rank_pool import RankPool
from trainer_cases import assert_close
from zero_cases import gradients, of_one_process, registered

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.mark.parametrize("zero", [1, 3])
def test_copies_of_shards_of_parts(eight: RankPool, zero: int) -> None:
    """Two replicas of two shards of two tensor ranks."""
    expected, norms = of_one_process(gradients, "ppo", spec="parted")
    results = eight.run(gradients, "ppo", spec="parted", layout=f"hybrid{zero}_tensor2")
    versions = eight.run(registered, spec="parted", layout=f"hybrid{zero}_tensor2")
    assert_close(results[0][0], expected, relative=1e-5)
    assert results[0][1] == results[7][1] == pytest.approx(norms, rel=1e-5)
    for _, found, _ in versions:
        for name, tensor in found.items():
            np.testing.assert_array_equal(tensor, versions[0][2][f"actor.master.{name}"], name)
