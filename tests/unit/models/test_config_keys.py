"""Every key of transformers' config classes: we give its logits, or refuse; and what only looks
like such a key."""

# T tokens, V vocabulary

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from gyre.core.errors import InputError
from gyre.launch.factories import tell_ignored_keys
from gyre.models.hub.load import load_hub
from gyre.models.hub_keys import IRRELEVANT, READ, keys_without_effect
from gyre.runconfig.run_config import RunConfig
from unit.models.test_transformers import CPU, LLAMA3, SIZES, hidden_of, some_tokens

CLASSES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
TOKENS_T = some_tokens(77)[0]


def marks_of(family: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return none for the family that make test runs."""
    return () if family == "qwen3" else (pytest.mark.slow,)


FAMILIES = [pytest.param(family, marks=marks_of(family)) for family in CLASSES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint per family, every parameter random, saved by transformers."""
    made = {}
    for family, kind in CLASSES.items():
        torch.manual_seed(0)
        more = {"head_dim": 6} if family == "qwen3" else {}
        config = kind(**SIZES, **more, tie_word_embeddings=False)
        theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        made[family] = tmp_path_factory.mktemp(family)
        theirs.save_pretrained(made[family])
    return made


@pytest.fixture(scope="module")
def unchanged(folders: dict[str, Path]) -> dict[str, Tensor | None]:
    """What transformers computes with each checkpoint."""
    return {family: their_logits(folder) for family, folder in folders.items()}


def edited(
    source: Path, target: Path, change: dict[str, Any], remove: tuple[str, ...] = ()
) -> Path:
    config = json.loads((source / "config.json").read_text()) | change
    target.mkdir()
    (target / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key not in remove})
    )
    shutil.copy(source / "model.safetensors", target)
    return target


