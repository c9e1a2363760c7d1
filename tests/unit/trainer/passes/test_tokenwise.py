"""Batch-invariant training over tensor ranks of a CPU: the trainer's log-probs are the engine's to
the bit at the same number of ranks, whatever shares a batch; elsewhere they differ and are close.
On GPUs: tests/gpu/test_invariant_tensor_gpu.py."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from gyre.trainer.passes.tokenwise import tokenwise_logprobs
from invariant_cases import batch_of, gaps, joined, rollouts, stepped
from rank_pool import RankPool
from shown_settings import show

COMPANY: list[dict[str, Any]] = [
    {},
    {"token_budget": 9, "max_running": 3},
    {"prefix_cache": False, "overlap": True},
    {"page_tokens": 4, "num_pages": 24, "token_budget": 21},
]


def pool_of(request: pytest.FixtureRequest, size: int) -> RankPool:
    return request.getfixturevalue({2: "pair", 4: "ranks"}[size])


def one_answer(pool: RankPool, which: str, **settings: Any) -> Any:
    """What all ranks got, with any company."""
    found = [pool.run(rollouts, which, **settings, **company) for company in COMPANY]
    kinds = {kind for ranks in found for _, its_kinds in ranks for kind in its_kinds}
    assert "engine.preempted" in kinds and "engine.torch_kernels" in kinds
    answers = [answer for ranks in found for answer, _ in ranks]
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.mark.slow  # make test has the first step, which finds no gap
@pytest.mark.parametrize(
    ("which", "size", "dtype"),
    show(
        (("qwen2", 2, "bfloat16"), ("qwen3", 4, "float32")),
        itertools.product(("llama", "qwen2", "qwen3"), (2, 4), ("float32", "bfloat16")),
    ),
)
def test_logprobs_are_the_engines_to_the_bit(
    request: pytest.FixtureRequest, which: str, size: int, dtype: str
) -> None:
    pool, temperature = pool_of(request, size), 0.7 if which == "qwen2" else 1.0
    answers = one_answer(pool, which, dtype=dtype, temperature=temperature)
    batches = [batch_of(answers, temperature, order) for order in (0, 1)]
    for tokens_per_chunk in (50, 500):
        given = which, batches, tokenwise_logprobs
        for other, count, _ in pool.run(
            gaps, *given, dtype=dtype, tokens_per_chunk=tokens_per_chunk
        ):
            assert (other, count) == (0, 4 * sum(len(tokens) for tokens, _ in answers.values()))


def test_the_mode_is_what_makes_them_equal(pair: RankPool) -> None:
    """Without it on either side, some differ, by rounding."""
    with_mode, without = (
        pair.run(rollouts, "qwen3", batch_invariant=mode)[0][0] for mode in (True, False)
    )
    for answers, logprobs in ((with_mode, None), (without, tokenwise_logprobs), (without, None)):
        other, _, largest = pair.run(gaps, "qwen3", [batch_of(answers)], logprobs)[0]
        assert other > 0 and largest < 1e-4


@pytest.mark.slow
def test_another_number_of_ranks_gives_other_bits(pair: RankPool, ranks: RankPool) -> None:
    """Bounded by rounding, not equal: sums have other parts."""
    answers = ranks.run(rollouts, "qwen3")[0][0]
    other, _, largest = pair.run(gaps, "qwen3", [batch_of(answers)], tokenwise_logprobs)[0]
    assert other > 0 and largest < 1e-4


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_first_step_finds_no_gap_and_the_ordinary_gradient(
    request: pytest.FixtureRequest, size: int
) -> None:
    pool = pool_of(request, size)
    batch = batch_of(pool.run(rollouts, "qwen3")[0][0])
    plain = pool.run(stepped, "qwen3", batch, None)
    ours = pool.run(stepped, "qwen3", batch, tokenwise_logprobs, zero=1)
    for steps, _ in ours:
        assert steps == ours[0][0], "the same on every rank"
        assert steps[0]["logprob_gap_max"] == steps[0]["engine_kl"] == 0.0
        assert steps[0]["tis_weight"] == 1.0
        assert steps[0]["kl_reference"] == 0.0 < steps[1]["kl_reference"]
    assert plain[0][0][0]["logprob_gap_max"] > 0.0
    for found, expected in zip(joined(ours), joined(plain), strict=True):
        for name, grad in expected.items():
            limit = 1e-4 * grad.abs().max().clamp(min=1e-3)
            assert (found[name] - grad).abs().max() < limit, name
