"""Family: the processes that a process has started. In: /proc. Out: process numbers; ended
processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection
from pathlib import Path


def children() -> list[int]:
    """Children of this process, those that have ended and were not waited for among them."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, (task / "children").read_text().split())
    return found if _kernel_lists_children() else _children_by_parent()


def end_orphans(keep: Collection[int]) -> bool:
    """Kill and collect every child that is not to be kept. True when none is left. To be called
    again until then: the children of a killed one come to a subreaper."""
    orphans = [pid for pid in children() if pid not in keep]
    for pid in orphans:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return not orphans


def _kernel_lists_children() -> bool:
    return Path(f"/proc/self/task/{os.getpid()}/children").exists()  # CONFIG_PROC_CHILDREN


def _children_by_parent() -> list[int]:
    found, me = [], str(os.getpid())
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if (folder / "stat").read_text().rpartition(")")[2].split()[1] == me:
                found.append(int(folder.name))
    return found
