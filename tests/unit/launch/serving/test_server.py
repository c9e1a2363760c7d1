"""What `gyre serve` refuses before it starts, and how a run's own template becomes a prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gyre.core.errors import ConfigError, InputError
from gyre.core.files import read_json
from gyre.launch.serving import server
from gyre.launch.serving.model import render_messages
from gyre.launch.serving.served_weights import ServedFolder
from gyre.launch.serving.server import (
    ServeArgs,
    count_gpus,
    engine_spec,
    refuse_uneven,
    say_ready,
)
from gyre.launch.stage_plan import cut_engine
from gyre.models.spec import spec_from_hub_config
from gyre.runconfig.run_config import RunConfig, load_run_config
from gyre.text.messages import Message, Tool
from gyre.text.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(["question: what is one? be brief"], vocab_size=300, min_share=0.0)
QUESTION = [Message(role="user", content="what is one?")]


def config(tmp_path: Path, **data: Any) -> RunConfig:
    path = tmp_path / "run.toml"
    rows = "\n".join(f"{name} = {json.dumps(value)}" for name, value in data.items())
    path.write_text(f'[model]\npath = "m"\n[objective]\nkind = "sft"\n[data]\n{rows}\n')
    return load_run_config(path, [])


def text_of(tmp_path: Path, messages: list[Message], **data: Any) -> str:
    return TOKENIZER.decode(render_messages(TOKENIZER, messages, (), config(tmp_path, **data)))


def test_a_run_is_asked_by_its_own_template_and_system_message(tmp_path) -> None:
    found = text_of(tmp_path, QUESTION, template="{system} question: {prompt}", system="be brief")
    assert found == "be brief question: what is one?"


def test_a_template_of_one_question_takes_no_conversation(tmp_path) -> None:
    for messages in (QUESTION * 2, [Message(role="system", content="be brief"), *QUESTION]):
        with pytest.raises(InputError, match="one question"):
            text_of(tmp_path, messages, template="question: {prompt}")


def test_a_conversation_brings_its_own_system_message_or_gets_that_of_the_run(tmp_path) -> None:
    own = [Message(role="system", content="a b"), *QUESTION]
    assert text_of(tmp_path, QUESTION, system="be brief") == "be brief\nwhat is one?\n"
    assert text_of(tmp_path, own, system="be brief") == "a b\nwhat is one?\n"


@pytest.mark.parametrize("template", ["chat", "question: {prompt}"])
def test_tools_that_no_template_shows_are_refused(template, tmp_path) -> None:
    with pytest.raises(InputError, match="shows no tools"):
        render_messages(TOKENIZER, QUESTION, [Tool(name="f")], config(tmp_path, template=template))


def args_of(folder: Path, config: RunConfig, *, replicas: int) -> ServeArgs:
    return ServeArgs(
        folder=folder, config=config, name="m", host="127.0.0.1", port=0, replicas=replicas,
        tool_parser="auto", reasoning_parser="auto", insecure=False, keys=None, tls_cert=None,
        tls_key=None, receive_s=30, drain_s=30,
    )  # fmt: skip


@pytest.mark.parametrize("as_json", [False, True])
def test_the_first_lines_name_the_api_and_the_page(tmp_path, capsys, as_json) -> None:
    args = args_of(tmp_path, config(tmp_path), replicas=1)
    say_ready("http://127.0.0.1:8000", args, as_json=as_json)
    said = capsys.readouterr().out
    if as_json:
        assert json.loads(said) == {"url": "http://127.0.0.1:8000", "model": "m"}
    else:
        first, second, third = said.splitlines()
        assert first == "serving m on http://127.0.0.1:8000/v1"
        assert second == "  in a browser: http://127.0.0.1:8000"
        assert third.startswith("  curl http://127.0.0.1:8000/v1/chat/completions")


def test_the_server_imports_no_torch() -> None:
    """Tokenizer, templates, records, pool and sockets need none; it would cost seconds and memory."""
    program = (
        "import sys, gyre.cli.serve, gyre.launch.serving.server\n"
        "heavy = ('torch', 'transformers', 'safetensors', 'ray')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"


def cut(tmp_path: Path, ranks: int, **more: Any) -> RunConfig:
    settings = {"engine.tensor_ranks": ranks, "run.device": "auto", **more}
    path = tmp_path / "served.toml"
    path.write_text('[model]\npath = "m"\n[objective]\nkind = "sft"\n')
    overrides = [f"{name}={value}" for name, value in settings.items()]
    return load_run_config(path, overrides, served=True)


@pytest.mark.parametrize(
    ("ranks", "replicas", "told"),
    [
        (2, 4, None),
        (8, 1, None),
        (2, 5, "--replicas 5 with engine.tensor_ranks = 2: this host has 8 GPUs"),
        (16, 1, "--replicas 1 with engine.tensor_ranks = 16: this host has 8 GPUs"),
        (1, 9, "--replicas 9: this host has 8 GPUs"),
    ],
)
def test_each_rank_needs_a_gpu_of_its_own(monkeypatch, tmp_path, ranks, replicas, told) -> None:
    monkeypatch.setattr(server, "count_visible_gpus", lambda: 8)
    if told is None:
        assert count_gpus(cut(tmp_path, ranks), replicas) == 8
    else:
        with pytest.raises(ConfigError, match=told):
            count_gpus(cut(tmp_path, ranks), replicas)
    assert count_gpus(cut(tmp_path, ranks, **{"run.device": "cpu"}), replicas) == 0


def test_a_replica_has_the_gpus_behind_those_of_the_one_before(tmp_path) -> None:
    args = args_of(tmp_path, cut(tmp_path, 4), replicas=2)
    served = ServedFolder(tmp_path)
    for number, devices in ((0, (0, 1, 2, 3)), (1, (4, 5, 6, 7))):
        spec = engine_spec(args, f"engine-{number}", served, gpus=8)
        assert spec.devices == devices and spec.gpus == 0
        assert spec.environment["NCCL_NVLS_ENABLE"] == "0", "NVLink multicast stays off"
    assert engine_spec(args, "engine-1", served, gpus=0).devices == ()
    one = engine_spec(args_of(tmp_path, cut(tmp_path, 1), replicas=2), "engine-1", served, gpus=2)
    assert (one.gpus, one.devices, one.environment) == (1.0, (), {})


def test_a_model_that_does_not_divide_is_refused_as_a_pod_refuses_it(tmp_path) -> None:
    hub = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 300,
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu", "torch_dtype": "float32", "eos_token_id": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hub))
    for ranks in (1, 2, 4):
        refuse_uneven(tmp_path, cut(tmp_path, ranks))
    config, spec = cut(tmp_path, 3), spec_from_hub_config(read_json(tmp_path / "config.json"))
    with pytest.raises(ConfigError) as here:
        refuse_uneven(tmp_path, config)
    with pytest.raises(ConfigError) as there:
        cut_engine(config.engine, spec)
    assert (here.value.message, here.value.hint) == (there.value.message, there.value.hint)
    assert (
        here.value.message
        == "engine.tensor_ranks = 3: 4 attention heads do not divide over 3 tensor ranks"
    )
