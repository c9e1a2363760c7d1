"""Materialize: storage and initial weights of the trainer's models. In: a Decoder, possibly on the
meta device, its layout over ranks, a TensorSource. Out: the same Decoder, in place: this rank's
part on its device, filled.

A meta-device decoder has shapes and no storage. Sharded in that state, it never exists whole: a
rank allocates its shards and reads its own runs, one tensor at a time. Without a source it stays
uninitialized, for a snapshot to fill.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from gyre.core.records import Projection
from gyre.distributed.layout import ModelLayout
from gyre.distributed.mesh import ModelSharding
from gyre.distributed.process_group import RankGroup
from gyre.kernels.rope import rope_frequencies
from gyre.memory.pools.host_buffer import HostBuffer
from gyre.models.decoder import NOTHING, Decoder
from gyre.models.layers.tensor_parallel import SequenceParallel
from gyre.models.layout import model_layout
from gyre.trainer.config import TrainerConfig, refuse_cut
from gyre.trainer.offload.weight_stream import WeightStream, carve, carved_bytes
from gyre.trainer.optim.flat import move_in
from gyre.trainer.parallelize.sharded_module import local_tensors
from gyre.weights.boxes import local_source
from gyre.weights.shards import ShardLayout, row_layout
from gyre.weights.tensor_source import LiveTensors, TensorSource, fill


def is_blank(decoder: Decoder) -> bool:
    """Return whether it has shapes only."""
    return decoder.device.type == "meta"


def blank_copy(decoder: Decoder) -> Decoder:
    """Return a meta-device model of the same shapes and dtype."""
    return Decoder(
        decoder.whole_spec,
        device=torch.device("meta"),
        dtype=decoder.dtype,
        tensor=decoder.tensor,
    )


def part_of(
    decoder: Decoder, tensor: RankGroup, weights: TensorSource | None
) -> tuple[Decoder, TensorSource | None]:
    """Return this tensor rank's part of a whole model, on the meta device, and what fills it: of a
    model with storage its own weights."""
    if not is_blank(decoder):
        assert weights is None
        weights = LiveTensors(dict(decoder.named_parameters()))
    part = Decoder(
        decoder.whole_spec,
        device=torch.device("meta"),
        dtype=decoder.dtype,
        tensor=SequenceParallel(tensor),
    )
    return part, weights


def table_of(decoder: Decoder) -> ModelLayout | None:
    """Return the table of a model over tensor ranks; None for one that is whole."""
    if (tensor := decoder.tensor) is None:
        return None
    return model_layout(decoder.whole_spec, tensor.group.size, sequence_parallel=tensor.splits_rows)


def cut_weights(
    decoder: Decoder, split: ModelSharding, *, trains: bool, float8: frozenset[Projection] = NOTHING
) -> None:
    """Shard the weights over the shard group, and allocate storage for the shards of a meta-device
    decoder. `float8` names the projections gathered in 8 bits."""
    from gyre.trainer.parallelize.fsdp import (
        shard_decoder,  # here, since FSDP2 is heavy and one process has no use for it
    )

    blank = is_blank(decoder)
    shard_decoder(decoder, split, trains=trains, float8=float8)
    if blank:
        make_storage(decoder, split.mesh.device)


def make_storage(decoder: Decoder, device: torch.device) -> None:
    """Allocate uninitialized storage for a meta-device decoder or its shards."""
    decoder.to_empty(device=device)
    place_constants(decoder, device)


def place_constants(decoder: Decoder, device: torch.device) -> None:
    """Allocate the constants that a forward pass reads besides the parameters."""
    spec = decoder.spec
    decoder.inv_freq_F = rope_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling, device)


@dataclass(frozen=True, slots=True)
class Away:
    """A frozen model in host memory, and the stream that brings it to the device."""

    buffer: HostBuffer
    stream: WeightStream


def start_frozen(
    name: str,
    decoder: Decoder,
    head: nn.Module | None,
    config: TrainerConfig,
    split: ModelSharding,
    weights: TensorSource | None,
) -> Away | None:
    """Prepare a model that is not trained; with `offload_parameters` every weight stays in host
    memory. A model with storage keeps its weights and takes no source. `head` is already filled."""
    assert weights is None or is_blank(decoder)
    blank, dtype, layout = is_blank(decoder), decoder.dtype, frozen_layout(decoder, split)
    buffer, device = None, split.mesh.device
    decoder.requires_grad_(False)
    if name in config.offload_parameters:
        refuse_cut(name, zero=split.zero, ranks=split.mesh.shard.size)
        parameters = [*decoder.parameters(), *([] if head is None else head.parameters())]
        buffer = HostBuffer(
            carved_bytes(parameters), pin=device.type == "cuda", owner=f"component {name}"
        )
        for parameter, into in zip(parameters, carve(buffer.bytes, parameters), strict=True):
            move_in(parameter, into)
        place_constants(decoder, device)
    elif split.shards_weights:
        cut_weights(decoder, split, trains=False)
    elif blank:
        make_storage(decoder, device)
    if weights is not None:
        source = local_source(weights, layout.model, split.mesh.tensor.rank)
        fill(local_tensors(decoder), layout.ranks[split.rank], source, dtype=dtype)
    return None if buffer is None else Away(buffer, WeightStream(decoder, head, device))


def frozen_layout(decoder: Decoder, split: ModelSharding) -> ShardLayout:
    """Return the layout of a model that is not trained. Call it before sharding."""
    shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    num_ranks = split.mesh.shard.size if split.shards_weights else 1
    return replace(row_layout(shapes, num_ranks=num_ranks), table=table_of(decoder))
