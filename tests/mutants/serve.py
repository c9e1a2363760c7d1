"""A warm Python that runs a mutant's tests: torch is loaded once, gyre anew in a child for each mutant.

In: a socket's path, test files. Each connection is answered with one byte: 0 when the tests pass, else 1. A client
that leaves ends its child. Started by run.py, in the folder of the copied tree.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys

import hypothesis.extra.numpy  # noqa: F401
import numpy  # noqa: F401
import pytest
import torch  # noqa: F401
from hypothesis import Phase, settings

LIMIT_S = 60  # of one test; an endless loop is noticed by it


def main(path: str, tests: list[str]) -> None:
    sys.dont_write_bytecode = True  # two mutants of one second and size would look alike
    settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), database=None, derandomize=True)
    settings.load_profile("mutants")  # a failure is enough, a small example of it takes long
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while True:
            client, _ = server.accept()
            with client:
                passed = run_child(client, tests)
                with contextlib.suppress(BrokenPipeError):
                    client.sendall(b"\0" if passed else b"\1")


def run_child(client: socket.socket, tests: list[str]) -> bool:
    child = os.fork()
    if child == 0:
        os.setsid()
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", f"--timeout={LIMIT_S}"]
        code = pytest.main([*options, *tests])
        sys.stdout.flush()
        os._exit(0 if code == 0 else 1)
    watch = os.pidfd_open(child)
    ready, _, _ = select.select([watch, client], [], [])
    if watch not in ready:  # the client left: it takes too long
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(watch)
    return status == 0


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
