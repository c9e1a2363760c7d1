"""Prompt log-probs: equal to transformers, whatever the chunks, hits, preemption and versions; kept
within a bound."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.chunks import collect
from gyre.core.records import Partial, PromptLogprobs, Request, Sampling
from gyre.engine.kv_cache.prompt_logprobs import (
    BlockScores,
    PromptLogprobStore,
    PromptSlice,
    ScoreStore,
    load_known,
    usable_pages,
)
from gyre.engine.sampling.logprobs import score_targets
from gyre.engine.scheduler.sequence import sequences_of
from gyre.models.hub.load import load_hub
from offers import offer_of
from sampling_cases import CPU, VOCAB, Events, answer_all, save_tiny, some_tokens, with_engine


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request, tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("only"), "qwen3")


def ask(name: str, tokens: np.ndarray, best: int | None = 3, **fields) -> Request:
    sampling = Sampling(
        temperature=0.0, max_tokens=fields.pop("max_tokens", 4), prompt_logprobs=best, **fields
    )
    return Request(request_id=name, tokens=tokens, sampling=sampling)


def exact(folder, tokens: np.ndarray) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return (
            model(torch.from_numpy(tokens)[None].long())
            .logits[0]
            .double()
            .log_softmax(dim=-1)
            .numpy()
        )


def check(
    folder, tokens: np.ndarray, got: PromptLogprobs | None, best: int, version: int = 3
) -> None:
    assert got is not None
    logprobs_PV = exact(folder, tokens)
    assert got.logprobs[0] == 0.0 and got.versions[0] == -1 and (got.versions[1:] == version).all()
    np.testing.assert_allclose(
        got.logprobs[1:], logprobs_PV[np.arange(len(tokens) - 1), tokens[1:]], atol=2e-4
    )
    assert got.top_ids.shape == got.top_logprobs.shape == (len(tokens), best)
    order = np.argsort(-logprobs_PV[:-1], axis=1, kind="stable")[:, :best]
    np.testing.assert_allclose(
        got.top_logprobs[1:], np.take_along_axis(logprobs_PV[:-1], order, 1), atol=2e-4
    )
    assert (got.top_ids[1:] == order).mean() > 0.98 if best else True


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "config", [{}, {"token_budget": 16, "rows_at_once": 1}, {"rows_at_once": 5, "page_tokens": 4}]
)
def test_they_equal_transformers_whatever_the_chunks(folder, config, overlap) -> None:
    prompts = [some_tokens(length, seed=length) for length in (1, 2, 7, 8, 9, 40, 65)]
    requests = [ask(f"r{i}", tokens, best=i % 4) for i, tokens in enumerate(prompts)]
    requests.append(ask("silent", prompts[3], best=None))
    results = with_engine(
        folder, lambda engine: answer_all(engine, requests), overlap=overlap, **config
    )
    for i, tokens in enumerate(prompts):
        check(folder, tokens, results[i][0].prompt_logprobs, i % 4)
    assert results[-1][0].prompt_logprobs is None


def test_they_come_once_with_the_first_tokens(qwen3) -> None:
    async def use(engine):
        return [
            chunk async for chunk in engine.submit(ask("r", some_tokens(20, 0), max_tokens=6, n=3))
        ]

    for config in ({}, {"max_running": 2}):
        chunks = with_engine(qwen3, use, **config)
        for index in range(3):
            mine = [chunk for chunk in chunks if chunk.index == index]
            assert mine[0].prompt_logprobs is not None and len(mine[0].tokens)
            assert all(chunk.prompt_logprobs is None for chunk in mine[1:])
            check(qwen3, some_tokens(20, 0), mine[0].prompt_logprobs, 3)


def test_completions_of_one_prompt_share_its_book_and_tell_the_same(qwen3) -> None:
    """Two rows at a time and one launch ahead: those that wait go on with a book that others
    fill."""
    tokens = some_tokens(40, 0)
    request = ask("r", tokens, max_tokens=3, n=9)
    assert (
        len(
            {id(sequence.prompt_store) for sequence in sequences_of(request, arrival=0, eos_ids=())}
        )
        == 1
    )
    for overlap in (False, True):
        for budget, prefix_cache in ((7, False), (64, True)):
            config = {
                "max_running": 2,
                "token_budget": budget,
                "prefix_cache": prefix_cache,
                "overlap": overlap,
            }
            [parts] = with_engine(qwen3, lambda engine: answer_all(engine, [request]), **config)
            for part in parts:
                check(qwen3, tokens, part.prompt_logprobs, 3)


@pytest.mark.parametrize("kept", [2**20, 0, 400])
def test_prefix_hits_reuse_what_is_kept_and_recompute_the_rest(qwen3, kept) -> None:
    base = some_tokens(50, seed=7)
    longer = np.concatenate([base, some_tokens(13, seed=8)])
    forked = np.concatenate([base[:37], some_tokens(20, seed=9)])
    events = Events()

    async def use(engine):
        results, computed = [], []
        for name, tokens, best in [
            ("first", base, 3),
            ("again", base, 3),
            ("fewer", base, 1),
            ("longer", longer, 2),
            ("forked", forked, 3),
            ("more", base, 5),
            ("more again", longer, 5),
        ]:
            before = (await engine.stats()).prefix_hit_tokens
            [[answer]] = await answer_all(engine, [ask(name, tokens, best)])
            computed.append((await engine.stats()).prefix_hit_tokens - before)
            results.append((tokens, best, answer.prompt_logprobs))
        assert engine.core.state.pages.prefix.scores.num_bytes <= kept
        return results, computed

    results, hits = with_engine(qwen3, use, events=events, prompt_logprob_bytes=kept)
    for tokens, best, got in results:
        check(qwen3, tokens, got, best)
    if kept == 2**20:
        # 50 tokens are 6 whole pages of 8; the last kept page gives the next one's first target, so
        # 5 are shared.
        assert hits == [0, 40, 40, 40, 24, 0, 40]
    else:
        assert sum(hits) < 200 and events.of("engine.hits_recomputed")


def test_a_hit_left_by_who_did_not_ask_is_computed_again(qwen3) -> None:
    base = some_tokens(50, seed=7)
    events = Events()

    async def use(engine):
        await answer_all(engine, [ask("plain", base, None)])
        return await answer_all(engine, [ask("asking", base, 2)])

    [[answer]] = with_engine(qwen3, use, events=events)
    check(qwen3, base, answer.prompt_logprobs, 2)
    assert events.of("engine.hits_recomputed")[0]["pages"] == 6


def test_preemption_changes_nothing(qwen3) -> None:
    prompts = [some_tokens(20 + 5 * i, seed=i) for i in range(7)]
    requests = [
        replace(ask(f"r{i}", tokens, i % 3, max_tokens=25, n=1 + i % 2), chunk_tokens=i % 2)
        for i, tokens in enumerate(prompts)
    ]
    events = Events()
    scarce = {"num_pages": 34, "page_tokens": 4, "max_running": 6, "token_budget": 16}
    for overlap, host in [(False, 0), (True, 0), (False, 10**6), (True, 10**6)]:
        results = with_engine(
            qwen3,
            lambda engine: answer_all(engine, requests),
            events=events,
            overlap=overlap,
            kv_host_bytes=host,
            prefill_tokens_per_s=1.0,  # so slow that swapping is always cheaper
            **scarce,
        )
        for i, (tokens, parts) in enumerate(zip(prompts, results, strict=True)):
            for part in parts:
                check(qwen3, tokens, part.prompt_logprobs, i % 3)
    assert {fields["way"] for fields in events.of("engine.preempted")} == {"swap", "recompute"}


@pytest.mark.parametrize("policy", ["drain", "keep_prefix", "continue"])
def test_new_weights_never_meet_old_entries(qwen3, tmp_path, policy) -> None:
    """After a commit the same prompt is answered under the new weights, and says so."""
    torch.manual_seed(1)
    other = transformers.AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    other.save_pretrained(tmp_path)
    tokens = some_tokens(50, seed=7)
    _, decoder = load_hub(tmp_path, device=CPU, dtype=torch.float32)
    tensors = {name: parameter.detach() for name, parameter in decoder.named_parameters()}

    async def use(engine):
        [[old]] = await answer_all(engine, [ask("old", tokens)])
        await engine.prepare(offer_of(4, tensors, checksums=True))
        flying = engine.submit(
            replace(ask("flying", some_tokens(60, 5), max_tokens=30), chunk_tokens=0)
        )
        await asyncio.sleep(0.01)
        await engine.commit(4, policy=policy)
        [flown] = await collect(flying)
        [[new], [again]] = [
            *await answer_all(engine, [ask("new", tokens)]),
            *await answer_all(engine, [ask("x", tokens)]),
        ]
        return old, flown, new, again

    old, flown, new, again = with_engine(qwen3, use, token_budget=16, shared_weights=False)
    check(qwen3, tokens, old.prompt_logprobs, 3)
    check(tmp_path, tokens, new.prompt_logprobs, 3, version=4)
    check(tmp_path, tokens, again.prompt_logprobs, 3, version=4)
    got = flown.prompt_logprobs
    assert got is not None and set(got.versions[1:].tolist()) <= {3, 4}
    if policy != "continue":
        folder = qwen3 if got.versions[1] == 3 else tmp_path
        check(folder, some_tokens(60, 5), got, 3, version=int(got.versions[1]))


def test_tenants_share_no_entries(qwen3) -> None:
    tokens = some_tokens(50, seed=7)

    async def use(engine):
        await answer_all(engine, [replace(ask("a", tokens), tenant_salt="a")])
        before = (await engine.stats()).prefix_hit_tokens
        [[answer]] = await answer_all(engine, [replace(ask("b", tokens), tenant_salt="b")])
        assert (await engine.stats()).prefix_hit_tokens == before
        return answer

    check(qwen3, tokens, with_engine(qwen3, use).prompt_logprobs, 3)


def test_entries_leave_with_their_page(qwen3) -> None:
    async def use(engine):
        prefix = engine.core.state.pages.prefix
        for i in range(12):
            await answer_all(engine, [ask(f"r{i}", some_tokens(60, seed=i))])
            assert 0 < len(prefix.scores) <= len(prefix)
        engine.core.state.pages.drop_cached()
        assert len(prefix.scores) == 0 and prefix.scores.num_bytes == 0

    with_engine(qwen3, use, num_pages=20)


def test_a_prompt_whose_logits_break_ends_only_its_request(qwen3) -> None:
    """One embedding row is unsound: whoever has that token in the prompt ends, the others do
    not."""
    bad = VOCAB - 1
    good, broken = some_tokens(30, 0), np.append(some_tokens(30, 1), [bad, 5, 6]).astype(np.int32)

    async def use(engine):
        with torch.no_grad():
            engine.worker.decoder.embed.weight[bad] = float("nan")
        return await answer_all(
            engine,
            [ask("good", good, None), ask("broken", broken, 2, n=3), ask("next", good, None)],
        )

    _, decoder = load_hub(qwen3, device=CPU, dtype=torch.float32)
    assert decoder.spec.tied
    results = with_engine(qwen3, use, max_running=2)
    assert all(part.finish == "abort" and "non-finite" in part.reason for part in results[1])


def test_unsound_entries_end_a_request_even_when_its_own_token_is_sound(qwen3, monkeypatch) -> None:
    def spoil(hidden_TE, places_N, targets_N, project, *, best, rows_at_once):
        numbers = score_targets(
            hidden_TE, places_N, targets_N, project, best=best, rows_at_once=rows_at_once
        )
        numbers[targets_N == 77, 0] = float("nan")
        return numbers

    monkeypatch.setattr("gyre.engine.sampling.prompt_scoring.score_targets", spoil)
    tokens = np.append(some_tokens(30, 1) % 70, [77, 5, 6]).astype(np.int32)
    requests = [ask("sound", tokens[:30]), ask("spoilt", tokens, n=2), ask("unasked", tokens, None)]

    async def use(engine):
        results = await answer_all(engine, requests)
        assert all(
            np.isfinite(s.logprobs).all()
            for s in engine.core.state.pages.prefix.scores.blocks.values()
        )
        return results

    for overlap in (False, True):
        sound, spoilt, unasked = with_engine(qwen3, use, token_budget=16, overlap=overlap)
        assert [part.finish for part in spoilt] == ["abort"] * 2
        assert [part.finish for part in sound + unasked] == ["length"] * 2


def test_a_continued_completion_is_not_told_again(qwen3) -> None:
    tokens = some_tokens(20, 0)
    begun = Partial(
        index=0,
        tokens=np.asarray([3, 4], np.int32),
        logprobs=np.zeros(2, np.float32),
        raw_logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int32),
    )
    request = replace(ask("r", tokens, n=2, top_logprobs=2), partials=(begun,))
    [[first, second]] = with_engine(qwen3, lambda engine: answer_all(engine, [request]))
    assert (
        first.prompt_logprobs is None
        and first.top_ids is not None
        and first.top_ids.shape == (2, 2)
    )
    check(qwen3, tokens, second.prompt_logprobs, 3)


# -- the book and the store, alone


def test_logits_exist_for_a_bounded_number_of_rows() -> None:
    weight_VE, seen = torch.randn(50, 8), []

    def project(hidden_NE):
        seen.append(len(hidden_NE))
        return hidden_NE @ weight_VE.T

    hidden_TE, places, targets = torch.randn(40, 8), torch.arange(3, 33), torch.arange(30)
    numbers = score_targets(hidden_TE, places, targets, project, best=4, rows_at_once=7)
    assert seen == [7, 7, 7, 7, 2] and numbers.shape == (30, 9)
    whole = score_targets(hidden_TE, places, targets, project, best=4, rows_at_once=100)
    torch.testing.assert_close(numbers, whole, atol=1e-5, rtol=0)


@settings(deadline=None, max_examples=200)
@given(
    length=st.integers(1, 40),
    page_tokens=st.sampled_from([1, 4, 8]),
    stored=st.integers(0, 10),
    hits=st.integers(0, 10),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=40),
)
def test_a_book_ends_whole_whatever_is_kept_hit_and_cut(
    length, page_tokens, stored, hits, chunks
) -> None:
    truth = np.arange(length, dtype=np.float32) - 100
    store, keys = (
        ScoreStore(10**6),
        [bytes([block]) for block in range((length - 1) // page_tokens)],
    )
    for block in range(min(stored, len(keys))):
        span = slice(block * page_tokens, (block + 1) * page_tokens)
        empty = np.zeros((page_tokens, 0))
        store.put(keys[block], BlockScores(logprobs=truth[span], top_ids=empty, top_logprobs=empty))
    book = PromptLogprobStore(length, 0)
    load_known(book, keys, store, page_tokens, version=1)
    at = usable_pages(book, min(hits, len(keys)), page_tokens) * page_tokens
    while at < length:
        count = min(chunks[at % len(chunks)], length - at)
        first, wanted = book.wanted(at, count)
        if wanted:
            assert at < first and first + wanted <= min(at + count + 1, length)
            empty = np.zeros((wanted, 0))
            piece = PromptSlice(
                prompt_store=book,
                first=first,
                logprobs=truth[first : first + wanted],
                top_ids=empty,
                top_logprobs=empty,
            )
            book.enter(piece, 1)
        at += count
    assert book.is_whole
    assert (book.result().logprobs[1:] == truth[1:]).all()


def test_the_store_keeps_its_bound_and_prefers_richer_entries() -> None:
    def scores(best: int) -> BlockScores:
        wide = np.zeros((8, best), np.float32)
        return BlockScores(
            logprobs=np.zeros(8, np.float32), top_ids=wide.astype(np.int32), top_logprobs=wide
        )

    store = ScoreStore(10 * scores(1).num_bytes)
    for block in range(30):
        store.put(bytes([block]), scores(1))
        assert store.num_bytes <= store.max_bytes and store.find(bytes([block]), 1) is not None
    assert len(store) == 10 and store.find(bytes([0]), 0) is None
    store.put(bytes([29]), scores(4))
    assert store.find(bytes([29]), 4) is not None and store.num_bytes <= store.max_bytes
    store.put(bytes([29]), scores(0))
    assert store.find(bytes([29]), 4) is not None
    store.put(b"wide", scores(500))
    assert store.num_bytes <= store.max_bytes and store.find(b"wide", 0) is None
