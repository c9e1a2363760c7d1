"""Files from elsewhere, damaged or made to harm: what comes out is a model, or an error of gyre
that names the key. The last test mutates whole files at random."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gyre.core.errors import ConfigError, GyreError, InputError
from gyre.core.files import read_json
from gyre.data.config import DataConfig
from gyre.data.sources import load_prompts
from gyre.models.config import ShapeConfig
from gyre.models.decoder import Decoder
from gyre.models.hub.load import export_hub, init_weights, load_hub
from gyre.models.spec import spec_from_hub_config, spec_from_shape
from gyre.runconfig.run_config import load_run_config, parse_run_config
from gyre.runconfig.toml_tree import apply_overrides, read_toml
from gyre.text.tokenizer import load_tokenizer
from unit.data.test_sources import Events
from unit.text.test_hub import hub_folder
from unit.text.test_tokenizer import TOKENIZER

CPU = torch.device("cpu")
SHAPE = ShapeConfig(
    hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=16, tied=False
)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "sharded"
    decoder = Decoder(
        spec_from_shape(SHAPE, vocab_size=32, bos_id=None, eos_ids=(1,)),
        device=CPU,
        dtype=torch.float32,
    )
    init_weights(decoder, 0)
    export_hub(decoder, folder, dtype=torch.float32, tokenizer_files=None, shard_bytes=4000)
    return folder


@pytest.fixture
def model(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


BAD_CONFIG = {
    "num_hidden_layers": [10**7, 10**400, -1, 0, True, 2.0, "2", None, [2]],
    "hidden_size": [10**12, float("nan")],
    "vocab_size": [10**12, {}],
    "num_attention_heads": [10**9, 0.5],
    "num_key_value_heads": [-1, "1"],
    "head_dim": [-8, 10**9, True],
    "intermediate_size": [1e300, False],
    "max_position_embeddings": [10**30, "long"],
    "rms_norm_eps": [None, float("nan"), "x", -1.0, float("inf")],
    "rope_theta": [float("nan"), float("inf"), -1.0, "x"],
    "rope_scaling": ["yarn", 3, {"rope_type": 7}, {"rope_type": "llama3", "factor": "x"}, [1]],
    "rope_parameters": ["x", {"rope_theta": float("nan")}],
    "eos_token_id": [{"a": 1}, "x", [1, "x"], -1, 10**20, True, 1.5],
    "bos_token_id": ["x", [1]],
    "tie_word_embeddings": ["no", 1],
    "sliding_window": ["x", 0],
    "layer_types": ["full_attention", 3, [1]],
}


@pytest.mark.parametrize("key", BAD_CONFIG)
def test_a_bad_key_of_config_json_is_named(key: str, model: Path) -> None:
    content = json.loads((model / "config.json").read_text())
    for value in BAD_CONFIG[key]:
        with pytest.raises(InputError, match=rf"config\.json: {key}"):
            spec_from_hub_config(content | {key: value})
    change(model / "config.json", **{key: BAD_CONFIG[key][0]})
    with pytest.raises(InputError):
        load_hub(model, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    "key", ["num_layers", "hidden_size", "num_heads", "mlp_size", "vocab_size", "context_tokens"]
)
def test_absurd_sizes_of_a_shape_are_config_errors(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_run_config(
            {"model": {"shape": {key: 10**12}}, "objective": {"kind": "sft"}}, where="run.toml"
        )


@pytest.mark.parametrize("shard", [7, None, ["a"], {"a": 1}])
def test_an_index_of_another_form_is_refused(shard: Any, model: Path) -> None:
    change(model / "model.safetensors.index.json", weight_map={"model.norm.weight": shard})
    with pytest.raises(InputError, match=r"index\.json: weight_map"):
        load_hub(model, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    "escape", ["../out.safetensors", "{}/out.safetensors", "sub/../../out.safetensors", "..", "."]
)
def test_shards_lie_in_the_folder(escape: str, model: Path, tmp_path: Path) -> None:
    index = model / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name, shard = next(iter(weight_map.items()))
    (model / "sub").mkdir()
    shutil.copy(model / shard, tmp_path / "out.safetensors")
    moved = {n: escape.format(tmp_path) if s == shard else s for n, s in weight_map.items()}
    change(index, weight_map=moved)
    with pytest.raises(InputError, match=r"index\.json: weight_map\..*beside it"):
        load_hub(model, device=CPU, dtype=torch.float32)
    assert name in moved


def test_links_of_the_hub_s_cache_work(model: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    spec, _ = load_hub(snapshot, device=CPU, dtype=torch.float32)
    assert spec.num_layers == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_floats_are_refused(dtype: torch.dtype, model: Path) -> None:
    shard = next(model.glob("*.safetensors"))
    save_file({name: tensor.to(dtype) for name, tensor in load_file(shard).items()}, shard)
    with pytest.raises(InputError, match="no floating-point weights"):
        load_hub(model, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "[1]", "", "\0", '{"a": 1', "\ud800"]
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_none_names_its_file(name: str, text: str, model: Path) -> None:
    (model / name).write_bytes(text.encode("utf-8", errors="surrogatepass"))
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        load_hub(model, device=CPU, dtype=torch.float32)


BAD_TOKENIZER = [
    ("tokenizer_config.json", {"eos_token": 7}, "eos_token"),
    ("tokenizer_config.json", {"eos_token": {"content": 7}}, r"eos_token\.content"),
    ("tokenizer_config.json", {"chat_template": [1]}, "chat_template"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"0": "x"}}, "added_tokens_decoder"),
    ("tokenizer_config.json", {"gyre_eos_ids": ["x"]}, "gyre_eos_ids"),
    ("tokenizer_config.json", {"gyre_eos_ids": [10**6]}, "end token 1000000"),
    ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id"),
    ("generation_config.json", {"eos_token_id": [True]}, "eos_token_id"),
    ("config.json", {"eos_token_id": {"a": 1}}, "eos_token_id"),
    ("config.json", {"num_hidden_layers": 10**7}, "num_hidden_layers"),
    ("config.json", {"rope_scaling": "yarn", "rms_norm_eps": None}, "no tokenizer could be loaded"),
    ("tokenizer.json", {"model": 3}, "model"),
    ("tokenizer.json", {"added_tokens": {}}, "added_tokens"),
    (
        "tokenizer.json",
        {"model": {"type": "BPE", "vocab": 3, "merges": 4}},
        "no tokenizer could be loaded",
    ),
]


@pytest.mark.parametrize(("name", "keys", "words"), BAD_TOKENIZER)
def test_a_bad_key_of_a_tokenizer_is_named(
    name: str, keys: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = hub_folder(tmp_path, "llama")
    change(folder / name, **keys)
    with pytest.raises(InputError, match=words):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "tokenizer.json", "generation_config.json", "config.json"]
)
@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "{", '{"a": ' + "9" * 5000 + "}"])
def test_tokenizer_files_that_are_no_json_are_refused(name: str, text: str, tmp_path: Path) -> None:
    (hub_folder(tmp_path, "qwen") / name).write_text(text)
    with pytest.raises(InputError):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("deep", ["[" * 20_000, "{a=" * 20_000, "9" * 5000, "[" * 400 + "]" * 400])
def test_toml_that_is_nested_too_deep_is_a_config_error(deep: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"[model]\npath = {deep}\n")
    with pytest.raises(ConfigError):
        parse_run_config(read_toml(tmp_path / "run.toml"), where="run.toml")
    with pytest.raises(ConfigError):
        parse_run_config(
            apply_overrides({}, [f"model.path={deep}", "run.seed=x"]), where="run.toml"
        )
    with pytest.raises(ConfigError):
        parse_run_config(apply_overrides({}, [".".join(["a"] * 20_000) + "=1"]), where="run.toml")


DOTS = ".".join(["a"] * 3000)
DEEP_TOML = {
    "a header": f"[data.template_options.{DOTS}]\nx = 1\n",
    "a list of tables": f"[[data.template_options.{DOTS}]]\nx = 1\n",
    "a key": f"[data.template_options]\n{DOTS} = 1\n",
    "a key in quotes": "[data.template_options]\n" + " . ".join(['"a.b"', "'c'"] * 1500) + " = 1\n",
    "a key in a table": f"[data.template_options]\nx = {{ {DOTS} = 1 }}\n",
    "a key of very many parts": "a." * 500_000 + "a = 1\n",
    "a header and a key": f"[{DOTS[:79]}]\n{DOTS[:79]} = 1\n",
    "lists": "[data.template_options]\nx = " + "[" * 70 + "]" * 70 + "\n",
}


@pytest.mark.parametrize("what", DEEP_TOML)
def test_toml_of_deep_keys_is_a_config_error(what: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(DEEP_TOML[what])
    with pytest.raises(ConfigError, match=r"run\.toml: .*more than 64 deep") as caught:
        load_run_config(tmp_path / "run.toml", [])
    assert caught.value.hint


# -- at random

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**30),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
PLACES = (  # file of which folder
    ("model", "config.json"),
    ("model", "model.safetensors.index.json"),
    ("words", "tokenizer.json"),
    ("words", "tokenizer_config.json"),
    ("words", "generation_config.json"),
    ("words", "config.json"),
)
ROWS = (
    b'{"prompt": [{"role": "user", "content": "a"}], "answer": 1}\n{"prompt": "b", "answer": '
    b'[1, {"c": null}]}\n'
)
TOML = (
    b'[model]\npath = "m"\n[data]\nsource = "jsonl"\npath = "rows"\n[objective]\nkind = '
    b'"sft"\n[trainer]\nsteps = 2\n'
)


def spoil(data: st.DataObject, content: bytes) -> bytes:
    """Cut, flip and put in a few bytes."""
    made = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(made)))
        made[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=3) | st.sampled_from([b"[", b"{", b'"', b"1e999", b"NaN"])
        )
    return bytes(made)


def replace_value(data: st.DataObject, content: bytes) -> bytes:
    """Put another value somewhere into JSON."""
    tree = json.loads(content)
    node, keys = tree, list(tree)
    while True:
        key = data.draw(st.sampled_from(keys))
        inside = node[key]
        keys = (
            list(inside)[:20]
            if isinstance(inside, dict)
            else list(range(min(20, len(inside))))
            if isinstance(inside, list)
            else []
        )
        if not keys or data.draw(st.booleans()):
            node[key] = data.draw(VALUES)
            return json.dumps(tree).encode()
        node = inside


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_only_errors_of_gyre_come_out(
    sharded: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    base = tmp_path_factory.mktemp("fuzz")
    kind, name = data.draw(st.sampled_from([*PLACES, ("rows", "rows.jsonl"), ("toml", "run.toml")]))
    try:
        if kind == "rows":
            (base / name).write_bytes(spoil(data, ROWS))
            load_prompts(
                DataConfig(source="jsonl", path=str(base / name), held_out_fraction=0),
                TOKENIZER,
                emit=Events(),
            )
        elif kind == "toml":
            (base / name).write_bytes(spoil(data, TOML))
            parse_run_config(read_toml(base / name), where=name)
        else:
            folder = (
                Path(shutil.copytree(sharded, base / "m"))
                if kind == "model"
                else hub_folder(base / "m", "llama", chat=False)
            )
            make = replace_value if data.draw(st.booleans()) else spoil
            (folder / name).write_bytes(make(data, (folder / name).read_bytes()))
            if kind == "model":
                load_hub(folder, device=CPU, dtype=torch.float32)
                read_json(folder / name)
            else:
                load_tokenizer(folder).encode("hi")
    except GyreError as error:
        assert error.message
    shutil.rmtree(base)
