"""Model zoo: published models by name and by their sizes, without their weights. In: a name such as
"qwen3-8b". Out: ModelNumbers. Pure.

The numbers are those of each model's hub `config.json`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from types import MappingProxyType

from gyre.core.errors import ConfigError
from gyre.models.layout import find_uneven, local_spec
from gyre.models.spec import Family, ModelSpec
from gyre.planner.plan import ModelNumbers


def _shape(
    family: Family,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    heads: tuple[int, int, int],
    mlp_size: int,
    context_tokens: int,
    *,
    tied: bool,
    rope_theta: float,
) -> ModelSpec:
    """`heads` is (query heads, KV heads, width of a head)."""
    return ModelSpec(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        mlp_size=mlp_size,
        tied=tied,
        context_tokens=context_tokens,
        rope_theta=rope_theta,
        norm_eps=1e-5 if family == "llama" else 1e-6,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def _qwen3(
    hidden_size: int, num_layers: int, heads: tuple[int, int, int], mlp_size: int, *, tied: bool
) -> ModelSpec:
    return _shape(
        "qwen3",
        151_936,
        hidden_size,
        num_layers,
        heads,
        mlp_size,
        40_960,
        tied=tied,
        rope_theta=1e6,
    )


def _llama3(
    hidden_size: int, num_layers: int, heads: tuple[int, int, int], mlp_size: int, *, tied: bool
) -> ModelSpec:
    return _shape(
        "llama",
        128_256,
        hidden_size,
        num_layers,
        heads,
        mlp_size,
        131_072,
        tied=tied,
        rope_theta=5e5,
    )


SHAPES: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "qwen3-0.6b": _qwen3(1024, 28, (16, 8, 128), 3072, tied=True),
        "qwen3-1.7b": _qwen3(2048, 28, (16, 8, 128), 6144, tied=True),
        "qwen3-4b": _qwen3(2560, 36, (32, 8, 128), 9728, tied=True),
        "qwen3-8b": _qwen3(4096, 36, (32, 8, 128), 12_288, tied=False),
        "qwen3-14b": _qwen3(5120, 40, (40, 8, 128), 17_408, tied=False),
        "qwen3-32b": _qwen3(5120, 64, (64, 8, 128), 25_600, tied=False),
        "qwen2.5-0.5b": _shape(
            "qwen2", 151_936, 896, 24, (14, 2, 64), 4864, 32_768, tied=True, rope_theta=1e6
        ),
        "qwen2.5-7b": _shape(
            "qwen2", 152_064, 3584, 28, (28, 4, 128), 18_944, 131_072, tied=False, rope_theta=1e6
        ),
        "llama-3.2-1b": _llama3(2048, 16, (32, 8, 64), 8192, tied=True),
        "llama-3-8b": _llama3(4096, 32, (32, 8, 128), 14_336, tied=False),
        "llama-3-70b": _llama3(8192, 80, (64, 8, 128), 28_672, tied=False),
    }
)


def find_shape(name: str) -> ModelSpec:
    """Return a shape by its name, whatever its case."""
    key = name.lower()
    if key in SHAPES:
        return SHAPES[key]
    near = difflib.get_close_matches(key, SHAPES, n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"--shape {name}: no shape of that name is known{meant}", hint=f"known: {', '.join(SHAPES)}"
    )


def model_numbers(spec: ModelSpec) -> ModelNumbers:
    """Return what the planner needs of a model."""
    names = [field.name for field in dataclasses.fields(ModelNumbers) if field.name != "row_ranks"]
    return ModelNumbers(**{name: getattr(spec, name) for name in names})


def tensor_parts(spec: ModelSpec, per_host: int) -> dict[int, ModelNumbers]:
    """Return what one rank has of a model, by tensor ranks above one. They are those that the model
    divides over and that share out a host of `per_host` GPUs evenly."""
    fitting = [n for n in range(2, per_host + 1) if per_host % n == 0]
    return {n: model_part(spec, n) for n in fitting if find_uneven(spec, n) is None}


def model_part(spec: ModelSpec, tensor_ranks: int) -> ModelNumbers:
    """Return what one of `tensor_ranks` trains of a model, or runs of a frozen one beside it."""
    part = model_numbers(local_spec(spec, tensor_ranks))
    return dataclasses.replace(part, row_ranks=tensor_ranks)
