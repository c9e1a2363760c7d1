"""gyre init, as a user of the wheel meets it: the wheel is built and installed into a fresh folder,
and every kind of run that it writes trains as it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from system_runs import Answer, events_of, gyre

KINDS = ("sft", "grpo", "ppo", "dpo", "rm")
REPOSITORY = Path(__file__).parents[2]
SHORT = {
    "trainer.steps": 2,
    "rollout.prompts_per_step": 4,
    "eval.num_problems": 4,
    "rewards.workers": 1,
    "observe.report": "false",
}
SHORT_START = {"cold_start.steps": 2, "cold_start.examples_per_step": 4}


def short(kind: str) -> list[str]:
    sets = SHORT | (SHORT_START if kind in ("grpo", "ppo", "dpo") else {})
    return [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]


def begin(folder: Path, *words: str) -> Answer:
    return gyre("init", *words, "--json", folder=folder)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip installs of the wheel that it builds; the packages that Gyre needs are those of this
    Python."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, folder / "source" / name)
    shutil.copytree(
        REPOSITORY / "src",
        folder / "source" / "src",
        ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"),
    )
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "wheel", *alone, "--no-build-isolation", "-w", folder, folder / "source"], check=True
    )
    (wheel,) = folder.glob("*.whl")
    subprocess.run(
        [*pip, "install", *alone, "--no-compile", "--target", folder / "site", wheel], check=True
    )
    return folder / "site"


@pytest.mark.slow
def test_a_wheel_is_enough_to_begin(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}

    def run(*words: str) -> str:
        command = [sys.executable, installed / "bin" / "gyre", *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    find = [sys.executable, "-c", "import gyre; print(gyre.__file__)"]
    assert subprocess.check_output(find, env=env, cwd=tmp_path, text=True).startswith(
        str(installed)
    )
    (number,) = [path.name.split("-")[1] for path in installed.glob("gyre_rl-*.dist-info")]
    assert run("--version").split() == ["gyre", number.removesuffix(".dist")]
    for kind in KINDS:
        assert (tmp_path / f"{kind}.toml").name in run("init", kind, "--from", kind)
    said = run("init").splitlines()
    assert {"my_run.toml", "my_run.jsonl", "my_run_rewards.py"} <= {
        path.name for path in tmp_path.iterdir()
    }
    (typed,) = [line.split("#")[0].split() for line in said if "gyre train" in line]
    result = json.loads(run(*typed[1:], *short("grpo"), "--json").splitlines()[-1])
    assert (tmp_path / result["run"] / "export" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["sft", "rm", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ppo", "dpo"))]
)  # grpo: above
def test_what_it_writes_trains_as_it_is(kind: str, tmp_path: Path) -> None:
    assert begin(tmp_path, "my-own", "--from", kind).code == 0
    answer = gyre("train", "my-own.toml", *short(kind), "--json", folder=tmp_path)
    assert answer.code == 0, answer.err
    run = tmp_path / answer.json["run"]
    assert len(events_of(run, "step.done")) >= 2 and not events_of(run, "reward.failed")
    assert run.parent.name == "runs" and run.name.startswith("my-own")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", ["taken.toml", "taken.jsonl", "taken_rewards.py"])
def test_nothing_is_overwritten(kind: str, file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("mine")
    answer = begin(tmp_path, "taken", "--from", kind)
    clash = kind in ("grpo", "ppo") or not file.endswith(".py")
    assert (tmp_path / file).read_text() == "mine"
    assert answer.code == (2 if clash else 0)
    if clash:
        assert file in answer.err and [path.name for path in tmp_path.iterdir()] == [file]


def test_a_link_to_nowhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "my_run.jsonl").symlink_to(tmp_path / "elsewhere")
    assert begin(tmp_path).code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["my_run.jsonl"]


def test_a_folder_that_takes_no_files_is_an_error_with_nothing_left(tmp_path: Path) -> None:
    # the config fits, the data does not
    answer = gyre("init", "--json", folder=tmp_path, file_bytes=8192)
    assert answer.code == 2 and "my_run.jsonl" in answer.err and "File too large" in answer.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["../up", "sub/run", "a.b", "", "3rd", "-x y", "ß" * 3, "n" * 65, "a\n"]
)
def test_a_name_is_one_of_a_file(name: str, tmp_path: Path) -> None:
    answer = gyre("init", "--json", "--", name, folder=tmp_path)
    assert answer.code == 2 and answer.json["error"]["kind"] == "config"
    assert not list(tmp_path.iterdir())


def test_an_objective_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    answer = begin(tmp_path, "--from", "grp0")
    assert (
        answer.code == 2
        and all(kind in answer.err for kind in KINDS)
        and not list(tmp_path.iterdir())
    )
