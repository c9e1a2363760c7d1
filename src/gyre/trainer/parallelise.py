"""Parallelise: a Decoder over the ranks of a shard group with FSDP2, a group per layer and one for the rest.
In: a whole Decoder, alike on all ranks. Out: the same Decoder, in place, holding its shards. Callers: the files of
this room that hold a model or run one.

The root group holds embedding, head and final norm: with tied embeddings these must be one group, and the head is read
after `hidden` has returned. Its weights stay gathered from the first layer to the end of the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from gyre.core.records import Projection
from gyre.models.decoder import NOTHING, Decoder
from gyre.parallel.mesh import Split
from gyre.trainer.float8 import Float8Shard, gather_in_float8, share_amaxes


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def shard_decoder(decoder: Decoder, split: Split, *, trains: bool, float8: frozenset[Projection] = NOTHING) -> None:
    """Cut the weights over the ranks of `split.mesh.shard`. Trained shards are float32, the master weights themselves:
    layers are gathered in the dtype that the decoder had, or in 8 bits the projections of `float8`; gradients are
    summed in float32. Copies on other replicas are kept equal by the optimiser, once per update."""
    assert split.mesh.torch_mesh is not None and split.shards_weights
    dtype, mesh = decoder.dtype, split.mesh.torch_mesh["shard"]
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if trains and dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in decoder.layers:
        _to_master(layer, trains)
        gather_in_float8(layer, float8, split.mesh.shard.size)
        fully_shard(layer, mesh=mesh, reshard_after_forward=split.zero == 3, mp_policy=policy)
    _to_master(decoder, trains)
    fully_shard(decoder, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    register_fsdp_forward_method(decoder, "hidden")
    for module in _parts(decoder):
        module.set_gradient_divide_factor(1.0)  # losses are divided by the denominator of all ranks already
        module.set_force_sum_reduction_for_comms(True)
    share_amaxes(decoder.parameters(), dtype, split.mesh.shard)


def reshard(decoder: Decoder) -> None:
    """Let go of everything gathered: what was gathered before the shards changed must not be read after."""
    for module in _parts(decoder):
        module.reshard()


def begin_chunk(decoder: Decoder, split: Split, *, last: bool) -> None:
    """Before the forward pass of an update's chunk. With zero 2 the weights stay gathered from chunk to chunk."""
    if not isinstance(decoder, FSDPModule):
        return
    decoder.set_requires_gradient_sync(last or split.sum_gradients == "chunk")
    if split.zero == 2:
        decoder.set_reshard_after_backward(last)


def local_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """This rank's part of each weight, by name."""
    return {name: local_part(parameter) for name, parameter in decoder.named_parameters()}


def local_part(parameter: Tensor) -> Tensor:
    """The plain tensor that a parameter is, or that this rank has of it; shares its storage."""
    found = parameter.detach()
    found = found.to_local() if isinstance(found, DTensor) else found
    return found.wide_OI if isinstance(found, Float8Shard) else found


def _to_master(module: nn.Module, trains: bool) -> None:
    """Parameters that are not sharded yet become float32."""
    if not trains:
        return
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()


def _parts(decoder: Decoder) -> list[FSDPModule]:
    return [module for module in decoder.modules() if isinstance(module, FSDPModule)]
