"""The cases of the engine against transformers and of the sampling rules, on the CPU in float32:
the same that tests/gpu/test_transformers_gpu.py and tests/gpu/test_rules_gpu.py run on a GPU in
BF16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hub_cases import (
    EXACT,
    FAMILIES,
    Oracle,
    Where,
    answer,
    check_completion,
    check_greedy,
    check_rules,
    rule_requests,
    save_random,
)

CPU = Where(device=torch.device("cpu"), dtype=torch.float32, page_tokens=16, bounds=EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_and_logprobs_are_transformers(family: str, tmp_path: Path) -> None:
    check_greedy(save_random(tmp_path / family, family), CPU)


@pytest.mark.slow
def test_every_rule_does_what_it_says(tmp_path: Path) -> None:
    check_rules(save_random(tmp_path / "qwen3", "qwen3"), CPU)


def test_the_oracle_of_the_rules_finds_faults(tmp_path: Path) -> None:
    """Numbers that are a little off, another seed, a wrong support: each is seen."""
    folder = save_random(tmp_path / "llama", "llama")
    requests = {request.request_id: request for request in rule_requests()}
    request, oracle = requests["all truncation"], Oracle(folder, CPU.device)
    part = answer(folder, CPU, [request])[0]
    check_completion(request, part, oracle, EXACT.most)
    assert part.support is not None
    other = int(np.setdiff1d(part.support.ids[: part.support.offsets[1]], part.tokens[:1])[0])
    faults = [
        replace(part, raw_logprobs=part.raw_logprobs + 0.01),
        replace(part, logprobs=part.logprobs - 0.01),
        replace(part, tokens=np.concatenate([[other], part.tokens[1:]]).astype(np.int32)),
        replace(part, support=replace(part.support, ids=part.support.ids // 2 * 2)),
        replace(part, finish="stop"),
    ]
    for fault in faults:
        with pytest.raises(AssertionError):
            check_completion(request, fault, oracle, EXACT.most)
    for wrong in (
        replace(request, seed=request.seed + 1),
        requests["everything"],
        requests["greedy"],
    ):
        with pytest.raises(AssertionError):
            check_completion(wrong, part, oracle, EXACT.most)
