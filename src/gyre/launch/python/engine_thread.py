"""Engine thread: one engine in this process, with an event loop in a thread of its own. In: a model
folder, its config, coroutines from any thread. Out: what they return.

    any thread ──coroutine──▶ loop thread: requests, text ──bursts──▶ compute thread: one engine
               ◀───result────                              ◀─chunks──
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from gyre.core.chunks import TokenStream
from gyre.core.errors import DeadlineError, InputError
from gyre.core.events import Emit
from gyre.core.records import Request
from gyre.engine.engine import NativeEngine
from gyre.engine.frontend.admission import Load, find_overload
from gyre.launch.factories import load_policy, make_engine, make_machine
from gyre.launch.serving.model import served_model
from gyre.runconfig.run_config import RunConfig
from gyre.server.generation import ServedModel, TextDelta, TokenUsage, pieces

Result = TypeVar("Result")
CLOSE_S = 120.0  # longest wait for the engine's thread to end: the step under way ends before
LOOK_AGAIN_S = 0.1  # for room: what a stream leaves unread ends without a word
SETTLE_S = 10.0  # for callers to learn that their requests were aborted


class LocalEngine:
    """An engine and the model that it serves. Every method runs on the engine's event loop."""

    def __init__(self, engine: NativeEngine, model: ServedModel, most: Load) -> None:
        self.engine = engine
        self.model = model
        self._most = most  # unanswered, that the engine accepts
        self._room = asyncio.Condition()

    async def submit(self, request: Request) -> TokenStream:
        """Wait until the engine has room for the request, and submit it."""
        async with self._room:
            while find_overload(request, self.engine.frontend.load, self._most) is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        await self._room.wait()
            return self.engine.submit(request)

    async def close(self, streams: Sequence[TokenStream]) -> None:
        """Abort what is unanswered, which frees its KV pages, and let others have the room."""
        await asyncio.gather(*(stream.aclose() for stream in streams))
        async with self._room:
            self._room.notify_all()

    async def complete(self, requests: Sequence[Request]) -> list[list[TextDelta]]:
        """Answer requests side by side, as many as the engine accepts. The first error, or a
        cancellation, aborts all of them."""
        streams: list[TokenStream] = []
        tasks: list[asyncio.Task[list[TextDelta]]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    streams.append(await self.submit(request))
                    tasks.append(group.create_task(self._collect(request, streams[-1])))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await self.close(streams)
        return [task.result() for task in tasks]

    async def _collect(self, request: Request, stream: TokenStream) -> list[TextDelta]:
        usage = TokenUsage(prompt_tokens=len(request.tokens))
        tokenizer = self.model.tokenizer
        found = [piece async for piece in pieces(stream, request, tokenizer, usage)]
        async with self._room:
            self._room.notify_all()
        return found


class EngineThread:
    """The loop thread. `close` ends it; so does `stop`, without waiting."""

    def __init__(self, folder: Path, config: RunConfig, *, name: str, emit: Emit) -> None:
        """Load the model and start the engine. Errors of either are raised here."""
        self._folder = folder
        self._config = config
        self._name = name
        self._emit = emit
        # over the next three; the collector may drop a stream, and so spawn, while it is held
        self._lock = threading.RLock()
        self._is_closed = False
        self._stop_now: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        ready: concurrent.futures.Future[LocalEngine] = concurrent.futures.Future()
        # a daemon, so that a program that never closes its engine can end
        self._thread = threading.Thread(
            target=self._run_loop, args=(ready,), name="gyre-engine", daemon=True
        )
        self._thread.start()
        try:
            self.local = ready.result()
        except BaseException:
            self.stop()
            raise

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run on the engine's loop, and wait. Ctrl-C cancels the work."""
        future = self._submit(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise closed() from None
        except BaseException:
            future.cancel()
            raise

    async def arun(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run on the engine's loop, and await it on the caller's. Cancelling the caller cancels the
        work."""
        future = self._submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise closed() from None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run on the engine's loop without waiting. After the end there is nothing to do."""
        with self._lock:
            if self._is_closed or self._loop is None:
                work.close()
                return
            asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """Let requests under way end as aborted, and the thread with them. May be called twice."""
        with self._lock:
            if not self._is_closed and self._loop is not None and self._stop_now is not None:
                self._loop.call_soon_threadsafe(self._stop_now.set)
            self._is_closed = True

    def close(self) -> None:
        """Stop, and wait for the end. DeadlineError when a step of the engine does not end."""
        self.stop()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise DeadlineError(
                f"the engine's thread has not ended after {CLOSE_S:g} s",
                hint="end the process; engine.step_deadline_s bounds a step on a GPU",
            )

    def _submit(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        # under the lock, so that the loop has this before the word to stop
        with self._lock:
            if self._is_closed or self._loop is None:
                work.close()
                raise closed()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run_loop(self, ready: concurrent.futures.Future[LocalEngine]) -> None:
        try:
            asyncio.run(self._serve(ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def _serve(self, ready: concurrent.futures.Future[LocalEngine]) -> None:
        stop_now = asyncio.Event()
        with self._lock:
            self._loop, self._stop_now = asyncio.get_running_loop(), stop_now
            if self._is_closed:
                stop_now.set()
        machine = make_machine(self._config)
        try:
            policy = await self._loop.run_in_executor(
                machine.compute,
                lambda: load_policy(
                    self._folder, machine, end_token=self._config.tokenizer.end_token
                ),
            )
            engine = make_engine(self._config.engine, policy, machine, self._emit)
            await engine.start(dummy=False)
            model = served_model(policy.tokenizer, self._config, self._name, engine.limits)
            settings = self._config.engine
            most = Load(
                completions=settings.max_running + settings.max_queued,
                tokens=engine.limits.cache_tokens + settings.max_queued_tokens,
            )
            ready.set_result(LocalEngine(engine, model, most))
            await stop_now.wait()
            await engine.terminate()
            callers = asyncio.all_tasks() - {asyncio.current_task()}
            if callers:
                await asyncio.wait(callers, timeout=SETTLE_S)
        finally:
            with self._lock:
                self._is_closed = True  # the loop ends
            machine.compute.shutdown()


def closed() -> InputError:
    """Return what a call of a closed engine raises."""
    return InputError("this engine is closed", hint="make another one: gyre.Engine(path)")
