"""Sampling on a CUDA device: truncation and choice inside a CUDA graph, no wait for the host, the
stated memory, and the same answers as on the CPU."""

# N rows, V vocabulary

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from test_engine_gpu import make_decoder

from gyre.core.chunks import collect
from gyre.core.records import Completion, Request, Sampling
from gyre.engine.config import EngineConfig, scoring_bytes
from gyre.engine.engine import NativeEngine
from gyre.engine.sampling.logits_processors import Past, make_shaping
from gyre.engine.sampling.logprobs import find_best, score_targets
from gyre.engine.sampling.sampler import Rules, choose, make_rules
from gyre.engine.sampling.truncation import keep_by_bisection, keep_by_candidates, make_cut
from gyre.planner.memory_model.engine import engine_bytes
from gyre.planner.plan import ModelNumbers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
WIDE = 151_936
LIMITS = [
    (50, 0.9, 0.0),
    (0, 0.95, 0.0),
    (0, 1.0, 0.02),
    (1, 1.0, 0.0),
    (0, 0.3, 0.3),
    (2000, 0.999, 1e-5),
]


def cut_of(device: torch.device):
    top_k, top_p, min_p = (np.asarray(column) for column in zip(*LIMITS, strict=True))
    return make_cut(top_k, top_p, min_p, vocab_size=WIDE, device=device)


def scaled(seed: int) -> torch.Tensor:
    drawn = torch.randn(len(LIMITS), WIDE, generator=torch.Generator().manual_seed(seed)) * 3
    return drawn.bfloat16().float()  # with the ties of BF16


def test_bisection_in_a_graph_keeps_the_set_that_candidates_keep() -> None:
    cut, logits_NV = cut_of(CUDA), scaled(0).to(CUDA)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        keep_by_bisection(logits_NV, cut)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = keep_by_bisection(logits_NV, cut)
    for seed in range(1, 6):
        logits_NV.copy_(scaled(seed))
        graph.replay()
        assert torch.equal(kept, keep_by_candidates(logits_NV, cut))
        assert torch.equal(
            kept.cpu(), keep_by_candidates(scaled(seed), cut_of(torch.device("cpu")))
        )


def shaped_rules(count: int) -> tuple[Rules, Past, torch.Tensor]:
    """Rows that ask for everything at once."""
    s = Sampling(
        temperature=0.8,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((5, 2.0),),
        min_tokens=9,
        top_logprobs=20,
    )
    full = np.ones(count)
    rules = make_rules(
        (full * 0.8).astype(np.float32),
        (full * 40).astype(np.int64),
        full * 0.9,
        full * 0.01,
        full > 0,
        vocab_size=WIDE,
        device=CUDA,
        shaping=make_shaping(range(count), [(s, (1, 2))] * count, device=CUDA),
        num_top_N=(full * 20).astype(np.int64),
        rows_at_once=64,
    )
    past = Past(
        ids_LW=torch.randint(0, WIDE, (count, 300), dtype=torch.int32, device=CUDA),
        prompt_L1=torch.full((count, 1), 200, device=CUDA),
        length_L1=torch.full((count, 1), 260, device=CUDA),
    )
    return rules, past, torch.full((count,), 60, device=CUDA)


def test_choosing_never_waits_for_the_host_and_fits_a_graph() -> None:
    rules, past, chosen_N = shaped_rules(6)
    logits_NV, uniform_N = scaled(0).to(CUDA), torch.rand(6, dtype=torch.float64, device=CUDA)
    choose(logits_NV, rules, uniform_N, chosen_N=chosen_N, past=past)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        choose(logits_NV, rules, uniform_N, chosen_N=chosen_N, past=past)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = choose(logits_NV, rules, uniform_N, chosen_N=chosen_N, past=past)
    for seed in range(1, 4):
        logits_NV.copy_(scaled(seed))
        uniform_N.uniform_()
        graph.replay()
        eager = choose(logits_NV, rules, uniform_N, chosen_N=chosen_N, past=past)
        assert torch.equal(captured.tokens_N, eager.tokens_N)
        assert torch.equal(captured.logprobs_N, eager.logprobs_N)
        assert captured.best is not None and eager.best is not None
        assert torch.equal(captured.best.ids_NK, eager.best.ids_NK)


