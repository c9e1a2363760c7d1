"""Watchdog: what all processes of a run use together. In: /proc. Out: the limit that they are over.

Kernel limits (sandbox.program) hold each process by itself; these sums hold them together. A server
runs one program at a time. So in strong mode every process of its namespace but itself belongs to
the run, and in the other modes every descendant does.
"""

from __future__ import annotations

import os
import resource
from typing import Any

from gyre.rewards.fork_server import processes
from gyre.rewards.sandbox.meter import MemoryMeter

PERIOD_S = 0.02  # a sum over a limit is seen this late at most
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGESIZE")


def excess(
    pids: list[int], limits: dict[str, Any], cpu_before_s: float, meter: MemoryMeter
) -> str | None:
    """Name the limit that all processes of the run together are over."""
    if len(pids) > limits["processes"]:
        return "processes"
    cpu_s, memory_bytes = children_cpu_s() - cpu_before_s, meter.total(pids)
    for pid in pids:
        fields = processes.read_stat(pid)
        if fields is not None:
            cpu_s += sum(int(ticks) for ticks in fields[11:15]) / _TICKS
            memory_bytes += _memory(pid, without_shared=meter.counts_mappings)
    if memory_bytes > limits["memory_bytes"]:
        return "memory"
    return "cpu" if cpu_s > limits["cpu_s"] else None


def children_cpu_s() -> float:
    """CPU seconds of all children that have been collected."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _memory(pid: int, *, without_shared: bool) -> int:
    """Bytes of a process, in memory and swapped out, pages shared by n processes counted as 1/n
    each."""
    wanted = {"Pss:": 1, "SwapPss:": 1, "Pss_Shmem:": -1 if without_shared else 0}
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            lines = [line.split() for line in file]
        return (
            sum(
                wanted.get(words[0], 0) * int(words[1]) for words in lines if words[0].endswith(":")
            )
            * 1024
        )
    except OSError:
        pass  # gone, or a process that hides its maps: the plain resident size, if any, stands in
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0
