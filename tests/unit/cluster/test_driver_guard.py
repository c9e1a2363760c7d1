"""The guard of a driver: started again when Ray ended it, nothing left when anyone is killed. Real
processes, no Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from gyre.core.errors import RankError
from gyre.cluster.driver_guard import guard_driver
folder, way = Path(sys.argv[1]), sys.argv[2]
try:
    guarded = guard_driver(1)
except RankError as error:
    (folder / "error").write_text(error.message)
    raise SystemExit(2)
# An orphan in a session of its own, as Ray's processes have orphans.
subprocess.run(["sh", "-c", "setsid sleep 300 & exec true"])
(folder / f"driver-{guarded.number}").write_text(f"{os.getpid()} {guarded.folder}")
guarded.tell_folder(folder / "run")
if way == "lost" or (way == "lost once" and not guarded.number):
    os._exit(1)
try:
    while way == "waits":
        time.sleep(0.01)
    code = 7
except KeyboardInterrupt:
    code = 130
guarded.tell_end()
raise SystemExit(code)
"""


@contextlib.contextmanager
def started(folder: Path, way: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(folder), way], cwd=folder)
    try:
        yield process
    finally:
        for one in below(process):
            one.kill()
        process.kill()
        process.wait()


def below(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.01)


def in_folder(folder: Path) -> list[str]:
    """Processes at work there, whoever their parent is."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
    return found


@pytest.mark.parametrize(
    ("way", "code", "drivers"), [("ends", 7, 1), ("lost once", 7, 2), ("lost", 2, 2)]
)
def test_a_driver_that_was_ended_without_a_word_is_started_again(tmp_path, way, code, drivers):
    with started(tmp_path, way) as process:
        assert process.wait(timeout=60) == code
    assert len(list(tmp_path.glob("driver-*"))) == drivers
    assert (tmp_path / "driver-0").read_text().endswith(" None")
    if drivers == 2:
        assert (tmp_path / "driver-1").read_text().endswith(f" {tmp_path / 'run'}"), (
            "it knows what to go on with"
        )
    assert (tmp_path / "error").exists() == (way == "lost")
    assert not in_folder(tmp_path)


@pytest.mark.parametrize("who", ["front", "guard", "driver"])
def test_whoever_is_killed_nothing_is_left(tmp_path, who):
    with started(tmp_path, "waits") as process:
        wait_until(lambda: (tmp_path / "driver-0").exists() and len(below(process)) == 3)
        driver = int((tmp_path / "driver-0").read_text().split()[0])
        guard = psutil.Process(driver).ppid()
        os.kill({"front": process.pid, "guard": guard, "driver": driver}[who], signal.SIGKILL)
        assert process.wait(timeout=60) == (-9 if who == "front" else 2)
        wait_until(lambda: not in_folder(tmp_path))
    assert not (tmp_path / "driver-1").exists(), "somebody wanted it gone"
    if who != "front":
        assert "signal 9" in (tmp_path / "error").read_text()


def test_a_signal_reaches_the_driver_and_its_exit_code_the_shell(tmp_path):
    with started(tmp_path, "waits") as process:
        wait_until(lambda: (tmp_path / "driver-0").exists())
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    assert not in_folder(tmp_path)
