"""Processes: what a process has started. In: /proc. Out: process numbers; ended processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection


def list_others() -> list[int]:
    """List every process that /proc shows except this one."""
    me = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != me]


def read_stat(pid: int) -> list[str] | None:
    """Read the fields of /proc/PID/stat from `state` on; None when the process has gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def list_children() -> list[int]:
    """List the children of this process, including those that have ended and were not reaped."""
    me = os.getpid()
    if not os.path.exists(f"/proc/self/task/{me}/children"):  # CONFIG_PROC_CHILDREN
        return [pid for pid, parent in _read_parents().items() if parent == me]
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError),  # the thread has ended
            open(f"/proc/self/task/{task}/children") as file,
        ):
            found += map(int, file.read().split())
    return found


def list_descendants() -> list[int]:
    """List all processes below this one."""
    me = os.getpid()
    parents, family = _read_parents(), {me}
    while grown := {
        pid for pid, parent in parents.items() if parent in family and pid not in family
    }:
        family |= grown
    return sorted(family - {me})


def _read_parents() -> dict[int, int]:
    """Map each other process to its parent."""
    return {pid: int(fields[1]) for pid in list_others() if (fields := read_stat(pid)) is not None}


def kill_group(pid: int) -> None:
    """Kill a child and its process group. Until it is reaped, its number is its own."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def end_orphans(keep: Collection[int]) -> bool:
    """Kill and reap each child that is not in `keep`. Returns True when none is left.

    Call it until then: the children of a killed process come to a subreaper.
    """
    orphans = [pid for pid in list_children() if pid not in keep]
    for pid in orphans:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return not orphans


def end_descendants() -> None:
    """Kill and reap until no child is left; a subreaper inherits every orphan."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            for descendant in list_descendants():
                # it may have ended since it was listed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(descendant, signal.SIGKILL)
            time.sleep(0.001)
