"""Truncation: both ways give one set, bit for bit, and it is the set of the definition in
float64."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.engine.sampling.truncation import (
    TruncationLimits,
    keep_by_bisection,
    keep_by_candidates,
    make_cut,
)

CPU = torch.device("cpu")
LIMITS = st.tuples(
    st.sampled_from([0, 1, 2, 7, 300, 5000]),
    st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 1e-6, 0.05, 0.7, 1.0]),
)


def cut_of(limits: list[tuple[int, float, float]], vocab: int) -> TruncationLimits:
    top_k, top_p, min_p = zip(*limits, strict=True)
    return make_cut(
        np.asarray(top_k), np.asarray(top_p), np.asarray(min_p), vocab_size=vocab, device=CPU
    )


def keep_in_float64(
    scaled_V: np.ndarray, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, bool]:
    """The kept ids of a vectorized float64 reading, and whether a boundary lies within rounding of
    a token."""
    wide = scaled_V.astype(np.float64)
    order = np.lexsort((np.arange(len(wide)), -wide))
    weight = np.exp(wide[order] - wide.max())
    near = (
        bool((np.abs(weight - min_p) < 1e-9 * max(min_p, 1e-3)).any())
        if min_p and min_p < 1.0
        else False
    )
    order = order[(weight >= min_p) & (wide[order] > -np.inf)]
    order = order[: top_k or len(order)]
    weight = np.exp(wide[order] - wide.max())
    before = np.cumsum(weight) - weight
    if top_p < 1.0:
        near |= bool((np.abs(before[1:] / weight.sum() - top_p) < 1e-7).any())
        order = order[before < top_p * weight.sum()]
    return np.sort(order), near


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 2, 5, 64, 900, 3000]),
    limits=st.lists(LIMITS, min_size=1, max_size=4),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0, 200.0]),
    grid=st.sampled_from([0.0, 0.125, 1.0]),
    banned=st.sampled_from([0.0, 0.3, 0.99]),
)
def test_both_ways_are_one_and_follow_the_definition(
    seed, vocab, limits, spread, grid, banned
) -> None:
    generator = np.random.default_rng(seed)
    scaled_MV = generator.normal(size=(len(limits), vocab)) * spread
    if grid:
        scaled_MV = np.round(scaled_MV / grid) * grid  # many ties, -0 and 0 among them
    barred_MV = generator.random(scaled_MV.shape) < banned
    barred_MV[:, int(generator.integers(vocab))] = False
    scaled_MV = np.where(barred_MV, -np.inf, scaled_MV).astype(np.float32)
    cut = cut_of(limits, vocab)
    by_candidates = keep_by_candidates(torch.from_numpy(scaled_MV), cut)
    by_bisection = keep_by_bisection(torch.from_numpy(scaled_MV), cut)
    assert torch.equal(by_candidates, by_bisection)
    for row, (top_k, top_p, min_p) in enumerate(limits):
        exact, near = keep_in_float64(scaled_MV[row], top_k, top_p, min_p)
        got = torch.nonzero(by_bisection[row])[:, 0].numpy()
        assert len(got) >= 1
        if near:
            assert abs(len(got) - len(exact)) <= 1 or spread == 0.01
        else:
            assert got.tolist() == exact.tolist()


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), limits=st.lists(LIMITS, min_size=2, max_size=5))
def test_a_row_does_not_see_the_rows_beside_it(seed, limits) -> None:
    scaled_MV = (
        torch.from_numpy(
            np.random.default_rng(seed).normal(size=(len(limits), 700)).astype(np.float32)
        )
        * 3
    )
    together = keep_by_candidates(scaled_MV, cut_of(limits, 700))
    for row, limit in enumerate(limits):
        for keep in (keep_by_candidates, keep_by_bisection):
            assert torch.equal(
                keep(scaled_MV[row : row + 1], cut_of([limit], 700))[0], together[row]
            )


def test_bisection_reads_nothing_on_the_host() -> None:
    """On the meta device there are no values: any look at one fails."""
    columns = [
        torch.empty((3, 1), dtype=dtype, device="meta")
        for dtype in (torch.int64, torch.float64, torch.float64)
    ]
    cut = TruncationLimits(
        top_k_M1=columns[0], top_p_M1=columns[1], min_p_M1=columns[2], candidates=256
    )
    assert keep_by_bisection(torch.empty((3, 900), device="meta"), cut).shape == (3, 900)


def test_a_row_without_numbers_harms_no_other() -> None:
    scaled_MV = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    limits = [(5, 0.9, 0.01)] * 3
    sound = keep_by_bisection(scaled_MV, cut_of(limits, 50))
    scaled_MV[1] = float("nan")
    for keep in (keep_by_candidates, keep_by_bisection):
        kept = keep(scaled_MV, cut_of(limits, 50))
        assert torch.equal(kept[[0, 2]], sound[[0, 2]])
