"""ModelSpec: the numbers that define one decoder. In: a hub `config.json` mapping, or a
ShapeConfig. Out: a frozen spec with parameter shapes, bytes and FLOPs, and the hub mapping again.
Pure; imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gyre.core.errors import InputError
from gyre.models.config import ShapeConfig
from gyre.models.hub_keys import refuse_unsupported
from gyre.models.hub_schema import check_config

Family = Literal["llama", "qwen2", "qwen3"]

FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LLAMA3_SCALING_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


class HasItemSize(Protocol):
    """A torch.dtype, typed without importing torch."""

    @property
    def itemsize(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One dense decoder: Llama 3, Qwen2.5 (hub type qwen2) or Qwen3."""

    family: Family
    vocab_size: int  # rows of the embedding
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int
    mlp_size: int
    tied: bool  # the head is the embedding
    context_tokens: int  # longest sequence
    rope_theta: float
    rope_scaling: Mapping[str, float] | None = None  # LLAMA3_SCALING_KEYS, or None
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    # newest tokens, itself included, that a token sees in a windowed layer
    window_tokens: int | None = None
    first_window_layer: int = 0  # it and those after it are windowed; meaningful with window_tokens
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def window_of(self, layer: int) -> int | None:
        """Return the layer's window in tokens, or None where attention is unbounded."""
        return self.window_tokens if layer >= self.first_window_layer else None

    @property
    def widest_view(self) -> int | None:
        """The largest attention span of any layer in tokens; None when some layer has no window."""
        return self.window_tokens if self.first_window_layer == 0 else None

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return our parameter names with their shapes, in the order of the forward pass."""
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, self.hidden_size)}
        for i in range(self.num_layers):
            layer = f"layers.{i}."
            shapes[layer + "attn_norm.weight"] = (self.hidden_size,)
            shapes[layer + "qkv.weight"] = (q_rows + 2 * kv_rows, self.hidden_size)
            if self.qkv_bias:
                shapes[layer + "qkv.bias"] = (q_rows + 2 * kv_rows,)
            if self.qk_norm:
                shapes[layer + "q_norm.weight"] = (self.head_dim,)
                shapes[layer + "k_norm.weight"] = (self.head_dim,)
            shapes[layer + "out.weight"] = (self.hidden_size, q_rows)
            shapes[layer + "mlp_norm.weight"] = (self.hidden_size,)
            shapes[layer + "gate_up.weight"] = (2 * self.mlp_size, self.hidden_size)
            shapes[layer + "down.weight"] = (self.hidden_size, self.mlp_size)
        shapes["final_norm.weight"] = (self.hidden_size,)
        if not self.tied:
            shapes["head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def weight_bytes(self, dtype: HasItemSize) -> int:
        return self.num_parameters * dtype.itemsize

    def kv_bytes_per_token(self, dtype: HasItemSize) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize

    def flops_per_token(self, context_tokens: int) -> int:
        """Return forward FLOPs of one token that attends to `context_tokens` tokens, itself
        included."""
        matrices = sum(math.prod(s) for s in self.parameter_shapes().values() if len(s) == 2)
        if not self.tied:
            matrices -= self.vocab_size * self.hidden_size  # the embedding is a look-up
        return 2 * matrices + 4 * self.num_layers * self.num_heads * self.head_dim * context_tokens


def spec_from_shape(
    shape: ShapeConfig, *, vocab_size: int, bos_id: int | None, eos_ids: tuple[int, ...]
) -> ModelSpec:
    """Return the spec of a fresh model; the vocabulary comes from its tokenizer."""
    return checked(
        ModelSpec(
            **shape.model_dump(exclude={"vocab_size"}),
            vocab_size=vocab_size,
            norm_eps=1e-5 if shape.family == "llama" else 1e-6,
            qkv_bias=shape.family == "qwen2",
            qk_norm=shape.family == "qwen3",
            bos_id=bos_id,
            eos_ids=eos_ids,
        )
    )


def spec_from_hub_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a hub `config.json`. InputError names an unsupported key."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise InputError(
            f"config.json has model_type {family!r}; we run {', '.join(FAMILIES)} (dense)",
            hint="use a Llama 3, Qwen2.5 or Qwen3 dense checkpoint",
        )
    check_config(config)
    refuse_unsupported(family, config)
    hidden_size, num_heads = need(config, "hidden_size"), need(config, "num_attention_heads")
    # transformers' defaults
    kv_heads = {"num_key_value_heads": None if family == "llama" else 32, **config}
    num_kv_heads = (
        num_heads
        if kv_heads["num_key_value_heads"] is None
        else need(kv_heads, "num_key_value_heads")
    )
    theta, scaling = rope_of(config)
    window_tokens, first_window_layer = window_of(family, config)
    return checked(
        ModelSpec(
            family=family,
            vocab_size=need(config, "vocab_size"),
            hidden_size=hidden_size,
            num_layers=need(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_of(family, config),
            mlp_size=need(config, "intermediate_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            context_tokens=need(config, "max_position_embeddings"),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            window_tokens=window_tokens,
            first_window_layer=first_window_layer,
            bos_id=config.get("bos_token_id"),
            eos_ids=ids_of(config.get("eos_token_id")),
        )
    )


def hub_config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Return the `config.json` mapping that transformers (4 and 5) and vLLM read as the same
    model."""
    eos = (
        list(spec.eos_ids) if len(spec.eos_ids) > 1 else (spec.eos_ids[0] if spec.eos_ids else None)
    )
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.mlp_size,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied,
        "max_position_embeddings": spec.context_tokens,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": spec.bos_id,
        "eos_token_id": eos,
    }
    if spec.rope_scaling is not None:
        config["rope_scaling"] = {"rope_type": "llama3", **spec.rope_scaling}
    if spec.family == "qwen2":
        config["use_sliding_window"] = False
    else:
        config["attention_bias"] = False
    if spec.window_tokens is not None:
        config["use_sliding_window"] = True
        config["sliding_window"] = spec.window_tokens
        config["max_window_layers"] = spec.first_window_layer
    if spec.family == "llama":
        config["mlp_bias"] = False
    return config


