"""gyre score: a config's rewards on given completions, without a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from typer.testing import CliRunner, Result

from gyre.cli.main import app

REWARDS = """
def score(task, completion, prompt):
    print("a reward prints")
    if task.get("level") == 3:
        raise KeyError("color")
    return float(len(prompt)), f"level {task.get('level')}"
"""
CONFIG = """
[model]
path = "nowhere"
[objective]
kind = "grpo"
[rewards]
workers = 1
parts = [
    {kind = "answer", wrong = -1.0, compare = "exact"},
    {kind = "format", weight = 0.5},
    {kind = "function", path = "my_score:score", weight = 0.1, failed = -5.0},
    {kind = "model", path = "some_reward_model"},
]
"""
ROWS = [
    {
        "completion": "<think>a</think><answer>5</answer><|im_end|>",
        "answer": "5",
        "prompt": "two",
        "level": 1,
    },
    {"completion": "<answer>7</answer>", "answer": "5", "level": 2},
    {"completion": "", "answer": "5", "level": 3},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_score.py").write_text(REWARDS)
    (tmp_path / "run.toml").write_text(CONFIG)
    write(tmp_path, ROWS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, rows: list[Any]) -> None:
    (folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["score", *map(str, arguments)], prog_name="gyre")


def last(result: Result) -> dict[str, Any]:
    return json.loads(result.stdout.splitlines()[-1])


def test_every_part_s_value_outcome_and_reason(folder: Path) -> None:
    result = invoke("run.toml", "c.jsonl", "--json")
    assert result.exit_code == 0, result.output
    assert list(last(result)) == ["rows"] and "left out: part 'model'" in result.stderr
    first, second, third = last(result)["rows"]
    assert first["total"] == pytest.approx(1.0 + 0.5 + 0.3) and second["total"] == pytest.approx(
        -1.0
    )
    assert third["total"] == pytest.approx(-0.5)
    assert {name: part["value"] for name, part in first["parts"].items()} == {
        "answer": 1,
        "format": 1,
        "function": 3,
    }
    assert (
        first["parts"]["function"]["reason"] == "level 1"
        and first["parts"]["function"]["outcome"] == "ok"
    )
    broken = third["parts"]["function"]
    assert broken["outcome"] == "error" and broken["value"] == -5.0
    assert broken["reason"] == "my_score:score raised KeyError at my_score.py:5: 'color'"
    assert all(
        part["seconds"] >= 0.0 and part["reason"]
        for row in (first, second)
        for part in row["parts"].values()
    )


def test_rows_become_tasks_as_in_a_run(folder: Path) -> None:
    """A whole number past 64 bits is its digits."""
    row = f'{{"completion": "<answer>{10**30}</answer>", "answer": {10**30}, "level": 1}}\n'
    (folder / "c.jsonl").write_text(row)
    result = invoke("run.toml", "c.jsonl", "--json")
    assert result.exit_code == 0 and last(result)["rows"][0]["parts"]["answer"]["value"] == 1, (
        result.output
    )


def test_a_table_that_fits_80_columns(folder: Path) -> None:
    code = "from gyre.cli.main import main; main()"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "NO_COLOR": "1",
        "COLUMNS": "80",
    }
    command = [sys.executable, "-X", "importtime", "-c", code, "score", "run.toml", "c.jsonl"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert (
        max(map(len, lines)) <= 80 and lines[-1] == "3 completions, mean total 0.1, 1 check failed"
    )
    assert lines[0].startswith("c.jsonl:1  total 1.8 ─") and "a reward prints" not in done.stdout
    assert "a reward prints" in done.stderr and "my_score.py:5" in done.stdout.replace("\n", "")
    assert "| torch" not in done.stderr and "| transformers" not in done.stderr, (
        "no model library is loaded"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "c.jsonl:2: not a JSON object"),
        ("[1]", "c.jsonl:2: need a JSON object"),
        ('{"answer": "5"}', "c.jsonl:2: field 'completion' is missing; the row has answer"),
        ('{"completion": null}', "c.jsonl:2: field 'completion' is NoneType"),
        ('{"completion": "x", "prompt": 3}', "c.jsonl:2: field 'prompt' is int"),
        ('{"completion": "x", "num_tokens": -1}', "c.jsonl:2: num_tokens = -1"),
        ('{"completion": "x", "num_tokens": 2147483647}', "c.jsonl:2: num_tokens = 2147483647"),
        (
            '{"completion": "x", "finish": "lenght"}',
            "c.jsonl:2: finish = 'lenght'; need one of stop, length",
        ),
        (
            '{"completion": "x", "answer": ' + "[" * 99 + "]" * 99 + "}",
            "c.jsonl:2: the row is nested deeper",
        ),
    ],
)
def test_a_bad_row_is_named_by_its_line(folder: Path, line: str, words: str) -> None:
    (folder / "c.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    result = invoke("run.toml", "c.jsonl", "--json")
    assert result.exit_code == 2 and words in last(result)["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run.toml", "none.jsonl"), "none.jsonl does not exist"),
        (("run.toml", "."), "is no file"),
        (("none.toml", "c.jsonl"), "none.toml"),
        ((".", "c.jsonl"), "not a run folder"),
        (("run.toml", "c.jsonl", "--set", "rewards.parts=[{kind='model', path='x'}]"), "has none"),
        (("run.toml", "empty.jsonl"), "has no rows"),
    ],
)
def test_what_is_not_there_is_refused(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    (folder / "empty.jsonl").write_text("\n")
    result = invoke(*arguments, "--json")
    assert result.exit_code == 2 and words in last(result)["error"]["message"]


def test_a_run_folder_has_its_own_config_changes_and_tokenizer(folder: Path) -> None:
    run = folder / "runs" / "it"
    (run / "tokenizer").mkdir(parents=True)
    (run / "config.toml").write_text(CONFIG)
    part = '{kind="length", soft_tokens=2, max_tokens=4}'
    (run / "overrides.json").write_text(json.dumps([f"rewards.parts=[{part}]"]))
    (run / "stage.txt").write_text("all")
    write(
        folder,
        [
            {"completion": "a a"},  # and the end token, which a run counts too
            {"completion": "a a<|im_end|>"},
            {"completion": "a a a", "finish": "length"},
            {"completion": "a", "num_tokens": 4},
            {"completion": "a", "tokens": [0, 0, 0, 1]},  # as samples.jsonl has them
            {"completion": "a", "tokens": "of the task"},
        ],
    )
    refused = invoke(run, "c.jsonl", "--json")
    assert (
        refused.exit_code == 2
        and "c.jsonl:1: part 'length' judges by the number" in last(refused)["error"]["message"]
    )
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(run / "tokenizer" / "tokenizer.json"))
    result = invoke(run, "c.jsonl", "--json")
    totals = [row["total"] for row in last(result)["rows"]]
    assert totals == [-0.5, -0.5, -0.5, -1.0, -1.0, 0.0]


def test_a_part_that_needs_tokens_is_named_as_in_the_config(folder: Path) -> None:
    part = "{kind='length', name='brevity', soft_tokens=2, max_tokens=4}"
    refused = invoke("run.toml", "c.jsonl", "--json", "--set", f"rewards.parts=[{part}]")
    assert refused.exit_code == 2
    assert "part 'brevity' judges by the number of tokens" in last(refused)["error"]["message"]