def their_logits(folder: Path) -> Tensor | None:
    """None where transformers cannot load it as it is, or cannot run it."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        if any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            return None
        with torch.no_grad():
            # transformers itself cannot run these classes with false
            model.config.return_dict = True
            return model.eval()(TOKENS_T[None]).logits[0]
    except Exception:  # noqa: BLE001  whatever its reason
        return None


def our_logits(folder: Path) -> Tensor | None:
    """None where we refuse."""
    try:
        _, ours = load_hub(folder, device=CPU, dtype=torch.float32)
    except InputError as error:
        assert error.message
        return None
    with torch.no_grad():
        return ours.logits(hidden_of(ours, [TOKENS_T]))


def is_loaded_as_theirs(folder: Path) -> bool:
    """Compare where we load; say whether we do."""
    ours = our_logits(folder)
    if ours is not None:
        theirs = their_logits(folder)
        assert theirs is not None, "we load what transformers cannot"
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    return ours is not None


# two values for each key, neither of them the fixture's
VALUES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (60, 64),
    "hidden_size": (20, 48),
    "intermediate_size": (20, 80),
    "num_hidden_layers": (1, 3),
    "num_attention_heads": (2, 8),
    "num_key_value_heads": (1, None),
    "head_dim": (4, None),
    "hidden_act": ("gelu", "relu"),
    "max_position_embeddings": (16, 4096),
    "initializer_range": (0.5, 0.001),
    "rms_norm_eps": (0.5, 1e-12),
    "use_cache": (False, True),
    "pad_token_id": (0, 3),
    "bos_token_id": (None, 5),
    "eos_token_id": (None, [4, 5]),
    "pretraining_tp": (2, None),
    "tie_word_embeddings": (True, False),
    "rope_parameters": ({"rope_type": "default", "rope_theta": 500.0}, LLAMA3),
    "attention_bias": (True, False),
    "attention_dropout": (0.5, 0.1),
    "mlp_bias": (True, False),
    "use_sliding_window": (True, False),
    "sliding_window": (5, None),
    "max_window_layers": (0, 1),
    "layer_types": (["full_attention", "sliding_attention"], ["full_attention"] * 2),
    "transformers_version": ("4.40.0", "5.0.0"),
    "architectures": (["Other"], None),
    "output_hidden_states": (True, None),
    "return_dict": (False, None),
    "dtype": ("bfloat16", "float16"),
    "chunk_size_feed_forward": (3, 1),
    "is_encoder_decoder": (True, False),
    "id2label": ({"0": "a"}, None),
    "label2id": ({"a": 0}, None),
    "problem_type": ("regression", None),
}  # fmt: skip
KEYS = [(family, field.name) for family, kind in CLASSES.items() for field in fields(kind)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "key"), [pytest.param(*one, marks=marks_of(one[0])) for one in KEYS]
)
def test_each_key_is_read_refused_or_without_effect(
    folders: dict[str, Path],
    unchanged: dict[str, Tensor | None],
    tmp_path: Path,
    family: str,
    key: str,
) -> None:
    base = unchanged[family]
    assert base is not None
    for number, value in enumerate(VALUES[key]):
        folder = edited(folders[family], tmp_path / str(number), {key: value})
        loaded = is_loaded_as_theirs(folder)
        if key in IRRELEVANT and not (key == "attention_bias" and family != "qwen2"):
            found = our_logits(folder)
            assert loaded and found is not None
            torch.testing.assert_close(found, base, rtol=1e-4, atol=1e-4)
    missing = edited(folders[family], tmp_path / "missing", {}, (key,))
    is_loaded_as_theirs(missing)
    assert not keys_without_effect({key: None})


def test_the_keys_are_transformers_own() -> None:
    """A key that a newer transformers brings has no row in VALUES, and fails above; ours that it
    lacks are named here."""
    known = {key for _, key in KEYS}
    assert READ - known == {
        "model_type",
        "rope_scaling",
        "rope_theta",
        "original_max_position_embeddings",
    }
    assert IRRELEVANT - known == {
        "output_attentions",
        "torch_dtype",
        "name_or_path",
        "_name_or_path",
    }


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
LLAMA3_BARE = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
OLD = {**{k: v for k, v in LLAMA3_BARE.items() if k != "rope_type"}, "type": "llama3"}
ROPES: dict[str, tuple[dict[str, Any], bool]] = {  # change, whether we load it
    "both, yarn": ({"rope_parameters": PLAIN, "rope_scaling": YARN}, False),
    "both, yarn replaced": (
        {"rope_parameters": YARN | {"rope_theta": 500.0}, "rope_scaling": PLAIN},
        True,
    ),
    "both, llama3": ({"rope_parameters": PLAIN, "rope_scaling": LLAMA3}, True),
    "both, llama3 without theta": ({"rope_parameters": PLAIN, "rope_scaling": LLAMA3_BARE}, True),
    "both, llama3 and a theta above": (
        {"rope_parameters": PLAIN, "rope_scaling": LLAMA3_BARE, "rope_theta": 77.0},
        True,
    ),
    "both, plain": ({"rope_parameters": LLAMA3, "rope_scaling": {"rope_type": "default"}}, True),
    "both, empty": ({"rope_parameters": LLAMA3, "rope_scaling": {}}, True),
    "both, null": ({"rope_parameters": LLAMA3, "rope_scaling": None}, True),
    "the older spelling": (
        {"rope_parameters": None, "rope_scaling": OLD, "rope_theta": 900.0},
        True,
    ),
    "two types": ({"rope_parameters": None, "rope_scaling": {**OLD, "rope_type": "default"}}, True),
    "two types, turned": (
        {"rope_parameters": None, "rope_scaling": {"type": "default", **LLAMA3}},
        True,
    ),
    "type is null": ({"rope_parameters": {"rope_type": None, "rope_theta": 500.0}}, False),
    "theta in both": ({"rope_parameters": PLAIN, "rope_theta": 77.0}, True),
    "theta above only": ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 77.0}, True),
    "theta alone": ({"rope_parameters": None, "rope_theta": 77}, True),
    "theta null": ({"rope_parameters": None, "rope_theta": None}, False),
    "theta null above": ({"rope_parameters": PLAIN, "rope_theta": None}, True),
    "theta null inside": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "rope_theta": 5.0},
        False,
    ),
    "theta text": ({"rope_parameters": {"rope_type": "default", "rope_theta": "5"}}, False),
    "nothing": ({"rope_parameters": None}, True),
    "per layer type": ({"rope_parameters": {"full_attention": PLAIN}}, False),
    "per layer types": (
        {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": YARN}},
        False,
    ),
    "factor without a type": ({"rope_parameters": None, "rope_scaling": {"factor": 4.0}}, True),
    "linear": ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}}, False),
    "dynamic": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10.0}},
        False,
    ),
    "mrope": ({"rope_parameters": {"type": "mrope", "mrope_section": [1, 1, 1]}}, False),
    "llama3 without its old context": (
        {"rope_parameters": {k: v for k, v in LLAMA3.items() if k[0] != "o"}},
        True,
    ),
    "old context above": ({"rope_parameters": LLAMA3, "original_max_position_embeddings": 8}, True),
    "llama3 lacks a factor": (
        {"rope_parameters": {k: v for k, v in LLAMA3.items() if k != "factor"}},
        False,
    ),
    "partial": ({"partial_rotary_factor": 0.5}, False),
    "partial inside": ({"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}, False),
    "partial, llama3": ({"rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5}}, False),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ROPES)
def test_rope_in_every_spelling(
    folders: dict[str, Path], tmp_path: Path, family: str, name: str
) -> None:
    change, loads = ROPES[name]
    assert is_loaded_as_theirs(edited(folders[family], tmp_path / "edited", change)) is loads


FULL, SLIDING = "full_attention", "sliding_attention"
# change, removed keys, whether we load Qwen's
WINDOWS: dict[str, tuple[dict[str, Any], tuple[str, ...], bool]] = {
    "sliding, not used": ({"layer_types": [SLIDING] * 2, "use_sliding_window": False}, (), False),
    "sliding, no window": (
        {"layer_types": [FULL, SLIDING], "use_sliding_window": True, "sliding_window": None},
        (),
        False,
    ),
    "sliding, used": (
        {"layer_types": [FULL, SLIDING], "use_sliding_window": True, "sliding_window": 5},
        (),
        True,
    ),
    "interleaved": (
        {"layer_types": [SLIDING, FULL], "use_sliding_window": True, "sliding_window": 5},
        (),
        False,
    ),
    "of another family": ({"layer_types": ["linear_attention", FULL]}, (), False),
    "too few": ({"layer_types": [FULL]}, (), False),
    "older name": ({"layer_types": ["attention", "attention"]}, (), True),
    "by layers": (
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        ("layer_types",),
        True,
    ),
    "by layers, none": (
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
        ("layer_types",),
        True,
    ),
    "by layers, null": (
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": None},
        ("layer_types",),
        False,
    ),
    "default window": (
        {"use_sliding_window": True, "max_window_layers": 0},
        ("layer_types", "sliding_window"),
        True,
    ),
    "window of 0": (
        {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
        ("layer_types",),
        False,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_as_transformers_reads_them(
    folders: dict[str, Path], tmp_path: Path, family: str, name: str
) -> None:
    change, removed, loads = WINDOWS[name]
    loaded = is_loaded_as_theirs(edited(folders[family], tmp_path / "edited", change, removed))
    if family != "llama":
        assert loaded is loads


@pytest.mark.parametrize(
    "change",
    [
        {"is_causal": False}, {"is_causal": None}, {"per_layer_config": {"0": {"rms_norm_eps": 0.5}}},
        {"per_layer_config": {"1": {"skip": ["attention"]}}}, {"attention_chunk_size": 8}, {"attn_logit_softcapping": 30.0},
        {"final_logit_softcapping": 30.0}, {"num_experts": 8}, {"kv_lora_rank": 512}, {"logit_scale": 0.5},
        {"residual_multiplier": 0.2}, {"quantization_config": {"bits": 4}}, {"no_rope_layers": [1, 0]}, {"hidden_act": None},
        {"sliding_window": 8, "model_type": "llama"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_other_architectures_are_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, family: str, change: dict[str, Any]
) -> None:
    folder = edited(folders[family], tmp_path / "edited", change)
    with pytest.raises(InputError, match=next(iter(change))):
        load_hub(folder, device=CPU, dtype=torch.float32)


def test_keys_that_nobody_reads_are_ignored_and_named(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    extra = {
        "dual_chunk_attention_config": {"chunk_size": 4},
        "unsloth_fixed": True,
        "temperature": 0.6,
        "is_causal": True,
    }
    folder = edited(
        folders["qwen2"], tmp_path / "edited", {**extra, "logit_scale": 1.0, "num_experts": 0}
    )
    assert is_loaded_as_theirs(folder)
    config = json.loads((folder / "config.json").read_text())
    assert keys_without_effect(config) == [
        "dual_chunk_attention_config",
        "temperature",
        "unsloth_fixed",
    ]
    assert "temperature" in GenerationConfig().to_dict()
    told: list[tuple[str, dict[str, Any]]] = []
    run = RunConfig.model_validate({"model": {"path": str(folder)}})
    tell_ignored_keys(run, lambda kind, **fields: told.append((kind, fields)))
    assert told == [
        ("warn.model_keys_ignored", {"folder": str(folder), "keys": keys_without_effect(config)})
    ]
    for source in folders.values():
        assert keys_without_effect(json.loads((source / "config.json").read_text())) == []
