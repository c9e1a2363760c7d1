"""A small native engine as a process of its own, whose commits a test can hold up. In: a file that lets
a version's commit begin. Out: a worker's object with an EngineEndpoint. Workers import it by name."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from engine_cases import CPU, make_decoder
from gyre.cluster.worker.endpoints import EngineEndpoint
from gyre.cluster.worker.server import Context
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine

LOOK_S = 0.01


def gated_engine(context: Context, *, gate: str = "", version: int = 0) -> Any:
    """`gate`: a file without which the commit of `version` does not begin."""
    engine = NativeEngine(
        make_decoder(0),
        EngineConfig(num_pages=80, page_tokens=4, max_running=6, token_budget=32, burst_steps=2),
        compute=ThreadPoolExecutor(1),
        emit=context.emit,
        device=CPU,
        dtype=torch.float32,
        shared_weights=False,
    )
    return SimpleNamespace(engine=GatedEndpoint(engine, gate=gate, version=version))


class GatedEndpoint(EngineEndpoint):
    """An engine that begins the commit of one version late."""

    def __init__(self, engine: NativeEngine, *, gate: str, version: int) -> None:
        super().__init__(engine)
        self._gate = gate
        self._gated_version = version

    async def commit(self, version: int, policy: Any) -> None:
        while self._gate and version == self._gated_version and not Path(self._gate).exists():
            await asyncio.sleep(LOOK_S)  # the caller has the deadline
        await super().commit(version, policy)
