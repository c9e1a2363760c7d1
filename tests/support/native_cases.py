"""Cases of the native engine: random models in hub layout, requests, a fresh engine that runs them,
and transformers' answers. Tests: tests/unit/engine/test_engine.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from gyre.core.records import Completion, EngineStats, Request, Sampling
from gyre.engine.engine import NativeEngine
from sampling_cases import answer_all, with_engine

VOCAB, CONTEXT = 101, 512


def tiny_config(family: str) -> transformers.PretrainedConfig:
    shared = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.25,  # wide, so that greedy choices are no near-ties
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    kinds = {
        "llama": lambda: transformers.LlamaConfig(**shared),
        "qwen2": lambda: transformers.Qwen2Config(**shared),
        "windows": lambda: transformers.Qwen2Config(
            **shared, use_sliding_window=True, sliding_window=11, max_window_layers=1
        ),
        "all_windows": lambda: transformers.Qwen2Config(
            **shared, use_sliding_window=True, sliding_window=11, max_window_layers=0
        ),
        "qwen3": lambda: transformers.Qwen3Config(**shared, head_dim=16, tie_word_embeddings=True),
    }
    return kinds[family]()


def save_tiny(folder: Path, family: str, *, seed: int = 0) -> transformers.PreTrainedModel:
    """A random model, kept in hub layout."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    model.save_pretrained(folder)
    return model


def run(
    folder: Path, requests: list[Request], *, waves: int = 1, tokenizer=None, **config
) -> list[tuple[Completion, ...]]:
    """All requests at once (or one wave after another) on a fresh engine; asserts that nothing
    leaks or fails."""
    results, _ = run_with_stats(folder, requests, waves=waves, tokenizer=tokenizer, **config)
    return results


def run_with_stats(
    folder: Path, requests: list[Request], *, waves: int = 1, tokenizer=None, **config
) -> tuple[list[tuple[Completion, ...]], EngineStats]:
    async def use(engine: NativeEngine) -> tuple[list[tuple[Completion, ...]], EngineStats]:
        results = []
        for wave in range(waves):
            results += await answer_all(engine, requests[wave::waves])
        return results, await engine.stats()

    return with_engine(folder, use, tokenizer=tokenizer, **config)


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 40) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [
        generator.integers(1, VOCAB - 1, generator.integers(low, high)).astype(np.int32)
        for _ in range(count)
    ]


def make_requests(count: int, *, seed: int = 0, high: int = 40, **sampling) -> list[Request]:
    rules = Sampling(**{"temperature": 0.0, "max_tokens": 24, **sampling})
    return [
        Request(request_id=f"r{i}", tokens=tokens, sampling=rules, seed=1000 + i, chunk_tokens=0)
        for i, tokens in enumerate(prompts(count, seed, high=high))
    ]


def tokens_of(results: list[tuple[Completion, ...]]) -> dict[str, list[list[int]]]:
    return {parts[0].request_id: [part.tokens.tolist() for part in parts] for parts in results}


def by_transformers(
    model: transformers.PreTrainedModel, requests: list[Request]
) -> dict[str, list[list[int]]]:
    """Greedy completions, one request at a time."""
    found = {}
    for request in requests:
        ids = torch.tensor(request.tokens[None], dtype=torch.int64)
        count = request.sampling.max_tokens
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
            )
        found[request.request_id] = [out[0, len(request.tokens) :].tolist()]
    return found
