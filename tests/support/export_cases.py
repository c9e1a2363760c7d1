"""Cases for exports by several ranks; functions here run in rank processes (rank_pool)."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from gyre.core import files
from gyre.core.errors import GyreError
from gyre.distributed.process_group import RankGroup
from gyre.launch.export import export_shards
from gyre.launch.factories import Machine
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from trainer_cases import make_trainer
from zero_cases import BIG, LAYOUTS


def exported_slowly(
    group: RankGroup, folder: str, *, sync_s: float, deadline_s: float, fails: bool
) -> tuple[int, str]:
    """An export at whose end the disk takes `sync_s` to sync, and then fails or not. (this rank's
    signs of progress, what it was told)."""
    decoder = Decoder(BIG, device=group.device, dtype=torch.float32)
    init_weights(decoder, 1)
    trainer = make_trainer("sft", decoder=decoder, group=group, parallel=LAYOUTS["zero3"])
    source = trainer.shards()
    honest, signs = files.sync, []

    def slow(at: Path) -> None:
        if at.name.endswith(".partial"):
            time.sleep(sync_s)
            if fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        honest(at)

    files.sync = slow
    tokenizer = Path(folder) / f"tokenizer-{group.rank}"
    tokenizer.mkdir(exist_ok=True)
    machine = Machine(device=group.device, dtype=torch.float32, compute=ThreadPoolExecutor(1))
    given = {"deadline_s": deadline_s, "progress": lambda: signs.append(None)}
    try:
        export_shards(
            BIG, None, source, group, Path(folder) / "export", machine, tokenizer, **given
        )
    except GyreError as error:
        return len(signs), f"{type(error).__name__}: {error}"
    finally:
        files.sync = honest
    return len(signs), ""
