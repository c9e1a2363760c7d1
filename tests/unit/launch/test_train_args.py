"""What a train command asks for: refused before anything is loaded or made, and which goals a run
can judge."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre.cli.main import app
from gyre.core.errors import ConfigError, SnapshotError
from gyre.launch.goal import judge_goal, main_metrics, why_unjudged
from gyre.launch.train_args import read_train_args
from gyre.runconfig.run_config import RunConfig, parse_run_config

MODEL = {"model": {"path": "somewhere"}}
GOAL = {"metric": "accuracy", "at_most_before": 0.6, "at_least_after": 0.9}
HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "reasoning_gym",
    "datasets",
    "math_verify",
}


def made(**tables: object) -> RunConfig:
    return parse_run_config({**MODEL, "eval": {"num_problems": 8}, **tables}, where="run.toml")


def in_a_process(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as the shell runs it; what it had loaded at its end is the last line of
    stderr."""
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print(sorted(sys.modules.keys() & {HEAVY!r}), file=sys.stderr))\n"
        "from gyre.cli.main import main\nmain()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "NO_COLOR": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


REFUSED = [
    ("train", "nowhere.toml"),
    ("train", "torn.toml"),
    ("train", "typo.toml"),
    ("train", "good.toml", "--set", "trainer.stpes=1"),
    ("train", "good.toml", "--stage", "cold_start"),
    ("train", "good.toml", "--check-goal"),
    ("train", "--resume", "nowhere"),
    ("plan", "nowhere.toml"),
    ("plan", "typo.toml"),
    ("eval", "nowhere"),
    ("eval", "model", "--config", "typo.toml"),
    ("chat", "nowhere", "--prompt", "1"),
    ("report", "nowhere"),
]
QUICK = ("train", "typo.toml"), ("plan", "nowhere.toml"), ("eval", "nowhere")


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in REFUSED],
)
def test_a_bad_path_or_key_is_refused_before_anything_heavy_is_loaded(tmp_path, arguments):
    (tmp_path / "torn.toml").write_text("[model\n")
    (tmp_path / "typo.toml").write_text('[model]\npath = "x"\n[trainer]\nstpes = 1\n')
    (tmp_path / "good.toml").write_text('[model]\npath = "x"\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    before = sorted(tmp_path.iterdir())
    done = in_a_process(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
    assert sorted(tmp_path.iterdir()) == before, "a command that was refused left something behind"


def test_a_stage_that_the_config_lacks_is_refused_before_a_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('[model]\npath = "x"\n')
    result = CliRunner().invoke(app, ["train", "run.toml", "--stage", "cold_start"])
    assert result.exit_code == 2 and "no [cold_start]" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_a_run_folder_that_lacks_a_part_is_no_run_folder(tmp_path):
    (tmp_path / "config.toml").write_text('[model]\npath = "x"\n')
    (tmp_path / "overrides.json").write_text("[]")
    with pytest.raises(SnapshotError, match=r"no stage\.txt"):
        read_train_args(None, [], resume=tmp_path, stage="all")


def test_a_resumed_run_keeps_its_stage_and_overrides(tmp_path):
    (tmp_path / "config.toml").write_text('[model]\npath = "x"\n[cold_start]\nsteps = 3\n')
    (tmp_path / "overrides.json").write_text('["trainer.steps=7"]')
    (tmp_path / "stage.txt").write_text("cold_start")
    order = read_train_args(None, [], resume=tmp_path, stage="all")
    assert order.stage == "cold_start" and order.config.trainer.steps == 7
    assert order.overrides == ("trainer.steps=7",)


# Goals
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "metrics"),
    [
        ({"kind": "grpo"}, ("accuracy",)),
        ({"kind": "ppo"}, ("accuracy",)),
        ({"kind": "dpo", "pairs": "online"}, ("accuracy",)),
        ({"kind": "dpo"}, ("preference_accuracy", "accuracy")),
        ({"kind": "rm"}, ("pair_accuracy",)),
        ({"kind": "sft"}, ("loss", "accuracy")),
    ],
)
def test_what_a_main_stage_evaluates(objective, metrics):
    assert main_metrics(made(objective=objective)) == metrics
    assert main_metrics(made(objective=objective, eval={"num_problems": 0})) == ()


def test_a_goal_is_the_main_stage_s():
    config = made(goal=GOAL, cold_start={"steps": 1})
    assert why_unjudged(config, "all") == why_unjudged(config, "main") == ""
    told = judge_goal(config, "cold_start", {"loss": {"before": 2.0, "after": 1.0, "n": 8}})
    assert told is not None and told["reached"] is None
    assert (
        "not judged" in told["verdict"]
        and "main stage" in told["verdict"]
        and "missed" not in told["verdict"]
    )


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"goal": {"metric": "loss", "margin": 0.1}}, "evaluates accuracy"),
        ({"goal": GOAL, "eval": {"num_problems": 0}}, "eval.num_problems = 0"),
        ({"goal": GOAL, "objective": {"kind": "rm"}}, "evaluates pair_accuracy"),
    ],
)
def test_a_goal_that_nobody_measures_is_not_called_missed(tables, words):
    config = made(**tables)
    told = judge_goal(config, "all", {})
    assert told is not None and told["reached"] is None and words in told["verdict"]


@pytest.mark.parametrize(
    ("after", "reached", "words"),
    [
        (0.95, True, "goal reached: accuracy before 0.500 ≤ 0.6, after 0.950 ≥ 0.9"),
        (0.7, False, "goal missed"),
    ],
)
def test_a_goal_that_was_measured_is_reached_or_missed(after, reached, words):
    told = judge_goal(made(goal=GOAL), "all", {"accuracy": {"before": 0.5, "after": after, "n": 8}})
    assert told is not None and told["reached"] is reached and words in told["verdict"]


def test_no_goal_no_verdict():
    assert judge_goal(made(), "all", {}) is None


@pytest.mark.parametrize(
    ("text", "stage", "words"),
    [
        ("", "all", r"no \[goal\]"),
        (
            "[goal]\nmargin = 0.1\n[eval]\nnum_problems = 8\n[cold_start]\nsteps = 1\n",
            "cold_start",
            "main stage",
        ),
        ("[goal]\nmargin = 0.1\n", "all", "num_problems = 0"),
    ],
)
def test_check_goal_without_one_says_so_before_the_run(tmp_path, text, stage, words):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "x"\n' + text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_train_args(path, [], resume=None, stage=stage, check_goal=True)
    assert caught.value.message.startswith("--check-goal") and caught.value.hint
    assert read_train_args(path, [], resume=None, stage=stage).stage == stage, (
        "without it the run may go on"
    )
