"""Token stream: what `submit` hands back. In: chunks or an error, pushed on the loop's thread.
Out: an async iterator of the chunks, which raises the error when there is one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import fields

from gyre.core.chunks import join_chunks
from gyre.core.records import Completion, TokenChunk


class TokenStream(AsyncIterator[TokenChunk]):
    """Chunks of one request, in order, for one reader. It ends after each of its completions has
    carried `finish`, or with `end`."""

    def __init__(
        self, request_id: str, num_completions: int, abort: Callable[[str], Awaitable[None]]
    ) -> None:
        self.request_id = request_id
        self._abort = abort
        self._unfinished = set(range(num_completions))
        self._chunks: deque[TokenChunk] = deque()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    @property
    def unfinished(self) -> list[int]:
        """Indices of completions that have no answer yet."""
        return sorted(self._unfinished)

    def push(self, chunk: TokenChunk) -> None:
        assert chunk.index in self._unfinished, (
            f"{chunk.request_id}[{chunk.index}] was answered before"
        )
        self._chunks.append(chunk)
        if chunk.finish is not None:
            self._unfinished.remove(chunk.index)
        self._changed.set()

    def end(self, error: BaseException | None = None) -> None:
        """Let no chunk follow. `error` is raised to the reader after the chunks that are there."""
        self._unfinished.clear()
        self._error = error
        self._changed.set()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenChunk:
        while not self._chunks:
            if self._error is not None:
                # the traceback of an earlier reader says nothing to this one
                raise self._error.with_traceback(None)
            if not self._unfinished:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._chunks.popleft()

    async def aclose(self) -> None:
        """Abort the request unless it is answered already: its reader goes away."""
        if self._unfinished:
            await self._abort(self.request_id)
        self._chunks.clear()


async def collect(stream: AsyncIterator[TokenChunk]) -> tuple[Completion, ...]:
    """Read a stream to its end and join each completion's chunks, by index."""
    chunks: dict[int, list[TokenChunk]] = {}
    async for chunk in stream:
        chunks.setdefault(chunk.index, []).append(chunk)
    return tuple(complete(chunks[index]) for index in sorted(chunks))


def complete(chunks: Sequence[TokenChunk]) -> Completion:
    """Return all chunks of one completion; the last one has `finish`."""
    whole = join_chunks(chunks)
    assert whole.finish is not None, whole
    return Completion(**{field.name: getattr(whole, field.name) for field in fields(Completion)})
