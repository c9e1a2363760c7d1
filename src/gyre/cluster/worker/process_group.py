"""Process group: a worker and all that it started end together. In: the number of a group. Out:
nothing of it is left, here or in shared memory.

Python's resource tracker is of the group too. It removes the shared memory that the others leave
behind, and it alone knows their names, such as those of vLLM's messages. So it ends last, by
itself. Imports the standard library alone, as another environment may lack the rest.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

TRACKER = b"multiprocessing.resource_tracker"
TRACKER_S = 3.0  # for it to remove what is left
LOOK_S = 0.01  # between two looks at the group
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_group(group: int) -> None:
    """Kill the processes of a group but for this one, and let its resource trackers end. Of this
    process's own group they end after it, as it holds them open. Blocks."""
    is_own, until_s = group == os.getpgrp(), time.monotonic() + TRACKER_S
    while members := find_members(group) - {os.getpid()}:
        others = {pid for pid in members if not is_tracker(pid)}
        for pid in others:
            kill_member(pid, group)
        if (is_own and not others) or time.monotonic() > until_s:
            break
        time.sleep(LOOK_S)
    if not is_own:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def go_on_when_orphaned() -> None:
    """Let the end of the starter's thread continue this process, should it be stopped by SIGSTOP:
    it then sees that the starter hung up. Nothing happens where it runs, or not on Linux."""
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def find_members(group: int) -> set[int]:
    """Return the processes of a group that have not ended; none where the system does not tell."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # pid (name) state parent group …; a name may have spaces and brackets
            state, _, own = path.read_bytes().rpartition(b")")[2].split()[:3]
            if int(own) == group and state not in (b"Z", b"X"):
                found.add(int(path.parent.name))
    return found


def is_tracker(pid: int) -> bool:
    with suppress(OSError):
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def kill_member(pid: int, group: int) -> None:
    """Kill a process, unless its number is another's by now."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            if os.getpgid(pid) == group:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
