"""Streams: what the pool's `submit` hands back. In: chunks, or an error. Out: an async iterator of
the chunks, which raises the error when there is one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from gyre.core.records import TokenChunk


class PoolStream(AsyncIterator[TokenChunk]):
    """One request's chunks, for one reader, on one event loop. Closing it early aborts the
    request."""

    def __init__(self, request_id: str, abort: Callable[[str], Awaitable[None]]) -> None:
        self._request_id, self._abort = request_id, abort
        self._chunks: deque[TokenChunk] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._changed = asyncio.Event()

    def push(self, chunk: TokenChunk) -> None:
        self._chunks.append(chunk)
        self._changed.set()

    def end(self, error: BaseException | None = None) -> None:
        """No chunk follows. `error` is raised to the reader after the chunks that are there."""
        self._ended, self._error = True, error
        self._changed.set()

    def __aiter__(self) -> PoolStream:
        return self

    async def __anext__(self) -> TokenChunk:
        while not self._chunks:
            if self._error is not None:
                # that of the reader before tells this one nothing
                raise self._error.with_traceback(None)
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._chunks.popleft()

    async def aclose(self) -> None:
        if not self._ended:
            await self._abort(self._request_id)
        self._chunks.clear()
