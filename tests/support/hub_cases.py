"""The engine against transformers, on any device: random checkpoints of each family, and sampling
rules by an oracle of their own, in float64. In: a device, a dtype, bounds. Out: assertions.
Callers: test_engine_hub (CPU, float32), tests/gpu/test_transformers_gpu and
tests/gpu/test_rules_gpu (BF16).

The oracle reads transformers' float32 logits along what the engine chose, and knows the engine's
draws by seed. Logits may differ by `bound`; every judgment below allows for that and for no more.
"""

# C chosen tokens, P prompt tokens, V vocabulary

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from gyre.core.chunks import collect
from gyre.core.records import Completion, Request, Sampling
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.engine.scheduler.random import draw_key, uniforms
from gyre.models.hub.load import load_hub

FAMILIES = ("llama", "qwen2", "qwen3")
VOCAB, CONTEXT = 320, 512


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """By how much the engine's logits may differ from transformers' in float32: anywhere, and on
    average."""

    most: float
    mean: float


EXACT = Bounds(most=2e-4, mean=2e-5)  # float32, other orders of addition
BF16 = Bounds(most=0.1, mean=0.03)  # of 8 bits per activation; on a CPU 0.04 and 0.018 were found


@dataclass(frozen=True, kw_only=True)
class Where:
    device: torch.device
    dtype: torch.dtype
    page_tokens: int
    bounds: Bounds


def save_random(folder: Path, family: str, *, hidden_size: int = 128, head_dim: int = 32) -> Path:
    """A checkpoint of this family as transformers saves it, every weight random, norms and biases
    too. Logits spread alike at any width."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": hidden_size,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": hidden_size // head_dim,
        "num_key_value_heads": hidden_size // head_dim // 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.12 * (128 / hidden_size) ** 0.5,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    if family == "llama":
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=False)
    elif family == "qwen2":
        config = transformers.Qwen2Config(**sizes, tie_word_embeddings=True)
    else:
        config = transformers.Qwen3Config(**sizes, head_dim=head_dim, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(
                    torch.randn_like(parameter) * 0.1 + (0.0 if name.endswith("bias") else 1.0)
                )
            parameter.copy_(parameter.bfloat16())  # so that every dtype here holds the same weights
    model.save_pretrained(folder)
    return folder


def answer(
    folder: Path, where: Where, requests: Sequence[Request], **config: Any
) -> list[Completion]:
    """What the engine answers; nothing is held afterwards."""
    _, decoder = load_hub(folder, device=where.device, dtype=where.dtype)
    settings = {
        "num_pages": 4096 // where.page_tokens,
        "max_running": 12,
        "token_budget": 128,
        **config,
    }

    async def main() -> list[Completion]:
        with ThreadPoolExecutor(1) as compute:
            engine = NativeEngine(
                decoder,
                EngineConfig(page_tokens=where.page_tokens, **settings),
                compute=compute,
                emit=lambda kind, **fields: None,
                device=where.device,
                dtype=where.dtype,
            )
            await engine.start(dummy=False)
            answers = await asyncio.gather(
                *[collect(engine.submit(request)) for request in requests]
            )
            assert (await engine.stats()).pages_used == 0
            await engine.terminate()
            return [part for parts in answers for part in parts]

    return asyncio.run(main())


class Oracle:
    """transformers' model in float32."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        made: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = made.to(device).eval()

    @torch.inference_mode()
    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """float64 [tokens, V], of what follows each token."""
        ids = torch.tensor(tokens.astype(np.int64), device=self.model.device)[None]
        return self.model(ids).logits[0].double().cpu().numpy()

    @torch.inference_mode()
    def greedy(self, prompt: np.ndarray, count: int) -> list[int]:
        ids = torch.tensor(prompt.astype(np.int64), device=self.model.device)[None]
        made = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return made[0, len(prompt) :].tolist()


def log_softmax(values: np.ndarray) -> np.ndarray:
    top = values.max(axis=-1, keepdims=True)
    return values - top - np.log(np.exp(values - top).sum(axis=-1, keepdims=True))


# -- against transformers, greedily