def test_scoring_stays_within_its_stated_memory(allocated) -> None:
    bound = scoring_bytes(EngineConfig(rows_at_once=32), vocab_size=WIDE)
    hidden_TE = torch.randn(2048, 64, device=CUDA, dtype=torch.bfloat16)
    weight_VE = torch.randn(WIDE, 64, device=CUDA, dtype=torch.bfloat16)
    places, targets = torch.arange(2048, device=CUDA), torch.randint(0, WIDE, (2048,), device=CUDA)
    logits_NV = torch.randn(64, WIDE, device=CUDA)
    rules, past, chosen_N = shaped_rules(64)

    def peak(work) -> int:
        work()  # workspaces and kernels, which stay, are made here
        before = allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def score() -> None:
        score_targets(
            hidden_TE, places, targets, lambda h: h @ weight_VE.T, best=20, rows_at_once=32
        )

    results = 2048 * 41 * 8 * 3
    measured = {
        "prompts": peak(score),
        "best": peak(lambda: find_best(logits_NV, 20, rows_at_once=32)),
    }
    assert max(measured.values()) <= bound + results, {
        name: size / (32 * WIDE) for name, size in measured.items()
    }
    uniform_N = torch.rand(64, dtype=torch.float64, device=CUDA)
    whole = peak(lambda: choose(logits_NV, rules, uniform_N, chosen_N=chosen_N, past=past))
    model = ModelNumbers(
        **{**dict.fromkeys(ModelNumbers.__dataclass_fields__, 0), "vocab_size": WIDE}
    )
    # what is left is sampling
    stated = engine_bytes(model, "bfloat16", tokens=0, running=64, longest=0)
    assert whole <= stated, f"choosing by all rules: {whole / (64 * WIDE)} bytes per row and token"


def answers(device: torch.device, overlap: bool) -> list[Completion]:
    decoder = make_decoder(device, torch.float32)
    generator = np.random.default_rng(0)
    asks = [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.9, "presence_penalty": 0.4, "top_p": 0.9},
        {"logit_bias": ((7, 5.0),), "min_tokens": 10, "stop_ids": tuple(range(60))},
        {"top_k": 12, "min_p": 0.01},
    ]
    requests = [
        Request(
            request_id=f"r{i}",
            tokens=generator.integers(1, 199, 20 + 9 * i).astype(np.int32),
            sampling=Sampling(
                max_tokens=24, top_logprobs=3, prompt_logprobs=2, n=1 + i % 2, **asks[i % 4]
            ),
            seed=i,
            chunk_tokens=0,
        )
        for i in range(10)
    ]

    async def main() -> list[Completion]:
        with ThreadPoolExecutor(1) as compute:
            engine = NativeEngine(
                decoder,
                EngineConfig(
                    num_pages=90, page_tokens=8, max_running=8, token_budget=64, overlap=overlap
                ),
                compute=compute,
                emit=lambda kind, **fields: None,
                device=device,
                dtype=torch.float32,
            )
            await engine.start(dummy=False)
            results = await asyncio.gather(
                *[collect(engine.submit(request)) for request in requests]
            )
            await engine.terminate()
            return [part for parts in results for part in parts]

    return asyncio.run(main())


def test_answers_equal_those_of_the_cpu() -> None:
    on_cpu = answers(torch.device("cpu"), overlap=False)
    for overlap in (False, True):
        for ours, theirs in zip(answers(CUDA, overlap), on_cpu, strict=True):
            assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.finish == theirs.finish
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=5e-3)
            assert ours.prompt_logprobs is not None and theirs.prompt_logprobs is not None
            np.testing.assert_allclose(
                ours.prompt_logprobs.logprobs, theirs.prompt_logprobs.logprobs, atol=5e-3
            )
            assert ours.top_logprobs is not None and theirs.top_logprobs is not None
            np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=5e-3)
