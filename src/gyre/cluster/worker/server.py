"""Worker server: the worker's side of a handle. In: a RoleSpec, then calls by name. Out: a Reply to
each, with the events that came up meanwhile. The same in a Ray actor and in a thread.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gyre.core.errors import ConfigError, GyreError, InputError, is_disk_full
from gyre.core.events import check_event
from gyre.core.records import RoleSpec

OnEvent = Callable[..., None]  # (worker, kind, **fields)
MAX_EVENTS = 10_000  # that wait for the next reply; older ones are dropped, and counted


class WorkerFault(RuntimeError):
    """A call that raised something else than a GyreError in the worker: a fault of ours. Ends with
    its traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailure:
    """What a call raised."""

    error: GyreError | OSError | None  # as it was, when it is one that a user can act on
    text: str
    trace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    value: Any
    failure: CallFailure | None
    events: tuple[tuple[str, Mapping[str, Any]], ...]


class Context:
    """What a builder gets: its name, where events go, and how it reports progress. Safe from any
    thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ticks = 0
        self._events: deque[tuple[str, Mapping[str, Any]]] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self._lock = threading.Lock()

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Keep an event for the next reply. AssertionError where it does not fit the schema."""
        check_event(kind, fields)
        with self._lock:
            self._events.append((kind, fields))
            self._num_events += 1

    def tick(self) -> None:
        self.ticks += 1

    def take_events(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        with self._lock:
            events, lost = tuple(self._events), self._num_events - len(self._events)
            self._events.clear()
            self._num_events = 0
        return (*events, ("drop.worker_events", {"count": lost})) if lost else events


class WorkerServer:
    """One worker's object, and how it is called."""

    def __init__(
        self, spec: RoleSpec, *, builders: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        """Call and import no other builder than `builders`, by name, where they are given."""
        self._spec = spec
        self._context = Context(spec.name)
        self._builders = builders
        self._role: Any = None

    async def build(self) -> Reply:
        async def make() -> int:
            builder = self._find_builder()
            self._role = await _settle(builder(self._context, **self._spec.arguments))
            return os.getpid()

        return await self._reply(make)

    def _find_builder(self) -> Callable[..., Any]:
        name, builders = self._spec.builder, self._builders
        if builders is None:
            module, _, function = name.partition(":")
            return getattr(self._import(module), function)
        if name not in builders:
            raise InputError(
                f"this worker builds {', '.join(builders)}, and was asked for {name}",
                hint="run the same version of Gyre on both sides",
            )
        return builders[name]

    def _import(self, module: str) -> Any:
        """Import a builder's module. ConfigError where another environment lacks a package of it;
        in our own that is a fault of ours."""
        try:
            return importlib.import_module(module)
        except ImportError as error:
            if not self._spec.interpreter:
                raise
            raise ConfigError(
                f"the environment in {sys.prefix} lacks what {module} imports: {error}",
                hint="make it again: gyre sidecar install vllm",
            ) from error

    async def ask(self, method: str, args: tuple[Any, ...]) -> Reply:
        async def call() -> Any:
            target = self._role
            for name in method.split("."):
                target = getattr(target, name)
            return await _settle(target(*args))

        return await self._reply(call)

    def look(self, what: str) -> Any:
        return self._context.ticks if what == "pulse" else describe_stacks()

    async def _reply(self, work: Callable[[], Any]) -> Reply:
        value, failure = None, None
        try:
            value = await work()
        except Exception as error:  # noqa: BLE001  whatever it was, the caller hears of it
            failure = describe_failure(error)
        return Reply(value=value, failure=failure, events=self._context.take_events())


def describe_failure(error: Exception) -> CallFailure:
    """Return what the caller gets to know. Called where the error is handled."""
    return CallFailure(
        error=error if isinstance(error, GyreError) or is_disk_full(error) else None,
        text=f"{type(error).__name__}: {error}",
        trace=traceback.format_exc(),
    )


def settle_reply(out: Future[Any], reply: Reply, worker: str, on_event: OnEvent) -> None:
    """Give a reply to the caller that waits for it, its events first. Events that cannot be
    written, on a full disk, fail the call: they would be lost otherwise."""
    try:
        for kind, fields in reply.events:
            on_event(worker, kind, **fields)
    except Exception as error:  # noqa: BLE001  whatever it was, the caller hears of it
        out.set_exception(error)
        return
    if reply.failure is None:
        out.set_result(reply.value)
    elif reply.failure.error is not None:
        out.set_exception(reply.failure.error)
    else:
        out.set_exception(
            WorkerFault(f"{reply.failure.text}\n\nin worker {worker}:\n{reply.failure.trace}")
        )


def describe_stacks() -> str:
    """Return what every thread of this process is at."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


async def _settle(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
