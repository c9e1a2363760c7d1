"""Marks: when the parts of one traced HTTP request happened. In: its requests to the engine, their
chunks, its answer's messages. Out: times by the monotonic clock, read when it has ended.

Only requests under a recorded trace have marks; nothing here runs for others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message

from gyre.core.chunks import EngineVisit, TokenStream
from gyre.core.records import PrefillTiming, Request, Timing, TokenChunk
from gyre.observability.tracing.trace_context import TraceContext
from gyre.server.bodies.schema import ApiError

TRACE = "gyre.trace"  # key of the scope under which a request's RequestTrace is
HUNG_UP_CODE, FAULT_CODE = "client_disconnected", "server_fault"


@dataclass(slots=True)
class CompletionMarks:
    """One completion, as its chunks came."""

    timing: Timing | None = None
    prefills: list[PrefillTiming] = field(default_factory=list)
    last_chunk_s: float = 0.0
    num_tokens: int = 0
    finish: str | None = None


class EngineMarks:
    """One request in the engines, from submit to its end."""

    def __init__(self, request: Request, clock: Callable[[], float]) -> None:
        self.request = request
        self._clock = clock
        self.submitted_s = self.ended_s = clock()
        self.completions: dict[int, CompletionMarks] = {}
        self.visits: Sequence[EngineVisit] = ()  # of the engines of a pool, in order
        self.error: str | None = None  # code of what ended it

    def watch(self, stream: AsyncIterator[TokenChunk]) -> MarkedStream:
        """Return the stream, whose chunks are noted as they are read."""
        if isinstance(stream, TokenStream):
            self.visits = stream.visits  # grows while it runs
        return MarkedStream(stream, self)

    def end(self, error: BaseException | None) -> None:
        self.ended_s = self._clock()
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.error = HUNG_UP_CODE
        elif error is not None:
            self.error = error.code if isinstance(error, ApiError) else FAULT_CODE

    def note(self, chunk: TokenChunk) -> None:
        marks = self.completions.get(chunk.index)
        if marks is None:
            marks = self.completions[chunk.index] = CompletionMarks()
        marks.last_chunk_s = self._clock()
        marks.num_tokens += len(chunk.tokens)
        marks.timing = marks.timing or chunk.timing
        marks.prefills += chunk.prefills
        marks.finish = chunk.finish or marks.finish


class MarkedStream(AsyncIterator[TokenChunk]):
    """A stream that can be read on after a reader was cancelled, as the one below can."""

    def __init__(self, stream: AsyncIterator[TokenChunk], marks: EngineMarks) -> None:
        self._stream = stream
        self._marks = marks

    async def __anext__(self) -> TokenChunk:
        chunk = await anext(self._stream)
        self._marks.note(chunk)
        return chunk


@dataclass(slots=True)
class WriteMarks:
    """The answer's messages, as they were given to the connection."""

    status: int | None = None
    is_stream: bool = False
    first_s: float | None = None
    last_s: float = 0.0
    num_messages: int = 0
    size_bytes: int = 0
    blocked_s: float = 0.0  # waited until the connection took more

    def note(self, message: Message, began_s: float, ended_s: float) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            self.is_stream = any(value.startswith(b"text/event-stream") for value in kinds)
        self.first_s = began_s if self.first_s is None else self.first_s
        self.last_s = ended_s
        self.num_messages += 1
        self.size_bytes += len(message.get("body", b""))
        self.blocked_s += ended_s - began_s


class RequestTrace:
    """One HTTP request under a trace. `open_ids` maps the requests under way to their trace, for
    the events about them."""

    def __init__(
        self,
        context: TraceContext,
        open_ids: MutableMapping[str, str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.context = context
        self._open_ids = open_ids
        self._clock = clock
        self.arrived_s = clock()
        self.answer_id: str | None = None  # None: it was refused before it had one
        self.works: list[EngineMarks] = []
        self.written = WriteMarks()

    @contextmanager
    def follow(self, request: Request) -> Iterator[EngineMarks]:
        """Note the request as long as it is in the engines."""
        marks = EngineMarks(request, self._clock)
        self.works.append(marks)
        self._open_ids[request.request_id] = self.context.trace_hex
        try:
            yield marks
        except BaseException as error:
            marks.end(error)
            raise
        else:
            marks.end(None)
        finally:
            self._open_ids.pop(request.request_id, None)


def trace_answer(scope: MutableMapping[str, Any], answer_id: str) -> RequestTrace | None:
    """Return what notes the times of an answer; None where its trace is not recorded."""
    trace: RequestTrace | None = scope.get(TRACE)
    if trace is None or not trace.context.is_sampled:
        return None
    trace.answer_id = answer_id
    return trace


def trace_fields(scope: MutableMapping[str, Any]) -> dict[str, str]:
    """Return the fields by which an event of a request names its trace; none without one."""
    trace: RequestTrace | None = scope.get(TRACE)
    return {} if trace is None else {"trace_id": trace.context.trace_hex}
