"""The fused engine against transformers on a CUDA device: random Llama, Qwen2.5 and Qwen3 checkpoints, greedily, in BF16
within the bounds that tests/unit/hub_cases.py states."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from hub_cases import BF16, EXACT, FAMILIES, Where, check_greedy, save_random

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize(
    "config", [{}, {"overlap": False}, {"batch_invariant": True}], ids=["", "depth 0", "invariant"]
)
def test_the_fused_engine_in_bfloat16(family: str, page_tokens: int, config: dict, tmp_path: Path) -> None:
    where = Where(device=CUDA, dtype=torch.bfloat16, page_tokens=page_tokens, bounds=BF16)
    check_greedy(save_random(tmp_path / family, family), where, **config)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_engine_in_float32(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    where = Where(device=CUDA, dtype=torch.float32, page_tokens=16, bounds=EXACT)
    check_greedy(save_random(tmp_path / family, family), where)
