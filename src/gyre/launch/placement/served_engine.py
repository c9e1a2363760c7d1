"""Served engine: the object in a worker of `gyre serve`. In: a model folder, the config. Out: an
engine's endpoint and its limits. Started by launch.serve, by the name
"gyre.launch.placement.served_engine:build_served_engine".
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from torch.nn.modules.module import register_module_forward_pre_hook

from gyre.cluster.worker.endpoints import EngineEndpoint
from gyre.cluster.worker.server import Context
from gyre.engine.frontend.admission import RequestLimits
from gyre.launch.factories import load_policy, make_engine, make_machine
from gyre.runconfig import RunConfig


class ServedEngine:
    """One engine over the weights of a folder."""

    def __init__(self, engine: EngineEndpoint, limits: RequestLimits) -> None:
        self.engine, self._limits = engine, limits

    def limits(self) -> RequestLimits:
        """Return what bounds a request."""
        return self._limits


async def build_served_engine(context: Context, *, folder: str, config_json: str) -> ServedEngine:
    """Load the weights and make the engine; `start` allocates its KV cache."""
    config = RunConfig.model_validate_json(config_json)
    machine = make_machine(config)
    policy = await asyncio.get_running_loop().run_in_executor(
        machine.compute,
        lambda: load_policy(Path(folder), machine, end_token=config.tokenizer.end_token),
    )
    # one for each layer that runs
    register_module_forward_pre_hook(lambda module, args: context.tick())
    engine = make_engine(config.engine, policy, machine, context.emit)
    endpoint = EngineEndpoint(engine, ticks=lambda: context.ticks)
    return ServedEngine(endpoint, engine.limits)
