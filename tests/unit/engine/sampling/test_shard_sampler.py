"""Sampling by ranks that have some columns of the logits each: what one rank chooses from the whole
rows, the same bits on every rank, and few bytes between them."""

# N rows, V vocabulary

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from choice_cases import Ask, Chosen, choose_many, chosen_by_ranks, scored_by_ranks
from gyre.core.records import Sampling
from gyre.distributed.process_group import RankGroup, alone
from gyre.engine.sampling.sampler import make_rules
from gyre.engine.sampling.shard_sampler import ShardSampler
from gyre.engine.sampling.vocabulary_shard import VocabularyShard
from gyre.engine.scheduler.random import draw_key, uniforms
from rank_pool import RankPool

META = torch.device("meta")
RULES = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 20, 400]),
    top_p=st.sampled_from([0.05, 0.6, 0.95, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 0.0, 1.1]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.0, 1.5]),
    min_tokens=st.sampled_from([0, 0, 2]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (11, -100.0))]),
    top_logprobs=st.sampled_from([0, 0, 1, 5]),
)
PLAIN = st.builds(Sampling, temperature=st.just(1.0))
ROWS = st.one_of(st.lists(RULES, min_size=1, max_size=6), st.lists(PLAIN, min_size=1, max_size=3))


def asks_of(asked: list[Sampling], vocab: int, generator: np.random.Generator) -> list[Ask]:
    """Histories from the whole vocabulary, and ids that it has."""
    asks: list[Ask] = []
    for s in asked:
        bias = {token % vocab: value for token, value in s.logit_bias}
        fitting = replace(
            s, logit_bias=tuple(bias.items()), top_logprobs=min(s.top_logprobs, vocab)
        )
        prompt, chosen = (
            generator.integers(0, vocab, generator.integers(low, 9)).tolist() for low in (1, 0)
        )
        asks.append((fitting, prompt, chosen, [0, vocab - 1]))
    return asks


def logits_of(
    generator: np.random.Generator,
    shape: tuple[int, int],
    spread: float,
    grid: float,
    banned: float,
) -> np.ndarray:
    logits_NV = generator.normal(size=shape) * spread
    if grid:
        logits_NV = np.round(logits_NV / grid) * grid  # ties, also of 0 and -0
    barred_NV = generator.random(shape) < banned
    barred_NV[:, int(generator.integers(shape[1]))] = False
    return np.where(barred_NV, -np.inf, logits_NV).astype(np.float32)


def assert_same_choice(found: Chosen, whole: Chosen) -> None:
    """Tokens, kept sets and alternatives to the bit; log-probs within their normalizer's
    rounding."""
    assert found.tokens.tolist() == whole.tokens.tolist()
    for name in ("kept", "best_ids"):
        ours, theirs = getattr(found, name), getattr(whole, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or np.array_equal(ours, theirs), name
    for name in ("logprobs", "raw_logprobs", "best_logprobs"):
        ours, theirs = getattr(found, name), getattr(whole, name)
        if ours is not None:
            assert ours.dtype == theirs.dtype
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=5e-6, err_msg=name)


def check_examples(pool: RankPool, examples: int) -> None:
    @settings(max_examples=examples, derandomize=True)
    @given(
        seed=st.integers(0, 2**32 - 1),
        vocab=st.sampled_from([5, 13, 24, 53, 301, 1202]),
        asked=ROWS,
        spread=st.sampled_from([0.01, 2.0, 8.0]),
        grid=st.sampled_from([0.0, 0.5]),
        banned=st.sampled_from([0.0, 0.3, 0.95]),
    )
    def choose_alike(seed, vocab, asked, spread, grid, banned) -> None:
        generator = np.random.default_rng(seed)
        asks = asks_of(asked, vocab, generator)
        logits_NV = logits_of(generator, (len(asks), vocab), spread, grid, banned)
        uniform_N = generator.random(len(asks))
        whole = Chosen.of(choose_many(logits_NV, asks, uniform_N))
        results = pool.run(chosen_by_ranks, logits_NV, asks, uniform_N)
        first, widened, _ = results[0]
        for found, its_widened, _ in results:
            assert found.bits() == first.bits() and its_widened == widened
        assert_same_choice(first, whole)
        assert not widened or vocab > 256

    choose_alike()


def test_two_ranks_choose_what_one_does(pair: RankPool) -> None:
    check_examples(pair, 120)


