"""Cases for layouts: a spec of any small decoder, and whole tensors with a number of its own
everywhere."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gyre.models.spec import Family, ModelSpec


def spec_of(family: Family = "qwen3", **sizes: Any) -> ModelSpec:
    sizes = {
        "vocab_size": 11,
        "hidden_size": 6,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "mlp_size": 8,
        "tied": False,
    } | sizes
    return ModelSpec(
        family=family,
        head_dim=2,
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