def need(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InputError(f"config.json needs {key} as a positive whole number; got {value!r}")
    return value


def ids_of(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def window_of(family: str, config: Mapping[str, Any]) -> tuple[int | None, int]:
    """Return the window in tokens, if any, and the first layer that has it, as transformers reads
    these keys."""
    layers, kinds = need(config, "num_hidden_layers"), config.get("layer_types")
    window = None
    if (
        family != "llama"
        and config.get("use_sliding_window")
        and config.get("sliding_window", 4096) is not None
    ):
        window = need({"sliding_window": 4096, **config}, "sliding_window")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        if window is not None and (not isinstance(first, int) or first < 0):
            raise InputError(
                f"config.json has max_window_layers = {first!r}; we take a whole number from 0 on"
            )
    else:
        # its name before transformers 5
        kinds = ["full_attention" if kind == "attention" else kind for kind in kinds]
        first = kinds.index("sliding_attention") if "sliding_attention" in kinds else layers
        if kinds != ["full_attention"] * first + ["sliding_attention"] * (layers - first):
            raise InputError(
                f"config.json has layer_types {kinds!r}; we run full layers first and windowed "
                "ones after them",
                hint=f"one kind for each of {layers} layers; interleaved windows are not supported",
            )
        if first < layers and window is None:
            raise InputError(
                "config.json has sliding_attention in layer_types, but no window for it",
                hint="set use_sliding_window and sliding_window, or make all layer_types "
                "full_attention",
            )
    return (window, first) if window is not None and first < layers else (None, 0)


def rope_of(config: Mapping[str, Any]) -> tuple[float, dict[str, float] | None]:
    """Return theta and scaling as transformers 5 does.

    A nonempty `rope_scaling` replaces `rope_parameters` entirely. A theta in that mapping precedes
    the top-level `rope_theta`; the default is 10,000.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise InputError(f"config.json has {parameters!r} for rope scaling; we take a mapping")
    nested = sorted(key for key, value in parameters.items() if isinstance(value, Mapping))
    if nested:
        raise InputError(
            f"config.json gives rope parameters per layer type ({', '.join(nested)}); we run one "
            "rope for all layers",
            hint="give rope_type and rope_theta directly in rope_parameters",
        )
    theta = rope_number(
        parameters if "rope_theta" in parameters else {"rope_theta": 10_000.0, **config},
        "rope_theta",
    )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if parameters.get("partial_rotary_factor") not in (None, 1):
        raise InputError(
            "config.json rotates a part of each head (partial_rotary_factor); we rotate all of it"
        )
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise InputError(
            f"config.json asks for rope scaling {kind!r}; we run the plain one and llama3",
            hint="remove rope_scaling from config.json if you stay within the original context",
        )
    parameters = {**parameters}
    parameters.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    if "original_max_position_embeddings" in config:  # it wins
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    missing = [key for key in LLAMA3_SCALING_KEYS if key not in parameters]
    if missing:
        raise InputError(f"config.json: llama3 rope scaling lacks {', '.join(missing)}")
    return theta, {key: rope_number(parameters, key) for key in LLAMA3_SCALING_KEYS}


def rope_number(parameters: Mapping[str, Any], key: str) -> Any:
    value = parameters[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise InputError(
            f"config.json has {key} = {value!r} for the rotary embedding; we take a number above 0",
            hint="copy the value from the model's original config.json",
        )
    return float(value) if key == "rope_theta" else value


def head_dim_of(family: str, config: Mapping[str, Any]) -> int:
    """Return the head dim. Qwen3's default is 128 whatever the hidden size; the other two derive
    it."""
    hidden_size, num_heads = need(config, "hidden_size"), need(config, "num_attention_heads")
    if family == "llama" and hidden_size % num_heads:
        raise InputError(
            f"config.json has hidden_size = {hidden_size}, no multiple of {num_heads} attention "
            "heads"
        )
    derived = 128 if family == "qwen3" else hidden_size // num_heads
    if family == "llama" and config.get("head_dim") is None:
        return derived
    return need({"head_dim": derived, **config}, "head_dim")


def checked(spec: ModelSpec) -> ModelSpec:
    if spec.num_heads % spec.num_kv_heads:
        raise InputError(
            f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} KV heads evenly",
            hint="make num_heads a multiple of num_kv_heads",
        )
    if spec.head_dim % 2 or spec.head_dim < 2:
        raise InputError(
            f"head_dim = {spec.head_dim}: rotary embedding needs an even number, 2 or more"
        )
    return spec
