"""A served engine with random weights that are made on its device, so that a large shape starts
without a checkpoint. In: a folder with config.json and a tokenizer. Out: `gyre serve` with it.
Caller: bench/routing.py --mode gpu, whose server loads `build` by name in a worker process.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from torch.nn.modules.module import register_module_forward_pre_hook

from engine import fill_dummy
from gyre.cluster.worker.endpoints import EngineEndpoint
from gyre.cluster.worker.server import Context
from gyre.core.files import read_json
from gyre.engine.engine import NativeEngine
from gyre.launch.factories import make_machine
from gyre.launch.placement.worker import ServedEngine
from gyre.models.decoder import Decoder
from gyre.models.hub.folders import CONFIG_FILE
from gyre.models.spec import spec_from_hub_config
from gyre.runconfig import RunConfig
from gyre.text.tokenizer import load_tokenizer


async def build(context: Context, *, folder: str, version: int, config_json: str) -> ServedEngine:
    """Make the worker's object, as launch.placement.worker.build_served_engine does."""
    config = RunConfig.model_validate_json(config_json)
    machine = make_machine(config)
    spec = spec_from_hub_config(read_json(Path(folder) / CONFIG_FILE))
    tokenizer = load_tokenizer(folder)

    def make() -> NativeEngine:
        decoder = Decoder(spec, device=machine.device, dtype=machine.dtype)
        fill_dummy(decoder)
        return NativeEngine(
            decoder,
            config.engine,
            tokenizer,
            compute=machine.compute,
            emit=context.emit,
            device=machine.device,
            dtype=machine.dtype,
            version=version,
            shared_weights=False,
        )

    # a first step that compiles its kernels is seen to go on
    register_module_forward_pre_hook(lambda module, args: context.tick())
    engine = await asyncio.get_running_loop().run_in_executor(machine.compute, make)
    return ServedEngine(EngineEndpoint(engine, ticks=lambda: context.ticks), engine.limits)


def main() -> None:
    """`gyre serve` with this engine in its workers."""
    from gyre.cli.main import main as gyre
    from gyre.launch.serving import server

    server.BUILDER = "dummy_engine:build"
    sys.argv[0] = "gyre"
    gyre()


if __name__ == "__main__":
    main()
