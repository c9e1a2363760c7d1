"""The engine on a CUDA device: the same tokens as on the CPU, and KV pages that really leave the
device."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import reference_kernels
from gyre.core.chunks import collect
from gyre.core.records import Request, Sampling
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.engine.kv_cache.host_pool import HostKv
from gyre.engine.kv_cache.pool import KvPool
from gyre.models.config import ShapeConfig
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.spec import spec_from_shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = 200
SHAPE = ShapeConfig(
    family="qwen3",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_size=96,
    tied=True,
    context_tokens=1024,
)


def make_decoder(device: torch.device, dtype: torch.dtype) -> Decoder:
    spec = spec_from_shape(SHAPE, vocab_size=VOCAB, bos_id=None, eos_ids=())
    decoder = Decoder(spec, device=device, dtype=dtype)
    init_weights(decoder, 0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            # peaked choices: rounding decides nothing
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
    return decoder


def make_engine(
    device: torch.device, dtype: torch.dtype, compute: ThreadPoolExecutor, **config
) -> NativeEngine:
    decoder = make_decoder(device, dtype)
    settings = {
        "num_pages": 600,
        "page_tokens": 8,
        "max_running": 16,
        "token_budget": 1024,
        **config,
    }
    return NativeEngine(
        decoder,
        EngineConfig(**settings),
        compute=compute,
        emit=lambda kind, **fields: None,
        device=device,
        dtype=dtype,
    )


def make_requests(**sampling) -> list[Request]:
    generator = np.random.default_rng(0)
    lengths = [5, 9, 30, 31, 64, 200, 333, 12]
    rules = Sampling(**{"temperature": 0.0, "max_tokens": 24, **sampling})
    return [
        Request(
            request_id=f"r{i}",
            tokens=generator.integers(0, VOCAB, n).astype(np.int32),
            sampling=rules,
            seed=i,
        )
        for i, n in enumerate(lengths)
    ]


def run(device: str, requests: list[Request], dtype: torch.dtype = torch.float32, **config):
    async def main():
        with ThreadPoolExecutor(1) as compute:
            engine = make_engine(torch.device(device), dtype, compute, **config)
            await engine.start(dummy=False)
            parts = await asyncio.gather(*[collect(engine.submit(request)) for request in requests])
            assert engine.core is not None
            engine.core.state.check()
            return parts, await engine.stats()

    return asyncio.run(main())


def judge(request: Request, chosen: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of the best and of the chosen token at each position, by the float32
    decoder on the CPU."""
    tokens = torch.tensor(np.concatenate([request.tokens, chosen]).astype(np.int64))
    decoder = make_decoder(torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        hidden = decoder.hidden(
            tokens,
            torch.arange(len(tokens)),
            lambda layer, q, k, v: reference_kernels.varlen_attention(q, k, v, [len(tokens)]),
        )
        logprobs = decoder.logits(hidden[len(request.tokens) - 1 : -1]).log_softmax(-1)
    return logprobs.amax(-1), logprobs.gather(-1, tokens[len(request.tokens) :, None])[:, 0]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "n": 3}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50}]
)
def test_the_same_tokens_as_on_the_cpu(sampling: dict) -> None:
    requests = make_requests(**sampling)
    on_cpu, _ = run("cpu", requests)
    for config in ({}, {"token_budget": 64}, {"num_pages": 60, "prefix_cache": False}):
        on_device, stats = run("cuda", requests, **config)
        assert (stats.preemptions > 0) == ("num_pages" in config)
        for ours, theirs in zip(on_device, on_cpu, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert a.tokens.tolist() == b.tokens.tolist()
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)
                assert a.raw_logprobs == pytest.approx(b.raw_logprobs, abs=1e-3)
                assert (a.support is None) == (b.support is None)


FUSED = {"page_tokens": 64, "num_pages": 200}


