"""Batch-invariant training on a CUDA device: the trainer's log-probs are the engine's to the bit,
however sequences are packed; the ordinary forward's are not; gradients agree with the ordinary
ones, and steps learn."""

from __future__ import annotations

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from gyre.core.chunks import collect
from gyre.core.records import Request, Sampling, TrainBatch, TrainSequence
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.models.decoder import Decoder
from gyre.models.spec import ModelSpec
from gyre.objectives.config import GrpoConfig, SftConfig
from gyre.trainer.config import TrainerConfig
from gyre.trainer.trainer import NativeTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
if torch.cuda.is_available():
    from gyre.kernels.gpu.sample import SampleScratch, given_logprobs, sample
    from gyre.trainer.passes.batch_invariant import InvariantLogprobs

DEVICE = torch.device("cuda")
VOCAB = 9000
QWEN3 = ModelSpec(
    family="qwen3",
    vocab_size=VOCAB,
    hidden_size=1024,
    num_layers=4,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    mlp_size=3072,
    tied=True,
    context_tokens=2048,
    rope_theta=1e6,
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=True,
)
LLAMA = ModelSpec(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=768,
    num_layers=3,
    num_heads=12,
    num_kv_heads=4,
    head_dim=128,
    mlp_size=2048,
    tied=False,
    context_tokens=2048,
    rope_theta=5e5,
    norm_eps=1e-5,
    qkv_bias=False,
    qk_norm=False,
)
SPECS = {"qwen3": QWEN3, "llama": LLAMA}
PACKINGS = (700, 1500, 4096, 60_000)  # tokens per chunk; the first is below the longest sequence


def make_decoder(spec: ModelSpec) -> Decoder:
    decoder = Decoder(spec, device=DEVICE, dtype=torch.bfloat16)
    generator = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(
                0.0, 0.04, generator=generator
            )
    return decoder


def requests(temperature: float, count: int = 24) -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        Request(
            request_id=f"r{i}",
            tokens=rng.integers(0, VOCAB, rng.integers(1, 900)).astype(np.int32),
            sampling=Sampling(temperature=temperature, max_tokens=int(rng.integers(1, 300))),
            seed=i,
        )
        for i in range(count)
    ]


def generate(decoder: Decoder, temperature: float, **changes: object) -> TrainBatch:
    """Rollouts of one engine in batch-invariant mode, prompts in chunks among decoding rows, as
    sequences to train on."""
    settings = {
        "num_pages": 0,
        "max_running": 16,
        "token_budget": 200,
        "kv_bytes": 2**29,
        **changes,
    }
    asked = requests(temperature)

    async def go() -> list:
        with ThreadPoolExecutor(1) as compute:
            engine = NativeEngine(
                copy.deepcopy(decoder),
                EngineConfig(**{"batch_invariant": True, **settings}),
                compute=compute,
                emit=lambda kind, **fields: None,
                device=DEVICE,
                dtype=torch.bfloat16,
            )
            await engine.start(dummy=False)
            answers = await asyncio.gather(*[collect(engine.submit(request)) for request in asked])
            await engine.terminate()
            return answers

    sequences = []
    for request, (part,) in zip(asked, asyncio.run(go()), strict=True):
        prompt = np.zeros(len(request.tokens), np.float32)
        advantage = float(request.seed % 2) - 0.5
        columns = {
            "loss_mask": np.concatenate([prompt, np.ones(len(part.tokens))]) > 0,
            "logprobs": np.concatenate([prompt, part.logprobs]).astype(np.float32),
            "advantages": np.concatenate(
                [prompt, np.full(len(part.tokens), advantage, np.float32)]
            ),
        }
        tokens = np.concatenate([request.tokens, part.tokens]).astype(np.int32)
        sequences.append(TrainSequence(tokens=tokens, columns=columns, temperature=temperature))
    return TrainBatch(sequences=tuple(sequences), step=0)


def make_trainer(
    decoder: Decoder, *, invariant: bool, page_tokens: int = 64, objective=None, **config
) -> NativeTrainer:
    passes = {"logprobs": InvariantLogprobs(page_tokens=page_tokens)} if invariant else {}
    return NativeTrainer(
        decoder=copy.deepcopy(decoder),
        objective=objective or GrpoConfig(kl_coef=0.04),
        config=TrainerConfig(**config),
        compute=ThreadPoolExecutor(1),
        emit=lambda kind, **fields: None,
        seed=0,
        **passes,
    )


def differing(batch: TrainBatch, per_token: tuple[np.ndarray, ...]) -> int:
    """How many targets have other bits than the engine's."""
    return sum(
        int(
            (
                got[sequence.columns["loss_mask"]]
                != sequence.columns["logprobs"][sequence.columns["loss_mask"]]
            ).sum()
        )
        for sequence, got in zip(batch.sequences, per_token, strict=True)
    )


def reordered(batch: TrainBatch, seed: int) -> TrainBatch:
    order = np.random.default_rng(seed).permutation(len(batch.sequences))
    return replace(batch, sequences=tuple(batch.sequences[i] for i in order))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", SPECS)
def test_logprobs_are_the_engines_to_the_bit(family: str, temperature: float) -> None:
    decoder = make_decoder(SPECS[family])
    batch = generate(decoder, temperature)
    longest = max(len(sequence.tokens) for sequence in batch.sequences)
    assert longest > 700 > 512, (
        "some sequences have more than one piece of keys, and a chunk of their own"
    )
    for seed, tokens_per_chunk in enumerate(PACKINGS):
        trainer = make_trainer(decoder, invariant=True, tokens_per_chunk=tokens_per_chunk)
        for shuffled in (batch, reordered(batch, seed)):
            for which in ("policy", "reference"):
                assert differing(shuffled, trainer.evaluate_now(shuffled, which).per_token) == 0, (
                    tokens_per_chunk
                )
        asyncio.run(trainer.close())


