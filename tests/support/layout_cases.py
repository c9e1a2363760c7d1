"""Cases for layouts: a spec of any small decoder, and whole tensors with a number of its own
everywhere."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gyre.models.spec import Family, ModelSpec
from gyre.weights.boxes import local_source
from gyre.weights.shards import ShardLayout
from gyre.weights.tensor_source import LiveTensors, fill


def spec_of(family: Family = "qwen3", **sizes: Any) -> ModelSpec:
    sizes = {
        "vocab_size": 11,
        "hidden_size": 6,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "mlp_size": 8,
        "tied": False,
        "head_dim": 2,
    } | sizes
    return ModelSpec(
        family=family,
        context_tokens=8,
        rope_theta=1e4,
        norm_eps=1e-6,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        **sizes,
    )


def numbered(spec: ModelSpec) -> dict[str, Tensor]:
    found, at = {}, 1
    for name, shape in spec.parameter_shapes().items():
        count = math.prod(shape)
        found[name] = torch.arange(at, at + count, dtype=torch.float32).view(shape)
        at += count
    return found


def held_by(layout: ShardLayout, whole: dict[str, torch.Tensor], rank: int):
    """What one rank of shard × tensor holds of whole tensors."""
    shard, tensor_rank = divmod(rank, len(layout.model.ranks))
    places = layout.ranks[shard]
    device = next(iter(whole.values())).device
    own = {
        name: torch.empty(place.stop - place.start, device=device) for name, place in places.items()
    }
    source = local_source(LiveTensors(whole), layout.model, tensor_rank)
    fill(own, places, source, dtype=torch.float32)
    return own
