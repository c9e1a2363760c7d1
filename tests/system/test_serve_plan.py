"""`gyre serve --dry-run`: its numbers are those of the engine that starts afterwards."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from system_models import save_checkpoint
from typer.testing import CliRunner

import gyre
from gyre.cli.main import app
from gyre.cli.serve import READ, refuse_unread
from gyre.core.errors import ConfigError, InputError
from gyre.models.hub.load import load_hub
from gyre.runconfig.run_config import parse_run_config

TABLES = {"model": {"path": "there"}, "objective": {"kind": "sft"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "qwen", "qwen3")


def dry(folder: Path, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["serve", str(folder), "--dry-run", "--json", *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_pages": 9},
        {"kv_bytes": 1_000_000},
        {"max_running": 3, "page_tokens": 32},
        {"kv_bytes": 40_000, "kv_host_bytes": 100_000},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_makes_the_pages_that_the_plan_says(folder, settings, dtype) -> None:
    changes = [f"engine.{name}={value}" for name, value in settings.items()]
    changes += [f"run.dtype={dtype}", "run.threads=1"]
    plan = dry(folder, *(part for change in changes for part in ("--set", change)))
    assert not plan["kv_follows_free_bytes"] and plan["fits"]
    made: dict[str, Any] = {}
    with gyre.Engine(
        folder,
        dtype=dtype,
        threads=1,
        emit=lambda kind, **fields: made.update({kind: fields}),
        **settings,
    ) as engine:
        stats = engine.stats()
        assert plan["kv_pages"] == stats.pages_total == made["engine.started"]["pages"]
        assert plan["kv_host_bytes"] == stats.host_pages_total * plan["page_bytes"]
        assert plan["context_tokens"] == engine.context_tokens
        # as many tokens as it says, and not one more
        room = [1] * (plan["context_tokens"] - 2)
        assert engine.generate(room, max_tokens=2).completions[0].tokens
        with pytest.raises(InputError):
            engine.generate(room, max_tokens=3)
    ours = "engine.c_kernels" in made
    assert ("C kernels" in plan["kernels"]) == ours
    _, decoder = load_hub(folder, device=torch.device("cpu"), dtype=getattr(torch, dtype))
    assert plan["weights_bytes"] == sum(each.nbytes for each in decoder.parameters())
    assert plan["dtype"] == dtype


def test_it_starts_nothing_and_says_it_in_words(folder) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(
            app, ["serve", str(folder), "--dry-run", "--port", port, "--replicas", "2"]
        )
    assert done.exit_code == 0, done.output
    for words in (
        "qwen: qwen3",
        "2 engines",
        "weights",
        "KV pages",
        "tokens at once",
        "fits",
    ):
        assert words in done.stdout


def test_what_a_start_refuses_is_refused(folder, tmp_path) -> None:
    for options, said in (
        (["--set", "engine.max_runing=1"], "did you mean"),
        (
            ["--set", "engine.batch_invariant=true", "--set", "engine.c_kernels=false"],
            "own kernels",
        ),
        (["--set", "cluster.engine_works=2"], "did you mean"),
        (["--set", "engine.vllm.kv_bytes=1"], "engine.vllm: a server does not read it"),
        (["--set", "run.seed=3", "--set", "run.threads=1"], "run.seed: a server does not read it"),
    ):
        done = CliRunner().invoke(app, ["serve", str(folder), "--dry-run", "--json", *options])
        assert done.exit_code == 2
        assert said in json.loads(done.stdout.splitlines()[-1])["error"]["message"]


def test_settings_of_a_run_are_refused_with_what_a_server_has_instead(folder, tmp_path) -> None:
    read = ["run.threads=1", "cluster.hang_s=9", "engine.journal=false", "engine.kind=native"]
    read += ["data.template=chat", "parallel.timeout_s=9", "tokenizer.end_token=</s>"]
    read += ["cluster={hang_s=8, stall_s=2}", "run . dtype = float32", "engine.disk_folder=there"]
    refuse_unread(read)
    for section, fields in READ.items():
        known = type(getattr(parse_run_config(TABLES, where="run.toml"), section)).model_fields
        assert fields <= known.keys()
    for setting, hint in (
        ("engine.kind = 'vllm'", "native engine"),
        ("cluster.engine_workers=2", "--replicas"),
        ("cluster={num_workers=2}", "--replicas"),
        ("parallel.tensor_ranks=2", "engine.tensor_ranks"),
        ("memory.leave.engine=destroy", "engine.kv_bytes"),
        ("model.path=elsewhere", "serve the folder"),
        ("run.stop_deadline_s=3", "--drain-s"),
        ("trainer.steps=3", "training"),
    ):
        with pytest.raises(ConfigError, match="a server does not read it") as refused:
            refuse_unread([*read, setting])
        assert hint in refused.value.hint
