"""A host beside this one for tests: a network namespace with a /dev/shm of its own, and members that join a
pod's run from there. In: the run's address and token. Out: the namespace's address, a process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 120.0  # for a run to come to the next point
JOIN = "from gyre.cli.main import main; main()"


@dataclass(frozen=True, kw_only=True)
class Network:
    """A namespace, and the address of this side of its link."""

    name: str
    address: str
    there: str  # the other side's device


@contextlib.contextmanager
def network_namespace(*, beside: Network | None = None) -> Iterator[Network]:
    """A namespace beside this one, joined by a pair of virtual Ethernet devices. Skips the test
    where none can be made. One that is `beside` another reaches this side by the same address."""
    for tool in ("ip", "unshare", "mount"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} (iproute2, util-linux) to make a network namespace")
    if os.geteuid() != 0:
        pytest.skip("needs root to make a network namespace")
    mark = uuid.uuid4().hex[:6]
    name, here, there = f"gyre-{mark}", f"gy{mark}h", f"gy{mark}t"
    subnet = f"10.{213 + os.getpid() % 20}.{os.getpid() % 251}"
    first = 1 if beside is None else 5
    own, other = f"{subnet}.{first}", f"{subnet}.{first + 1}"

    def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)

    made = ip("netns", "add", name, check=False)
    if made.returncode != 0:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    try:
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        ip("addr", "add", f"{own}/30", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", name, "addr", "add", f"{other}/30", "dev", there)
        ip("-n", name, "link", "set", there, "up")
        if beside is not None:
            ip("-n", name, "route", "add", beside.address, "via", own)
        address = own if beside is None else beside.address
        yield Network(name=name, address=address, there=there)
    finally:
        ip("link", "del", here, check=False)
        ip("netns", "del", name)


@contextlib.contextmanager
def member(network: Network, address: str, token: Path, name: str) -> Iterator[subprocess.Popen]:
    """A member in the namespace, with shared memory of its own: weights can come by TCP alone."""
    own_memory = 'mount -t tmpfs none /dev/shm && exec "$@"'
    words = [sys.executable, "-c", JOIN, "sidecar", "join", address, "--token-file", str(token)]
    process = subprocess.Popen(
        [
            *("ip", "netns", "exec", network.name, "unshare", "-m", "sh", "-c", own_memory, "sh"),
            *words,
            *("--name", name),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


def until(
    found: Callable[[], Any], what: Callable[[], str], *, deadline_s: float = DEADLINE_S
) -> Any:
    """What `found` returns once it is something."""
    end_s = time.monotonic() + deadline_s
    while not (value := found()):
        assert time.monotonic() < end_s, what()
        time.sleep(0.05)
    return value
