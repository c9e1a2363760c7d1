"""Ordinary programs print in the sandbox what they print outside, in every mode that this machine
has."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys

import pytest
from ordinary_programs import PROGRAMS

from gyre.rewards.sandbox import syscall_filter
from gyre.rewards.sandbox.executors import Cell, IsolationUnavailable
from gyre.rewards.sandbox.meter import MemoryMeter
from gyre.rewards.sandbox.records import Limits, Program

LIMITS = Limits(wall_s=120.0, cpu_s=60.0, memory_bytes=1 << 30, processes=24)
BATCH = 51
# Runs one program after the other in a fork each, so that none meets what another left in its
# process.
RUNNER = """
import json, os, sys
for number, source in enumerate(json.load(sys.stdin)):
    print(f"=== {number}", flush=True)
    child = os.fork()
    if child == 0:
        os.mkdir(str(number))
        os.chdir(str(number))
        space = {"__name__": "__main__"}
        exec(compile(source, "program", "exec"), space)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


def _parts(text: str) -> list[str]:
    return text.split("=== ")[1:]


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """What each batch prints without a sandbox."""
    found = []
    for at in range(0, len(PROGRAMS), BATCH):
        done = subprocess.run(
            [sys.executable, "-S", "-s", "-P", "-c", RUNNER],
            input=json.dumps(PROGRAMS[at : at + BATCH]).encode(),
            capture_output=True,
            cwd=tmp_path_factory.mktemp("outside"),
            timeout=120,
            env={
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "PYTHONHASHSEED": "0",
                "PYTHONUTF8": "1",
                "LANG": "C.UTF-8",
            },
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        found.append(_parts(done.stdout.decode()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strong", "bubblewrap", "weak"])
def test_ordinary_programs_print_as_outside(outside, mode):
    assert len(PROGRAMS) >= 200
    cell = Cell(mode)
    try:
        cell.start()
    except IsolationUnavailable as error:
        pytest.skip(f"no such mode on this machine: {error}")
    try:
        for at, wanted in zip(range(0, len(PROGRAMS), BATCH), outside, strict=True):
            programs = json.dumps(PROGRAMS[at : at + BATCH])
            result = cell.run(Program(source=RUNNER, stdin=programs), limits=LIMITS)
            assert (result.outcome, result.stderr) == ("ok", ""), result
            assert _parts(result.stdout) == wanted
            assert not result.refused_calls
    finally:
        cell.close()


NUMPY = """
import socket, sys
from gyre.rewards.fork_server import kernel
from gyre.rewards.sandbox import program, syscall_filter
kernel.forbid_new_privileges()
program.announce(socket.socket(fileno=int(sys.argv[1])), syscall_filter.CallFilter())
import numpy as np
a = np.random.default_rng(0).normal(size=(200, 200))
np.linalg.svd(a @ a.T)
np.save("a.npy", a)
print(np.memmap("a.npy", dtype="u1", mode="r")[:6].tobytes(), len(np.fft.fft(a)))
"""


def test_numpy_and_its_threads_need_no_refused_call(tmp_path):
    pytest.importorskip("numpy")
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-c", NUMPY, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    theirs.close()
    _, files, _, _ = socket.recv_fds(ours, 10, 1)
    listener, ended = (
        syscall_filter.Listener(files[0], MemoryMeter(-1, 0, 0)),
        os.pidfd_open(child.pid),
    )
    while ended not in (ready := select.select([listener.fd, ended], [], [], 60)[0]):
        assert ready, "numpy hangs"
        listener.answer_one()
    assert child.communicate()[0] == "b'\\x93NUMPY' 200\n" and child.returncode == 0
    assert not listener.refused
    for fd in (listener.fd, ended):
        os.close(fd)
    ours.close()
