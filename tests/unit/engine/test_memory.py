"""What an engine says that it holds beside weights and KV: memory that its other ranks write, which
stays where it is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gyre.core.errors import InputError
from gyre.distributed.process_group import alone
from gyre.engine.config import EngineConfig
from gyre.engine.memory import EngineMemory
from gyre.memory.pools.cuda_vmm import VirtualUsage
from gyre.models.decoder import Decoder
from gyre.models.layers.tensor_parallel import ReplicatedRows
from layout_cases import spec_of

CPU = torch.device("cpu")
SPEC = replace(
    spec_of("qwen3", hidden_size=16, num_layers=2, vocab_size=53, mlp_size=24), context_tokens=96
)


def memory_of(peers: Any) -> EngineMemory:
    tensor = ReplicatedRows(alone(), peers)
    decoder = Decoder(SPEC, device=CPU, dtype=torch.float32, tensor=tensor)
    config = EngineConfig(num_pages=30, page_tokens=4)
    return EngineMemory(decoder, config, shared_weights=False, device=CPU, dtype=torch.float32)


def test_memory_that_peers_write_has_an_owner_and_does_not_move() -> None:
    """It is the driver's, which gives whole granules of 2 MiB; torch does not count it."""
    memory = memory_of(SimpleNamespace(size_bytes=5_000_000))
    found = {one.name: one for one in memory.components()}
    assert found["engine.peers"].tiers == ("device",) == (memory.tier("engine.peers"),)
    usage = memory.measure()["engine.peers"]
    assert isinstance(usage, VirtualUsage)
    assert usage.device_bytes == 5_000_000 and usage.mapped_bytes == 6 << 20
    memory.move("engine.peers", "device")
    for tier in ("host", "none"):
        with pytest.raises(InputError, match=r"engine\.peers stays on the device"):
            memory.move("engine.peers", tier)


def test_an_engine_without_such_memory_does_not_name_it() -> None:
    memory = memory_of(None)
    assert "engine.peers" not in memory.measure()
    assert [one.name for one in memory.components()] == ["engine.weights", "engine.kv"]
