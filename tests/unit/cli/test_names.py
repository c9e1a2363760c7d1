"""Names that do not exist: refused with what was looked for, before torch is loaded and without
waiting for a network. The hub is an address on this machine where nobody listens, so nothing
outside is contacted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gyre.core.hub import is_hub_name, is_reachable

RUN = """
[model]
path = {model}
[tokenizer]
path = {tokenizer}
[data]
source = "{source}"
path = {data}
[objective]
kind = "sft"
"""


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def gyre(folder: Path, *arguments: str, **variables: str) -> tuple[dict[str, str], str]:
    """(error, heavy modules that were loaded) of a command in a process of its own."""
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(*({'torch', 'transformers', 'datasets'} & "
        "set(sys.modules)), file=sys.stderr))\n"
        "from gyre.cli.main import main; main()"
    )
    quiet = {
        name: value
        for name, value in os.environ.items()
        if "proxy" not in name.lower() and not name.startswith("HF_")
    }
    environment = quiet | {
        "PYTHONPATH": os.pathsep.join(sys.path), "HF_ENDPOINT": f"http://127.0.0.1:{closed_port()}",
        "HF_HOME": str(folder / "hf"),
    } | variables  # fmt: skip
    command = [sys.executable, "-c", code, *arguments, "--json"]
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["error"], done.stderr.splitlines()[-1]


def run_file(
    folder: Path, *, model: str = "", tokenizer: str = "", data: str = "", source: str = "jsonl"
) -> str:
    (folder / "here").mkdir(exist_ok=True)
    (folder / "here" / "config.json").write_text("{}")
    (folder / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    given = {
        "model": model or "here",
        "tokenizer": tokenizer or "here",
        "data": data or "rows.jsonl",
    }
    (folder / "run.toml").write_text(
        RUN.format(source=source, **{k: json.dumps(v) for k, v in given.items()})
    )
    return "run.toml"


CASES = {
    "model folder": ({"model": "./her"}, "model folder ./her does not exist; did you mean here"),
    "model name": (
        {"model": "nobody/no-such-model"},
        "model nobody/no-such-model: there is no such folder here, the hub",
    ),
    "tokenizer folder": (
        {"tokenizer": "/nowhere/at/all"},
        "tokenizer folder /nowhere/at/all is not a folder",
    ),
    "tokenizer name": (
        {"tokenizer": "nobody/nothing"},
        "tokenizer nobody/nothing: there is no such folder here",
    ),
    "data file": (
        {"data": "row.jsonl"},
        "data file row.jsonl does not exist; did you mean rows.jsonl",
    ),
    "data set": (
        {"data": "nobody/nothing", "source": "datasets"},
        "data set nobody/nothing: there is no such folder",
    ),
    "data set that is a file": (
        {"data": "rows.jsonl", "source": "datasets"},
        "data.path rows.jsonl is a file; data.source",
    ),
    "data folder": (
        {"data": "/nowhere/set", "source": "datasets"},
        "data set /nowhere/set does not exist",
    ),
}


QUICK = ("model name", "data file")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_run_names_what_is_not_there(case: str, tmp_path: Path) -> None:
    given, words = CASES[case]
    error, loaded = gyre(
        tmp_path, "train" if "model" in case else "plan", run_file(tmp_path, **given)
    )
    assert words in error["message"] and error["hint"]
    assert loaded == ""


def test_offline_is_said(tmp_path: Path) -> None:
    error, _ = gyre(
        tmp_path, "plan", run_file(tmp_path, model="nobody/nothing"), HF_HUB_OFFLINE="1"
    )
    assert "HF_HUB_OFFLINE is set" in error["message"] and "hf download" in error["hint"]


@pytest.mark.parametrize(
    "command",
    [
        ["chat"],
        *(
            pytest.param(command, marks=pytest.mark.slow)
            for command in (["eval"], ["report"], ["train", "--resume"])
        ),
    ],
)
def test_a_run_folder_that_is_not_there_has_near_names(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "arith-grpo").mkdir(parents=True)
    for name in ("runs/arith-gpro", "arith-gpro"):
        error, loaded = gyre(tmp_path, *command, name)
        assert "does not exist; did you mean runs/arith-grpo?" in error["message"]
        assert loaded == ""


def test_a_name_server_that_does_not_answer_is_waited_for_no_longer_than_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: (answered.wait(30), [])[1])
    assert not is_reachable(0.05)
    assert not answered.is_set()
    answered.set()


def test_the_hub_behind_an_open_port_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        assert is_reachable(5)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert not is_reachable(5)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("gpt2", True), ("Qwen/Qwen3-0.6B", True), ("a/b/c", False), ("/a/b", False), ("./a", False), ("a/..", False),
     ("..", False), ("a b", False), ("a/b\n", False), ("", False), ("~/x", False)],
)  # fmt: skip
def test_what_the_hub_takes_for_a_name(text: str, is_one: bool) -> None:
    assert is_hub_name(text) == is_one