def test_four_ranks_choose_what_one_does(ranks: RankPool) -> None:
    check_examples(ranks, 60)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1), vocab=st.sampled_from([5, 24, 301]), asked=ROWS,
    grid=st.sampled_from([0.0, 0.5]),
)  # fmt: skip
def test_a_shard_that_is_the_whole_chooses_as_without(seed, vocab, asked, grid) -> None:
    generator = np.random.default_rng(seed)
    asks = asks_of(asked, vocab, generator)
    logits_NV = logits_of(generator, (len(asks), vocab), 2.0, grid, 0.3)
    uniform_N = generator.random(len(asks))
    found, _, sent = chosen_by_ranks(alone(), logits_NV, asks, uniform_N)
    assert_same_choice(found, Chosen.of(choose_many(logits_NV, asks, uniform_N)))
    assert not sent


def test_padding_is_never_chosen(ranks: RankPool) -> None:
    """Five tokens on four ranks: two, two, one and none. All real ones are barred but one, or tie;
    the last draw there is lies at the very end."""
    everything = Sampling(temperature=1.0, top_logprobs=5, top_p=0.999, top_k=5)
    for last, s in [(1.0 - 2.0**-40, everything), (0.0, everything), (0.5, Sampling())]:
        for barred in ([], [0, 1, 2, 3], [1, 2, 3, 4]):
            logits_NV = np.full((1, 5), -40.0, np.float32)
            logits_NV[:, barred] = -np.inf
            asks: list[Ask] = [(s, [1], [], [])]
            whole = Chosen.of(choose_many(logits_NV, asks, np.full(1, last)))
            for found, _, _ in ranks.run(chosen_by_ranks, logits_NV, asks, np.full(1, last)):
                assert_same_choice(found, whole)
                assert found.best_ids is None or sorted(found.best_ids[0].tolist()) == [*range(5)]


def test_ties_go_to_the_lowest_id_across_ranks(ranks: RankPool) -> None:
    """Greedy tokens, alternatives, and the last places that truncation has."""
    logits_NV = np.zeros((3, 11), np.float32)
    logits_NV[1, [2, 4, 7, 10]] = 3.0
    logits_NV[2, 4:] = 1.0
    asks: list[Ask] = [
        (Sampling(temperature=0.0, top_logprobs=5), [1], [], []),
        (Sampling(temperature=0.0, top_logprobs=5), [1], [], []),
        (Sampling(temperature=1.0, top_k=3, top_logprobs=5), [1], [], []),
    ]
    for found, _, _ in ranks.run(chosen_by_ranks, logits_NV, asks, np.full(3, 0.99)):
        assert found.tokens.tolist() == [0, 2, 6]
        assert found.best_ids is not None and found.kept is not None
        assert found.best_ids.tolist() == [[0, 1, 2, 3, 4], [2, 4, 7, 10, 0], [4, 5, 6, 7, 8]]
        assert np.flatnonzero(found.kept[0]).tolist() == [4, 5, 6]


@pytest.mark.parametrize("s", [Sampling(top_p=0.97), Sampling(min_p=0.9), Sampling(top_k=700)])
def test_flat_rows_take_the_exact_path_on_all_ranks(pair: RankPool, s: Sampling) -> None:
    """More is kept than candidates are looked at. Peaked rows do not, and top_k says itself how many
    are enough. There are more rows than are looked at together."""
    vocab, rows, uniform_N = 3001, 70, np.linspace(0.0, 0.99, 70)
    generator = np.random.default_rng(1)
    flat_NV = (generator.normal(size=(rows, vocab)) * 0.01).astype(np.float32)
    peaked_NV = (generator.normal(size=(rows, vocab)) * 8).astype(np.float32)
    for logits_NV, wide in ((flat_NV, s.top_k == 0), (peaked_NV, False)):
        asks: list[Ask] = [(s, [1], [], [])] * rows
        whole = Chosen.of(choose_many(logits_NV, asks, uniform_N))
        for found, widened, _ in pair.run(chosen_by_ranks, logits_NV, asks, uniform_N):
            assert widened == ([rows] if wide else [])
            assert_same_choice(found, whole)


