"""Client rate: how many chunks a second this client reads at most. In: nothing. Out: the rate, for
one core.

It streams from a null server in a process of its own, and divides by the client's processor time.
So the rate does not depend on how fast the null server is, or what else the machine does.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

from gyre.benchmark.client import Client, ClientSettings
from gyre.benchmark.connection import ConnectionPool, parse_url
from gyre.benchmark.null_server import CHUNKS
from gyre.benchmark.records import RequestResult
from gyre.core.errors import InputError

CONNECTIONS, ANSWERS = 32, 64
DEADLINE_S = 60.0


async def measure_client() -> float:
    """Return chunks per second of the client's processor time. InputError where the null server
    does not start or answer."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gyre.benchmark.null_server",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in a terminal is for this process, which then ends it
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            url = (await process.stdout.readline()).decode().strip()
            return await _rate(url)
    except TimeoutError:
        raise InputError(
            f"the null server, which measures this client, took over {DEADLINE_S:g} s",
            hint="the machine is overloaded; --no-client-rate leaves the measurement out",
        ) from None
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(5.0):
                await process.wait()
        except TimeoutError:
            process.kill()


async def _rate(url: str) -> float:
    pool = ConnectionPool(parse_url(url), most=CONNECTIONS)
    settings = ClientSettings(path="/chat/completions", stream=True, timeout_s=DEADLINE_S)
    client = Client(pool, settings)
    try:
        await _ask_all(client, CONNECTIONS)
        begun_s = time.process_time()
        outcomes = await _ask_all(client, ANSWERS)
        cpu_s = time.process_time() - begun_s
    finally:
        pool.close()
    assert all(len(outcome.text_times_s) == CHUNKS for outcome in outcomes), outcomes
    return ANSWERS * CHUNKS / cpu_s


async def _ask_all(client: Client, count: int) -> list[RequestResult]:
    outcomes: list[RequestResult] = []

    async def ask() -> None:
        outcomes.append(await client.ask(b"{}", time.perf_counter()))

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(ask())
    return outcomes
