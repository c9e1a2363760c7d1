"""Hub keys: classifies each key of a hub `config.json`. In: the mapping. Out: an error, or the keys
without effect.

Each key of transformers' LlamaConfig, Qwen2Config and Qwen3Config is read by models.spec, refused
unless it has the supported value, or irrelevant to the logits.
tests/unit/models/test_config_keys.py checks them against transformers. Unknown keys are ignored,
here with an event. Exceptions are keys that transformers' shared code reads or that identify
another architecture: such a checkpoint is not the model that it claims to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.core.errors import InputError
from gyre.models.hub_schema import ConfigKeys

READ = {*ConfigKeys.model_fields, "model_type", "original_max_position_embeddings"} - {
    "dtype",
    "torch_dtype",
}

# Without effect on the logits of a causal model at inference. Dropout is not applied in training
# either.
IRRELEVANT = frozenset((
    "attention_dropout", "initializer_range", "use_cache", "pad_token_id", "transformers_version",
    "architectures", "output_hidden_states", "output_attentions", "return_dict", "dtype",
    "torch_dtype", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id",
    "problem_type", "name_or_path", "_name_or_path", "attention_bias",
))  # fmt: skip

_OFF: tuple[Any, ...] = (None, False, 0, [], {})
_ONE: tuple[Any, ...] = (None, 1)
# Read by code that all models of transformers share.
_OF_ALL_MODELS = (
    "per_layer_config", "attention_chunk_size", "kv_sharing_modes", "fusion_config",
    "transformers_weights",
)  # fmt: skip
# Of other architectures; as are the factors below.
_OF_OTHERS = (
    "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "num_experts",
    "num_local_experts", "n_routed_experts", "num_experts_per_tok", "kv_lora_rank", "q_lora_rank",
    "no_rope_layers", "no_rope_layer_interval", "use_parallel_residual", "parallel_attn",
    "use_qk_norm", "qk_layernorm", "clip_qkv", "use_bidirectional_attention", "use_alibi", "alibi",
    "num_nextn_predict_layers", "text_config", "vision_config",
)  # fmt: skip
_FACTORS = (
    "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb",
    "scale_depth", "lm_head_multiplier",
)  # fmt: skip
# Of these only the named values are run.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": _ONE,
    "pretraining_tp": _ONE,
    "is_causal": (True,),  # transformers takes null as false
    **dict.fromkeys(("mlp_bias", "quantization_config"), _OFF),
    **dict.fromkeys(_OF_ALL_MODELS, _OFF),
    **dict.fromkeys(_OF_OTHERS, _OFF),
    **dict.fromkeys(_FACTORS, _ONE),
}


def refuse_unsupported(family: str, config: Mapping[str, Any]) -> None:
    """Raise InputError for the first key whose value requires an unsupported model."""
    accepted = dict(_ONLY)
    if family != "qwen2":  # its projections have a bias whatever the key says
        accepted["attention_bias"] = _OFF
    if family == "llama":
        accepted |= {"use_sliding_window": _OFF, "sliding_window": _OFF}
    for key, values in accepted.items():
        if key in config and config[key] not in values:
            wanted = " or ".join(repr(value) for value in values if value not in ([], {}))
            raise InputError(
                f"config.json has {key} = {config[key]!r}; for {family} we run {wanted}",
                hint="this is another architecture; removing the key would give other logits",
            )


def keys_without_effect(config: Mapping[str, Any]) -> list[str]:
    """Return keys that neither we nor transformers' classes of these families know; both ignore
    them."""
    return sorted(
        key for key in config if key not in READ and key not in IRRELEVANT and key not in _ONLY
    )
