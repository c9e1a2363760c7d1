"""A role for the tests of worker processes, of the standard library alone: what a process sees, may take
and has started."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any

LOOK = """
import json, os, resource
print(json.dumps([resource.getrlimit(resource.RLIMIT_DATA)[0], sorted(os.sched_getaffinity(0))]))
"""


class ProcessRole:
    def __init__(self) -> None:
        self._taken = b""

    def packages(self, names: Sequence[str]) -> dict[str, bool]:
        return {name: importlib.util.find_spec(name) is not None for name in names}

    def prefix(self) -> str:
        return sys.prefix

    def limits(self, who: str) -> tuple[int, tuple[int, ...]]:
        if who == "child":
            told = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, check=True)
            data_bytes, cores = json.loads(told.stdout)
            return data_bytes, tuple(cores)
        cores = tuple(sorted(os.sched_getaffinity(0)))
        return resource.getrlimit(resource.RLIMIT_DATA)[0], cores

    def take(self, size_bytes: int) -> None:
        self._taken = bytearray(size_bytes)

    def work(self, seconds: float) -> str:
        time.sleep(seconds)  # the event loop stands still meanwhile
        return "done"

    def start_child(self) -> tuple[int, int]:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return os.getpid(), child.pid

    def share_memory(self) -> tuple[int, list[str]]:
        """Make shared memory here and in a child, as vLLM does for its messages."""
        self._shared = SharedMemory(create=True, size=4096)
        spawn = multiprocessing.get_context("spawn")
        told, tell = spawn.Pipe(duplex=False)
        spawn.Process(target=hold_memory, args=(tell,)).start()
        return os.getpid(), [self._shared.name, told.recv()]


def hold_memory(tell: Any) -> None:
    shared = SharedMemory(create=True, size=4096)
    tell.send(shared.name)
    time.sleep(600)


def make(context: Any) -> ProcessRole:
    return ProcessRole()
