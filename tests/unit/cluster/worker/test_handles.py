"""Handles called from several threads at once: every call has a number of its own, in the order in
which they went out."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from gyre.cluster.ray_cluster import RayHandle
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
