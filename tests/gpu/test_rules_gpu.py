"""Rules of sampling on the fused path of a CUDA device (graphs, kernels, rule book) against the
float64 oracle of tests/support/hub_cases.py: temperature, truncation, penalties, bias, stop ids,
seeds, alternatives, prompt log-probs, all of them beside each other in one batch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from hub_cases import BF16, Where, check_rules, save_random

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_rule_does_what_it_says(family: str, tmp_path: Path) -> None:
    """In invariant mode, so that a rule's numbers are the same in every batch and seeds alone
    decide."""
    where = Where(device=torch.device("cuda"), dtype=torch.bfloat16, page_tokens=16, bounds=BF16)
    folder = save_random(tmp_path / family, family)
    for overlap in (True, False):
        check_rules(folder, where, batch_invariant=True, overlap=overlap)


def test_the_librarys_products_serve_the_rules_as_well(tmp_path: Path) -> None:
    """The same batch twice is the same steps twice, so here too the second answers are the first
    ones."""
    where = Where(device=torch.device("cuda"), dtype=torch.bfloat16, page_tokens=64, bounds=BF16)
    check_rules(save_random(tmp_path / "qwen3", "qwen3"), where, token_budget=2048, burst_steps=64)
