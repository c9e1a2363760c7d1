"""The gate between a start that has begun and its memory, with a real process behind it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from gyre.sidecars.vllm.gate import StartGate

WAIT = """
import pathlib, sys
from gyre.sidecars.vllm.gate import wait_until_open
wait_until_open(pathlib.Path(sys.argv[1]))
"""
# starts one that waits, and ends as soon as it does
START = """
import pathlib, subprocess, sys, time
waiting = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
while not any(pathlib.Path(sys.argv[2]).parent.glob("reached-*")):
    time.sleep(0.01)
"""
SOON_S = 30.0


def wait_for(work) -> None:
    until_s = time.monotonic() + SOON_S
    while not work():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_worker_waits_until_the_gate_is_open(tmp_path: Path) -> None:
    gate = StartGate(tmp_path)
    assert not gate.is_reached
    waiting = subprocess.Popen([sys.executable, "-c", WAIT, str(gate.path)])
    wait_for(lambda: gate.is_reached)
    assert waiting.poll() is None
    gate.open()
    assert waiting.wait(SOON_S) == 0
    gate.remove()
    assert not list(tmp_path.iterdir())


def test_a_worker_ends_when_its_gate_is_removed_or_its_parent_has_gone(tmp_path: Path) -> None:
    gate = StartGate(tmp_path)
    waiting = subprocess.Popen([sys.executable, "-c", WAIT, str(gate.path)])
    wait_for(lambda: gate.is_reached)
    gate.remove()
    assert waiting.wait(SOON_S) == 1
    argv = [sys.executable, "-c", START, WAIT, str(StartGate(tmp_path).path)]
    # it ends with the last process that has its output: the one that waits
    subprocess.run(argv, stdout=subprocess.PIPE, timeout=SOON_S, check=True)
