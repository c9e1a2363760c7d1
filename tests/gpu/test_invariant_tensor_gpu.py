"""Batch-invariant mode over two GPUs, over NCCL: trainer and engine on the same two tensor ranks
have the same log-probs to the bit, however requests share a batch and sequences are packed; without
the mode, or on another number of ranks, they do not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from gyre.distributed.process_group import RankGroup, alone
from invariant_cases import batch_of, gaps, joined, rollouts, stepped
from rank_pool import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
FAMILIES = ("llama_large", "qwen2_large", "qwen3_large")
BFLOAT16 = {"dtype": "bfloat16"}
COMPANY: list[dict[str, Any]] = [
    {},
    {"token_budget": 40, "max_running": 3, "overlap": False},
    {"num_pages": 8, "prefix_cache": False},
]


@pytest.fixture(scope="module")
def pair():
    pool = RankPool(2, backend="nccl", device="cuda", timeout_s=60.0)
    yield pool
    pool.close()


def invariant() -> Any:
    from gyre.trainer.passes.batch_invariant import InvariantLogprobs  # imports Triton

    return InvariantLogprobs(page_tokens=16)


def by_itself(group: RankGroup, case: Any, *args: Any, **settings: Any) -> Any:
    """A case on this rank's own GPU, without the other."""
    return case(alone(group.device), *args, **settings)


@pytest.mark.parametrize("which", FAMILIES)
def test_logprobs_are_the_engines_to_the_bit(pair: RankPool, which: str) -> None:
    found = [pair.run(rollouts, which, **BFLOAT16, **company) for company in COMPANY]
    kinds = {kind for ranks in found for _, its_kinds in ranks for kind in its_kinds}
    assert "engine.preempted" in kinds and "engine.torch_kernels" not in kinds
    answers = [answer for ranks in found for answer, _ in ranks]
    assert all(answer == answers[0] for answer in answers), "one answer, on both ranks"
    batches = [batch_of(answers[0], order=order) for order in (0, 1)]
    for tokens_per_chunk in (80, 1000):
        given = which, batches, invariant()
        for other, count, _ in pair.run(
            gaps, *given, **BFLOAT16, tokens_per_chunk=tokens_per_chunk
        ):
            assert other == 0 < count


def test_without_the_mode_or_on_one_gpu_they_are_others(pair: RankPool) -> None:
    """Bounded by the rounding of bfloat16, not equal."""
    which = FAMILIES[2]
    on = pair.run(rollouts, which, **BFLOAT16)[0][0]
    off = pair.run(rollouts, which, **BFLOAT16, batch_invariant=False)[0][0]
    one = pair.run(by_itself, rollouts, which, **BFLOAT16)[0][0]
    for answers, logprobs in ((on, None), (off, invariant()), (one, invariant())):
        batches = [batch_of(answers)]
        other, _, largest = pair.run(gaps, which, batches, logprobs, **BFLOAT16)[0]
        assert other > 0 and largest < 0.5


def test_the_first_step_finds_no_gap_and_nearly_the_ordinary_gradient(pair: RankPool) -> None:
    which = FAMILIES[2]
    batch = batch_of(pair.run(rollouts, which, **BFLOAT16)[0][0])
    plain = pair.run(stepped, which, batch, None, **BFLOAT16)
    ours = pair.run(stepped, which, batch, invariant(), **BFLOAT16)
    for steps, _ in ours:
        assert steps[0]["logprob_gap_max"] == steps[0]["engine_kl"] == 0.0
        assert steps[0]["kl_reference"] == 0.0 < steps[1]["kl_reference"]
    for found, expected in zip(joined(ours), joined(plain), strict=True):
        for name, grad in expected.items():
            assert (found[name] - grad).norm() < 0.1 * grad.norm(), name
