"""Collecting from the real engine: set aside and continued, interrupted and used again."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from fakes.scorer import TableScorer
from gyre.core.records import Sampling
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.loop.collect import Collector, InFlightGroup, RequestRules, open_groups, split_whole
from gyre.loop.evaluate import EVALUATION
from gyre.loop.scoring import Scoring
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.spec import ModelSpec
from loop_cases import TOKENIZER, TRAIN, interrupt_when, run
from trainer_cases import CPU

SPEC = ModelSpec(
    family="qwen3",
    vocab_size=TOKENIZER.vocab_size,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    mlp_size=48,
    tied=True,
    context_tokens=256,
    rope_theta=10_000.0,
    rope_scaling=None,
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=True,
    bos_id=None,
    eos_ids=TOKENIZER.eos_ids,
)


def silent(kind: str, **fields: object) -> None: ...


@pytest.fixture
def engine():
    decoder = Decoder(SPEC, device=CPU, dtype=torch.float32)
    init_weights(decoder, 3)
    with ThreadPoolExecutor(1) as compute:
        yield NativeEngine(
            decoder,
            EngineConfig(num_pages=400),
            TOKENIZER,
            compute=compute,
            emit=silent,
            device=CPU,
            dtype=torch.float32,
        )


async def collect(
    engine: NativeEngine, sampling: Sampling, *, cap: int
) -> dict[str, InFlightGroup]:
    """Ask in as many steps as it takes."""
    groups = open_groups(TRAIN[:3], run_seed=5, step=1)
    done: list[InFlightGroup] = []
    waiting = groups
    while waiting:
        async with Scoring(
            TableScorer(lambda rollout: 1.0, emit=silent), deadline_s=20.0
        ) as scoring:
            collector = Collector(
                engine,
                scoring,
                TOKENIZER,
                RequestRules(sampling=sampling, cap_tokens=cap),
                deadline_s=60.0,
                emit=silent,
            )
            await collector.run(waiting)
            await scoring.finish()
        whole, waiting = split_whole(waiting, sampling.n)
        done += whole
    return {group.group_id: group for group in done}


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_completion_that_was_set_aside_is_the_one_that_never_was(engine, top_k):
    sampling = Sampling(n=3, max_tokens=40, top_k=top_k)

    async def go() -> None:
        await engine.start(dummy=False)
        straight, parted = (
            await collect(engine, sampling, cap=40),
            await collect(engine, sampling, cap=7),
        )
        assert list(straight) == sorted(parted)
        for name, group in straight.items():
            for sample, rollout in group.rollouts.items():
                other = parted[name].rollouts[sample]
                assert (
                    other.tokens.tolist() == rollout.tokens.tolist()
                    and other.finish == rollout.finish
                )
                np.testing.assert_allclose(other.logprobs, rollout.logprobs, atol=1e-5)
                if top_k:
                    np.testing.assert_array_equal(other.support.offsets, rollout.support.offsets)
                    np.testing.assert_array_equal(other.support.ids, rollout.support.ids)
        assert (
            max(int(r.sampled.sum()) for g in straight.values() for r in g.rollouts.values()) > 21
        )
        await engine.terminate()

    run(go())


def test_an_interrupted_engine_is_idle_and_answers_the_next_question_the_same(engine):
    sampling = Sampling(n=2, max_tokens=200, ignore_eos=True)

    async def go() -> None:
        await engine.start(dummy=False)
        before = await collect(engine, Sampling(n=1, max_tokens=8), cap=0)
        long = asyncio.create_task(collect(engine, sampling, cap=0))
        while (await engine.stats()).running < 6:
            await asyncio.sleep(0.001)
        await interrupt_when(long, lambda: True)
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        after = await collect(engine, Sampling(n=1, max_tokens=8), cap=0)
        for name, group in before.items():
            assert after[name].rollouts[0].tokens.tolist() == group.rollouts[0].tokens.tolist()
        await engine.terminate()

    run(go())


@pytest.fixture
def one_thread():
    """Which row of the engine a request gets may show in a product's last bit when threads share it
    out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("num_pages", [40, 400])
def test_an_evaluation_leaves_no_trace_in_the_rollouts_that_follow(num_pages):
    """A resumed run has not made the evaluation that came before its first step: hits and bits must
    be the same. The smaller number of pages makes the cache give up some, and requests wait."""

    async def go(*, evaluates: bool, salt: str) -> tuple[list[int], list[np.ndarray]]:
        decoder = Decoder(SPEC, device=CPU, dtype=torch.float32)
        init_weights(decoder, 3)
        with ThreadPoolExecutor(1) as compute:
            settings = EngineConfig(num_pages=num_pages, page_tokens=4, max_running=6)
            engine = NativeEngine(
                decoder,
                settings,
                TOKENIZER,
                compute=compute,
                emit=silent,
                device=CPU,
                dtype=torch.float32,
            )
            await engine.start(dummy=False)
            if evaluates:
                await ask(engine, "eval", Sampling(max_tokens=6, temperature=0.0), salt)
            before = await engine.stats()
            rollouts, hits = [], []
            for step in range(2):
                found = await ask(engine, f"step{step}", Sampling(n=2, max_tokens=8), "")
                rollouts += [r.logprobs for group in found for r in group.rollouts.values()]
                hits.append((await engine.stats()).prefix_hit_tokens - before.prefix_hit_tokens)
            await engine.terminate()
        return hits, rollouts

    async def ask(
        engine: NativeEngine, name: str, sampling: Sampling, salt: str
    ) -> list[InFlightGroup]:
        groups = open_groups(TRAIN[:5], run_seed=sum(name.encode()), step=1)
        async with Scoring(
            TableScorer(lambda rollout: 1.0, emit=silent), deadline_s=20.0
        ) as scoring:
            collector = Collector(
                engine,
                scoring,
                TOKENIZER,
                RequestRules(sampling=sampling, tenant_salt=salt),
                deadline_s=60.0,
                emit=silent,
            )
            await collector.run(groups)
            await scoring.finish()
        return groups

    bare_hits, bare = run(go(evaluates=False, salt=""))
    hits, after = run(go(evaluates=True, salt=EVALUATION))
    assert hits == bare_hits and hits[-1] > 0
    assert all(np.array_equal(one, other) for one, other in zip(bare, after, strict=True))
    shared, _ = run(go(evaluates=True, salt=""))
    assert shared != bare_hits, "without a salt of its own it would be found"