def check_greedy(folder: Path, where: Where, **config: Any) -> None:
    """Each token is the best that transformers knows there, but for the bound; where the second
    best is further away it is the same token; and log-probs are transformers' within the bounds. In
    float32 the texts are equal."""
    generator = np.random.default_rng(0)
    requests = [
        Request(
            request_id=f"r{i}",
            tokens=generator.integers(1, VOCAB, length).astype(np.int32),
            sampling=Sampling(temperature=0.0, max_tokens=40, prompt_logprobs=0),
            chunk_tokens=0,
        )
        for i, length in enumerate([1, 2, 15, 16, 17, 40, 64, 130])
    ]
    oracle, gaps = Oracle(folder, where.device), []
    for request, part in zip(requests, answer(folder, where, requests, **config), strict=True):
        assert part.finish == "length" and len(part.tokens) == 40
        if where.bounds is EXACT:
            assert part.tokens.tolist() == oracle.greedy(request.tokens, 40)
        raw = log_softmax(oracle.logits(np.concatenate([request.tokens, part.tokens])))
        prompt = len(request.tokens)
        here = raw[prompt - 1 : -1]
        chosen, (second, best) = here[np.arange(40), part.tokens], np.sort(here, axis=1)[:, -2:].T
        assert (best - chosen).max() <= 2 * where.bounds.most
        assert (chosen == best)[best - second > 2 * where.bounds.most].all()
        gaps.append(np.abs(part.raw_logprobs - chosen))
        assert part.prompt_logprobs is not None
        gaps.append(
            np.abs(
                part.prompt_logprobs.logprobs[1:] - raw[np.arange(prompt - 1), request.tokens[1:]]
            )
        )
    found = np.concatenate(gaps)
    assert found.max() <= 2 * where.bounds.most and found.mean() <= where.bounds.mean, (
        found.max(),
        found.mean(),
    )


# -- rules of sampling

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.6},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8, "temperature": 0.8},
    "min-p": {"min_p": 0.05},
    "all truncation": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 1.2},
    "greedy": {"temperature": 0.0},
    "repetition": {"repetition_penalty": 1.3},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "temperature": 0.7},
    "greedy with penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
    },
    "bias": {"logit_bias": ((5, 6.0), (9, -100.0), (17, 3.0)), "top_k": 20},
    "stop ids": {"stop_ids": tuple(range(120)), "min_tokens": 6},
    "told": {"top_logprobs": 5, "prompt_logprobs": 4},
    "everything": {
        "temperature": 0.9,
        "top_k": 60,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": ((3, 2.0),),
        "stop_ids": (11, 12, 13),
        "min_tokens": 4,
        "top_logprobs": 3,
        "prompt_logprobs": 1,
    },
}


def rule_requests() -> list[Request]:
    """Each rule, beside all the others in one batch; each with siblings, so that seeds are told
    apart."""
    generator = np.random.default_rng(3)
    return [
        Request(
            request_id=name,
            tokens=generator.integers(1, VOCAB, 3 + 11 * (i % 5)).astype(np.int32),
            sampling=Sampling(max_tokens=24, n=2, **rules),
            seed=i,
            chunk_tokens=0,
        )
        for i, (name, rules) in enumerate(RULES.items())
    ]


def check_rules(folder: Path, where: Where, **config: Any) -> None:
    """All rules in one batch: each answer by the oracle, and by its seed alone."""
    requests, oracle = rule_requests(), Oracle(folder, where.device)
    answers = answer(folder, where, requests, **config)
    by_name = {request.request_id: request for request in requests}
    for part in answers:
        check_completion(by_name[part.request_id], part, oracle, where.bounds.most)
    drawn = {name for name, rules in RULES.items() if rules.get("temperature") != 0.0}
    texts = {(part.request_id, part.index): part.tokens.tolist() for part in answers}
    assert all((texts[name, 0] != texts[name, 1]) == (name in drawn) for name in RULES), (
        "siblings have draws of their own"
    )
    again = answer(folder, where, requests, **config)
    assert {(part.request_id, part.index): part.tokens.tolist() for part in again} == texts, (
        "seeds decide"
    )
    others = answer(
        folder, where, [replace(request, seed=request.seed + 100) for request in requests], **config
    )
    # else company moves roundings, and near-ties
    alone = where.bounds is EXACT or config.get("batch_invariant", False)
    for part in others:
        if part.request_id in drawn or alone:
            assert (part.tokens.tolist() != texts[part.request_id, part.index]) == (
                part.request_id in drawn
            )


