"""What tensor ranks keep away from the device, and parked components, are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from rank_pool import RankPool
from trainer_cases import assert_close
from zero_cases import TENSOR_LAYOUTS, equal_away, moved, train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", ["zero0_tensor2", "zero1_tensor2", "zero3_tensor2"])
def test_state_away_from_the_device_changes_no_bit(
    ranks: RankPool, layout: str, tmp_path: Path
) -> None:
    hows = ["host and gradients", "disk and gradients"]
    settings = {"spec": "parted", "layout": layout}
    for wrong in ranks.run(equal_away, "ppo", hows, str(tmp_path), **settings):
        assert not wrong


@pytest.mark.parametrize("layout", ["zero0_tensor2", "zero1_tensor2", "tensor4"])
@pytest.mark.parametrize(
    ("kind", "models"), [("ppo", ("actor", "critic", "reward")), ("grpo", ("actor", "reference"))]
)
def test_weights_in_host_memory(
    ranks: RankPool, layout: str, kind: str, models: tuple[str, ...]
) -> None:
    settings = {"spec": "parted", "reference_refresh_steps": 1}
    _, expected = train(None, kind, **settings)
    settings |= {"offload_optimizer": "host", "offload_cut_bytes": 8192}
    results = ranks.run(train, kind, layout=layout, offload_parameters=models, **settings)
    assert_close(results[0][1], expected, relative=2e-4)


@pytest.mark.parametrize("layout", TENSOR_LAYOUTS)
def test_parked_components_come_back(ranks: RankPool, layout: str) -> None:
    _, expected = train(None, "ppo", spec="parted")
    assert_close(ranks.run(moved, "ppo", spec="parted", layout=layout)[0], expected, relative=2e-4)
