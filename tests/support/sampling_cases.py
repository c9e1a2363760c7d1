"""A tiny model of the hub's kind, and an engine on it that runs requests and is checked for
leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from gyre.core.chunks import collect
from gyre.core.records import Completion, Request
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.models.hub.load import load_hub

CPU = torch.device("cpu")
VOCAB, CONTEXT = 101, 512


def save_tiny(folder: Path, family: str) -> Path:
    """Save a model with wide random weights, so that greedy choices are no near-ties."""
    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.25,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    if family == "qwen3":
        config = transformers.Qwen3Config(**shared, head_dim=16, tie_word_embeddings=True)
    else:
        config = transformers.LlamaConfig(**shared)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        folder
    )
    return folder


class Letters:
    """A tokenizer of one character per token."""

    eos_ids = (100,)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(32 + i) for i in ids)


class Events(list):
    """What the engine told, as (kind, fields)."""

    def __call__(self, kind: str, **fields: object) -> None:
        self.append((kind, fields))

    def of(self, kind: str) -> list[dict]:
        return [fields for got, fields in self if got == kind]


def with_engine(
    folder: Path,
    use: Callable[[NativeEngine], Any],
    *,
    events: Events | None = None,
    tokenizer: Any = None,
    shared_weights: bool = True,
    **config,
) -> Any:
    """Run `await use(engine)` on a fresh engine; then nothing may be held or have failed."""
    _, decoder = load_hub(folder, device=CPU, dtype=torch.float32)
    settings = {
        "num_pages": 400,
        "page_tokens": 8,
        "max_running": 16,
        "token_budget": 256,
        **config,
    }
    told = Events() if events is None else events

    async def main() -> Any:
        with ThreadPoolExecutor(1) as compute:
            engine = NativeEngine(
                decoder,
                EngineConfig(**settings),
                tokenizer,
                compute=compute,
                emit=told,
                device=CPU,
                dtype=torch.float32,
                version=3,
                shared_weights=shared_weights,
            )
            await engine.start(dummy=False)
            result = await use(engine)
            assert engine.core is not None
            engine.core.state.check()
            stats = await engine.stats()
            assert stats.pages_used == 0 and stats.running == 0 and stats.waiting == 0
            assert not told.of("engine.failed"), told.of("engine.failed")
            return result

    return asyncio.run(main())


async def answer_all(
    engine: NativeEngine, requests: Sequence[Request]
) -> list[tuple[Completion, ...]]:
    return list(await asyncio.gather(*[collect(engine.submit(request)) for request in requests]))


def some_tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, VOCAB - 1, count).astype(np.int32)
