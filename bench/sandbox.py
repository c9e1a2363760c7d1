"""Sandbox starts per second and kill latency. In: nothing. Out: starts/s one after the other and
with 2 to 4 in flight, the time from a program's wall limit to its death. Run: python
bench/sandbox.py [--json] [--record].

A start is a fresh isolated process that runs one Python program and returns its output; every
output is checked. The limit is what the machine does at best: bare forks of an equally warm Python,
nothing isolated and nothing run.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from gyre.rewards.sandbox.executors import Cells, choose_mode
from gyre.rewards.sandbox.records import Limits, Program
from record import parser, say

PEER = {"name": "Kimi k1.5 (published; containers, 16 cores)", "value": 120.0}
LIMITS = Limits(wall_s=10.0, cpu_s=5.0)
KILL = Limits(wall_s=0.3, cpu_s=60.0, memory_bytes=256 << 20, processes=16)
STUBBORN = {
    "loops": "while True: pass",
    "sleeps": "import time; time.sleep(1000)",
    "ignores signals": "import signal\nfor n in range(1, 32):\n  try: signal.signal(n, "
    "signal.SIG_IGN)\n"
    "  except OSError: pass\nwhile True: pass",
    "forks": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "holds memory": "import time\nblock = bytearray(200 << 20)\ntime.sleep(1000)",
    "daemonizes": "import os, time\nif os.fork() == 0:\n  os.setsid()\n  "
    "os.fork()\ntime.sleep(1000)",
    "closes its streams": "import os\nfor fd in (0, 1, 2): os.close(fd)\nwhile True: pass",
}
BARE_FORKS = """
import os, sys, time
import bisect, collections, copy, ctypes, functools, gc, heapq, itertools, math, random, re
import socket, string, typing
gc.collect(); gc.freeze()
count, end = 0, time.perf_counter() + float(sys.argv[1])
while time.perf_counter() < end:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    count += 1
print(count)
"""


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--cores", type=int, default=2, help="keep to so many cores")
    options.add_argument("--starts", type=int, default=600, help="starts per measurement")
    options.add_argument("--kills", type=int, default=20, help="kills per kind of program")
    options.add_argument(
        "--mode", choices=("strong", "weak", "bubblewrap"), help="instead of the best one"
    )
    args = options.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    events: list[dict[str, Any]] = []
    mode = args.mode or choose_mode(
        "auto", emit=lambda kind, **fields: events.append({"event": kind, **fields})
    )

    rates = {
        in_flight: asyncio.run(starts(mode, in_flight, args.starts)) for in_flight in (1, 2, 3, 4)
    }
    kills = asyncio.run(kill_latencies(mode, args.kills))
    every = sorted(latency for latencies in kills.values() for latency in latencies)
    say(
        args,
        name="sandbox",
        unit="starts/s",
        ours=max(rates.values()),
        peer=PEER,
        limit=bare_forks(args.cores),
        settings={
            "mode": mode,
            "cores": args.cores,
            "starts": args.starts,
            "program": "print(n)",
            "aim": 200,
        },
        detail={
            "starts_per_s_by_in_flight": {str(n): round(rate, 1) for n, rate in rates.items()},
            "kill_latency_ms": {
                "p50": quantile(every, 0.5),
                "p99": quantile(every, 0.99),
                "kills": len(every),
            },
            "kill_latency_ms_p50_by_program": {
                name: quantile(sorted(found), 0.5) for name, found in kills.items()
            },
            "load_average_1min": round(os.getloadavg()[0], 2),
            "events": events,
        },
    )


async def starts(mode: Any, in_flight: int, count: int) -> float:
    """Starts per second with `in_flight` programs at a time."""
    sandbox = Cells(mode, in_flight=in_flight)
    waiting = asyncio.Semaphore(in_flight)

    async def one(number: int) -> None:
        async with waiting:
            result = await sandbox.run(Program(source=f"print({number})"), limits=LIMITS)
        assert result.outcome == "ok" and result.stdout == f"{number}\n", result

    await asyncio.gather(*(one(number) for number in range(4 * in_flight)))  # the servers start
    begun_s = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(count)))
    rate = count / (time.perf_counter() - begun_s)
    sandbox.close()
    return rate


async def kill_latencies(mode: Any, count: int) -> dict[str, list[float]]:
    """Milliseconds from the wall limit until the result is here, which is when every process is
    gone."""
    sandbox = Cells(mode, in_flight=1)
    await sandbox.run(Program(source=""), limits=LIMITS)
    found: dict[str, list[float]] = {}
    for name, source in STUBBORN.items():
        for _ in range(count):
            begun_s = time.perf_counter()
            result = await sandbox.run(Program(source=source), limits=KILL)
            elapsed_s = time.perf_counter() - begun_s
            assert result.outcome in ("timeout", "processes"), (name, result)
            # ended before its wall limit, where the kernel does not count for us
            if result.outcome == "processes":
                continue
            found.setdefault(name, []).append(round((elapsed_s - KILL.wall_s) * 1e3, 2))
    sandbox.close()
    return found


def quantile(ordered: list[float], share: float) -> float:
    return (
        ordered[min(int(share * len(ordered)), len(ordered) - 1)]
        if len(ordered) > 1
        else statistics.mean(ordered)
    )


def bare_forks(cores: int, seconds: float = 1.5) -> float:
    """Forks per second of a warm Python on every core at once."""
    command = [sys.executable, "-S", "-s", "-P", "-c", BARE_FORKS, str(seconds)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(cores)]
    return sum(int(process.communicate()[0]) for process in running) / seconds


if __name__ == "__main__":
    main()
