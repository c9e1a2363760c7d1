"""Sharded modules: a possibly sharded Decoder as passes and optimizers use it. In: a Decoder, whole
or sharded by FSDP2. Out: this rank's part; control over gathering and freeing its layers.

FSDP2 is slow to import: `trainer.parallelize.fsdp` imports it where weights are sharded. This file
only checks whether it was imported.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from gyre.distributed.mesh import ModelSharding
from gyre.models.decoder import Decoder
from gyre.trainer.parallelize.float8_gather import Float8Shard


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP2 has sharded the module; without the import none is."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_shard(tensor: Tensor) -> bool:
    """Return whether a parameter is a rank's shard (a DTensor)."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def reshard(decoder: Decoder) -> None:
    """Free all gathered weights; they are stale once the shards change."""
    for module in sharded_parts(decoder):
        module.reshard()


def begin_chunk(
    decoder: Decoder, split: ModelSharding, *, last: bool, reads_head: bool = True
) -> None:
    """Prepare the forward pass of an update's micro-batch. With zero 2 the weights stay gathered
    across micro-batches. `reads_head`: whether the pass ends at the vocabulary."""
    if not is_sharded(decoder):
        return
    root: Any = decoder
    root.set_requires_gradient_sync(last or split.sum_gradients == "chunk")
    if not reads_head and not decoder.spec.tied:
        # FSDP2 looks for a gradient to keep in weights that it has never gathered
        head: Any = decoder.head
        head.set_requires_gradient_sync(True)
    if split.zero == 2:
        root.set_reshard_after_backward(last)


def local_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Return this rank's part of each weight, by name."""
    return {name: local_part(parameter) for name, parameter in decoder.named_parameters()}


def local_part(parameter: Tensor) -> Tensor:
    """Return the plain tensor of a parameter, or this rank's part; shares its storage."""
    found: Any = parameter
    # where a shard gives its tensor as it is, without an operation of its own
    with torch.no_grad():
        found = found.to_local() if is_shard(found) else found
    return (found.wide_OI if isinstance(found, Float8Shard) else found).detach()


def sharded_parts(decoder: Decoder) -> list[Any]:
    """Return the root and every layer as FSDP2 modules."""
    return [module for module in decoder.modules() if is_sharded(module)]
