"""A role for the cluster's tests that does wrong on demand. Its worker imports no torch and starts at
once. In: a Context, plain arguments. Out: an object with methods to call."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from gyre.cluster.worker.server import Context
from gyre.core.errors import InputError


class Odd:
    """What a worker may do wrong, on demand."""

    def __init__(self, context: Context) -> None:
        self._context, self._noted = context, []

    def note(self, number: int, value: Any) -> None:
        self._noted.append(number)

    def noted(self) -> list[int]:
        return self._noted

    def pid(self) -> int:
        return os.getpid()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def echo(self, value: Any) -> Any:
        self._context.emit("engine.prefix_cleared", pages=len(str(value)), reason="echo")
        return value

    def lock(self) -> Any:
        return threading.Lock()  # which no cluster of processes can send

    def refuse(self) -> None:
        raise InputError("not this", hint="something else")

    def break_(self) -> None:
        raise ValueError("broken inside")

    async def block(self, seconds: float) -> None:
        time.sleep(seconds)

    def die(self) -> None:
        os._exit(3)


def odd(context: Context, *, fail: bool = False) -> Odd:
    if fail:
        raise InputError("the builder was told to fail", hint="do not tell it")
    return Odd(context)
