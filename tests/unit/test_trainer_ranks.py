"""A trainer on several ranks, real processes over gloo, does what one process does."""

from __future__ import annotations

import numpy as np
import pytest
from rank_pool import RankPool
from trainer_cases import OBJECTIVES
from zero_cases import train


@pytest.fixture(scope="module", params=[2])
def ranks(request):
    pool = RankPool(request.param)
    yield pool
    pool.close()


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_ranks_equal_one_process(ranks, kind):
    expected, weights = train(None, kind)
    results = ranks.run(train, kind)
    for reports, state in results:
        assert reports == results[0][0]
        for report, one in zip(reports, expected, strict=True):
            assert report.metrics.keys() == one.metrics.keys()
            for name in one.metrics:
                if name != "padding_share":
                    assert report.metrics[name] == pytest.approx(one.metrics[name], rel=1e-4, abs=1e-5), name
        for name in weights:
            np.testing.assert_allclose(state[name], weights[name], atol=2e-5, err_msg=name)
