"""A trainer on several ranks, real processes over gloo, does what one process does."""

from __future__ import annotations

import numpy as np
import pytest
from rank_pool import RankPool
from trainer_cases import OBJECTIVES
from zero_cases import LAYOUTS, gradients


@pytest.fixture(scope="module", params=[4])
def ranks(request):
    pool = RankPool(request.param)
    yield pool
    pool.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_gradients_equal_one_process(ranks, kind, layout):
    expected, norms = gradients(None, kind, spec="odd")
    results = ranks.run(gradients, kind, spec="odd", layout=layout)
    found = results[0][0]
    assert found.keys() == expected.keys() and any(grad.any() for grad in found.values())
    for name, grad in expected.items():
        np.testing.assert_allclose(found[name], grad, atol=1e-5 * np.abs(grad).max(), rtol=0, err_msg=name)
    assert all(result[1] == results[0][1] for result in results)
    assert results[0][1] == pytest.approx(norms, rel=1e-5)
