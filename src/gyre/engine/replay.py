"""Replay: play a kept journal again, to reproduce what an engine did. In: the entries of a journal,
a decoder, its weights by version. Out: the TokenChunks that came out then, in order and to the bit
on an equal machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from gyre.core.events import Emit
from gyre.core.records import TokenChunk
from gyre.engine.config import EngineConfig
from gyre.engine.core_worker import CoreWorker
from gyre.engine.scheduler.core import Decodes
from gyre.engine.scheduler.journal import Commit, Entry, MoveComponent, Start, Steps
from gyre.models.decoder import Decoder


def replay(
    entries: Iterable[Entry],
    decoder: Decoder,
    *,
    load: Callable[[int], None],
    tokenizer: Decodes | None = None,
    emit: Emit,
) -> Iterator[TokenChunk]:
    """Yield what comes out of the engine. `load(version)` writes the weights of a version into the
    decoder, in place; it is called before the first step on them. CoreFailed where the engine
    failed. What lay on disk is kept in host memory."""
    worker: CoreWorker | None = None
    version, loaded = -1, -1
    for entry in entries:
        if isinstance(entry, Start):
            worker = _start(entry, decoder, tokenizer, emit)
            version = entry.version
            continue
        assert worker is not None, "a journal begins with a Start"
        if isinstance(entry, Commit):
            version = entry.version
        if isinstance(entry, Steps) and loaded != version:
            load(version)
            loaded = version
        if isinstance(entry, MoveComponent):
            worker.move([entry.component], "host" if entry.tier == "disk" else entry.tier)
        yield from worker.play([] if isinstance(entry, MoveComponent) else [entry]).chunks


def _start(start: Start, decoder: Decoder, tokenizer: Decodes | None, emit: Emit) -> CoreWorker:
    fixed = {"num_pages": start.num_pages, "journal": False, "disk_folder": None}
    worker = CoreWorker(
        decoder,
        EngineConfig.model_validate({**start.settings, **fixed}),
        tokenizer,
        emit=emit,
        device=torch.device(decoder.device),
        dtype=decoder.dtype,
        version=start.version,
        shared_weights=True,
        eos_ids=start.eos_ids,
    )
    worker.start(dummy=False)
    return worker
