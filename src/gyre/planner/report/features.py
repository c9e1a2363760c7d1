"""Features: which of the things that a plan may call for this Gyre has. In: the tree of config
sections. Out: whether a feature is built, by whether a key turns it on. Pure.

A feature is built when its key exists: so the checklists turn true by themselves when the key
arrives.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from types import MappingProxyType

from pydantic import BaseModel

FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "several GPUs": "parallel.shard_ranks",
        "tensor parallelism": "parallel.tensor_ranks",
        "pipeline parallelism": "parallel.pipeline_ranks",
        "ZeRO": "parallel.zero",
        "activation checkpointing": "trainer.checkpointing",
        "optimizer offload": "trainer.offload_optimizer",
        "FP8 training": "trainer.matmul=fp8",
        "8-bit optimizer states": "trainer.moments=8_bit",
        "FP16 with loss scaling": "run.dtype=float16",
        "asynchronous snapshots": "snapshot.background",
        "restart by itself": "cluster.max_restarts",
        "quantized weights": "engine.quantize",
        "speculative decoding": "engine.speculate",
        "tensor parallel engine": "engine.tensor_ranks",
    }
)


def built_features(config: type[BaseModel]) -> dict[str, bool]:
    """Return each feature, and whether the config has its key (and the value after "=", where one
    is named)."""
    return {feature: _has(config, *key.partition("=")[::2]) for feature, key in FEATURES.items()}


def _has(section: type[BaseModel], key: str, value: str) -> bool:
    name, _, rest = key.partition(".")
    field = section.model_fields.get(name)
    if field is None:
        return False
    if rest:
        return any(_has(inner, rest, value) for inner in _sections(field.annotation))
    return not value or value in _choices(field.annotation)


def _sections(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in typing.get_args(annotation) for section in _sections(part)]


def _choices(annotation: object) -> set[object]:
    if typing.get_origin(annotation) is typing.Literal:
        return set(typing.get_args(annotation))
    return {choice for part in typing.get_args(annotation) for choice in _choices(part)}
