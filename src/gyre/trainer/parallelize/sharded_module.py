"""Parallelise: a Decoder that may lie in shards, as passes and optimisers see it. In: a Decoder,
whole or cut by FSDP2. Out: this rank's part of it; when its layers are gathered and let go.

FSDP2 is heavy to import: `trainer.parallelize.fsdp` does, where weights are cut. Here it is only
asked after.
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
    """Whether FSDP2 has cut the module; nothing has been cut by what was never imported."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_shard(tensor: Tensor) -> bool:
    """Whether a parameter is a rank's part of one (a DTensor)."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def reshard(decoder: Decoder) -> None:
    """Let go of everything gathered: what was gathered before the shards changed must not be read
    after."""
    for module in sharded_parts(decoder):
        module.reshard()


def begin_chunk(decoder: Decoder, split: ModelSharding, *, last: bool) -> None:
    """Before the forward pass of an update's chunk. With zero 2 the weights stay gathered from
    chunk to chunk."""
    if not is_sharded(decoder):
        return
    root: Any = decoder
    root.set_requires_gradient_sync(last or split.sum_gradients == "chunk")
    if split.zero == 2:
        root.set_reshard_after_backward(last)


def local_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """This rank's part of each weight, by name."""
    return {name: local_part(parameter) for name, parameter in decoder.named_parameters()}


def local_part(parameter: Tensor) -> Tensor:
    """The plain tensor that a parameter is, or that this rank has of it; shares its storage."""
    found: Any = parameter
    # where a shard gives its tensor as it is, without an operation of its own
    with torch.no_grad():
        found = found.to_local() if is_shard(found) else found
    return (found.wide_OI if isinstance(found, Float8Shard) else found).detach()


def sharded_parts(decoder: Decoder) -> list[Any]:
    """The root and every layer, as FSDP2's modules."""
    return [module for module in decoder.modules() if is_sharded(module)]
