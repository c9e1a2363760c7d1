"""Served rank: one process of a served engine that is cut over several. In: a model folder, this
rank's number, the port of the store where the ranks meet. Out: on rank 0 the engine's endpoint; the
others play what it plays.

`launch.serving.engine_groups` starts the ranks of an engine together, and ends them together. The
store is rank 0's, so it ends with the engine.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from gyre.cluster.worker.endpoints import EngineEndpoint
from gyre.cluster.worker.server import Context
from gyre.core.errors import InputError
from gyre.core.events import Emit
from gyre.core.files import read_json
from gyre.distributed.init import RankSpec, hold_store, join
from gyre.distributed.process_group import RankGroup
from gyre.engine.config import plan_engine
from gyre.engine.engine import NativeEngine
from gyre.engine.frontend.admission import RequestLimits
from gyre.engine.tensor_group import EntryStream, agree_on_pages, connect, follow
from gyre.engine.weights import read_weights
from gyre.launch.factories import (
    Machine,
    Policy,
    make_engine,
    make_machine,
    make_rows,
    reading_tokenizer,
)
from gyre.launch.serving.served_weights import find_signature
from gyre.models.decoder import Decoder
from gyre.models.hub.checkpoint import Checkpoint
from gyre.models.hub.folders import CONFIG_FILE, LoadFormat
from gyre.models.init import init_dummies
from gyre.models.spec import spec_from_hub_config
from gyre.runconfig.run_config import RunConfig, read_served_config

Result = TypeVar("Result")
LOOPBACK = "127.0.0.1"
MOST_CHARS = 500  # of a warning
ROUND = "served"  # each start of an engine has a store of its own


async def build_served_rank(
    context: Context,
    *,
    folder: str,
    version: int,
    config_json: str,
    load_format: LoadFormat = "auto",
    kept_tokenizer: str = "",
    tensor_rank: int = 0,
) -> ServedRank:
    """Make ready to meet the other ranks, and load nothing yet. `kept_tokenizer` is a file where
    the server leaves what it reads of a hub tokenizer."""
    tell_warnings(context.emit)
    config = read_served_config(config_json)
    # one for each layer that runs
    register_module_forward_pre_hook(lambda module, args: context.tick())
    return ServedRank(
        context,
        config,
        Path(folder),
        version=version,
        load_format=load_format,
        kept_tokenizer=Path(kept_tokenizer) if kept_tokenizer else None,
        rank=tensor_rank,
    )


def tell_warnings(emit: Emit) -> None:
    """Make events of what libraries warn of: each line of the server's log is a JSON object."""

    def show(message: Warning | str, category: type[Warning], filename: str, *_: object) -> None:
        text = str(message)[:MOST_CHARS]
        emit(
            "serve.library_warning",
            logger=Path(filename).stem,
            level="WARNING",
            message=text,
            error=category.__name__,
        )

    warnings.showwarning = show


class ServedRank:
    """One rank. `engine` is there on rank 0, once it has met the others."""

    def __init__(
        self,
        context: Context,
        config: RunConfig,
        folder: Path,
        *,
        version: int,
        load_format: LoadFormat,
        kept_tokenizer: Path | None,
        rank: int,
    ) -> None:
        self._context = context
        self._config = config
        self._folder = folder
        self._version = version
        self._load_format = load_format
        self._kept_tokenizer = kept_tokenizer
        self._rank = rank
        self._imports_s = time.time() - psutil.Process().create_time()
        self._machine = make_machine(config)
        self._store: torch.distributed.TCPStore | None = None
        self._group: RankGroup | None = None
        self._native: NativeEngine | None = None
        self._following: asyncio.Future[None] | None = None
        self.engine: EngineEndpoint | None = None

    def open_store(self) -> int:
        """Hold the store where the ranks meet, and return its port."""
        self._store = hold_store(LOOPBACK, timeout_s=self._config.parallel.timeout_s)
        return self._store.port

    async def meet(self, port: int) -> None:
        """Join the ranks, read this one's part of the weights, and be a rank of the engine from
        here on. All ranks are called. RankError names a rank that does not come or that fails,
        ConfigError devices of two kinds."""
        engine, stream = await self._on_compute(partial(self._make, port))
        if stream is None:
            self._native = engine
            self.engine = EngineEndpoint(engine, ticks=lambda: self._context.ticks, lost=self._lost)
            return
        assert self._group is not None
        following = partial(follow, stream, engine.worker, self._group)
        self._following = asyncio.ensure_future(self._on_compute(following))
        # the first rank hears of its error, by the failure detector, and names it
        self._following.add_done_callback(lambda done: done.cancelled() or done.exception())

    def limits(self) -> RequestLimits:
        """Return what bounds a request."""
        assert self._native is not None
        return self._native.limits

    def _make(self, port: int) -> tuple[NativeEngine, EntryStream | None]:
        """Return this rank's engine; of a follower the way to hear what it is to play."""
        config, machine, emit = self._config, self._machine, self._context.emit
        on_gpu = machine.device.type == "cuda"
        group = self._group = join(
            RankSpec(
                rank=self._rank,
                world_size=config.engine.tensor_ranks,
                store_host=LOOPBACK,
                store_port=port,
                round_id=ROUND,
                backend="nccl" if on_gpu else "gloo",
                device=torch.device("cuda", 0) if on_gpu else machine.device,
                timeout_s=config.parallel.timeout_s,
            )
        )
        with group.guard("the start of the engine"):
            policy = self._load(group, machine)
            settings = agree_on_pages(
                plan_engine(config.engine, device_type=machine.device.type),
                policy.decoder,
                group,
                dtype=machine.dtype,
            )
            followers, stream = connect(group, emit)
        engine = make_engine(
            settings,
            policy,
            machine,
            emit,
            shared_weights=False,
            version=self._version,
            followers=followers,
        )
        return engine, stream

    def _load(self, group: RankGroup, machine: Machine) -> Policy:
        """Return this rank's part of the model. InputError where another rank sees other files."""
        begun_s, folder, emit = time.monotonic(), self._folder, self._context.emit
        files = [list(one) for one in find_signature(folder)]
        if any(other != files for other in group.share(files)):
            raise InputError(
                f"{folder} has other files for one rank than for another",
                hint="it was changed meanwhile: start again once it is whole",
            )
        end_token = self._config.tokenizer.end_token
        with reading_tokenizer(folder, end_token, self._kept_tokenizer) as reading:
            spec = spec_from_hub_config(read_json(folder / CONFIG_FILE))
            rows = make_rows(group, spec, machine, emit)
            decoder = Decoder(spec, device=machine.device, dtype=machine.dtype, tensor=rows)
            if self._load_format == "dummy":
                init_dummies(decoder)
            else:
                with closing(Checkpoint(folder)) as source:
                    read_weights(decoder, source)
            tokenizer = reading.result()
        emit(
            "engine.loaded",
            load_format=self._load_format,
            imports_s=self._imports_s,
            seconds=time.monotonic() - begun_s,
        )
        return Policy(decoder=decoder, tokenizer=tokenizer, spec=spec)

    def _lost(self) -> str:
        """Return why the engine has ended for good, or an empty string: after a failure of one all
        ranks are started again."""
        assert self._native is not None and self._group is not None
        fault = self._group.fault
        return self._native.failure or (f"a rank of the engine is lost: {fault}" if fault else "")

    async def _on_compute(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._machine.compute, work)
