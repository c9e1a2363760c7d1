"""A fresh run reads and checks its config once, from the command to the run's end."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gyre.cli.train import run_train
from gyre.launch import train_args
from gyre.loop.controller import Ring
from gyre.runconfig import run_config
from gyre.runconfig.run_config import RunConfig
from unit.data.test_sources import write_jsonl

CONFIG = """
[run]
folder = "{folder}/runs"
device = "cpu"
threads = 1
[model.shape]
family = "qwen3"
hidden_size = 32
num_layers = 1
num_heads = 2
num_kv_heads = 1
head_dim = 16
mlp_size = 64
context_tokens = 64
[data]
source = "jsonl"
path = "{rows}"
[objective]
kind = "sft"
[trainer]
steps = 1
[rollout]
prompts_per_step = 2
[observe]
report = false
"""


def test_a_fresh_run_reads_and_checks_its_config_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def counted(where: Any, name: str) -> None:
        plain = getattr(where, name)

        def call(*given: Any, **named: Any) -> Any:
            calls[name] += 1
            return plain(*given, **named)

        monkeypatch.setattr(where, name, call)

    counted(train_args, "load_run_config")
    counted(run_config, "read_toml")
    counted(RunConfig, "model_validate")
    counted(RunConfig, "model_validate_json")
    counted(RunConfig, "_why_no_batch")
    rows = [{"prompt": f"p{number}", "response": f"r{number}"} for number in range(8)]
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(folder=tmp_path, rows=write_jsonl(tmp_path / "rows.jsonl", rows)))
    run_train(
        path,
        ["trainer.steps=1"],
        resume=None,
        stage="all",
        check_goal=False,
        plain=True,
        quiet=True,
    )
    assert calls == dict.fromkeys(
        ["load_run_config", "read_toml", "model_validate", "_why_no_batch"], 1
    )


def test_four_calls_lead_from_the_command_to_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first journey of docs/architecture.md has it; asyncio's own frames apart."""
    stacks: list[list[str]] = []
    plain = Ring.run

    async def run(self: Ring, *given: Any) -> Any:
        frames = [one for one in traceback.extract_stack() if "/gyre/" in one.filename]
        stacks.append([one.name for one in frames])
        return await plain(self, *given)

    monkeypatch.setattr(Ring, "run", run)
    rows = write_jsonl(
        tmp_path / "rows.jsonl", [{"prompt": f"p {n}", "answer": n} for n in range(8)]
    )
    config = tmp_path / "run.toml"
    text = CONFIG.format(folder=tmp_path, rows=rows).replace('"sft"', '"grpo"')
    config.write_text(text)
    run_train(
        config,
        [
            "data.held_out_fraction=0.5",
            "rollout.max_tokens=4",
            "rewards.parts=[{kind='length', max_tokens=4, soft_tokens=2}]",
        ],
        resume=None,
        stage="all",
        check_goal=False,
        plain=True,
        quiet=True,
    )
    (stack,) = stacks
    assert stack[stack.index("run_train") + 1 :] == ["train", "go", "_run_stage"]
