"""What a server holds: of its own process and of its engines'. In: a running server. Out: accounts,
which are to be the same whenever nobody asks anything."""

from __future__ import annotations

import time
from dataclasses import dataclass

import httpx
import psutil

from scraped import Samples, read_samples
from served import Served

IDLE_S = 60.0
BUSY = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "gyre_engine_outstanding_tokens",
)


@dataclass(frozen=True, kw_only=True)
class ProcessAccount:
    pid: int
    role: str  # "server" or "engine"
    handles: int  # files, sockets, pipes
    threads: int
    rss_bytes: int


@dataclass(frozen=True, kw_only=True)
class Account:
    processes: tuple[ProcessAccount, ...]
    samples: Samples  # of /metrics

    def of(self, pid: int) -> ProcessAccount | None:
        return next((one for one in self.processes if one.pid == pid), None)

    def busy(self) -> Samples:
        """What is still held for requests."""
        found = {key: value for key, value in self.samples.items() if key[0] in BUSY and value}
        in_flight = self.samples[("gyre_requests_in_flight",)]
        if in_flight > 1:  # the scrape itself is one
            found[("gyre_requests_in_flight",)] = in_flight
        return found


def engines_of(served: Served) -> list[psutil.Process]:
    """The worker processes that are there."""
    tree = psutil.Process(served.process.pid).children(recursive=True)
    return [one for one in tree if "gyre.cluster.worker.process" in one.cmdline()]


def look(served: Served, client: httpx.Client) -> Account:
    """What is held now, the client's one connection with it."""
    text = client.get(f"{served.url}/metrics").text
    server = psutil.Process(served.process.pid)
    processes = [("server", server), *(("engine", one) for one in engines_of(served))]
    return Account(
        processes=tuple(
            ProcessAccount(
                pid=one.pid,
                role=role,
                handles=one.num_fds(),
                threads=one.num_threads(),
                rss_bytes=one.memory_info().rss,
            )
            for role, one in processes
        ),
        samples=read_samples(text),
    )


def look_when_idle(served: Served, secret: str) -> Account:
    """What is held when nothing runs; it must come to that."""
    ends = time.monotonic() + IDLE_S
    quiet = 0
    with httpx.Client(headers={"authorization": f"Bearer {secret}"}, timeout=30) as client:
        while True:
            found = look(served, client)
            quiet = 0 if found.busy() else quiet + 1
            if quiet == 3:  # a connection that was just closed has ended too
                return found
            assert time.monotonic() < ends, found.busy()
            time.sleep(0.1)
