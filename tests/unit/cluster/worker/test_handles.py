"""Handles called from several threads at once: every call has a number of its own, in the order in
which they went out. A call is sent whole, however little the socket takes at once."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvloop

from gyre.cluster.ray_cluster import RayHandle
from gyre.cluster.worker import frames
from gyre.cluster.worker.link import LinkHandle
from gyre.core.records import RoleSpec


class Outbox:
    """Where an actor's calls go; each takes a while to send, and one of `fails_at` cannot be
    sent."""

    def __init__(self, fails_at: str = "") -> None:
        self.numbers: list[int] = []
        self._fails_at = fails_at

    def remote(self, number: int, method: str) -> Any:
        time.sleep(0.001)
        if method == self._fails_at:
            raise TypeError("cannot pickle it")
        self.numbers.append(number)
        return SimpleNamespace(future=Future)


def make(outbox: Outbox) -> RayHandle:
    spec = RoleSpec(name="worker-0", builder="none:none")
    return RayHandle(
        spec, SimpleNamespace(ask=outbox), lambda *args, **fields: None, here="127.0.0.1"
    )


def test_calls_from_several_threads_have_one_number_each() -> None:
    outbox = Outbox()
    handle, together = make(outbox), threading.Barrier(4)

    def call() -> None:
        together.wait()
        for _ in range(25):
            handle.begin("echo")

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(call) for _ in range(4)]:
            done.result(60)
    assert outbox.numbers == list(range(100))


def test_a_call_that_cannot_be_sent_takes_no_number() -> None:
    outbox = Outbox(fails_at="odd")
    handle = make(outbox)
    handle.begin("echo")
    with pytest.raises(TypeError, match="pickle"):
        handle.begin("odd")
    handle.begin("echo")
    assert outbox.numbers == [0, 1]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_calls_that_do_not_fit_into_the_socket_arrive_whole(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """A loop may make the socket one that does not wait, and the worker reads late."""
    here, there = socket.socketpair()
    sent = [np.arange(500_000 + number, dtype=np.int32) for number in range(3)]

    def work() -> list[Any]:
        found = []
        for number in range(1 + len(sent)):
            time.sleep(0.05)
            call, payload = frames.receive(there)
            found.append(frames.decode(payload))
            frames.send(there, call, frames.encode(["reply", number, None, ()]))
        return found

    async def main() -> list[Any]:
        spec = RoleSpec(name="worker-0", builder="none:none")
        handle = LinkHandle(spec, here, place="here", on_event=lambda *args, **fields: None)
        calls = [handle.begin("take", array) for array in sent]
        answers = [await asyncio.wrap_future(call) for call in (handle.built, *calls)]
        here.shutdown(socket.SHUT_RDWR)
        await asyncio.wrap_future(handle.gone)
        return answers

    loop = new_loop()
    with ThreadPoolExecutor(1) as worker:
        reading = worker.submit(work)
        assert loop.run_until_complete(asyncio.wait_for(main(), 60)) == [0, 1, 2, 3]
        _, *found = reading.result(60)
    loop.close()
    there.close()
    for (kind, method, (array,)), expected in zip(found, sent, strict=True):
        assert (kind, method) == ("ask", "take") and np.array_equal(array, expected)