@pytest.mark.parametrize("page_tokens", [16, 32, 128])
def test_pages_of_the_engines_size_give_its_bits(page_tokens: int) -> None:
    """Smaller pages are smaller tiles of keys, and so another order of addition: the trainer must
    follow."""
    decoder = make_decoder(QWEN3)
    batch = generate(decoder, 1.0, page_tokens=page_tokens)
    trainer = make_trainer(decoder, invariant=True, page_tokens=page_tokens)
    assert differing(batch, trainer.evaluate_now(batch, "policy").per_token) == 0


@pytest.mark.parametrize("family", SPECS)
def test_the_ordinary_forward_gives_other_bits(family: str) -> None:
    decoder = make_decoder(SPECS[family])
    batch = generate(decoder, 1.0)
    ordinary = make_trainer(decoder, invariant=False)
    assert differing(batch, ordinary.evaluate_now(batch, "policy").per_token) > 0


def gradient(decoder: Decoder, batch: TrainBatch, *, invariant: bool) -> dict[str, torch.Tensor]:
    trainer = make_trainer(
        decoder, invariant=invariant, objective=SftConfig(), tokens_per_chunk=3000
    )
    (update,) = trainer.plan(batch).updates
    trainer.forward_backward(update)
    grads = {name: grad.clone() for name, grad in trainer.models.actor.optimizer.grads().items()}
    asyncio.run(trainer.close())
    return grads


@pytest.mark.parametrize("family", SPECS)
def test_gradients_are_those_of_the_ordinary_forward_but_for_rounding(family: str) -> None:
    """Relative to the norm of each tensor's gradient: 10 %, the two forwards being bfloat16 passes
    that round apart. (On a CPU, two that round in other places differ by up to 7 %.)"""
    decoder = make_decoder(SPECS[family])
    batch = generate(decoder, 0.7)
    ours, plain = (gradient(decoder, batch, invariant=invariant) for invariant in (True, False))
    for name, grad in plain.items():
        assert grad.norm() > 0, name
        assert (ours[name] - grad).norm() < 0.1 * grad.norm(), name


def test_the_first_step_finds_no_gap_and_no_kl_and_steps_learn() -> None:
    decoder = make_decoder(QWEN3)
    batch = generate(decoder, 1.0)
    trainer = make_trainer(decoder, invariant=True, learning_rate=1e-5, tokens_per_chunk=4096)
    report = trainer.step_now(batch)
    assert report.num_updates == 1 and report.metrics["logprob_gap_max"] == 0.0
    assert report.metrics["kl_reference"] == 0.0 and report.metrics["engine_kl"] == 0.0
    assert trainer.step_now(replace(batch, step=1)).metrics["kl_reference"] > 0.0
    asyncio.run(trainer.close())
    supervised = make_trainer(
        make_decoder(QWEN3),
        invariant=True,
        objective=SftConfig(),
        learning_rate=3e-4,
        tokens_per_chunk=4096,
    )
    losses = [supervised.step_now(replace(batch, step=step)).metrics["loss"] for step in range(6)]
    assert losses[-1] < losses[0], losses


@pytest.mark.parametrize("vocab_size", [50, 5000, 151_936])
def test_a_given_token_has_the_logprob_of_a_chosen_one(vocab_size: int) -> None:
    rng, count = np.random.default_rng(vocab_size), 65
    logits = (torch.randn(count, vocab_size, device=DEVICE) * 3).to(torch.bfloat16)
    temperature = rng.choice([0.3, 0.7, 1.0, 1.9], count).astype(np.float32)
    inverse = torch.tensor(np.float32(1.0) / temperature, device=DEVICE)
    tokens = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    rows, logprobs = (
        torch.arange(count, dtype=torch.int32, device=DEVICE),
        torch.zeros(2, count, device=DEVICE),
    )
    uniform = torch.tensor(rng.random(count), device=DEVICE)
    scratch = SampleScratch.make(count, vocab_size, DEVICE)
    sample(logits, inverse, uniform, scratch, rows, torch.zeros_like(rows), tokens, logprobs)
    given = given_logprobs(logits, inverse, tokens.long())
    assert torch.equal(given.logprobs_N, logprobs[0])
    exact = (logits.double() / torch.tensor(temperature, device=DEVICE)[:, None]).log_softmax(-1)
    assert torch.allclose(
        given.logprobs_N.double(), exact.gather(1, tokens.long()[:, None])[:, 0], atol=2e-5
    )
    for place in (0, 7, count - 1):
        alone = given_logprobs(
            logits[place : place + 1].clone(),
            inverse[place : place + 1],
            tokens[place].long()[None],
        )
        assert torch.equal(alone.logprobs_N, given.logprobs_N[place : place + 1])


def test_nothing_stays_behind(allocated) -> None:
    """Pages and scratch of a chunk belong to no component, so none may outlive the pass."""
    decoder = make_decoder(QWEN3)
    batch = generate(decoder, 1.0)
    trainer = make_trainer(decoder, invariant=True, tokens_per_chunk=4096)
    trainer.step_now(batch)
    before = allocated()
    trainer.step_now(replace(batch, step=1))
    trainer.evaluate_now(replace(batch, step=2), "policy")
    assert allocated() == before
