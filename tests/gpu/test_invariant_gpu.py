"""Batch-invariant mode on a CUDA device: one answer to the bit, whatever shares the batch and
however it is cut; and with the mode off the same trials find different bits, so they can fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from gyre.core.chunks import collect
from gyre.core.records import Request, Sampling
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.models.decoder import Decoder
from gyre.models.spec import ModelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPEC = ModelSpec(
    family="qwen3",
    vocab_size=4000,
    hidden_size=1024,
    num_layers=4,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    mlp_size=4096,
    tied=True,
    context_tokens=2048,
    rope_theta=1e6,
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=True,
)
TRIALS = 50


def make_decoder() -> Decoder:
    decoder = Decoder(SPEC, device=torch.device("cuda"), dtype=torch.bfloat16)
    generator = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(
                0.0, 0.04, generator=generator
            )
    return decoder


def watched(temperature: float) -> Request:
    rng = np.random.default_rng(7)
    return Request(
        request_id="watched",
        tokens=rng.integers(0, 4000, 700).astype(np.int32),
        sampling=Sampling(temperature=temperature, max_tokens=200),
        seed=3,
    )


def others(trial: int, count: int) -> list[Request]:
    rng = np.random.default_rng(trial)
    return [
        Request(
            request_id=f"other{i}",
            tokens=rng.integers(0, 4000, rng.integers(1, 900)).astype(np.int32),
            sampling=Sampling(temperature=1.0, max_tokens=int(rng.integers(1, 400))),
            seed=i,
        )
        for i in range(count)
    ]


async def one_trial(engine: NativeEngine, trial: int, count: int, temperature: float) -> bytes:
    """Return the watched request's tokens and log-probs, as bytes, run among `count` others."""
    beside = others(trial, count)
    place = trial % (count + 1)
    requests = [*beside[:place], watched(temperature), *beside[place:]]
    answers = await asyncio.gather(*[collect(engine.submit(request)) for request in requests])
    (part,) = answers[place]
    return part.tokens.tobytes() + part.logprobs.tobytes() + part.raw_logprobs.tobytes()


def run_trials(
    settings: list[dict], *, invariant: bool, temperature: float
) -> tuple[set[bytes], Counter[str]]:
    """Spread the trials over the settings. Return the different answers, and what happened
    meanwhile."""
    decoder, answers, happened = make_decoder(), set(), Counter()

    async def under(config: EngineConfig, trials: range) -> None:
        with ThreadPoolExecutor(1) as compute:
            engine = NativeEngine(
                decoder,
                config,
                compute=compute,
                emit=lambda kind, **fields: None,
                device=torch.device("cuda"),
                dtype=torch.bfloat16,
            )
            await engine.start(dummy=False)
            for trial in trials:
                answers.add(await one_trial(engine, trial, [0, 1, 7, 30][trial % 4], temperature))
            stats = await engine.stats()
            happened.update({name: getattr(stats, name) for name in HAPPEN})
            await engine.terminate()

    each = TRIALS // len(settings)
    for place, changes in enumerate(settings):
        config = EngineConfig(
            **{
                "num_pages": 800,
                "max_running": 32,
                "token_budget": 4096,
                "batch_invariant": invariant,
                **changes,
            }
        )
        asyncio.run(under(config, range(place * each, (place + 1) * each)))
    return answers, happened


SETTINGS = [
    {},
    {"token_budget": 100},
    {"prefix_cache": False, "num_pages": 40},
    {"overlap": False, "token_budget": 777},
    # swapping is cheaper
    {"num_pages": 40, "token_budget": 300, "kv_host_bytes": 2**28, "prefill_tokens_per_s": 1.0},
]
# in some of the trials
HAPPEN = ("preemptions", "swaps_in", "recomputed_tokens", "prefix_hit_tokens")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_fifty_trials_one_answer(temperature: float) -> None:
    answers, happened = run_trials(SETTINGS, invariant=True, temperature=temperature)
    assert all(happened[name] > 0 for name in HAPPEN), happened
    assert len(answers) == 1


def test_with_the_mode_off_the_trials_differ() -> None:
    answers, _ = run_trials(SETTINGS, invariant=False, temperature=1.0)
    assert len(answers) > 1


def test_eager_and_graph_agree() -> None:
    """A step that mixes prompt chunks in runs eagerly; one that only decodes runs as a graph."""
    answers, _ = run_trials(
        [{"max_running": 2}, {"max_running": 32}], invariant=True, temperature=1.0
    )
    assert len(answers) == 1


@pytest.mark.parametrize("depth,width", [(512, 1000), (1408, 512), (4096, 6144)])
def test_rows_of_a_product_do_not_depend_on_each_other(depth: int, width: int) -> None:
    from gyre.kernels.gpu import matmul

    x = torch.randn(3000, depth, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(width, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5
    residual = torch.randn(3000, width, device="cuda", dtype=torch.bfloat16)
    whole = matmul.invariant_linear(x, weight)
    exact = x.double() @ weight.double().t()
    assert (whole - exact).abs().max() < 0.03
    added = matmul.invariant_linear(x, weight, residual_MN=residual)
    assert (added - (exact + residual)).abs().max() < 0.05
    for count in (1, 5, 64, 65, 300, 513, 2999):
        assert torch.equal(matmul.invariant_linear(x[:count], weight), whole[:count]), count
        assert torch.equal(matmul.invariant_linear(x[-count:], weight), whole[-count:]), count
        for tile in (matmul.SMALL, matmul.MIDDLE, matmul.LARGE):
            assert torch.equal(
                matmul.invariant_linear(x[:count], weight, tile=tile), whole[:count]
            ), (count, tile)
