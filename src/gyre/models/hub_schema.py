"""Schemas of a model's files: the keys of config.json that we read, and its shard index. In: a
mapping or a path. Out: nothing, or an InputError that names the key; an index's table. `spec`
interprets the values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import Field

from gyre.core.errors import InputError
from gyre.core.files import read_json
from gyre.core.schema import Foreign, check
from gyre.models.config import MOST_CONTEXT, MOST_HEADS, MOST_LAYERS, MOST_VOCAB, MOST_WIDTH

Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Heads = Annotated[int, Field(ge=1, le=MOST_HEADS)]
Width = Annotated[int, Field(ge=1, le=MOST_WIDTH)]
Tokens = Annotated[int, Field(ge=1, le=MOST_CONTEXT)]
TokenId = Annotated[int, Field(ge=0, lt=MOST_VOCAB)]
TokenIds = TokenId | Annotated[list[TokenId], Field(max_length=1024)] | None
Factor = Annotated[float, Field(gt=0, le=1e12)]


class RopeKeys(Foreign):
    """rope_scaling and rope_parameters."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Factor | None = None
    factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    original_max_position_embeddings: Factor | None = None


class ConfigKeys(Foreign):
    """config.json of the supported families."""

    vocab_size: Annotated[int, Field(ge=1, le=MOST_VOCAB)]
    hidden_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: Annotated[int, Field(ge=1, le=MOST_WIDTH)] | None = None
    intermediate_size: Width
    max_position_embeddings: Tokens
    tie_word_embeddings: bool | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    rope_theta: Factor | None = None
    rope_scaling: RopeKeys | None = None
    rope_parameters: RopeKeys | None = None
    use_sliding_window: bool | None = None
    sliding_window: Tokens | None = None
    max_window_layers: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    layer_types: Annotated[list[str], Field(max_length=MOST_LAYERS)] | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenIds = None
    dtype: str | None = None
    torch_dtype: str | None = None


class Index(Foreign):
    """model.safetensors.index.json."""

    weight_map: dict[str, str]


def check_config(config: Mapping[str, Any]) -> None:
    """Raise InputError for a key of the wrong type, a non-finite number, or an implausible size."""
    check(config, ConfigKeys, "config.json")


def read_weight_map(path: Path) -> Mapping[str, str]:
    """Return hub tensor → shard. A shard is a file of the index's own folder, possibly a link, as
    in the hub's cache."""
    weight_map = check(read_json(path), Index, str(path)).weight_map
    for tensor, shard in weight_map.items():
        name = PurePosixPath(shard)
        if (
            len(name.parts) != 1
            or name.parts[0] in ("..", "/")
            or name.suffix != ".safetensors"
            or "\0" in shard
        ):
            raise InputError(
                f"{path}: weight_map.{tensor} = {shard[:80]!r}; need the name of a .safetensors "
                "file beside it",
                hint="copy the folder again from its source",
            )
    return weight_map
