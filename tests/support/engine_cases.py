"""An engine on a tiny random model, with its events and its compute thread, for tests of its
life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from gyre.core.chunks import collect
from gyre.core.records import Completion, Request, Sampling
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.models.config import ShapeConfig
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.spec import spec_from_shape
from offers import offer_of

CPU = torch.device("cpu")


def make_decoder(seed: int) -> Decoder:
    return make_decoder_of(vocab_size=60, context_tokens=256, seed=seed)


def make_decoder_of(*, vocab_size: int, context_tokens: int, seed: int = 0) -> Decoder:
    shape = ShapeConfig(
        family="qwen3",
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        mlp_size=48,
        tied=True,
        context_tokens=context_tokens,
    )
    spec = spec_from_shape(shape, vocab_size=vocab_size, bos_id=None, eos_ids=())
    decoder = Decoder(spec, device=CPU, dtype=torch.float32)
    init_weights(decoder, seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            # peaked choices, so that versions differ visibly
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
    return decoder


def tensors_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


class Bench:
    """One engine, its events and its compute thread."""

    def __init__(
        self,
        *,
        shared: bool,
        folder: Path | None = None,
        seed: int = 1,
        clock: Callable[[], float] = time.monotonic,
        journal_folder: Path | None = None,
        **config,
    ) -> None:
        self.events: list[tuple[str, dict]] = []
        self.decoder = make_decoder(seed)
        self.compute = ThreadPoolExecutor(1)
        self.engine = NativeEngine(
            self.decoder,
            EngineConfig(
                **{
                    "num_pages": 60,
                    "page_tokens": 4,
                    "max_running": 8,
                    "token_budget": 64,
                    **config,
                },
                disk_folder=str(folder) if folder else None,
            ),
            compute=self.compute,
            emit=lambda kind, **fields: self.events.append((kind, fields)),
            device=CPU,
            dtype=torch.float32,
            shared_weights=shared,
            journal_folder=journal_folder,
            clock=clock,
        )

    async def ask(self, count: int = 3, **fields) -> list[tuple[Completion, ...]]:
        return list(
            await asyncio.gather(
                *[collect(self.engine.submit(one)) for one in ask(count, **fields)]
            )
        )

    async def move(self, names: list[str], tier) -> None:
        await asyncio.get_running_loop().run_in_executor(
            self.compute, lambda: self.engine.move(names, tier)
        )

    async def publish(self, version: int, source: Decoder, *, shared: bool, policy="drain") -> None:
        tensors = tensors_of(source)
        await self.engine.prepare(offer_of(version, tensors, shared=shared, checksums=not shared))
        await self.engine.commit(version, policy=policy)

    def check(self) -> None:
        assert self.engine.core is not None
        self.engine.core.state.check()

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def ask(count: int, *, max_tokens: int = 12, **fields) -> list[Request]:
    generator = np.random.default_rng(0)
    return [
        Request(
            request_id=f"{fields.get('name', 'r')}{i}",
            tokens=generator.integers(0, 60, 9).astype(np.int32),
            sampling=Sampling(temperature=0.0, max_tokens=max_tokens),
            chunk_tokens=fields.get("chunk_tokens", 0),
            deadline_s=fields.get("deadline_s"),
        )
        for i in range(count)
    ]


def tokens_of(results: list[tuple[Completion, ...]]) -> list[list[int]]:
    return [parts[0].tokens.tolist() for parts in results]


def versions_of(results: list[tuple[Completion, ...]]) -> set[int]:
    return set(np.concatenate([parts[0].versions for parts in results]).tolist())


def go(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))  # type: ignore[arg-type]
