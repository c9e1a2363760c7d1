"""Sampler: exact distributions, log-probs against float64, truncation against a plain reading of
the definitions."""

# N rows, V vocabulary

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.engine.sampling.sampler import choose, make_rules
from gyre.engine.scheduler.random import draw_key, uniforms

CPU = torch.device("cpu")


def rules(num_rows: int, vocab_size: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Each parameter is one number or one per row."""
    temperature_N, top_k_N, top_p_N, min_p_N = (
        np.broadcast_to(np.asarray(values), (num_rows,))
        for values in (temperature, top_k, top_p, min_p)
    )
    truncated_N = (temperature_N > 0) & ((top_k_N > 0) | (top_p_N < 1) | (min_p_N > 0))
    return make_rules(
        temperature_N.astype(np.float32),
        top_k_N,
        top_p_N.astype(np.float64),
        min_p_N.astype(np.float64),
        truncated_N,
        vocab_size=vocab_size,
        device=CPU,
    )


def keep_by_definition(
    logits_V: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """The kept ids, in float64 and one token at a time: min-p, then top-k, then top-p over what
    those leave."""
    scaled = logits_V.astype(np.float64) / temperature
    order = sorted(
        np.flatnonzero(scaled > -np.inf).tolist(), key=lambda token: (-scaled[token], token)
    )
    order = [token for token in order if np.exp(scaled[token] - scaled[order[0]]) >= min_p]
    order = order[: top_k or len(order)]
    weights = np.exp(scaled[order] - scaled[order[0]])
    kept, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if kept and top_p < 1.0 and mass >= top_p * weights.sum():
            break
        kept.append(token)
        mass += weight
    return np.sort(kept)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_frequencies_match_the_exact_probabilities(params: dict) -> None:
    """Chi-square over many draws of one row's distribution; the 99.99 % point of its degrees of
    freedom."""
    vocab, draws = 16, 40_000
    logits_V = np.random.default_rng(3).normal(size=vocab) * 1.5
    scaled = logits_V / params.get("temperature", 1.0)
    kept = keep_by_definition(
        logits_V,
        params.get("temperature", 1.0),
        params.get("top_k", 0),
        params.get("top_p", 1.0),
        params.get("min_p", 0.0),
    )
    exact = np.zeros(vocab)
    exact[kept] = np.exp(scaled[kept]) / np.exp(scaled[kept]).sum()
    keys = np.asarray([draw_key(seed, seed % 3) for seed in range(draws // 100)], np.uint64).repeat(
        100
    )
    uniform = uniforms(keys, np.tile(np.arange(100), draws // 100))
    choice = choose(
        torch.tensor(logits_V, dtype=torch.float32).expand(draws, vocab).contiguous(),
        rules(draws, vocab, **params),
        torch.from_numpy(uniform),
    )
    counts = np.bincount(choice.tokens_N.numpy(), minlength=vocab)
    assert counts[exact == 0].sum() == 0
    expected = exact[exact > 0] * draws
    chi_square = ((counts[exact > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 14


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([4, 33, 700]),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 2.0]),
            st.sampled_from([0, 1, 3, 400]),
            st.sampled_from([0.05, 0.5, 0.95, 1.0]),
            st.sampled_from([0.0, 0.01, 0.5, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
    ties=st.booleans(),
)
def test_mixed_rows_match_float64_and_do_not_see_each_other(seed, vocab, rows, ties) -> None:
    generator = np.random.default_rng(seed)
    logits_NV = generator.normal(size=(len(rows), vocab)) * 2
    if ties:
        logits_NV = np.round(logits_NV)  # as BF16 logits often tie
    logits_NV = logits_NV.astype(np.float32)
    uniform_N = generator.random(len(rows))
    choice = choose(
        torch.tensor(logits_NV),
        rules(len(rows), vocab, *zip(*rows, strict=True)),
        torch.tensor(uniform_N),
    )
    place = 0
    for row, (temperature, top_k, top_p, min_p) in enumerate(rows):
        alone = choose(
            torch.tensor(logits_NV[row : row + 1]),
            rules(1, vocab, temperature, top_k, top_p, min_p),
            torch.tensor(uniform_N[row : row + 1]),
        )
        token = int(choice.tokens_N[row])
        assert token == int(alone.tokens_N[0])
        assert float(choice.logprobs_N[row]) == pytest.approx(float(alone.logprobs_N[0]), abs=1e-6)
        raw = logits_NV[row].astype(np.float64)
        assert float(choice.raw_logprobs_N[row]) == pytest.approx(
            raw[token] - np.log(np.exp(raw - raw.max()).sum()) - raw.max(), abs=2e-5
        )
        if temperature == 0.0:
            assert token == int(logits_NV[row].argmax()) and float(choice.logprobs_N[row]) == 0.0
            continue
        kept = keep_by_definition(logits_NV[row], temperature, top_k, top_p, min_p)
        if top_k or top_p < 1.0 or min_p:
            got = torch.nonzero(choice.kept_MV[place])[:, 0].numpy()
            place += 1
            # Float32 may fall on the other side of a boundary that float64 puts within its
            # rounding: one token.
            assert len(np.setxor1d(got, kept)) <= (0 if ties is False and vocab < 100 else 1)
            kept = got
        assert token in kept
        scaled = raw[kept] / temperature
        exact = (
            raw[token] / temperature - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
        )
        assert float(choice.logprobs_N[row]) == pytest.approx(exact, abs=2e-5)


def test_truncation_that_removes_nothing_changes_nothing() -> None:
    logits_NV = torch.randn(32, 50, generator=torch.Generator().manual_seed(0))
    uniform_N = torch.rand(32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = choose(logits_NV, rules(32, 50), uniform_N)
    kept_all = choose(logits_NV, rules(32, 50, top_k=50), uniform_N)
    assert torch.equal(plain.tokens_N, kept_all.tokens_N)
    assert kept_all.kept_MV is not None and bool(kept_all.kept_MV.all())


def test_the_largest_draw_never_chooses_an_impossible_token() -> None:
    logits_NV = torch.full((2, 1000), -200.0)
    logits_NV[:, 3] = 5.0
    top = torch.full((2,), 1.0 - 2.0**-40, dtype=torch.float64)
    assert choose(logits_NV, rules(2, 1000), top).tokens_N.tolist() == [3, 3]


def test_draws_depend_on_seed_index_and_position_only_and_are_uniform() -> None:
    keys = np.asarray([draw_key(7, 0), draw_key(7, 1), draw_key(8, 0)], np.uint64)
    first = uniforms(keys, np.asarray([0, 0, 0]))
    assert len(set(first.tolist())) == 3
    assert uniforms(keys[1:2], np.asarray([0]))[0] == first[1]
    assert (uniforms(keys, np.asarray([1, 1, 1])) != first).all()
    many = uniforms(np.full(100_000, keys[0]), np.arange(100_000))
    assert many.min() >= 0.0 and many.max() < 1.0
    counts = np.histogram(many, bins=50, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 49 + 4 * np.sqrt(98) + 14
    pairs = np.corrcoef(many[:-1], many[1:])[0, 1]
    assert abs(pairs) < 0.02