def test_wide_truncation_is_told_at_each_doubling_with_all_since() -> None:
    told: list[tuple[str, int]] = []
    sampler = ShardSampler(
        VocabularyShard(group=alone(), vocab_size=900),
        lambda kind, **fields: told.append((kind, fields["count"])),
    )
    rules = make_rules(
        np.ones(1, np.float32), np.zeros(1, np.int64), np.full(1, 0.9), np.zeros(1),
        np.ones(1, bool), vocab_size=900, device=torch.device("cpu"),
    )  # fmt: skip
    for _ in range(9):
        sampler.choose(torch.zeros(1, 900), rules, torch.zeros(1, dtype=torch.float64))
    assert told == [("engine.wide_truncation", count) for count in (1, 1, 2, 4)]


def test_seeds_draw_what_they_draw_on_one_rank(pair: RankPool) -> None:
    """Many draws of one distribution: token by token those of one rank, and as frequent as they
    are probable."""
    vocab, draws = 37, 4000
    logits_V = (np.random.default_rng(3).normal(size=vocab) * 1.5).astype(np.float32)
    keys = np.asarray([draw_key(seed, 0) for seed in range(draws)], np.uint64)
    uniform_N = uniforms(keys, np.arange(draws))
    logits_NV, asks = np.tile(logits_V, (draws, 1)), [(Sampling(), [1], [], [])] * draws
    whole = Chosen.of(choose_many(logits_NV, asks, uniform_N))
    found = pair.run(chosen_by_ranks, logits_NV, asks, uniform_N)[0][0]
    assert_same_choice(found, whole)
    exact = np.exp(logits_V.astype(np.float64))
    expected = exact / exact.sum() * draws
    counts = np.bincount(found.tokens, minlength=vocab)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < (vocab - 1) + 4 * np.sqrt(2 * (vocab - 1)) + 14


def test_what_is_kept_and_penalized_equals_transformers(pair: RankPool) -> None:
    """Its warpers on whole logits, in the same order: repetition, temperature, top-k, top-p; and
    min-p alone. It keeps all tokens that tie at an edge, so there are no ties here."""
    vocab, rows = 211, 4
    generator = np.random.default_rng(5)
    logits_NV = (generator.normal(size=(rows, vocab)) * 3).astype(np.float32)
    prompts = [generator.integers(0, vocab, 12).tolist() for _ in range(rows)]
    uniform_N = generator.random(rows)
    for s in (
        Sampling(temperature=0.7, top_k=30, top_p=0.9, repetition_penalty=1.4),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(temperature=1.0, min_p=0.02),
    ):
        whole = torch.from_numpy(logits_NV.copy())
        ids = torch.tensor(prompts)
        for process in (
            transformers.RepetitionPenaltyLogitsProcessor(s.repetition_penalty),
            transformers.TemperatureLogitsWarper(s.temperature),
            *([transformers.TopKLogitsWarper(s.top_k)] if s.top_k else []),
            *([transformers.TopPLogitsWarper(s.top_p)] if s.top_p < 1 else []),
            *([transformers.MinPLogitsWarper(s.min_p)] if s.min_p else []),
        ):
            whole = torch.as_tensor(process(ids, whole))
        theirs = whole.double().log_softmax(dim=-1).numpy()
        asks: list[Ask] = [(s, prompt, [], []) for prompt in prompts]
        for found, _, _ in pair.run(chosen_by_ranks, logits_NV, asks, uniform_N):
            assert found.kept is not None
            assert np.array_equal(found.kept, theirs > -np.inf)
            np.testing.assert_allclose(
                found.logprobs, theirs[np.arange(rows), found.tokens], atol=2e-5
            )


@pytest.mark.parametrize("best", [0, 1, 4])
def test_prompts_are_scored_as_on_one_rank(ranks: RankPool, best: int) -> None:
    generator = np.random.default_rng(best)
    for vocab in (5, 53):
        logits_NV = logits_of(generator, (7, vocab), 2.0, 0.5, 0.0)
        targets_N = generator.integers(0, vocab, 7)
        whole = scored_by_ranks(alone(), logits_NV, targets_N, best, whole=True)
        results = ranks.run(scored_by_ranks, logits_NV, targets_N, best)
        for found in results:
            assert found.tobytes() == results[0].tobytes()
            assert np.array_equal(found[:, 1 : 1 + best], whole[:, 1 : 1 + best])
            np.testing.assert_allclose(found, whole, atol=2e-6)


