"""Penalties, bias and min_tokens: against transformers and plain numpy; exact distributions under
every combination."""

# N rows, V vocabulary

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from choice_cases import choose_many, column
from gyre.core.records import Request, Sampling
from gyre.engine.sampling.logits_processors import Past, penalize
from gyre.engine.sampling.logprobs import find_best
from gyre.engine.scheduler.random import draw_key, uniforms
from sampling_cases import VOCAB, Events, Letters, answer_all, save_tiny, some_tokens, with_engine


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3")


def shape_by_definition(
    logits_V: np.ndarray, s: Sampling, prompt: list[int], chosen: list[int], stops
) -> np.ndarray:
    """One row, one token at a time, in the stated order."""
    shaped = logits_V.astype(np.float64).copy()
    if len(chosen) < s.min_tokens:
        shaped[list(stops)] = -np.inf
    for token, value in s.logit_bias:
        shaped[token] += value
    for token in range(len(shaped)):
        if token in prompt or token in chosen:
            shaped[token] *= (
                s.repetition_penalty if shaped[token] <= 0 else 1 / s.repetition_penalty
            )
        times = chosen.count(token)
        shaped[token] -= s.frequency_penalty * times + s.presence_penalty * (times > 0)
    return shaped


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), penalty=st.sampled_from([0.5, 0.9, 1.0, 1.3, 4.0]))
def test_repetition_equals_transformers(seed, penalty) -> None:
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy(generator.normal(size=(3, 40)).astype(np.float32)) * 4
    ids = torch.from_numpy(generator.integers(0, 40, (3, 12)))
    ours = penalize(
        logits,
        Past(
            ids_LW=ids.int(),
            prompt_L1=column([5] * 3, torch.int64),
            length_L1=column([12] * 3, torch.int64),
        ),
        repetition_L1=column([penalty] * 3),
        frequency_L1=column([0.0] * 3),
        presence_L1=column([0.0] * 3),
    )
    theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    torch.testing.assert_close(ours, torch.as_tensor(theirs), rtol=1e-6, atol=0)


def test_bias_and_min_tokens_equal_transformers() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    biased = transformers.SequenceBiasLogitsProcessor([[[3], 5.0], [[9], -7.5]])(
        torch.tensor([[1, 2]]), logits.clone()
    )
    s = Sampling(temperature=0.0, logit_bias=((3, 5.0), (9, -7.5)))
    assert (
        choose_many(logits.numpy(), [(s, [1, 2], [], [])], np.zeros(1)).tokens_N[0]
        == torch.as_tensor(biased).argmax()
    )
    stop = int(logits.argmax())
    barred = transformers.MinNewTokensLengthLogitsProcessor(2, 3, stop, device="cpu")
    for chosen in ([], [5, 5], [5, 5, 5]):
        ids = torch.tensor([[1, 2, *chosen]])
        theirs = torch.as_tensor(barred(ids, logits.clone())).argmax()
        s = Sampling(temperature=0.0, min_tokens=3)
        assert (
            choose_many(logits.numpy(), [(s, [1, 2], chosen, [stop])], np.zeros(1)).tokens_N[0]
            == theirs
        )


RULES = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 3, 20]),
    top_p=st.sampled_from([0.6, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 1.1]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.5]),
    min_tokens=st.sampled_from([0, 2]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (11, -100.0))]),
    top_logprobs=st.sampled_from([0, 1, 5]),
)


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32 - 1), asked=st.lists(RULES, min_size=1, max_size=7))
def test_each_row_follows_its_rules_whoever_stands_beside_it(seed, asked) -> None:
    generator, vocab = np.random.default_rng(seed), 24
    logits_NV = (generator.normal(size=(len(asked), vocab)) * 2).astype(np.float32)
    asks = [
        (
            s,
            *(generator.integers(0, vocab, generator.integers(low, 6)).tolist() for low in (1, 0)),
            [0, 1],
        )
        for s in asked
    ]
    uniform_N = generator.random(len(asked))
    together = choose_many(logits_NV, asks, uniform_N)
    told = iter(range(len(asked)))
    for row, ask in enumerate(asks):
        alone = choose_many(logits_NV[row : row + 1], [ask], uniform_N[row : row + 1])
        token = int(together.tokens_N[row])
        assert token == int(alone.tokens_N[0])
        assert float(together.logprobs_N[row]) == float(alone.logprobs_N[0])
        s, raw = ask[0], logits_NV[row].astype(np.float64)
        raw_logprobs = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
        assert float(together.raw_logprobs_N[row]) == pytest.approx(raw_logprobs[token], abs=2e-5)
        shaped = shape_by_definition(logits_NV[row], *ask)
        if s.temperature == 0.0:
            assert (
                shaped[token] == pytest.approx(shaped.max(), abs=1e-4)
                and float(together.logprobs_N[row]) == 0.0
            )
        elif s.top_k == 0 and s.top_p == 1.0 and s.min_p == 0.0:
            scaled = shaped / s.temperature
            exact = scaled[token] - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
            assert float(together.logprobs_N[row]) == pytest.approx(exact, abs=1e-4)
        if s.top_logprobs:
            place = next(told)
            assert together.best is not None
            best = np.lexsort((np.arange(vocab), -logits_NV[row]))[: s.top_logprobs]
            assert together.best.ids_NK[place, : s.top_logprobs].tolist() == best.tolist()
            got = together.best.logprobs_NK[place, : s.top_logprobs].numpy()
            np.testing.assert_allclose(got, raw_logprobs[best], atol=2e-5)


