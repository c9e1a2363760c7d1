"""The fused engine against transformers on a CUDA device: random Llama, Qwen2.5 and Qwen3
checkpoints, greedily, in BF16 within the bounds that tests/support/hub_cases.py states."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

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
def test_the_fused_engine_in_bfloat16(
    family: str, page_tokens: int, config: dict, tmp_path: Path
) -> None:
    where = Where(device=CUDA, dtype=torch.bfloat16, page_tokens=page_tokens, bounds=BF16)
    check_greedy(save_random(tmp_path / family, family), where, **config)


@pytest.mark.parametrize("token_budget", [64, 200, 512])
def test_residuals_of_a_wide_model(token_budget: int, tmp_path: Path) -> None:
    """With few rows the next norm adds them, after a product with a bias of zeros or without; with
    many the product does (`models.fused_forward`). The first steps have 64, 200 and 285 rows,
    decoding ones 8."""
    where = Where(device=CUDA, dtype=torch.bfloat16, page_tokens=64, bounds=BF16)
    check_greedy(
        save_random(tmp_path / "qwen3", "qwen3", hidden_size=2048), where, token_budget=token_budget
    )


def test_flash_attention_4_in_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is faster on so small a model, it serves prompt chunks, some of them beside
    decoding rows."""
    from gyre.engine.runners import gpu_attention

    flash4, calls = gpu_attention.find_flash4(), []
    if flash4 is None:
        pytest.skip("flash-attn-4 is not installed")

    def counted(*given):
        calls.append(given)
        return flash4(*given)

    seconds = iter([2.0, 1.0])  # ours, then theirs
    monkeypatch.setattr(gpu_attention, "find_flash4", lambda: counted)
    monkeypatch.setattr(
        gpu_attention.GpuAttention, "_probe", lambda self, make, **fields: next(seconds)
    )
    where = Where(
        device=CUDA, dtype=torch.bfloat16, page_tokens=gpu_attention.FLASH4_PAGE, bounds=BF16
    )
    check_greedy(save_random(tmp_path / "qwen3", "qwen3", hidden_size=256, head_dim=64), where)
    assert calls


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("exact_float32")
def test_the_plain_engine_in_float32(family: str, tmp_path: Path) -> None:
    where = Where(device=CUDA, dtype=torch.float32, page_tokens=16, bounds=EXACT)
    check_greedy(save_random(tmp_path / family, family), where)
