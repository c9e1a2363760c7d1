"""A second signal ends the process, whatever its display waits for."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, threading
from gyre.launch.signals import StopSignals
from gyre.loop.stopping import StopRequest

signals = StopSignals(StopRequest(deadline_s=60.0), say=lambda error: print("ended by", error.exit_code, flush=True))
signals.install()
try:
    os.kill(os.getpid(), signal.SIGTERM)
except KeyboardInterrupt:
    print("asked", flush=True)
if "stuck" in sys.argv:
    held = threading.Lock()
    held.acquire()
    signals.close_display = held.acquire
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("display", ["free", "stuck"])
def test_a_second_signal_ends_the_process_also_beside_a_stuck_display(display: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, display], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 128 + signal.SIGTERM, ran.stderr
    asked, *last = ran.stdout.splitlines()
    assert asked == "asked" and last == (["ended by 143"] if display == "free" else [])