def check_completion(request: Request, part: Completion, oracle: Oracle, bound: float) -> None:
    """Every number of one answer, position by position."""
    rules, prompt = request.sampling, len(request.tokens)
    logits = oracle.logits(np.concatenate([request.tokens, part.tokens]))
    raw, stops = log_softmax(logits), set(rules.stop_ids)
    count = len(part.tokens)
    assert part.finish == ("stop" if int(part.tokens[-1]) in stops else "length")
    assert part.finish == "stop" or count == rules.max_tokens
    assert not any(int(token) in stops for token in part.tokens[:-1])
    assert part.finish == "length" or count > rules.min_tokens
    draws = uniforms(
        np.full(count, draw_key(request.seed, part.index), np.uint64), np.arange(count)
    )
    for at, token in enumerate(part.tokens.tolist()):
        here = raw[prompt - 1 + at]
        assert abs(part.raw_logprobs[at] - here[token]) <= 2 * bound
        if rules.top_logprobs:
            assert part.top_ids is not None and part.top_logprobs is not None
            check_told(part.top_ids[at], part.top_logprobs[at], here, bound)
        shaped = shape(logits[prompt - 1 + at], rules, request.tokens, part.tokens[:at])
        error = bound * max(1.0, rules.repetition_penalty)
        if rules.temperature == 0.0:
            assert shaped[token] >= shaped.max() - 2 * error and part.logprobs[at] == 0.0
            continue
        kept = (
            None
            if part.support is None
            else part.support.ids[part.support.offsets[at] : part.support.offsets[at + 1]]
        )
        check_draw(
            shaped / rules.temperature,
            token,
            kept,
            rules,
            float(part.logprobs[at]),
            draws[at],
            error,
        )
    if rules.prompt_logprobs is not None:
        told = part.prompt_logprobs
        assert (
            told is not None
            and len(told.logprobs) == prompt
            and told.top_ids.shape == (prompt, rules.prompt_logprobs)
        )
        expected = raw[np.arange(prompt - 1), request.tokens[1:]]
        assert np.abs(told.logprobs[1:] - expected).max(initial=0.0) <= 2 * bound
        for place in range(1, prompt):
            check_told(told.top_ids[place], told.top_logprobs[place], raw[place - 1], bound)


def shape(
    logits: np.ndarray, rules: Sampling, prompt: np.ndarray, before: np.ndarray
) -> np.ndarray:
    """What the rules make of one position's logits before temperature, from their definitions."""
    shaped = logits.copy()
    if len(before) < rules.min_tokens:
        shaped[list(rules.stop_ids)] = -np.inf
    for token, bias in rules.logit_bias:
        shaped[token] += bias
    for token in {*prompt.tolist(), *before.tolist()}:
        shaped[token] *= (
            1 / rules.repetition_penalty if shaped[token] > 0 else rules.repetition_penalty
        )
    for token in before.tolist():
        shaped[token] -= rules.frequency_penalty
    for token in set(before.tolist()):
        shaped[token] -= rules.presence_penalty
    return shaped


def check_told(ids: np.ndarray, logprobs: np.ndarray, raw: np.ndarray, bound: float) -> None:
    """Alternatives are the best ones, in order, with their plain log-probs."""
    best = np.sort(raw)[::-1][: len(ids)]
    assert len(set(ids.tolist())) == len(ids) and (np.diff(logprobs) <= 0).all()
    assert np.abs(raw[ids] - best).max(initial=0.0) <= 2 * bound
    assert np.abs(raw[ids] - logprobs).max(initial=0.0) <= 2 * bound


def check_draw(
    scaled: np.ndarray,
    token: int,
    kept: np.ndarray | None,
    rules: Sampling,
    logprob: float,
    uniform: float,
    error: float,
) -> None:
    """The token is where the uniform falls in the distribution over what truncation keeps, in token
    order."""
    slack = 2 * error / rules.temperature
    surely, perhaps = truncate(scaled, rules, slack)
    if kept is None:
        assert surely.all() or not (rules.top_k or rules.top_p < 1.0 or rules.min_p > 0.0)
        kept = np.flatnonzero(np.isfinite(scaled))
    else:
        assert set(np.flatnonzero(surely)) <= set(kept.tolist()) <= set(np.flatnonzero(perhaps))
    assert token in kept
    expected = log_softmax(scaled[kept])
    assert abs(expected[kept == token][0] - logprob) <= slack
    upto = np.cumsum(np.exp(expected))
    place = int(np.flatnonzero(kept == token)[0])
    low, high = upto[place] - np.exp(expected[place]), upto[place]
    assert low - slack <= uniform <= high + slack, (
        "the draw of this seed and position falls elsewhere"
    )


def truncate(scaled: np.ndarray, rules: Sampling, slack: float) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens truncation keeps whatever the error, and which it may keep: min-p, then top-k,
    then top-p."""
    floor = -np.inf if rules.min_p == 0.0 else scaled.max() + np.log(rules.min_p)
    top_k = rules.top_k or len(scaled)
    order = np.sort(scaled[np.isfinite(scaled)])[::-1]
    nominal = order[: min(top_k, int((order >= floor).sum()))]  # what top-p takes its masses of
    mass = np.exp(log_softmax(nominal))

    def keeps(value: float, allowance: float) -> bool:
        """With everybody else's logits worse (better) than known by the allowance."""
        own = int(allowance < 0)  # it is among those that it is compared with
        first = (order > value + allowance).sum() - own < top_k
        before = mass[nominal > value + allowance].sum() - own * mass[0] * np.exp(
            value - nominal[0]
        )
        return bool(
            np.isfinite(value)
            and value >= floor - allowance
            and first
            and (rules.top_p == 1.0 or before < rules.top_p + allowance)
        )

    perhaps = [keeps(value, slack) or value >= scaled.max() - slack for value in scaled]
    return np.array([keeps(value, -slack) for value in scaled]), np.array(perhaps)
