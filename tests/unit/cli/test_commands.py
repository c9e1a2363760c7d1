"""The command line: help, exit codes, and what goes to stdout under --json."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gyre.cli.answer import answer
from gyre.cli.main import app
from gyre.core.errors import DeadlineError, GyreError
from gyre.observability.events import EventLog

COMMANDS = ("train", "plan", "eval", "chat", "score", "report", "doctor")
SUM = '[model.shape]\nfamily = "qwen3"\n'


def gyre(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as its entry point runs it."""
    code = "import sys; from gyre.cli.main import main; main(); "
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "NO_COLOR": "1",
        "COLUMNS": "100",
    }
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="gyre")


def error_of(result: Result) -> dict[str, Any]:
    """The error object: the last line of stdout."""
    return json.loads(result.stdout.strip().splitlines()[-1])["error"]


CTRL_C_WHILE_IMPORTING = """
import signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "gyre.cli.doctor":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
from gyre.cli.main import main
main()
"""


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_ctrl_c_while_a_command_is_imported_is_told_as_at_any_time(words):
    command = [sys.executable, "-c", CTRL_C_WHILE_IMPORTING, "doctor", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "stopped by Ctrl-C\n")
    if words:
        assert json.loads(done.stdout)["error"]["kind"] == "stopped"


def test_help_names_each_command_with_what_it_is_for():
    done = gyre("--help")
    assert done.returncode == 0 and not done.stderr
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command):
    result = invoke(command, "--help")
    assert (
        result.exit_code == 0 and f"gyre {command}" in result.stdout and "--json" in result.stdout
    )


def test_no_arguments_show_the_help():
    assert "Commands" in invoke().output


def test_an_unknown_command_or_option_is_refused():
    assert invoke("trian").exit_code == 2
    assert invoke("train", "--resum", "x").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (("train",), "config", "needs a config"),
        (("train", "a.toml", "--resume", "runs/a"), "config", "not both"),
        (("train", "a.toml", "--stage", "warm"), "config", "all, cold_start, main"),
        (("train", "--resume", "runs/a", "--stage", "main"), "config", "--resume goes on"),
        (("train", "nowhere.toml"), "config", "cannot read nowhere.toml"),
        (("train", "--resume", "nowhere"), "snapshot", "not a run folder"),
        (("plan", "nowhere.toml"), "config", "cannot read nowhere.toml"),
        (("plan", "--gpus", "8"), "config", "--gpu is missing"),
        (
            ("plan", "--shape", "qwen3-8b", "--gpu", "h200", "--set", "a.b=1"),
            "config",
            "key of RUN.toml, and none",
        ),
        (("eval", "nowhere"), "input", "neither a run folder nor a model folder"),
        (
            ("chat", "nowhere", "--prompt", "1+1="),
            "input",
            "neither a run folder nor a model folder",
        ),
        (("report", "nowhere"), "input", "not a run folder"),
    ],
)
def test_a_fault_of_the_user_s_is_exit_2_one_sentence_and_a_json_object(
    tmp_path, monkeypatch, arguments, kind, words
):
    monkeypatch.chdir(tmp_path)
    plain, as_json = invoke(*arguments), invoke(*arguments, "--json")
    assert plain.exit_code == as_json.exit_code == 2
    assert plain.stdout == ""
    assert (
        plain.stderr.startswith("error: ")
        and words in plain.stderr
        and "Traceback" not in plain.stderr
    )
    error = error_of(as_json)
    assert set(error) == {"kind", "message", "hint"}
    assert error["kind"] == kind and words in error["message"]
    assert list(tmp_path.iterdir()) == [], "a command that was refused left something behind"