def test_a_row_without_numbers_harms_no_other(pair: RankPool) -> None:
    logits_NV = np.random.default_rng(0).normal(size=(4, 31)).astype(np.float32)
    uniform_N = np.full(4, 0.4)
    for s in (
        Sampling(presence_penalty=1.0, min_tokens=2, top_k=5, top_p=0.9, top_logprobs=3),
        Sampling(temperature=0.0),
        Sampling(),
    ):
        asks: list[Ask] = [(s, [1, 2], [3], [9])] * 4
        sound = pair.run(chosen_by_ranks, logits_NV, asks, uniform_N)[0][0]
        for fault, columns in [(np.nan, slice(None)), (np.nan, 20), (np.inf, 3), (-np.inf, ...)]:
            broken_NV = logits_NV.copy()
            broken_NV[2, columns] = fault
            (found, *_), (second, *_) = pair.run(chosen_by_ranks, broken_NV, asks, uniform_N)
            others = [0, 1, 3]
            assert found.bits() == second.bits()
            assert found.tokens[others].tolist() == sound.tokens[others].tolist()
            assert found.logprobs[others].tolist() == sound.logprobs[others].tolist()
            assert not np.isfinite(found.raw_logprobs[2]) and 0 <= found.tokens[2] < 31


def sent_for(pool: RankPool, vocab: int, s: Sampling, rows: int = 3) -> int:
    logits_NV = np.random.default_rng(0).normal(size=(rows, vocab)).astype(np.float32) * 9
    asks: list[Ask] = [(s, [1], [], [])] * rows
    sent = pool.run(chosen_by_ranks, logits_NV, asks, np.full(rows, 0.3))[0][2]
    assert sent.keys() == {"all_gather"}
    return sent["all_gather"]


def test_what_is_sent_does_not_grow_with_the_vocabulary(pair: RankPool) -> None:
    """Of three rows, to one other rank: 4 float64 for the best, 1 for the mass, 3 for the token.
    Truncation adds its candidates and one bit per token."""
    for vocab in (600, 5000):
        assert sent_for(pair, vocab, Sampling(temperature=0.0)) == 3 * 8 * 4
        assert sent_for(pair, vocab, Sampling()) == 3 * 8 * 8
        marks = -(-vocab // 2 // 8)
        truncated = 3 * (8 * 8 + 4 * 256 + 8 + 16 + marks)
        assert sent_for(pair, vocab, Sampling(top_p=0.9)) == truncated


def captured_by_ranks(group: RankGroup, logits_NV: np.ndarray, asks: list[Ask]) -> dict[str, int]:
    """Bytes of the collectives that a capture would record."""
    shard = VocabularyShard(group=group, vocab_size=logits_NV.shape[1])
    group.traffic.take()
    with group.capturing() as captured:
        choose_many(logits_NV, asks, np.full(len(asks), 0.3), shard=shard)
    assert not group.traffic.take().bytes_by_kind, "nothing is counted while a graph is captured"
    return captured.bytes_by_kind


def test_all_exchanges_may_be_captured(pair: RankPool) -> None:
    s = Sampling(top_p=0.9, repetition_penalty=1.3, top_logprobs=2)
    logits_NV = np.random.default_rng(0).normal(size=(2, 60)).astype(np.float32)
    asks: list[Ask] = [(s, [1], [2], [])] * 2
    sent = pair.run(chosen_by_ranks, logits_NV, asks, np.full(2, 0.3))[0][2]
    assert pair.run(captured_by_ranks, logits_NV, asks) == [sent, sent]


def test_a_choice_looks_at_no_value(monkeypatch) -> None:
    """On the meta device there are no values: reading one on the host fails. This is the way that
    CUDA takes, by digits."""
    monkeypatch.setattr(
        "gyre.engine.sampling.shard_truncation.keep_by_shared_candidates", lambda *given: None
    )
    s = Sampling(
        temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2,
        frequency_penalty=0.1, logit_bias=((5, 2.0),), top_logprobs=7,
    )  # fmt: skip
    shard = VocabularyShard(group=alone(META), vocab_size=5000)
    asks: list[Ask] = [(s, [1, 2], [3], [9])] * 3
    choice = choose_many(
        np.zeros((3, 5000), np.float32), asks, np.zeros(3), shard=shard, device=META
    )
    assert choice.tokens_N.shape == (3,) and choice.best is not None
    assert choice.kept_MV is not None and choice.kept_MV.shape == (3, 5000)