def test_alternatives_that_tie_stand_by_id() -> None:
    logits_NV = torch.tensor(
        [[1.0, 2.0, 2.0, -0.0, 0.0, 2.0], [0.0] * 6, [-1.0, -2.0, -1.0, -3.0, -1.0, -9.0]]
    )
    best = find_best(logits_NV, 5, rows_at_once=2)
    assert best.ids_NK.tolist() == [[1, 2, 5, 0, 3], [0, 1, 2, 3, 4], [0, 2, 4, 1, 3]]


COMBINED = [
    Sampling(presence_penalty=1.0, frequency_penalty=0.5),
    Sampling(repetition_penalty=1.4, temperature=0.7),
    Sampling(logit_bias=((2, 3.0), (5, -100.0)), top_k=6),
    Sampling(min_tokens=9, top_p=0.85),
    Sampling(
        repetition_penalty=0.8,
        presence_penalty=-0.4,
        frequency_penalty=0.3,
        logit_bias=((1, 1.5),),
        min_tokens=9,
        temperature=1.3,
        min_p=0.03,
        top_k=9,
        top_p=0.9,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("s", COMBINED, ids=range(len(COMBINED)))
def test_frequencies_match_the_exact_probabilities(s: Sampling) -> None:
    """Chi-square over many draws under each combination; far beyond its degrees of freedom
    fails."""
    vocab, draws = 16, 30_000
    logits_V = (np.random.default_rng(5).normal(size=vocab) * 1.5).astype(np.float32)
    ask = (s, [1, 2, 3, 3], [4, 4, 5], [0, 6])
    scaled = shape_by_definition(logits_V, *ask) / s.temperature
    order = [
        t for t in np.argsort(-scaled, kind="stable") if np.exp(scaled[t] - scaled.max()) >= s.min_p
    ]
    order = [t for t in order if scaled[t] > -np.inf][: s.top_k or vocab]
    weights = np.exp(scaled[order] - scaled.max())
    kept = np.asarray(order)[(np.cumsum(weights) - weights) < s.top_p * weights.sum()]
    exact = np.zeros(vocab)
    exact[kept] = np.exp(scaled[kept] - scaled.max())
    exact /= exact.sum()
    keys = np.asarray([draw_key(seed, 0) for seed in range(draws // 100)], np.uint64).repeat(100)
    uniform_N = uniforms(keys, np.tile(np.arange(100), draws // 100))
    choice = choose_many(np.tile(logits_V, (draws, 1)), [ask] * draws, uniform_N)
    counts = np.bincount(choice.tokens_N.numpy(), minlength=vocab)
    assert counts[exact == 0].sum() == 0
    expected = exact[exact > 1e-6] * draws
    chi_square = ((counts[exact > 1e-6] - expected) ** 2 / expected).sum()
    assert chi_square < len(expected) + 4 * np.sqrt(2 * len(expected)) + 14
    np.testing.assert_allclose(
        choice.logprobs_N.numpy()[:50], np.log(exact[choice.tokens_N.numpy()[:50]]), atol=1e-4
    )


def test_a_row_without_numbers_harms_no_other() -> None:
    logits_NV = np.random.default_rng(0).normal(size=(4, 30)).astype(np.float32)
    s = Sampling(presence_penalty=1.0, min_tokens=2, top_k=5, top_logprobs=3)
    asks = [(s, [1, 2], [3], [9])] * 4
    uniform_N = np.full(4, 0.4)
    sound = choose_many(logits_NV, asks, uniform_N)
    for fault in (np.nan, np.inf, -np.inf):
        broken_NV = logits_NV.copy()
        broken_NV[2] = fault
        choice = choose_many(broken_NV, asks, uniform_N)
        others = [0, 1, 3]
        assert torch.equal(choice.tokens_N[others], sound.tokens_N[others])
        assert torch.equal(choice.logprobs_N[others], sound.logprobs_N[others])
        assert not np.isfinite(float(choice.raw_logprobs_N[2]))


# -- through the engine


def greedy_by_definition(model, tokens: list[int], s: Sampling, stops: list[int]) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < s.max_tokens and not (chosen and chosen[-1] in stops):
        with torch.no_grad():
            logits = model(torch.tensor([[*tokens, *chosen]])).logits[0, -1].numpy()
        chosen.append(int(shape_by_definition(logits, s, tokens, chosen, stops).argmax()))
    return chosen


SCARCE = {"num_pages": 22, "page_tokens": 4, "max_running": 6, "token_budget": 20}
SHAPED = [
    {"repetition_penalty": 1.7},
    {"frequency_penalty": 1.9, "presence_penalty": 0.8},
    {"logit_bias": ((7, 30.0),), "frequency_penalty": 2.0},
    {"repetition_penalty": 2.0, "presence_penalty": -1.0, "min_tokens": 6},
    {},
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "config", [{}, SCARCE, {**SCARCE, "kv_host_bytes": 10**6, "prefill_tokens_per_s": 1.0}]
)
def test_penalized_greedy_equals_the_definition_through_batching_and_preemption(
    qwen3, config, overlap
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    requests = [
        Request(
            request_id=f"r{i}",
            tokens=some_tokens(5 + 3 * i, seed=i),
            sampling=Sampling(
                temperature=0.0, max_tokens=20, stop_ids=(50, 60), **SHAPED[i % len(SHAPED)]
            ),
            chunk_tokens=0,
        )
        for i in range(8)
    ]
    expected = [
        greedy_by_definition(model, r.tokens.tolist(), r.sampling, [50, 60]) for r in requests
    ]
    events = Events()
    results = with_engine(
        qwen3, lambda engine: answer_all(engine, requests), events=events, overlap=overlap, **config
    )
    assert bool(events.of("engine.preempted")) == bool(config)
    assert [parts[0].tokens.tolist() for parts in results] == expected


def test_the_same_request_and_seed_give_the_same_tokens_in_any_batch(qwen3) -> None:
    def request(i: int) -> Request:
        rules = dict(
            SHAPED[i % len(SHAPED)], top_p=0.9, temperature=1.2, top_logprobs=i % 4, n=1 + i % 3
        )
        return Request(
            request_id=f"r{i}",
            tokens=some_tokens(4 + i, seed=i),
            sampling=Sampling(max_tokens=16, **rules),
            seed=i,
            chunk_tokens=i % 5,
        )

    requests = [request(i) for i in range(9)]
    together = with_engine(qwen3, lambda engine: answer_all(engine, requests))
    scarce = {"num_pages": 30, "page_tokens": 4, "max_running": 5, "token_budget": 12}
    preempted = with_engine(qwen3, lambda engine: answer_all(engine, requests), **scarce)
    for i, request in enumerate(requests):
        [alone] = with_engine(qwen3, lambda engine, request=request: answer_all(engine, [request]))
        for a, b, c in zip(alone, together[i], preempted[i], strict=True):
            assert a.tokens.tolist() == b.tokens.tolist() == c.tokens.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
            if request.sampling.top_logprobs:
                assert (
                    a.top_ids is not None and b.top_ids is not None and a.top_logprobs is not None
                )
                assert a.top_ids.shape == (len(a.tokens), request.sampling.top_logprobs)
                assert (a.top_ids == b.top_ids).mean() > 0.99
                first = np.asarray(
                    [best == token for best, token in zip(a.top_ids[:, 0], a.tokens, strict=True)]
                )
                np.testing.assert_allclose(
                    a.top_logprobs[first, 0], a.raw_logprobs[first], atol=1e-5
                )
            else:
                assert a.top_ids is None and a.top_logprobs is None


def test_stop_strings_wait_for_min_tokens(qwen3) -> None:
    tokens = some_tokens(9, seed=4)
    letters = Letters()

    def ask(**fields) -> Request:
        sampling = Sampling(temperature=0.0, max_tokens=30, ignore_eos=True, **fields)
        return Request(request_id=str(fields), tokens=tokens, sampling=sampling)

    def run(**fields) -> list[int]:
        results = with_engine(
            qwen3, lambda engine: answer_all(engine, [ask(**fields)]), tokenizer=letters
        )
        return results[0][0].tokens.tolist()

    free = run(logit_bias=((40, 9.0), (41, 8.0)))
    bias = ((40, 9.0), (41, 8.0))
    stop = letters.decode(free[3:5])
    ends = [at for at in range(2, 31) if letters.decode(free[at - 2 : at]) == stop]
    for least in (0, 4, 5, 12, 29):
        got = run(stop=(stop,), min_tokens=least, logit_bias=bias)
        assert len(got) == next((end for end in ends if end > least), 30)
        assert got == free[: len(got)]


def test_no_stop_id_comes_before_min_tokens(qwen3) -> None:
    sampling = Sampling(
        temperature=2.0, max_tokens=12, min_tokens=5, stop_ids=tuple(range(40)), n=16
    )
    request = Request(request_id="r", tokens=some_tokens(6, seed=1), sampling=sampling)
    [parts] = with_engine(qwen3, lambda engine: answer_all(engine, [request]))
    assert all(len(part.tokens) > 5 and (part.tokens[:5] >= 40).all() for part in parts)
    assert any(part.finish == "stop" for part in parts) and VOCAB > 100