def test_the_fused_runner_chooses_what_the_cpu_chooses() -> None:
    """In bfloat16, greedily: each token is the best, but for rounding, of a float32 pass over what
    came before it; over mixed steps, graphs, forks, preemption, overlap or not."""
    requests, seen = make_requests(n=2, max_tokens=150), []
    for config in (
        {},
        {"overlap": False},
        {"token_budget": 64},
        {"num_pages": 12, "prefix_cache": False},
    ):
        on_device, stats = run("cuda", requests, torch.bfloat16, **{**FUSED, **config})
        assert (stats.preemptions > 0) == ("num_pages" in config)
        for request, parts in zip(requests, on_device, strict=True):
            for part in parts:
                best, chosen = judge(request, part.tokens)
                assert (best - chosen).max() < 0.4 and (best - chosen).mean() < 0.02, (
                    "bfloat16 on amplified weights"
                )
                assert part.raw_logprobs == pytest.approx(chosen.numpy(), abs=0.4)
        seen.append([part.raw_logprobs.tolist() for group in on_device for part in group])
    assert seen[0] == seen[1], "overlap changes no bit"


def test_the_fused_runner_samples_by_each_rule() -> None:
    for rules in (
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01},
    ):
        requests = make_requests(**rules)
        parts, _ = run("cuda", requests, torch.bfloat16, **FUSED)
        again, _ = run("cuda", requests[:3], torch.bfloat16, **FUSED)
        alone, _ = run("cuda", requests, torch.bfloat16, **FUSED, max_running=16, overlap=False)
        for (part,), (same,) in zip(parts, alone, strict=True):
            assert part.tokens.tolist() == same.tokens.tolist(), (
                "the same request and seed give the same tokens"
            )
            assert np.isfinite(part.logprobs).all() and (part.logprobs <= 1e-6).all()
            if part.support is not None:
                for place, token in enumerate(part.tokens):
                    kept = part.support.ids[
                        part.support.offsets[place] : part.support.offsets[place + 1]
                    ]
                    assert token in kept and len(kept) <= (rules.get("top_k") or VOCAB)
        assert len(again) == 3


def test_bfloat16_runs_and_its_logprobs_are_finite() -> None:
    parts, stats = run("cuda", make_requests(temperature=1.0, n=4), torch.bfloat16)
    assert stats.generated_tokens == 8 * 4 * 24
    assert all(
        np.isfinite(part.logprobs).all() and part.finish == "length"
        for group in parts
        for part in group
    )


def test_kv_pages_leave_the_device_and_come_back() -> None:
    async def main() -> None:
        with ThreadPoolExecutor(1) as compute:
            engine = make_engine(torch.device("cuda"), torch.bfloat16, compute, num_pages=40_000)
            await engine.start(dummy=False)
            request = make_requests()[4]
            before = (await collect(engine.submit(request)))[0].tokens.tolist()
            (kv,) = engine.components()
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0]
            loop = asyncio.get_running_loop()
            for tier in ("host", "none"):
                await loop.run_in_executor(
                    compute, lambda tier=tier: engine.move(["engine.kv"], tier)
                )
                assert torch.cuda.mem_get_info()[0] - free >= kv.size_bytes - (4 << 20)
                await loop.run_in_executor(compute, lambda: engine.move(["engine.kv"], "device"))
                assert (await collect(engine.submit(request)))[0].tokens.tolist() == before

    asyncio.run(main())


def test_swapped_pages_lie_in_pinned_memory_and_come_back_to_the_bit() -> None:
    pool = KvPool(
        num_layers=3,
        num_pages=200,
        num_kv_heads=2,
        page_tokens=16,
        head_dim=32,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
    )
    host = HostKv(pool, 150, name="engine.kv_host")
    assert host.buffer.bytes.is_pinned()
    rng = np.random.default_rng(0)
    pages, slots = 1 + rng.permutation(200)[:130], rng.permutation(150)[:130]
    pool.tensor.normal_()
    want = pool.tensor[:, pages].clone()
    host.copy_out(pages, slots)
    pool.tensor.fill_(torch.nan)
    elsewhere = 1 + rng.permutation(200)[:130]
    host.copy_in(slots, elsewhere)
    assert torch.equal(pool.tensor[:, elsewhere], want)
