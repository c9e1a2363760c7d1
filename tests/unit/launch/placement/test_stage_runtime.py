"""What a worker's memory may be, told from its config alone."""

from __future__ import annotations

import pytest

from gyre.launch.placement.stage_runtime import ENGINE_GROUP_BYTES, outside_tolerance_bytes
from gyre.runconfig.run_config import RunConfig

TOLERANCE = 3 << 20


@pytest.mark.parametrize(
    ("kind", "colocated", "tensor_ranks", "has_trainer", "more"),
    [
        ("pod", True, 2, True, ENGINE_GROUP_BYTES),
        ("pod", True, 2, False, 0),
        ("pod", True, 1, True, 0),
        ("pod", False, 2, True, 0),
        ("ray", True, 2, True, 0),
    ],
)
def test_a_trainer_beside_an_engine_over_ranks_grants_what_its_group_holds(
    kind: str, colocated: bool, tensor_ranks: int, has_trainer: bool, more: int
) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": "somewhere"},
            "memory": {"outside_tolerance_bytes": TOLERANCE},
            "engine": {"tensor_ranks": tensor_ranks},
            "parallel": {"tensor_ranks": tensor_ranks},
            "cluster": {
                "kind": kind,
                "num_workers": 2,
                **({} if colocated else {"colocated": False, "engine_workers": 1}),
            },
        }
    )
    found = outside_tolerance_bytes(config, has_trainer=has_trainer)
    assert found == TOLERANCE + more
