"""Drill: 60 hostile programs in every mode that this machine has, as root and as an ordinary
user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hostile_programs import COUNTED, COUNTED_WALLED, HOSTILE, REFUSED, WALLED

import gyre

SOURCE = Path(gyre.__file__).parents[1]
HERE = Path(__file__).parent
WALL_S = 1.5  # of drill.py
MODES = ("strong", "bubblewrap", "weak")
QUICK = {("strong", "own")}
FILES = {"strong": {"exit"}, "bubblewrap": {"exit"}, "weak": {"files"}}


def _objects() -> set[tuple[str, str]]:
    """System V objects of this machine."""
    found = set()
    for kind in ("sem", "msg", "shm"):
        path = Path("/proc/sysvipc") / kind
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        found |= {(kind, line.split()[1]) for line in lines}
    return found


def _run(mode: str, prefix: list[str], python: str) -> dict[str, dict]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{SOURCE}:{HERE}"}
    command = [*prefix, python, str(HERE / "drill.py"), mode]
    done = subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and not done.stderr, done.stderr[-3000:]
    found = json.loads(done.stdout)
    if "unavailable" in found:
        pytest.skip(found["unavailable"])
    return found


def _ordinary() -> tuple[list[str], str]:
    """How to become somebody else, and a Python that everybody may read."""
    python = next(
        (
            p
            for p in ("/usr/bin/python3.13", "/usr/bin/python3.12", "/usr/bin/python3.11")
            if Path(p).exists()
        ),
        "",
    )
    if not python or not shutil.which("setpriv"):
        pytest.skip("needs setpriv and a Python that everybody may read")
    prefix = ["setpriv", "--reuid=65533", "--regid=65533", "--clear-groups"]
    if subprocess.run([*prefix, "test", "-r", str(HERE / "drill.py")]).returncode:
        pytest.skip("the source tree is not readable by others")
    return prefix, python


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "user"),
    [
        pytest.param(mode, user, marks=() if (mode, user) in QUICK else pytest.mark.slow)
        for mode in MODES
        for user in ("own", "ordinary")
    ],
)
def test_hostile_programs_are_bounded_and_leave_nothing(mode, user):
    if user == "ordinary" and os.geteuid() != 0:
        pytest.skip("this is an ordinary user already")
    prefix, python = _ordinary() if user == "ordinary" else ([], sys.executable)
    objects, mounts = _objects(), Path("/proc/self/mountinfo").read_text()
    processes = {process.pid for process in psutil.Process().children(recursive=True)}

    found = _run(mode, prefix, python)

    assert len(found) >= 60 and found.keys() == {*HOSTILE, *(() if mode == "weak" else WALLED)}
    for name, ended in found.items():
        assert ended["outcome"] != "failed", (name, ended)
        assert "opened" not in ended["stdout"] and "raised" not in ended["stdout"], (name, ended)
        assert not ended["left"], (name, ended)
    x86 = os.uname().machine == "x86_64"
    missing = {
        name: call for name, call in REFUSED.items() if x86 and call not in found[name]["refused"]
    }
    assert not missing
    held = COUNTED | (set() if mode == "weak" else COUNTED_WALLED)
    assert {name: found[name]["outcome"] for name in held} == dict.fromkeys(held, "memory")
    assert {found[name]["outcome"] for name in ("many_files", "removed_files")} <= FILES[mode]
    assert (
        found["scm_cycle_stdout"]["stdout"] == "sent\n" and found["fake_125"]["outcome"] == "exit"
    )
    assert _objects() <= objects | _of_others()
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= processes


def _of_others() -> set[tuple[str, str]]:
    """Objects of users that no program of ours runs as; other work on this machine may make them
    meanwhile."""
    found = set()
    for kind, owner in (("sem", 4), ("msg", 7), ("shm", 7)):
        path = Path("/proc/sysvipc") / kind
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            if int(line.split()[owner]) not in (os.geteuid(), 65533, 65534):
                found.add((kind, line.split()[1]))
    return found