def test_a_bad_config_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(SUM + "[trainer]\nstpes = 3\n")
    result = invoke("train", "run.toml", "--json")
    assert result.exit_code == 2
    assert "did you mean 'steps'?" in error_of(result)["message"]
    (tmp_path / "run.toml").write_text(SUM)
    result = invoke("train", "run.toml", "--set", "trainer.steps=many", "--json")
    assert "trainer.steps = 'many': need a whole number" in error_of(result)["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize("option", ["--sequence-tokens", "--update-tokens"])
def test_a_plan_takes_lengths_from_its_config(tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(SUM + '[objective]\nkind = "sft"\n')
    result = invoke("plan", "run.toml", "--gpu", "h200", option, "64", "--json")
    assert (
        result.exit_code == 2
        and f"{option} is for a shape without RUN.toml" in error_of(result)["message"]
    )


def test_the_help_of_each_command_is_whole_on_eighty_columns():
    listed = invoke("--help").output.partition("Commands:")[2]
    assert "train" in listed and "..." not in listed


def test_a_fault_keeps_its_exit_code_through_the_process():
    done = gyre("report", "nowhere", "--json")
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["kind"] == "input"
    assert done.stderr.startswith("error: nowhere is not a run folder")


def stop() -> dict[str, Any]:
    raise KeyboardInterrupt


def late() -> dict[str, Any]:
    raise DeadlineError("waited", hint="wait longer")


def hintless() -> dict[str, Any]:
    raise GyreError("so it is")


@pytest.mark.parametrize("as_json", [False, True])
def test_answers(capsys, as_json):
    def ended(body: Any) -> tuple[int, str, str]:
        code: Any = 0
        try:
            answer(body, as_json=as_json)
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err

    code, out, err = ended(lambda: {"value": 3})
    assert (code, err) == (0, "") and out == ('{"value": 3}\n' if as_json else "")
    assert ended(lambda: {"goal_missed": True})[0] == 1
    code, out, err = ended(late)
    assert (code, err) == (2, "error: waited\n hint: wait longer\n")
    if as_json:
        assert json.loads(out) == {
            "error": {"kind": "deadline", "message": "waited", "hint": "wait longer"}
        }
    assert ended(hintless)[2] == "error: so it is\n"
    code, out, err = ended(stop)
    assert code == 130 and "stopped by Ctrl-C" in err
    if as_json:
        assert json.loads(out)["error"]["kind"] == "stopped"


def test_a_fault_of_ours_is_not_dressed_up():
    with pytest.raises(AssertionError):
        answer(lambda: (_ for _ in ()).throw(AssertionError("ours")), as_json=False)


def test_doctor_says_what_is_there(monkeypatch):
    result = invoke("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert result.exit_code == 0
    assert {"processor", "torch", "code sandbox", "disk"} <= set(findings)
    assert all(finding["verdict"] in ("ok", "weaker", "missing") for finding in findings.values())
    assert all(
        finding["advice"] for finding in findings.values() if finding["verdict"] == "missing"
    )


def test_a_run_on_ray_without_ray_says_what_to_install(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *more: None if name == "ray" else found(name, *more),
    )
    config = Path(__file__).parents[3] / "configs" / "arith_grpo_cpu.toml"
    sets = ["--set", "cluster.kind=ray", "--set", f"run.folder={tmp_path}"]
    result = invoke("train", config, *sets, "--json")
    assert result.exit_code != 0
    error = error_of(result)
    assert error["kind"] == "config" and "gyre-rl[cluster]" in error["hint"]
    assert not list(tmp_path.iterdir())


def test_the_report_of_a_pod_has_its_timeline_in_each_form(tmp_path: Path) -> None:
    """In the terminal, as JSON and in the page the same table and lanes; the path comes last."""
    log = EventLog(tmp_path / "events.jsonl", attempt=1, clock=iter(range(1, 9)).__next__)
    log.emit("pod.activity", worker="worker-0", activity="train", seconds=1.0)
    log.emit("pod.activity", worker="engine-0", activity="update", seconds=0.5, size_bytes=1536)
    done = {"version": 1, "metrics": {}, "num_tokens": 1, "num_updates": 1, "seconds": 3.0}
    log.emit("step.done", stage="main", step=1, **done)
    log.close()
    shown = invoke("report", tmp_path).stdout.splitlines()
    assert shown[-1] == str(tmp_path / "report.html")
    told = json.loads(invoke("report", tmp_path, "--json").stdout.splitlines()[-1])
    assert told["report"] == shown[-1]
    assert shown[:-2] == [*told["pod"]["table"], "", *told["pod"]["drawing"]]
    assert any(line.startswith("U  update") and "1.5 KiB" in line for line in shown)
    assert json.dumps(told["pod"]["drawing"][1])[1:-1] in (tmp_path / "report.html").read_text()
