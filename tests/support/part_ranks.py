"""What a rank of a trainer registers, for a pool of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gyre.core.offers import LocalShards
from gyre.distributed.process_group import RankGroup
from gyre.weights.transports.publish import PublishedPart, publish_part
from gyre.weights.transports.shared_memory import SharedMemoryStore
from part_cases import RUN, silent
from zero_cases import batch_for, trainer_on


def publish_from_trainer(
    group: RankGroup, *, layout: str, folder: str
) -> tuple[PublishedPart, int, dict[str, np.ndarray]]:
    """On every rank: train a step, register the version, and return this rank's part, the version
    and what its whole tensors are."""
    trainer = trainer_on(group, "sft", layout=layout)
    trainer.step_now(batch_for(8, seed=0))
    offer = trainer.register_now()
    store = SharedMemoryStore(run_id=RUN, owner=group.rank, emit=silent, folder=Path(folder))
    part = publish_part(offer, rank=group.rank, num_ranks=group.size, store=store)
    if isinstance(offer.source, LocalShards):
        shapes = offer.source.shards.layout.model.shapes
        whole = {name: torch.zeros(shape) for name, shape in shapes.items()}
        offer.source.shards.gather_into(whole)
    else:
        whole = offer.source.tensors
    return part, offer.version, {name: tensor.numpy() for name, tensor in whole.items()}
